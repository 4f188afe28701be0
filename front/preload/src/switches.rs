//! On/off options of sockets: each is a bit of the word `FLAGS` of an endpoint's entry.

use libc::c_int;
use slipway_socket::option;

/// On/off options that are stored but have no effect, each with the bit that stores it.
pub const SWITCHES: [(c_int, c_int, u32); 11] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 1),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 2),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 3),
    (libc::SOL_SOCKET, libc::SO_BROADCAST, 4),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, 5),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, 6),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 7),
    (libc::IPPROTO_TCP, libc::TCP_CORK, 8),
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK, 9),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 10),
];

/// Returns the bit of `FLAGS` that stores an on/off option, or `None` if the option is no row of
/// [`SWITCHES`].
pub fn switch_of(level: c_int, name: c_int) -> Option<u64> {
    let found = SWITCHES.iter().find(|(at, what, _)| (*at, *what) == (level, name));
    found.map(|(_, _, bit)| 1 << (option::FREE + bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_switch_has_a_bit_of_its_own_and_others_have_none() {
        let mut seen = 0;
        for (level, name, _) in SWITCHES {
            let bit = switch_of(level, name).unwrap();
            assert_eq!((bit.count_ones(), seen & bit), (1, 0));
            seen |= bit;
        }
        for own in [option::NONBLOCK, option::SIX, option::ABORT] {
            assert_eq!(seen & own, 0);
        }
        // The same number at another level is another option.
        assert_eq!(switch_of(libc::IPPROTO_TCP, libc::SO_KEEPALIVE), None);
        assert_eq!(switch_of(libc::SOL_SOCKET, -1), None);
    }
}
