//! The control queue (section 5.1.6.5), which the function serves on its own thread.

use slipway_ram::Memory;
use slipway_switch::Mac;
use slipway_virtio::Virtqueue;
use slipway_virtio::queue::{Broken, Chain, Range};
use slipway_virtio_spec::net::{Features, control as command};

use crate::driven::Driven;
use crate::filter::TABLE;

/// Most bytes of a command that are read: two tables of addresses, even if some are larger than
/// they may be.
const LONGEST: usize = 8192;

/// A command that was carried out, and is to be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    head: u16,
    /// The address of the acknowledgement.
    at: u64,
    pub ack: u8,
}

pub(crate) struct ControlQueue {
    pub virtqueue: Virtqueue,
    chain: Chain,
    bytes: Vec<u8>,
    /// A command that was carried out, and is acknowledged once the port follows it.
    pub pending: Option<Done>,
}

impl ControlQueue {
    pub fn new(virtqueue: Virtqueue) -> Self {
        Self { virtqueue, chain: Chain::default(), bytes: Vec::new(), pending: None }
    }

    /// Reads the next command. Returns `None` if there is none; the driver will then notify the
    /// next one.
    pub fn next(&mut self, memory: &Memory) -> Result<Option<(Done, &[u8])>, Broken> {
        let Some(head) = self.virtqueue.queue.take(memory, &mut self.chain)? else {
            return Ok(None);
        };
        let at = self.chain.writable.iter().find(|(_, len)| *len > 0).map(|(at, _)| *at);
        // A command without room for its acknowledgement is invalid (section 5.1.6.5).
        let at = at.filter(|at| !memory.is_remote(*at, 1)).ok_or(Broken::Chain)?;
        let done = Done { head, at, ack: command::ERR };
        if !gather(memory, &self.chain.readable, &mut self.bytes) {
            self.bytes.clear();
        }
        Ok(Some((done, &self.bytes)))
    }

    /// Acknowledges a command, and interrupts if the driver wants that.
    pub fn finish(&mut self, memory: &Memory, done: Done) -> Result<(), Broken> {
        memory.write(done.at, &[done.ack])?;
        self.virtqueue.queue.report(memory, done.head, 1)?;
        self.virtqueue.publish(memory)?;
        Ok(())
    }
}

/// Copies the driver's data, up to [`LONGEST`] bytes. Returns `false` if the data is longer, or is
/// not mapped.
fn gather(memory: &Memory, ranges: &[Range], bytes: &mut Vec<u8>) -> bool {
    bytes.clear();
    for &(at, len) in ranges {
        let (from, len) = (bytes.len(), len as usize);
        if len > LONGEST - from || memory.is_remote(at, len) {
            return false;
        }
        bytes.resize(from + len, 0);
        if memory.read(at, &mut bytes[from..]).is_err() {
            return false;
        }
    }
    true
}

/// The effect of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The port's rules stay as they are.
    Nothing,
    /// The port's rules have changed.
    Rules,
}

/// Carries out a command: class, command, its data. Returns `None` if it is invalid, or not
/// negotiated: the driver is then told of an error.
pub(crate) fn execute(bytes: &[u8], features: Features, driven: &mut Driven) -> Option<Change> {
    let [class, number, data @ ..] = bytes else { return None };
    if !features.contains(required(*class, *number)?) {
        return None;
    }
    match (*class, *number) {
        (command::RX, mode) => receive_mode(mode, data, driven)?,
        (command::MAC, command::MAC_TABLE_SET) => {
            let (unicast, rest) = table(data)?;
            let (multicast, rest) = table(rest)?;
            if !rest.is_empty() {
                return None;
            }
            (driven.filter.unicast, driven.filter.multicast) = (unicast, multicast);
        }
        (command::MAC, command::MAC_ADDR_SET) => {
            let mac = <[u8; 6]>::try_from(data).ok().filter(|mac| Mac(*mac).is_unicast())?;
            driven.filter.mac = mac;
        }
        (command::VLAN, add_or_delete) => vlan(add_or_delete, half(data)?, driven)?,
        (command::ANNOUNCE, command::ANNOUNCE_ACK) if data.is_empty() => {
            driven.announce = false;
            return Some(Change::Nothing);
        }
        (command::MQ, command::MQ_VQ_PAIRS_SET) => {
            driven.pairs = half(data).filter(|pairs| (1..=driven.most_pairs).contains(pairs))?;
        }
        (command::GUEST_OFFLOADS, command::GUEST_OFFLOADS_SET) => {
            let wanted = u64::from_le_bytes(data.try_into().ok()?);
            let wanted = Features::from_bits(wanted)?;
            if !(features & Features::GUEST_OFFLOADS).contains(wanted) {
                return None;
            }
            driven.offloads = wanted.bits();
        }
        _ => return None,
    }
    Some(Change::Rules)
}

/// Returns the feature that a command needs, or `None` if no command has this class.
fn required(class: u8, number: u8) -> Option<Features> {
    Some(match (class, number) {
        (command::RX, command::RX_PROMISC | command::RX_ALLMULTI) => Features::CTRL_RX,
        (command::RX, _) => Features::CTRL_RX_EXTRA,
        (command::MAC, command::MAC_TABLE_SET) => Features::CTRL_RX,
        (command::MAC, _) => Features::CTRL_MAC_ADDR,
        (command::VLAN, _) => Features::CTRL_VLAN,
        (command::ANNOUNCE, _) => Features::GUEST_ANNOUNCE,
        (command::MQ, _) => Features::MQ,
        (command::GUEST_OFFLOADS, _) => Features::CTRL_GUEST_OFFLOADS,
        _ => return None,
    })
}

