//! Arenas and connections, by this engine's numbers and by the machine's.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;

use slipway_ring::cross::{Arena, Own, Stream};
use slipway_sgiov_spec::function::{self, ARENAS};

use crate::remote::Line;

/// A connection whose other side is the machine.
pub struct Carried {
    pub line: Line,
    pub place: function::Line,
    /// Set if the machine has confirmed the connection, or has made it.
    pub connected: bool,
}

/// Arenas in pieces of memory, by number. A number is unused once the machine has released it.
#[derive(Default)]
pub struct Arenas(HashMap<u32, Arena>);

impl Arenas {
    pub fn free_number(&self) -> Option<u32> {
        (0..ARENAS).find(|number| !self.0.contains_key(number))
    }

    pub fn insert(&mut self, number: u32, arena: Arena) {
        self.0.insert(number, arena);
    }

    pub fn number(&self, arena: &Arena) -> Option<u32> {
        let at = arena.words().as_ptr();
        self.0.iter().find(|(_, own)| own.words().as_ptr() == at).map(|(number, _)| *number)
    }

    /// Removes an arena. Returns whether it existed.
    pub fn remove(&mut self, number: u32) -> bool {
        self.0.remove(&number).is_some()
    }
}

/// All connections.
#[derive(Default)]
pub struct Streams {
    all: HashMap<u32, Carried>,
    /// Connections by arena and stream.
    by_place: HashMap<(u32, u32), u32>,
    /// Places by family and entry.
    by_entry: HashMap<(u32, u32), (u32, u32)>,
}

impl Streams {
    pub fn insert(&mut self, connection: u32, line: Line, place: function::Line, connected: bool) {
        let at = (place.arena, place.stream);
        self.by_place.insert(at, connection);
        self.by_entry.insert((line.family, line.entry), at);
        self.all.insert(connection, Carried { line, place, connected });
    }

    pub fn get_mut(&mut self, connection: u32) -> Option<&mut Carried> {
        self.all.get_mut(&connection)
    }

    pub fn remove(&mut self, connection: u32) -> Option<Carried> {
        let carried = self.all.remove(&connection)?;
        let at = (carried.place.arena, carried.place.stream);
        self.by_place.remove(&at);
        // The program has closed this stream, so the entry may be another stream's by now.
        let entry = (carried.line.family, carried.line.entry);
        if self.by_entry.get(&entry) == Some(&at) {
            self.by_entry.remove(&entry);
        }
        Some(carried)
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn connections(&self) -> Vec<u32> {
        self.all.keys().copied().collect()
    }

    /// Returns the arena and the stream of a family's entry.
    pub fn place(&self, family: u32, entry: u64) -> Option<(u32, u32)> {
        let entry = u32::try_from(entry).ok()?;
        self.by_entry.get(&(family, entry)).copied()
    }

    /// Returns the arenas and streams of all entries of a family.
    pub fn places(&self, family: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let own = move |(key, _): &(&(u32, u32), &(u32, u32))| key.0 == family;
        self.by_entry.iter().filter(own).map(|(_, place)| *place)
    }

    /// Wakes the program of a stream.
    pub fn raise(&self, place: (u32, u32)) {
        let connection = self.by_place.get(&place);
        if let Some(carried) = connection.and_then(|connection| self.all.get(connection)) {
            raise(&carried.line);
        }
    }

    /// Wakes the programs of all streams.
    pub fn raise_all(&self) {
        self.all.values().for_each(|carried| raise(&carried.line));
    }
}

/// Wakes the program of a stream. If the program cannot be woken without waiting, its stream ends.
fn raise(line: &Line) {
    if !slipway_peer::eventfd::raise(line.eventfd.as_fd()) {
        end(line);
    }
}

/// Resets a stream on behalf of the machine, which no longer accesses it.
pub fn break_off(line: &Line) {
    end(line);
    // A program that cannot be woken sees the reset at its next look, within a second.
    let _ = slipway_peer::eventfd::raise(line.eventfd.as_fd());
}

fn end(line: &Line) {
    // Continue from the machine's last published counters.
    let said = line.arena.inbox(line.stream, line.side.other());
    let words = [said.tail, said.head]
        .map(|word| AtomicU64::new(word.load(std::sync::atomic::Ordering::Acquire)));
    let [tail, head] = &words;
    let seen = [AtomicU64::new(0), AtomicU64::new(0)];
    let (out, into) = (Own { own: tail, seen: &seen[0] }, Own { own: head, seen: &seen[1] });
    let stream = Stream::new(&line.arena, line.stream, line.side, out, into);
    stream.out.reset();
    stream.into.reset();
}
