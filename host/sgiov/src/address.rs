//! Addresses: conversions from and to the standard library's, and which listeners an address
//! reaches.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use slipway_sgiov_spec::Address;

/// Converts an address of the standard library.
pub fn of(address: SocketAddr) -> Address {
    Address { ip: octets(address.ip()), port: address.port() }
}

/// Returns an address's sixteen bytes; IPv4 is mapped into IPv6.
pub fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Returns the IP address as people write it: one that is mapped into IPv6 becomes IPv4.
pub fn ip(address: &Address) -> IpAddr {
    Ipv6Addr::from(address.ip).to_canonical()
}

/// Formats the address as people write it, with its port.
pub fn show(address: &Address) -> String {
    SocketAddr::new(ip(address), address.port).to_string()
}

/// Returns whether a connection to `to` reaches a listener bound to `at`. With `v6_only` an IPv6
/// wildcard takes IPv6 only. `to` has to be an address of the listener's network namespace.
pub fn is_meant(at: &Address, v6_only: bool, to: &Address) -> bool {
    at.port == to.port
        && (at.ip == to.ip
            || match (at.is_unspecified(), at.as_v4(), to.as_v4()) {
                (true, Some(_), Some(_)) => true,
                (true, None, Some(_)) => !v6_only,
                (true, None, None) => true,
                _ => false,
            })
}

/// Returns whether two listeners of one network namespace, each an address and its `v6_only`, would
/// both be reached by one address.
pub fn collide(a: (&Address, bool), b: (&Address, bool)) -> bool {
    let all_of_v4 = Address::v4([0; 4], a.0.port);
    is_meant(a.0, a.1, b.0)
        || is_meant(b.0, b.1, a.0)
        // An IPv4 and an IPv6 wildcard.
        || (is_meant(a.0, a.1, &all_of_v4) && is_meant(b.0, b.1, &all_of_v4))
}

/// Returns the address that connect(2) uses for `to`: instead of a wildcard, the loopback address
/// of the same IP version.
pub fn specific(to: Address) -> Address {
    match (to.is_unspecified(), to.as_v4()) {
        (true, Some(_)) => Address::v4([127, 0, 0, 1], to.port),
        (true, None) => Address { ip: Ipv6Addr::LOCALHOST.octets(), port: to.port },
        _ => to,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Address {
        of(text.parse().unwrap())
    }

    #[test]
    fn wildcards_mean_what_they_mean_to_the_kernel() {
        let cases = [
            ("0.0.0.0:80", false, "10.0.0.1:80", true),
            ("0.0.0.0:80", false, "10.0.0.1:81", false),
            ("0.0.0.0:80", false, "[fd00::1]:80", false),
            ("[::]:80", false, "[fd00::1]:80", true),
            ("[::]:80", false, "10.0.0.1:80", true),
            ("[::]:80", true, "10.0.0.1:80", false),
            ("10.0.0.2:80", false, "10.0.0.1:80", false),
            ("10.0.0.1:80", false, "10.0.0.1:80", true),
        ];
        for (listener, v6_only, to, meant) in cases {
            assert_eq!(is_meant(&at(listener), v6_only, &at(to)), meant, "{listener} {to}");
        }
    }

    #[test]
    fn listeners_collide_as_the_kernels_do() {
        let cases = [
            ("0.0.0.0:80", false, "[::]:80", false, true),
            ("0.0.0.0:80", false, "[::]:80", true, false),
            ("0.0.0.0:80", false, "127.0.0.1:80", false, true),
            ("127.0.0.2:80", false, "127.0.0.1:80", false, false),
            ("[::1]:80", false, "0.0.0.0:80", false, false),
            ("[::]:80", true, "[::1]:80", false, true),
        ];
        for (a, a6, b, b6, want) in cases {
            assert_eq!(collide((&at(a), a6), (&at(b), b6)), want, "{a} {b}");
            assert_eq!(collide((&at(b), b6), (&at(a), a6)), want, "{b} {a}");
        }
    }

    #[test]
    fn addresses_look_as_people_write_them() {
        for text in ["10.0.0.1:80", "[fd00::1]:80", "[::1]:9"] {
            assert_eq!(show(&at(text)), text);
        }
        assert_eq!(show(&specific(Address::ANY)), "[::1]:0");
        assert_eq!(show(&specific(at("0.0.0.0:5"))), "127.0.0.1:5");
    }
}
