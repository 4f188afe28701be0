//! The learning table: the port behind which each station was seen.
//!
//! The table has sets of four entries, a cache line each: a lookup costs one line, whatever the
//! table holds. A full set forgets the station that was silent for longest. The hash has a secret,
//! so that a guest cannot choose addresses that fall into one set. Each port has a limit, so that
//! one guest cannot make the switch forget other guests' stations.
//!
//! The sizes and the age are `LearningOptions`: `Fabric::switch_or_new` (`host/fabric`, `fabric`)
//! takes the defaults, and no user can change them. For a user's choice, `CreateSwitchRequest`
//! (`plane.proto`) needs a field that `Fabric::create_switch` passes on, and a network the property
//! (the head of `ledger` in `host/network`); a switch that an endpoint names first has the defaults
//! even so. The most ports of a switch are `MAX_PORTS` (`index`). `docs/networks.md` names these
//! limits if users meet them; tests are below, and `forwarding`.

use std::collections::HashMap;

use crate::lookup::{Key, Lookup, Station, Target};
use crate::{MAX_PORTS, PortIndex};

/// Settings of a [`Learning`] table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearningOptions {
    /// The number of stations that the table holds, rounded up to a power of two; 4 to 2^20.
    pub stations: usize,
    /// The largest number of stations learned behind one port.
    pub per_port: u32,
    /// Seconds of silence after which a station is forgotten.
    pub age: u32,
}

impl Default for LearningOptions {
    /// 16,384 stations, 1,024 to a port, 300 seconds (IEEE 802.1Q, table 8-3).
    fn default() -> Self {
        Self { stations: 16_384, per_port: 1_024, age: 300 }
    }
}

#[derive(Clone, Copy, Default)]
struct StationEntry {
    station: Station,
    port: PortIndex,
    fixed: bool,
    /// The second in which the station was last seen.
    seen: u32,
}

const WAYS: usize = 4;
const MOST_STATIONS: usize = 1 << 20;

#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Set([StationEntry; WAYS]);

/// A lookup that learns stations from the frames that it forwards.
pub struct Learning {
    sets: Box<[Set]>,
    secret: u64,
    options: LearningOptions,
    /// The number of stations learned, by port.
    learned: Box<[u32]>,
    /// The fixed stations, by port: a port that goes takes them along without a look at the whole
    /// table.
    fixed: HashMap<PortIndex, Vec<Station>>,
    /// The second of the last removal of old stations.
    swept: u32,
}

impl Learning {
    /// Creates an empty table. `secret` must be a random number that no guest knows.
    pub fn new(options: LearningOptions, secret: u64) -> Self {
        let stations = options.stations.clamp(WAYS, MOST_STATIONS).next_power_of_two();
        Self {
            sets: vec![Set::default(); stations / WAYS].into_boxed_slice(),
            secret: spread(secret) | 1,
            options,
            learned: vec![0; MAX_PORTS].into_boxed_slice(),
            fixed: HashMap::new(),
            swept: 0,
        }
    }

    #[inline]
    fn set(&self, station: Station) -> usize {
        // Every bit of the station affects the upper half of the product.
        let mixed = (station.0 ^ self.secret >> 7).wrapping_mul(self.secret);
        ((mixed ^ mixed >> 29) >> 20) as usize & (self.sets.len() - 1)
    }

    #[inline]
    fn find(&self, station: Station, now: u32) -> Option<PortIndex> {
        let set = &self.sets[self.set(station)].0;
        let entry = set.iter().find(|entry| entry.station == station)?;
        (entry.fixed || now.wrapping_sub(entry.seen) <= self.options.age).then_some(entry.port)
    }

    #[inline]
    fn learn(&mut self, station: Station, port: PortIndex, now: u32) {
        let at = self.set(station);
        let set = &mut self.sets[at].0;
        match set.iter_mut().find(|entry| entry.station == station) {
            Some(entry) if entry.port == port => entry.seen = now,
            Some(entry) if entry.fixed => {}
            Some(entry) => {
                if self.learned[usize::from(port)] < self.options.per_port {
                    self.learned[usize::from(entry.port)] -= 1;
                    self.learned[usize::from(port)] += 1;
                    (entry.port, entry.seen) = (port, now);
                }
            }
            None => self.add(at, station, port, now),
        }
    }

