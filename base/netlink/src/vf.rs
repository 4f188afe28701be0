//! Settings of virtual functions (VFs), which a host makes through the link of the physical
//! function (linux/if_link.h, `IFLA_VFINFO_LIST`).

use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::message::Request;
use crate::{Netlink, RTM_NEWLINK, link};

const IFLA_VFINFO_LIST: u16 = 22;
const IFLA_VF_INFO: u16 = 1;
const IFLA_VF_MAC: u16 = 1;
const IFLA_VF_VLAN: u16 = 2;
const IFLA_VF_SPOOFCHK: u16 = 4;
const IFLA_VF_RATE: u16 = 6;
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

    /// Sets the VLAN of a VF: the device tags the VF's frames, and gives it untagged those of the
    /// VLAN alone. 0 ends that.
    ///
    /// # Errors
    /// The kernel's errors, as for [`Netlink::set_vf_mac`].
    pub fn set_vf_vlan(&mut self, index: u32, vf: u32, vlan: u16) -> io::Result<()> {
        // struct ifla_vf_vlan: VF, VLAN, priority.
        self.set_vf(index, IFLA_VF_VLAN, &[vf, vlan.into(), 0].map(u32::to_ne_bytes).concat())
    }

    /// Sets the most megabits (10^6 bits) that a VF may send in a second. 0 ends the bound.
    ///
    /// # Errors
    /// The kernel's errors, as for [`Netlink::set_vf_mac`]. Some drivers refuse (`EINVAL`) more
    /// than the link's speed, and any rate while the link has no carrier.
    pub fn set_vf_rate(&mut self, index: u32, vf: u32, megabits: u32) -> io::Result<()> {
        // struct ifla_vf_rate: VF, least rate, most.
        self.set_vf(index, IFLA_VF_RATE, &[vf, 0, megabits].map(u32::to_ne_bytes).concat())
    }

    fn set_vf(&mut self, index: u32, kind: u16, value: &[u8]) -> io::Result<()> {
        let mut request = Request::new(RTM_NEWLINK);
        request.body(&link::header(index, 0, 0));
        request.attribute(IFLA_VFINFO_LIST, &nested(IFLA_VF_INFO, &nested(kind, value)));
        self.exchange(request, |_, _| {})
    }
}

/// Returns whether a driver has the setting of VFs that `set` is the outcome of.
///
/// # Errors
/// The errors of `set`, except one that says that the driver lacks the setting.
pub fn is_supported(set: io::Result<()>) -> io::Result<bool> {
    // The kernel's own number, beside that of programs: drivers return it.
    const ENOTSUPP: i32 = 524;
    let lacks = [Errno::OPNOTSUPP.raw_os_error(), ENOTSUPP];
    match set {
        Err(error) if error.raw_os_error().is_some_and(|number| lacks.contains(&number)) => {
            Ok(false)
        }
        set => set.map(|()| true),
    }
}

/// Returns the name of the link of a VF's physical function, and the VF's number there. `function`
/// is the VF's directory in sysfs. Returns `None` if the function is no VF, or its physical
/// function has no link.
pub fn physical_link(function: &Path) -> Option<(String, u32)> {
    let physical = function.join("physfn");
    let mut links = std::fs::read_dir(physical.join("net")).ok()?;
    let link = links.next()?.ok()?.file_name().into_string().ok()?;
    let own = function.file_name()?;
    let all = std::fs::read_dir(&physical).ok()?.flatten();
    let mut numbers = all.filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix("virtfn")?.parse().ok()?;
        let target = std::fs::read_link(entry.path()).ok()?;
        (target.file_name() == Some(own)).then_some(number)
    });
    Some((link, numbers.next()?))
}

/// Lays out an attribute within another one. `value` has a multiple of four bytes.
fn nested(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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
        netlink.set_vf_vlan(link.index, 0, 5).unwrap_err();
        netlink.set_vf_rate(link.index, 0, 100).unwrap_err();
    }

    #[test]
    fn a_driver_without_a_setting_is_no_error() {
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        assert!(is_supported(Ok(())).unwrap());
        assert!(!is_supported(error(libc::EOPNOTSUPP)).unwrap());
        assert!(!is_supported(error(524)).unwrap());
        assert!(is_supported(error(libc::EPERM)).is_err());
    }

    #[test]
    fn a_vf_is_found_at_its_physical_function() {
        let devices = tempfile::tempdir().unwrap();
        let at = |path: &str| devices.path().join(path);
        std::fs::create_dir_all(at("0000:01:00.0/net/eno1")).unwrap();
        for (number, name) in ["0000:01:10.0", "0000:01:10.2"].iter().enumerate() {
            std::fs::create_dir(at(name)).unwrap();
            let link = at(&format!("0000:01:00.0/virtfn{number}"));
            symlink(format!("../{name}"), link).unwrap();
        }
        let vf = at("0000:01:10.2");
        assert_eq!(physical_link(&vf), None);
        symlink("../0000:01:00.0", vf.join("physfn")).unwrap();
        assert_eq!(physical_link(&vf), Some(("eno1".to_owned(), 1)));
        assert_eq!(physical_link(&at("0000:01:00.0")), None);
    }
}