/// Parses data that are a 16-bit number.
fn half(data: &[u8]) -> Option<u16> {
    data.try_into().ok().map(u16::from_le_bytes)
}

fn receive_mode(mode: u8, data: &[u8], driven: &mut Driven) -> Option<()> {
    let [on] = data else { return None };
    let filter = &mut driven.filter;
    let flag = match mode {
        command::RX_PROMISC => &mut filter.promiscuous,
        command::RX_ALLMULTI => &mut filter.all_multicast,
        command::RX_ALLUNI => &mut filter.all_unicast,
        command::RX_NOMULTI => &mut filter.no_multicast,
        command::RX_NOUNI => &mut filter.no_unicast,
        command::RX_NOBCAST => &mut filter.no_broadcast,
        _ => return None,
    };
    *flag = *on != 0;
    Some(())
}

type Addresses = Option<Vec<[u8; 6]>>;

/// Reads a table of addresses, and returns it with the bytes that follow. A table with more
/// addresses than are kept is `None`, and lets everything through.
fn table(data: &[u8]) -> Option<(Addresses, &[u8])> {
    let (count, rest) = data.split_first_chunk::<4>()?;
    let count = usize::try_from(u32::from_le_bytes(*count)).ok()?;
    let len = count.checked_mul(6).filter(|len| *len <= rest.len())?;
    let (addresses, rest) = rest.split_at(len);
    let addresses = addresses.as_chunks::<6>().0;
    Some(((count <= TABLE).then(|| addresses.to_vec()), rest))
}

fn vlan(add_or_delete: u8, vlan: u16, driven: &mut Driven) -> Option<()> {
    let vlans = driven.filter.vlans.as_mut().filter(|_| vlan < 4096)?;
    match (add_or_delete, vlans.binary_search(&vlan)) {
        (command::VLAN_ADD, Err(at)) => vlans.insert(at, vlan),
        (command::VLAN_DEL, Ok(at)) => drop(vlans.remove(at)),
        (command::VLAN_ADD | command::VLAN_DEL, _) => {}
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driven() -> Driven {
        let mut driven = Driven::new(Mac::local(1), 4);
        driven.negotiated(Features::all());
        driven
    }

    #[test]
    fn commands_that_are_none_change_nothing() {
        let bad: [&[u8]; 14] = [
            &[],
            &[0],
            &[0, 0],
            &[0, 0, 1, 1],
            &[0, 9, 1],
            &[9, 0],
            &[1, 0, 1, 0, 0, 0],
            &[1, 0, 255, 255, 255, 255, 0, 0, 0, 0],
            &[1, 1, 1, 2, 3, 4, 5, 6],
            &[2, 0, 0, 16],
            &[2, 7, 0, 1],
            &[4, 0, 0, 0],
            &[4, 0, 5, 0],
            &[5, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        ];
        for bytes in bad {
            let mut after = driven();
            assert_eq!(execute(bytes, Features::all(), &mut after), None, "{bytes:?}");
            assert_eq!(after, driven(), "{bytes:?}");
        }
        let set_promiscuous: &[u8] = &[0, 0, 0];
        assert_eq!(execute(set_promiscuous, Features::CTRL_VQ, &mut driven()), None);
    }

    #[test]
    fn commands_do_what_they_say() {
        let mut driven = driven();
        let mut run = |bytes: &[u8]| execute(bytes, Features::all(), &mut driven);
        assert_eq!(run(&[0, 0, 0]), Some(Change::Rules));
        let tables =
            [&[1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 9][..], &[1, 0, 0, 0, 0x33, 0x33, 0, 0, 0, 1]];
        assert_eq!(run(&tables.concat()), Some(Change::Rules));
        assert_eq!(run(&[1, 1, 2, 0, 0, 0, 0, 7]), Some(Change::Rules));
        assert_eq!(run(&[2, 0, 7, 0]), Some(Change::Rules));
        assert_eq!(run(&[2, 0, 5, 0]), Some(Change::Rules));
        assert_eq!(run(&[2, 1, 7, 0]), Some(Change::Rules));
        assert_eq!(run(&[3, 0]), Some(Change::Nothing));
        assert_eq!(run(&[4, 0, 3, 0]), Some(Change::Rules));
        assert_eq!(run(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]), Some(Change::Rules));
        assert!(!driven.filter.promiscuous && driven.filter.is_sound());
        assert_eq!(driven.filter.unicast, Some(vec![[2, 0, 0, 0, 0, 9]]));
        assert_eq!(driven.filter.multicast, Some(vec![[0x33, 0x33, 0, 0, 0, 1]]));
        assert_eq!((driven.filter.mac, driven.filter.vlans), ([2, 0, 0, 0, 0, 7], Some(vec![5])));
        assert_eq!((driven.pairs, driven.offloads), (3, Features::GUEST_CSUM.bits()));
    }

    #[test]
    fn a_table_that_is_too_large_lets_everything_through() {
        let mut bytes = vec![1, 0, 65, 0, 0, 0];
        bytes.extend([2; 6 * 65]);
        bytes.extend([0; 4]);
        let mut driven = driven();
        assert_eq!(execute(&bytes, Features::all(), &mut driven), Some(Change::Rules));
        assert_eq!((driven.filter.unicast, driven.filter.multicast), (None, Some(Vec::new())));
    }
}