    #[cold]
    fn add(&mut self, at: usize, station: Station, port: PortIndex, now: u32) {
        if self.learned[usize::from(port)] >= self.options.per_port {
            return;
        }
        let set = &mut self.sets[at].0;
        let silence = |entry: &StationEntry| match entry.station {
            Station::NONE => u64::MAX,
            _ => u64::from(now.wrapping_sub(entry.seen)),
        };
        let free = set.iter_mut().filter(|entry| !entry.fixed).max_by_key(|entry| silence(entry));
        let Some(entry) = free else { return };
        if entry.station != Station::NONE {
            self.learned[usize::from(entry.port)] -= 1;
        }
        *entry = StationEntry { station, port, fixed: false, seen: now };
        self.learned[usize::from(port)] += 1;
    }

    /// Puts a fixed entry in the place of one that is not fixed. Returns `false` if its set has
    /// only fixed entries.
    fn put(&mut self, new: StationEntry) -> bool {
        let at = self.set(new.station);
        let free = self.sets[at].0.iter_mut().filter(|entry| !entry.fixed);
        let Some(entry) = free.min_by_key(|entry| entry.station != Station::NONE) else {
            return false;
        };
        if entry.station != Station::NONE {
            self.learned[usize::from(entry.port)] -= 1;
        }
        *entry = new;
        true
    }

    /// Doubles the table; every station stays. Returns `false` if the table has its largest size;
    /// the table is then unchanged.
    fn grow(&mut self) -> bool {
        let sets = self.sets.len() * 2;
        if sets > MOST_STATIONS / WAYS {
            return false;
        }
        let grown = vec![Set::default(); sets].into_boxed_slice();
        let old = std::mem::replace(&mut self.sets, grown);
        let entries = old.iter().flat_map(|set| set.0);
        for entry in entries.filter(|entry| entry.station != Station::NONE) {
            let at = self.set(entry.station);
            // A set's number is the low bits of a hash, so each set is split in two and no set gets
            // more entries than it has room for.
            let ways = &mut self.sets[at].0;
            if let Some(free) = ways.iter_mut().find(|free| free.station == Station::NONE) {
                *free = entry;
            }
        }
        true
    }

    /// Empties the entries of learned stations for which `gone` returns `true`.
    fn forget(&mut self, gone: impl Fn(&StationEntry) -> bool) {
        for entry in self.sets.iter_mut().flat_map(|set| &mut set.0) {
            if entry.station != Station::NONE && !entry.fixed && gone(entry) {
                self.learned[usize::from(entry.port)] -= 1;
                *entry = StationEntry::default();
            }
        }
    }

    /// Empties the entry of a station, which is in the station's set or nowhere.
    fn clear(&mut self, station: Station) {
        let at = self.set(station);
        let set = &mut self.sets[at].0;
        let Some(entry) = set.iter_mut().find(|entry| entry.station == station) else { return };
        if !entry.fixed {
            self.learned[usize::from(entry.port)] -= 1;
        }
        *entry = StationEntry::default();
    }
}

impl Lookup for Learning {
    fn look_up(&mut self, from: PortIndex, keys: &[Key], targets: &mut [Target], now: u32) {
        let mut last = Station::NONE;
        for (key, target) in keys.iter().zip(targets) {
            // Most bursts come from few stations.
            if key.source != last {
                self.learn(key.source, from, now);
                last = key.source;
            }
            *target = match key.destination.is_group() {
                true if key.destination.is_of_reports() => Target::Unknown,
                true => Target::Flood,
                false => self.find(key.destination, now).map_or(Target::Unknown, Target::Port),
            };
        }
    }

    fn fix(&mut self, station: Station, port: PortIndex) -> bool {
        let set = &self.sets[self.set(station)].0;
        if let Some(entry) = set.iter().find(|entry| entry.station == station && entry.fixed) {
            return entry.port == port;
        }
        self.clear(station);
        while !self.put(StationEntry { station, port, fixed: true, seen: 0 }) {
            if !self.grow() {
                return false;
            }
        }
        self.fixed.entry(port).or_default().push(station);
        true
    }

    fn remove(&mut self, port: PortIndex) {
        for station in self.fixed.remove(&port).unwrap_or_default() {
            self.clear(station);
        }
        // Learned stations may be in any set.
        if self.learned[usize::from(port)] > 0 {
            self.forget(|entry| entry.port == port);
        }
    }

    fn age(&mut self, now: u32) {
        if now.wrapping_sub(self.swept) < self.options.age.div_ceil(4) {
            return;
        }
        self.swept = now;
        let age = self.options.age;
        self.forget(|entry| now.wrapping_sub(entry.seen) > age);
    }

