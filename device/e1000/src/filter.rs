//! Chooses the frames that a driver wants (section 3.2.1): unicast addresses, the multicast table,
//! broadcast, promiscuous modes, and the VLAN table.

use slipway_e1000_spec::{ADDRESSES, TABLE, rah, rctl};
use slipway_ethernet_spec::Mac;
use slipway_switch::FilterView;

/// The receive filter, as the registers describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    /// The driver's addresses as numbers, of which the first `count` are in use.
    addresses: [u64; ADDRESSES],
    count: usize,
    multicast: [u32; TABLE],
    /// `None` if frames of every VLAN pass.
    vlans: Option<[u32; TABLE]>,
    rctl: u32,
}

/// The filter that a frame passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The driver does not want the frame.
    Rejected,
    /// The frame's address is one of the driver's, or broadcast.
    Exact,
    /// The frame passed a promiscuous mode, or the multicast table.
    Inexact,
}

impl Filter {
    /// Reads the filter off the registers. `addresses` are pairs of RAL and RAH.
    pub fn new(
        rctl: u32,
        addresses: &[u32],
        multicast: &[u32; TABLE],
        vlans: &[u32; TABLE],
    ) -> Self {
        // Sources are not selected by: no driver asks for that.
        let valid = |high: u32| high & rah::AV != 0 && high & rah::AS == 0;
        let pairs = addresses.as_chunks::<2>().0.iter().filter(|[_, high]| valid(*high));
        let (mut own, mut count) = ([0; ADDRESSES], 0);
        for (place, [low, high]) in own.iter_mut().zip(pairs) {
            *place = u64::from(*low) | u64::from(high & 0xffff) << 32;
            count += 1;
        }
        let filters_vlans = rctl & rctl::VFE != 0;
        let vlans = filters_vlans.then_some(*vlans);
        Self { addresses: own, count, multicast: *multicast, vlans, rctl }
    }

    /// Returns a view of the filter.
    pub fn view(&self) -> FilterView {
        let set = |mode: u32| self.rctl & mode != 0;
        let ones = |table: &[u32; TABLE]| {
            table.iter().map(|word| word.count_ones() as usize).sum::<usize>()
        };
        FilterView {
            promiscuous: set(rctl::UPE) && set(rctl::MPE),
            all_multicast: set(rctl::MPE),
            unicast: (!set(rctl::UPE)).then_some(self.count),
            multicast: (!set(rctl::MPE)).then(|| ones(&self.multicast)),
            vlans: self.vlans.as_ref().map(ones),
        }
    }

    /// Judges a frame to `to`, of VLAN `vlan` if it has a tag.
    #[inline]
    pub fn judge(&self, to: Mac, vlan: Option<u16>) -> Verdict {
        if let (Some(vlans), Some(vlan)) = (&self.vlans, vlan)
            && vlans[usize::from(vlan >> 5) % TABLE] >> (vlan & 31) & 1 == 0
        {
            return Verdict::Rejected;
        }
        if self.addresses[..self.count].contains(&number(to)) {
            return Verdict::Exact;
        }
        let (set, otherwise) = match to {
            Mac::BROADCAST => (self.rctl & rctl::BAM != 0, Verdict::Exact),
            _ if to.is_group() => {
                (self.rctl & rctl::MPE != 0 || self.has_group(to), Verdict::Inexact)
            }
            _ => (self.rctl & rctl::UPE != 0, Verdict::Inexact),
        };
        if set { otherwise } else { Verdict::Rejected }
    }

    /// Returns whether the multicast table has the bit of a group's address: 12 bits of its last
    /// two bytes, from a bit on that RCTL.MO selects (section 13.5.1).
    fn has_group(&self, to: Mac) -> bool {
        let last = u16::from_le_bytes([to.0[4], to.0[5]]);
        let shift = [4, 3, 2, 0][(self.rctl >> rctl::MO) as usize & 3];
        let hash = last >> shift & 0xfff;
        self.multicast[usize::from(hash >> 5) % TABLE] >> (hash & 31) & 1 != 0
    }
}

/// Returns an address as a number, in the order of RAL and RAH.
#[inline]
fn number(mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac.0;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);
    const GROUP: Mac = Mac([0x33, 0x33, 0, 0, 0x5a, 0xc3]);

    fn filter(rctl: u32) -> Filter {
        let addresses = [0x0000_0002, rah::AV | 0x0100, 0x0000_0002, 0x0200];
        Filter::new(rctl, &addresses, &[0; TABLE], &[0; TABLE])
    }

    #[test]
    fn each_mode_lets_its_own_kind_through() {
        let judge =
            |rctl: u32| [OWN, OTHER, GROUP, Mac::BROADCAST].map(|to| filter(rctl).judge(to, None));
        use Verdict::{Exact, Inexact, Rejected};
        assert_eq!(judge(0), [Exact, Rejected, Rejected, Rejected]);
        assert_eq!(judge(rctl::UPE), [Exact, Inexact, Rejected, Rejected]);
        assert_eq!(judge(rctl::MPE), [Exact, Rejected, Inexact, Rejected]);
        assert_eq!(judge(rctl::BAM), [Exact, Rejected, Rejected, Exact]);
    }

    #[test]
    fn the_multicast_table_is_looked_up_at_each_offset() {
        // Bits 47:36, 46:35, 45:34 and 43:32 of the address, whose last bytes are 0x5a and 0xc3.
        for (offset, hash) in [(0, 0xc35), (1, 0x86b), (2, 0x0d6), (3, 0x35a)] {
            let mut one = filter(offset << rctl::MO);
            assert_eq!(one.judge(GROUP, None), Verdict::Rejected);
            one.multicast[hash >> 5] |= 1 << (hash & 31);
            assert_eq!(one.judge(GROUP, None), Verdict::Inexact, "offset {offset}");
        }
    }

    #[test]
    fn vlans_are_filtered_only_when_that_is_on() {
        assert_eq!(filter(0).judge(OWN, Some(7)), Verdict::Exact);
        let mut one = filter(rctl::VFE);
        assert_eq!(one.judge(OWN, Some(100)), Verdict::Rejected);
        assert_eq!(one.judge(OWN, None), Verdict::Exact);
        if let Some(vlans) = &mut one.vlans {
            vlans[3] = 1 << 4;
        }
        assert_eq!(one.judge(OWN, Some(100)), Verdict::Exact);
        assert_eq!(one.judge(OTHER, Some(100)), Verdict::Rejected);
    }
}
