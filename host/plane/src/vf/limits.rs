//! Settings of hardware VFs that are network interfaces, to which their physical functions hold
//! them: a VLAN and a rate for all VFs of a pool, and those of an owner's client, which may have a
//! MAC address beside.

use std::io;
use std::path::Path;

use slipway_netlink::{Netlink, is_supported, physical_link};
use slipway_plane_api::vf_v1;
use slipway_plane_api::vf_v1::template::Kind;
use slipway_switch::Mac;
use slipway_vf_pool::Fault;
use slipway_vfio::PciAddress;

/// The directory of the host's PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";
/// The bytes of a megabit, in which devices count rates.
const MEGABIT: u64 = 125_000;
/// The largest VLAN (IEEE 802.1Q).
const LAST_VLAN: u32 = 4094;

/// The settings of a VF. The default has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// The VLAN; 0 for none.
    vlan: u16,
    /// The most megabits that the VF may send in a second; 0 for no bound.
    megabits: u32,
    /// The MAC address; `None` for the one that the VF has.
    mac: Option<Mac>,
    /// Frames from other addresses than `mac` pass.
    is_unchecked: bool,
}

/// Checks a VLAN, and a rate in bytes per second. 0 stands for none.
///
/// # Errors
/// A sentence about the fault.
pub(super) fn check(vlan: u32, rate: u64) -> Result<(), String> {
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
    /// Returns the limits of a template that was checked; none for another kind.
    pub fn of(template: &vf_v1::Template) -> Self {
        let Some(Kind::Hardware(hardware)) = &template.kind else { return Self::default() };
        Self::new(hardware.vlan, hardware.max_rate)
    }

    /// Returns a VLAN and a rate that were checked. The rate is rounded down to whole megabits.
    fn new(vlan: u32, rate: u64) -> Self {
        let megabits = u32::try_from(rate / MEGABIT).unwrap_or(u32::MAX);
        Self { vlan: u16::try_from(vlan).unwrap_or(0), megabits, ..Self::default() }
    }

    /// Checks that a client asks for no other VLAN than that of its pool, whose limits `self` are.
    /// No client leaves the VLAN of a pool that has one.
    ///
    /// # Errors
    /// A sentence about the VLAN.
    pub fn allow(self, client: &vf_v1::Client) -> Result<(), String> {
        let (own, asked) = (u32::from(self.vlan), client.vlan);
        if own == 0 || asked == 0 || own == asked {
            return Ok(());
        }
        Err(format!(
            "the functions of the pool are in VLAN {own}, not in VLAN {asked}: leave out the VLAN, \
             or name a pool without one"
        ))
    }

    /// Returns the settings of a client that was checked. A VLAN that it does not name is the
    /// pool's, whose limits `self` are. The pool's rate is a bound for all clients.
    pub fn for_client(self, client: &vf_v1::Client) -> Self {
        let own = Self::new(client.vlan, client.max_rate);
        let rates = [own.megabits, self.megabits].into_iter().filter(|megabits| *megabits > 0);
        Self {
            vlan: if own.vlan == 0 { self.vlan } else { own.vlan },
            megabits: rates.min().unwrap_or(0),
            mac: client.mac.parse().ok(),
            is_unchecked: client.no_spoof_check,
        }
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

    /// Sets the settings that there are. All of them are tried. Returns those that were set, and
    /// the first one that the driver of the physical function refuses.
    pub fn set(self, address: PciAddress) -> (Self, Result<(), Fault>) {
        self.give(address, self)
    }

    /// Gives the settings that there are the values of `others`, or ends them where `others` has
    /// none. All of them are tried.
    ///
    /// # Errors
    /// The first setting that the driver of the physical function refuses.
    pub fn replace(self, address: PciAddress, others: Self) -> Result<(), Fault> {
        self.give(address, others).1
    }

    /// Does what [`Limits::replace`] does. Returns the settings that the driver did not refuse
    /// beside the outcome.
    fn give(self, address: PciAddress, others: Self) -> (Self, Result<(), Fault>) {
        let mut physical = match Physical::of(address) {
            Ok(physical) => physical,
            Err(fault) => return (Self::default(), Err(fault)),
        };
        let (index, vf, netlink) = (physical.index, physical.vf, &mut physical.netlink);
        let (mut mac, mut check, mut vlan, mut rate) = (Ok(()), Ok(true), Ok(()), Ok(()));
        if self.mac.is_some() {
            // Zeros: the driver of the VF chooses.
            mac = netlink.set_vf_mac(index, vf, others.mac.unwrap_or_default().0);
            // Off for a VF that got its address alone: a later call ends both together.
            let is_on = !others.is_unchecked || mac.is_err();
            // A driver that sets addresses need not check those of frames.
            check = is_supported(netlink.set_vf_spoof_check(index, vf, is_on));
        }
        if self.vlan != 0 {
            vlan = netlink.set_vf_vlan(index, vf, others.vlan);
        }
        if self.megabits != 0 {
            rate = netlink.set_vf_rate(index, vf, others.megabits);
        }
        let given = Self {
            vlan: if vlan.is_ok() { self.vlan } else { 0 },
            megabits: if rate.is_ok() { self.megabits } else { 0 },
            mac: self.mac.filter(|_| mac.is_ok()),
            is_unchecked: self.is_unchecked && mac.is_ok(),
        };
        let outcome = mac.map_err(|error| physical.refused("MAC address", &error));
        let outcome = outcome.and_then(|()| {
            check.map(drop).map_err(|error| physical.refused("check of addresses", &error))
        });
        let outcome = outcome.and_then(|()| vlan.map_err(|error| physical.refused("VLAN", &error)));
        let outcome = outcome.and_then(|()| rate.map_err(|error| physical.refused("rate", &error)));
        (given, outcome)
    }

    /// Ends the limits. A refusal of the driver's is logged and has no other effect: the VF has
    /// left its pool.
    pub fn clear(self, address: PciAddress) {
        // Without a link the VF or its physical function is gone, and the limits with it.
        if link_of(address).is_ok()
            && let Err(Fault(error)) = self.replace(address, Self::default())
        {
            tracing::warn!(error, "a virtual function keeps settings");
        }
    }

    /// Formats the settings that there are, without their values, for [`Limits::from_words`].
    pub fn words(self) -> String {
        let all =
            [("mac", self.mac.is_some()), ("vlan", self.vlan != 0), ("rate", self.megabits != 0)];
        let there = all.into_iter().filter(|(_, is_there)| *is_there).map(|(word, _)| word);
        there.collect::<Vec<_>>().join(" ")
    }

    /// Returns settings of which [`Limits::replace`] changes the same as of those whose words these
    /// are. Other words are passed over.
    pub fn from_words(words: &str) -> Self {
        let has = |word: &str| words.split_whitespace().any(|one| one == word);
        Self {
            vlan: has("vlan").into(),
            megabits: has("rate").into(),
            mac: has("mac").then(Mac::default),
            is_unchecked: false,
        }
    }
}

/// The physical function of a VF, with a socket to the kernel.
struct Physical {
    /// The VF's address.
    address: PciAddress,
    /// The name of the physical function's link.
    link: String,
    netlink: Netlink,
    /// The number of that link.
    index: u32,
    /// The VF's number there.
    vf: u32,
}

impl Physical {
    /// Finds the physical function of the VF at `address`.
    ///
    /// # Errors
    /// There is none with a link; the kernel's errors.
    fn of(address: PciAddress) -> Result<Self, Fault> {
        let (link, vf) = link_of(address).map_err(Fault)?;
        match open(&link) {
            Ok((netlink, index)) => Ok(Self { address, link, netlink, index, vf }),
            Err(error) => Err(refused((&link, address), "limits", &error)),
        }
    }

    fn refused(&self, what: &str, error: &io::Error) -> Fault {
        refused((&self.link, self.address), what, error)
    }
}

fn refused((link, address): (&str, PciAddress), what: &str, error: &io::Error) -> Fault {
    Fault(format!("{link}, of which {address} is a VF, sets no {what} of it: {error}"))
}

/// Returns the name of the link of the physical function of the VF at `address`, and the VF's
/// number there.
fn link_of(address: PciAddress) -> Result<(String, u32), String> {
    let function = Path::new(DEVICES).join(address.to_string());
    physical_link(&function).ok_or_else(|| {
        format!(
            "PCI function {address} has no physical function whose network interface could set a \
             MAC address, a VLAN or a rate of it"
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

    #[test]
    fn limits_that_no_device_has_are_refused() {
        for (vlan, rate) in [(0, 0), (1, 0), (4094, MEGABIT), (0, 12_500_000_000)] {
            assert_eq!(check(vlan, rate), Ok(()), "{vlan} {rate}");
        }
        for (vlan, rate) in [(4095, 0), (0, MEGABIT - 1), (0, u64::MAX)] {
            assert!(check(vlan, rate).is_err(), "{vlan} {rate}");
        }
    }

    #[test]
    fn a_rate_has_whole_megabits() {
        let of = |vlan, max_rate| {
            let hardware = vf_v1::template::Hardware { vlan, max_rate, ..Default::default() };
            let kind = Some(Kind::Hardware(hardware));
            Limits::of(&vf_v1::Template { kind, ..Default::default() })
        };
        let expected = Limits { vlan: 5, megabits: 2, ..Default::default() };
        assert_eq!(of(5, 2 * MEGABIT + 1), expected);
        assert!(of(0, 0).is_none() && !of(5, 0).is_none() && !of(0, MEGABIT).is_none());
        assert!(Limits::of(&vf_v1::Template::default()).is_none());
    }

    #[test]
    fn a_client_has_its_own_settings_and_the_pools() {
        let pool = Limits::new(5, 2 * MEGABIT);
        let (mac, no_spoof_check) = ("02:00:00:00:00:07".to_owned(), true);
        let client = vf_v1::Client { mac, no_spoof_check, max_rate: MEGABIT, ..Default::default() };
        let own = pool.for_client(&client);
        assert_eq!((own.vlan, own.megabits, own.is_unchecked), (5, 1, true));
        assert_eq!(own.mac, Some(Mac([2, 0, 0, 0, 0, 7])));
        let other = Limits::new(0, MEGABIT);
        let other = other.for_client(&vf_v1::Client { vlan: 6, ..Default::default() });
        assert_eq!(other, Limits::new(6, MEGABIT));
        assert_eq!((own.words().as_str(), pool.words().as_str()), ("mac vlan rate", "vlan rate"));
        for one in [own, pool, Limits::default()] {
            let again = Limits::from_words(&one.words());
            assert_eq!((again.words(), again.is_none()), (one.words(), one.is_none()));
        }
    }

    #[test]
    fn a_client_stays_within_the_limits_of_its_pool() {
        let (pool, open) = (Limits::new(5, 2 * MEGABIT), Limits::default());
        let client = |vlan, max_rate| vf_v1::Client { vlan, max_rate, ..Default::default() };
        assert_eq!(pool.for_client(&client(0, 3 * MEGABIT)), pool, "no more than the pool's rate");
        assert_eq!(pool.for_client(&client(5, 0)), pool);
        assert_eq!(open.for_client(&client(6, 3 * MEGABIT)), Limits::new(6, 3 * MEGABIT));
        for (limits, vlan) in [(pool, 0), (pool, 5), (open, 6), (open, 0)] {
            limits.allow(&client(vlan, 0)).unwrap();
        }
        let refused = pool.allow(&client(6, 0)).unwrap_err();
        assert!(refused.contains("in VLAN 5, not in VLAN 6"), "{refused}");
    }

    #[test]
    fn limits_need_a_physical_function_with_a_link() {
        let nowhere = "0000:fe:1f.7".parse().unwrap();
        Limits::default().check(nowhere).unwrap();
        let limits = Limits::new(5, 0);
        let refused = limits.check(nowhere).unwrap_err();
        assert!(refused.contains("no physical function whose network"), "{refused}");
        let (set, outcome) = limits.set(nowhere);
        assert!(set.is_none() && outcome.is_err());
        limits.clear(nowhere);
    }
}
