//! The limits of hardware VFs that are network interfaces, to which their physical functions hold
//! them: a VLAN and a rate.

use std::io;
use std::path::Path;

use slipway_netlink::{Netlink, physical_link};
use slipway_plane_api::vf_v1;
use slipway_plane_api::vf_v1::template::Kind;
use slipway_vf_pool::Fault;
use slipway_vfio::PciAddress;

/// The directory of the host's PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";
/// The bytes of a megabit, in which devices count rates.
const MEGABIT: u64 = 125_000;
/// The largest VLAN (IEEE 802.1Q).
const LAST_VLAN: u32 = 4094;

/// The limits of each VF of a pool. The default has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// The VLAN; 0 for none.
    vlan: u16,
    /// The most megabits that the VF may send in a second; 0 for no bound.
    megabits: u32,
}

/// Checks the limits of a template.
///
/// # Errors
/// A sentence about the fault.
pub(super) fn check(template: &vf_v1::template::Hardware) -> Result<(), String> {
    let (vlan, rate) = (template.vlan, template.max_rate);
    if vlan > LAST_VLAN {
        return Err(format!("{vlan} is no VLAN: 1 to {LAST_VLAN}"));
    }
    match rate {
        0 => Ok(()),
        1..MEGABIT => Err("hardware sends at least 1 Mbit/s".into()),
        _ if u32::try_from(rate / MEGABIT).is_err() => Err("such a rate cannot be set".into()),
        _ => Ok(()),
    }
}

impl Limits {
    /// Returns the limits of a template that was checked; none for another kind. A rate is rounded
    /// down to whole megabits.
    pub fn of(template: &vf_v1::Template) -> Self {
        let Some(Kind::Hardware(hardware)) = &template.kind else { return Self::default() };
        let megabits = u32::try_from(hardware.max_rate / MEGABIT).unwrap_or(u32::MAX);
        Self { vlan: u16::try_from(hardware.vlan).unwrap_or(0), megabits }
    }

    /// Returns whether there are none.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// Checks that there are none, or that the function at `address` has a physical function that
    /// could hold it to them.
    ///
    /// # Errors
    /// A sentence about the function.
    pub fn check(self, address: PciAddress) -> Result<(), String> {
        if self.is_none() { Ok(()) } else { link_of(address).map(|_| ()) }
    }

    /// Sets the limits.
    ///
    /// # Errors
    /// The driver of the physical function refuses.
    pub fn set(self, address: PciAddress) -> Result<(), Fault> {
        let (link, vf) = link_of(address).map_err(Fault)?;
        let refused = |what: &str, error: io::Error| {
            Fault(format!("{link}, of which {address} is a VF, sets no {what} of it: {error}"))
        };
        let (mut netlink, index) = open(&link).map_err(|error| refused("limits", error))?;
        if self.vlan != 0 {
            let set = netlink.set_vf_vlan(index, vf, self.vlan);
            set.map_err(|error| refused("VLAN", error))?;
        }
        if self.megabits != 0 {
            let set = netlink.set_vf_rate(index, vf, self.megabits);
            set.map_err(|error| refused("rate", error))?;
        }
        Ok(())
    }

    /// Ends the limits. What a driver refuses is logged: the VF is no pool's any more.
    pub fn clear(self, address: PciAddress) {
        // An error: the VF or its physical function is gone, and the limits with it.
        let Ok((link, vf)) = link_of(address) else { return };
        let ended = open(&link).and_then(|(mut netlink, index)| {
            let vlan = if self.vlan == 0 { Ok(()) } else { netlink.set_vf_vlan(index, vf, 0) };
            let rate = if self.megabits == 0 { Ok(()) } else { netlink.set_vf_rate(index, vf, 0) };
            vlan.and(rate)
        });
        if let Err(error) = ended {
            tracing::warn!(%error, %address, %link, "a virtual function keeps its VLAN or rate");
        }
    }
}

/// Returns the name of the link of the physical function of the VF at `address`, and the VF's
/// number there.
fn link_of(address: PciAddress) -> Result<(String, u32), String> {
    let function = Path::new(DEVICES).join(address.to_string());
    physical_link(&function).ok_or_else(|| {
        format!(
            "PCI function {address} has no physical function whose network interface could set a \
             VLAN or a rate of it"
        )
    })
}

/// Opens a socket to the kernel. Returns it with the number of a link.
fn open(link: &str) -> io::Result<(Netlink, u32)> {
    let mut netlink = Netlink::open()?;
    let found = netlink.link(link)?.ok_or(io::ErrorKind::NotFound)?;
    Ok((netlink, found.index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(vlan: u32, max_rate: u64) -> vf_v1::template::Hardware {
        vf_v1::template::Hardware { vlan, max_rate, ..Default::default() }
    }

    #[test]
    fn limits_that_no_device_has_are_refused() {
        for (vlan, rate) in [(0, 0), (1, 0), (4094, MEGABIT), (0, 12_500_000_000)] {
            assert_eq!(check(&template(vlan, rate)), Ok(()), "{vlan} {rate}");
        }
        for (vlan, rate) in [(4095, 0), (0, MEGABIT - 1), (0, u64::MAX)] {
            assert!(check(&template(vlan, rate)).is_err(), "{vlan} {rate}");
        }
    }

    #[test]
    fn a_rate_has_whole_megabits() {
        let of = |vlan, rate| {
            let kind = Some(Kind::Hardware(template(vlan, rate)));
            Limits::of(&vf_v1::Template { kind, ..Default::default() })
        };
        assert_eq!(of(5, 2 * MEGABIT + 1), Limits { vlan: 5, megabits: 2 });
        assert!(of(0, 0).is_none() && !of(5, 0).is_none() && !of(0, MEGABIT).is_none());
        assert!(Limits::of(&vf_v1::Template::default()).is_none());
    }

    #[test]
    fn limits_need_a_physical_function_with_a_link() {
        let nowhere = "0000:fe:1f.7".parse().unwrap();
        Limits::default().check(nowhere).unwrap();
        let refused = Limits { vlan: 5, megabits: 0 }.check(nowhere).unwrap_err();
        assert!(refused.contains("no physical function whose network"), "{refused}");
        Limits { vlan: 5, megabits: 0 }.clear(nowhere);
    }
}
