//! From events to durations.

use std::collections::HashMap;

use slipway_telemetry::Histogram;

/// Beginnings that wait for their ends; more are forgotten, as those of merged requests must be.
const MOST_OPEN: usize = 1 << 16;

/// A command's class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Read,
    Write,
    Flush,
    Other,
}

impl Class {
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    /// Of an opcode of the NVM command set.
    pub fn of_opcode(opcode: u8) -> Self {
        match opcode {
            0 => Self::Flush,
            1 => Self::Write,
            2 => Self::Read,
            _ => Self::Other,
        }
    }

    /// Of the block layer's letters for an operation (`blk_fill_rwbs`) and its sectors.
    pub fn of_letters(letters: &[u8], sectors: u32) -> Self {
        match letters {
            [b'R', ..] => Self::Read,
            [b'F', ..] if sectors == 0 => Self::Flush,
            [b'W', ..] | [b'F', b'W', ..] => Self::Write,
            _ => Self::Other,
        }
    }
}

/// What was seen at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The driver began a command: controller, queue, identifier.
    Setup((u32, u32, u32), Class),
    /// It has its end.
    Completed((u32, u32, u32)),
    /// Somebody submitted to the block layer: device, sector.
    Queued((u32, u64), Class),
    /// The block layer has its end.
    Ended((u32, u64), Class),
}

/// Durations in ns, by [`Class`].
pub type Latencies = [Histogram; Class::ALL.len()];

/// Pairs beginnings and ends, given in the order of their times.
#[derive(Default)]
pub struct Pairs {
    commands: HashMap<(u32, u32, u32), (u64, Class)>,
    requests: HashMap<((u32, u64), Class), u64>,
    /// From the driver's beginning to its end.
    pub driver: Latencies,
    /// From the submission to the block layer to its end.
    pub block: Latencies,
}

impl Pairs {
    /// Takes an event in.
    pub fn add(&mut self, at_ns: u64, what: What) {
        match what {
            What::Setup(key, class) => {
                make_room(&mut self.commands);
                self.commands.insert(key, (at_ns, class));
            }
            What::Completed(key) => {
                if let Some((from, class)) = self.commands.remove(&key) {
                    self.driver[class as usize].record(at_ns.saturating_sub(from));
                }
            }
            What::Queued(key, class) => {
                make_room(&mut self.requests);
                self.requests.insert((key, class), at_ns);
            }
            What::Ended(key, class) => {
                if let Some(from) = self.requests.remove(&(key, class)) {
                    self.block[class as usize].record(at_ns.saturating_sub(from));
                }
            }
        }
    }

    /// Events were lost: a beginning without its end would pair with a later one.
    pub fn forget(&mut self) {
        self.commands.clear();
        self.requests.clear();
    }

    /// Gives what was counted and begins anew; what is under way stays.
    pub fn take(&mut self) -> (Latencies, Latencies) {
        (std::mem::take(&mut self.driver), std::mem::take(&mut self.block))
    }
}

fn make_room<K, V>(open: &mut HashMap<K, V>) {
    if open.len() >= MOST_OPEN {
        open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_and_ends_pair_by_their_keys() {
        let mut pairs = Pairs::default();
        pairs.add(90, What::Queued((1, 8), Class::Read));
        pairs.add(100, What::Setup((0, 1, 7), Class::Read));
        pairs.add(110, What::Setup((0, 2, 7), Class::Write));
        pairs.add(150, What::Completed((0, 1, 7)));
        pairs.add(155, What::Ended((1, 8), Class::Read));
        pairs.add(180, What::Completed((0, 2, 7)));
        pairs.add(190, What::Completed((0, 2, 7)));
        pairs.add(191, What::Ended((1, 8), Class::Write));
        let (driver, block) = pairs.take();
        let sums = |latencies: &Latencies| latencies.each_ref().map(|one| one.sum() as u64);
        assert_eq!((sums(&driver), sums(&block)), ([50, 70, 0, 0], [65, 0, 0, 0]));
        pairs.add(200, What::Setup((0, 1, 1), Class::Read));
        pairs.forget();
        pairs.add(300, What::Completed((0, 1, 1)));
        assert_eq!(pairs.driver[0].count(), 0);
    }

    #[test]
    fn the_block_layers_letters() {
        let of = |letters: &str, sectors| Class::of_letters(letters.as_bytes(), sectors);
        assert_eq!(
            (of("R", 8), of("RA", 8), of("WS", 8)),
            (Class::Read, Class::Read, Class::Write)
        );
        assert_eq!((of("FWS", 0), of("FWFS", 8)), (Class::Flush, Class::Write));
        assert_eq!(
            (of("D", 8), of("", 0), of("FF", 0)),
            (Class::Other, Class::Other, Class::Flush)
        );
    }
}
