//! Settings of virtual functions (VFs), which a host makes through the link of the physical
//! function (linux/if_link.h, `IFLA_VFINFO_LIST`).

use std::io;

use crate::message::Request;
use crate::{Netlink, RTM_NEWLINK, link};

const IFLA_VFINFO_LIST: u16 = 22;
const IFLA_VF_INFO: u16 = 1;
const IFLA_VF_MAC: u16 = 1;
const IFLA_VF_SPOOFCHK: u16 = 4;
/// The bytes of an address in `struct ifla_vf_mac`.
const LONGEST_ADDRESS: usize = 32;

impl Netlink {
    /// Sets the MAC address of VF `vf` of the physical function whose link has the number `index`.
    /// The VF has it from its next reset on.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link or VF, a driver that sets no addresses
    /// (`EOPNOTSUPP`).
    pub fn set_vf_mac(&mut self, index: u32, vf: u32, mac: [u8; 6]) -> io::Result<()> {
        let mut address = [0; LONGEST_ADDRESS];
        address[..6].copy_from_slice(&mac);
        self.set_vf(index, IFLA_VF_MAC, &[&vf.to_ne_bytes()[..], &address].concat())
    }

    /// Sets whether the physical function drops frames of a VF that do not have its MAC address.
    ///
    /// # Errors
    /// The kernel's errors, as for [`Netlink::set_vf_mac`].
    pub fn set_vf_spoof_check(&mut self, index: u32, vf: u32, is_on: bool) -> io::Result<()> {
        let setting = u32::from(is_on);
        self.set_vf(index, IFLA_VF_SPOOFCHK, &[vf.to_ne_bytes(), setting.to_ne_bytes()].concat())
    }

    fn set_vf(&mut self, index: u32, kind: u16, value: &[u8]) -> io::Result<()> {
        let mut request = Request::new(RTM_NEWLINK);
        request.body(&link::header(index, 0, 0));
        request.attribute(IFLA_VFINFO_LIST, &nested(IFLA_VF_INFO, &nested(kind, value)));
        self.exchange(request, |_, _| {})
    }
}

/// Lays out an attribute within another one. `value` has a multiple of four bytes.
fn nested(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::attributes;

    #[test]
    fn a_setting_is_nested_twice() {
        let value = [1_u32.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        let bytes = nested(IFLA_VF_INFO, &nested(IFLA_VF_SPOOFCHK, &value));
        let (outer, inner) = attributes(&bytes).next().unwrap();
        assert_eq!((outer, bytes.len()), (IFLA_VF_INFO, 16));
        assert_eq!(attributes(inner).next().unwrap(), (IFLA_VF_SPOOFCHK, &value[..]));
    }

    /// The loopback link has no VFs.
    #[test]
    fn a_link_without_functions_refuses_settings() {
        let mut netlink = Netlink::open().unwrap();
        let link = netlink.link("lo").unwrap().unwrap();
        netlink.set_vf_mac(link.index, 0, [2, 0, 0, 0, 0, 1]).unwrap_err();
        netlink.set_vf_spoof_check(link.index, 0, true).unwrap_err();
    }
}
