//! Links: their properties in messages.

use crate::message::{Request, attributes, u32_at};

// linux/if_link.h, linux/if.h.
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_LINK_NETNSID: u16 = 37;
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
const IFLA_INFO_KIND: u16 = 1;
const IFF_UP: u32 = 1;
/// The longest name of a link in bytes.
const LONGEST_NAME: usize = 15;

/// A network interface, as rtnetlink(7) describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Number of the interface.
    pub index: u32,
    /// Name of the interface.
    pub name: String,
    /// Hardware address, or `None` if the interface has no Ethernet address.
    pub mac: Option<[u8; 6]>,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u32,
    /// `true` if the interface is set up, with or without a carrier.
    pub up: bool,
    /// The kind of a virtual link, such as "tun" or "veth"; empty if the kernel names none, as for
    /// the loopback link and hardware.
    pub kind: String,
    /// Number of the interface that belongs to this one, if it is in the same namespace: that below
    /// a VLAN or a macvlan, and the peer of a veth.
    pub lower: Option<u32>,
}

/// The changes to a link; a field that is `None` leaves its property as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkChange {
    /// Up or down.
    pub up: Option<bool>,
    /// Largest packet in bytes.
    pub mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<[u8; 6]>,
}

/// Lays out the change of a link.
pub fn change(request: &mut Request, index: u32, change: LinkChange) {
    let (flags, mask) = match change.up {
        Some(true) => (IFF_UP, IFF_UP),
        Some(false) => (0, IFF_UP),
        None => (0, 0),
    };
    request.body(&header(index, flags, mask));
    if let Some(mtu) = change.mtu {
        request.attribute(IFLA_MTU, &mtu.to_ne_bytes());
    }
    if let Some(mac) = change.mac {
        request.attribute(IFLA_ADDRESS, &mac);
    }
}

/// Lays out another name of a link.
pub fn rename(request: &mut Request, index: u32, name: &str) {
    request.body(&header(index, 0, 0));
    request.attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
}

/// Returns whether the kernel could have a link of this name.
pub fn can_be_a_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len()) && !name.contains('\0')
}

/// Lays out the question for the link of this name, without its statistics.
pub fn named(request: &mut Request, name: &str) {
    request.body(&header(0, 0, 0));
    request.attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
    request.attribute(IFLA_EXT_MASK, &RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
}

/// Returns the header of a request about a link: flags, and those of them that change.
pub fn header(index: u32, flags: u32, mask: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&mask.to_ne_bytes());
    header
}

/// Reads a link from the attributes that follow its header.
pub fn parse(index: u32, flags: u32, rest: &[u8]) -> LinkInfo {
    let up = flags & IFF_UP != 0;
    let (name, kind) = (String::new(), String::new());
    let mut link = LinkInfo { index, name, mac: None, mtu: 0, up, kind, lower: None };
    let mut is_elsewhere = false;
    for (kind, value) in attributes(rest) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_LINKINFO => {
                let kind = attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND);
                link.kind = kind.map(|(_, value)| text(value)).unwrap_or_default();
            }
            IFLA_ADDRESS => link.mac = value.try_into().ok(),
            IFLA_MTU => link.mtu = u32_at(value, 0).unwrap_or(0),
            IFLA_LINK => link.lower = u32_at(value, 0).filter(|number| *number != 0),
            IFLA_LINK_NETNSID => is_elsewhere = true,
            _ => {}
        }
    }
    // The number is another interface's in this namespace then.
    link.lower = link.lower.filter(|_| !is_elsewhere);
    link
}

/// Returns a text that ends with a zero byte.
fn text(value: &[u8]) -> String {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = (4 + value.len() as u16).to_ne_bytes();
        let mut bytes = [&length[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_interface_below_is_one_of_the_same_namespace() {
        let name = attribute(IFLA_IFNAME, b"eth0.7\0");
        let of = |number: u32| attribute(IFLA_LINK, &number.to_ne_bytes());
        let lower = |parts: &[&[u8]]| parse(7, IFF_UP, &parts.concat()).lower;
        assert_eq!(lower(&[&name, &of(4)]), Some(4));
        assert_eq!((lower(&[&name]), lower(&[&of(0), &name])), (None, None));
        let elsewhere = attribute(IFLA_LINK_NETNSID, &[0; 4]);
        assert_eq!(lower(&[&of(4), &elsewhere]), None);
        assert_eq!(lower(&[&elsewhere, &name, &of(4)]), None);
    }
}