    fn stations(&self) -> Vec<(Station, PortIndex, Option<u32>)> {
        let entries = self.sets.iter().flat_map(|set| &set.0);
        entries
            .filter(|entry| entry.station != Station::NONE)
            .map(|entry| (entry.station, entry.port, (!entry.fixed).then_some(entry.seen)))
            .collect()
    }
}

/// Spreads a number over all 64 bits (the finaliser of splitmix64): a multiplier with few bits set
/// would put many stations into one set.
fn spread(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipway_ethernet_spec::Mac;

    fn station(number: u64) -> Station {
        Station::new(Mac::local(number), 1)
    }

    fn look(
        table: &mut Learning,
        from: PortIndex,
        source: u64,
        destination: u64,
        now: u32,
    ) -> Target {
        let key = Key { source: station(source), destination: station(destination) };
        let mut targets = [Target::Drop];
        table.look_up(from, &[key], &mut targets, now);
        targets[0]
    }

    fn table(stations: usize, per_port: u32) -> Learning {
        Learning::new(LearningOptions { stations, per_port, age: 300 }, 0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn stations_are_found_where_they_spoke_last() {
        let mut table = table(1024, 100);
        assert_eq!(look(&mut table, 1, 10, 20, 0), Target::Unknown);
        assert_eq!(look(&mut table, 2, 20, 10, 0), Target::Port(1));
        assert_eq!(look(&mut table, 3, 10, 20, 0), Target::Port(2));
        assert_eq!(look(&mut table, 2, 20, 10, 0), Target::Port(3), "it has moved");
    }

    #[test]
    fn reports_of_group_members_go_to_routers() {
        let mut table = table(1024, 100);
        let mut to = |mac: [u8; 6]| {
            let destination = Station::new(Mac(mac), 1);
            let mut targets = [Target::Drop];
            table.look_up(1, &[Key { source: station(10), destination }], &mut targets, 0);
            targets[0]
        };
        assert_eq!(to([0x33, 0x33, 0, 0, 0, 0x16]), Target::Unknown);
        assert_eq!(to([0x01, 0x00, 0x5e, 0, 0, 0x16]), Target::Unknown);
        assert_eq!(to([0x33, 0x33, 0, 0, 0, 0x01]), Target::Flood);
        assert_eq!(to([0xff; 6]), Target::Flood);
    }

    #[test]
    fn vlans_are_apart() {
        let mut table = table(1024, 100);
        look(&mut table, 1, 10, 20, 0);
        let other = Key { source: station(20), destination: Station::new(Mac::local(10), 2) };
        let mut targets = [Target::Drop];
        table.look_up(2, &[other], &mut targets, 0);
        assert_eq!(targets, [Target::Unknown]);
    }

    #[test]
    fn who_is_silent_is_forgotten() {
        let mut table = table(1024, 100);
        look(&mut table, 1, 10, 20, 0);
        assert_eq!(look(&mut table, 2, 20, 10, 300), Target::Port(1));
        assert_eq!(look(&mut table, 2, 20, 10, 301), Target::Unknown);
        table.age(301);
        assert_eq!(table.stations().len(), 1);
        assert_eq!(table.learned[1], 0);
    }

    #[test]
    fn one_port_cannot_fill_the_table() {
        let mut table = table(1024, 100);
        look(&mut table, 1, 10, 20, 0);
        for number in 1000..100_000 {
            look(&mut table, 2, number, 10, 1);
        }
        assert_eq!(table.learned[2], 100);
        assert_eq!(look(&mut table, 3, 30, 10, 1), Target::Port(1));
    }

    #[test]
    fn a_full_set_forgets_the_most_silent() {
        let mut table = table(4, 100);
        for number in 0..5 {
            look(&mut table, 1, number, 99, number as u32);
        }
        assert_eq!(look(&mut table, 2, 50, 0, 5), Target::Unknown);
        assert_eq!(table.learned[1] + table.learned[2], 4);
    }

    #[test]
    fn what_is_fixed_stays() {
        let mut table = table(4, 100);
        assert!(table.fix(station(1), 1));
        assert!(table.fix(station(1), 1));
        assert!(!table.fix(station(1), 2), "somebody else has it");
        for number in 2..100 {
            look(&mut table, 2, number, 1, number as u32);
        }
        look(&mut table, 2, 1, 1, 100);
        assert_eq!(look(&mut table, 2, 7, 1, 10_000), Target::Port(1));
        table.age(20_000);
        assert_eq!(table.stations(), [(station(1), 1, None)]);
        table.remove(1);
        assert!(table.fix(station(1), 2));
    }

    #[test]
    fn there_is_room_for_every_fixed_station() {
        for secret in 0..4 {
            let options = LearningOptions { stations: 4, per_port: 100, age: 300 };
            let mut table = Learning::new(options, secret);
            for number in 0..4096 {
                assert!(table.fix(station(number), number as PortIndex));
            }
            assert!(table.sets.len() * WAYS <= 1 << 18, "{} for 4,096", table.sets.len() * WAYS);
            for number in 0..4096 {
                let port = Target::Port(number as PortIndex);
                assert_eq!(look(&mut table, 1, 5000, number, 0), port);
            }
        }
    }

    #[test]
    fn a_table_that_grows_keeps_every_station() {
        let mut table = table(64, 100);
        for number in 1000..1040 {
            look(&mut table, 1, number, 99, 0);
        }
        let sets = table.sets.len();
        let mut before = table.stations();
        let mut fixed = 0;
        while table.sets.len() == sets {
            // A fixed station takes the place of a learned one until its set has only fixed ones.
            before = table.stations();
            assert!(table.fix(station(fixed), 2));
            fixed += 1;
        }
        let after = table.stations();
        assert!(before.iter().all(|station| after.contains(station)));
        assert_eq!(after.len(), before.len() + 1);
        let learned = after.iter().filter(|station| station.2.is_some()).count();
        assert!(learned > 0);
        assert_eq!(table.learned[1] as usize, learned);
    }

    #[test]
    fn a_fixed_station_without_room_in_any_size_changes_no_other() {
        let largest = table(MOST_STATIONS, 100);
        let set = largest.set(station(0));
        let same = (0..).filter(|number| largest.set(station(*number)) == set);
        let same: Vec<u64> = same.take(WAYS + 1).collect();
        let mut table = table(4, 100);
        for number in &same[..WAYS] {
            assert!(table.fix(station(*number), 2));
        }
        assert!(!table.fix(station(same[WAYS]), 3), "there is no room");
        for number in &same[..WAYS] {
            assert_eq!(look(&mut table, 4, 98, *number, 0), Target::Port(2));
        }
        table.remove(2);
        assert!(table.fix(station(same[WAYS]), 3));
    }

    #[test]
    fn a_full_table_of_the_largest_size_stays_as_it_is() {
        let mut table = table(MOST_STATIONS, 100);
        // Stations that all fall into the set of the first.
        let set = table.set(station(0));
        let same: Vec<u64> =
            (0..).filter(|number| table.set(station(*number)) == set).take(WAYS + 1).collect();
        let other = (1..).find(|number| table.set(station(*number)) != set).unwrap();
        look(&mut table, 1, other, 99, 0);
        for number in &same[..WAYS] {
            assert!(table.fix(station(*number), 2));
        }
        assert!(!table.fix(station(same[WAYS]), 3), "there is no room");
        assert_eq!(table.learned[1], 1);
        assert_eq!(look(&mut table, 4, 98, other, 0), Target::Port(1));
        table.remove(1);
        assert_eq!(table.learned[1], 0);
        for number in &same[..WAYS] {
            assert_eq!(look(&mut table, 4, 98, *number, 0), Target::Port(2));
        }
    }

    #[test]
    fn counts_are_those_of_the_entries() {
        let mut table = table(64, 20);
        let mut number = 1_u64;
        for step in 0..20_000_u32 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step.into());
            let port = (number >> 60) as PortIndex;
            look(&mut table, port, number >> 40 & 255, number >> 32 & 255, step / 100);
            match number >> 50 & 1023 {
                0 => table.remove(port),
                1 => drop(table.fix(station(number >> 40 & 255), port)),
                2 => table.age(step / 100),
                _ => {}
            }
        }
        for port in 0..16 {
            let of_port = |fixed| {
                let of = |one: &&(Station, PortIndex, Option<u32>)| {
                    one.1 == port && one.2.is_none() == fixed
                };
                table.stations().iter().filter(of).count()
            };
            assert_eq!(of_port(false) as u32, table.learned[usize::from(port)]);
            assert_eq!(of_port(true), table.fixed.get(&port).map_or(0, Vec::len));
        }
        for port in 0..16 {
            table.remove(port);
            assert!(table.stations().iter().all(|station| station.1 != port), "{port}");
        }
        assert!(table.fixed.is_empty());
    }
}
