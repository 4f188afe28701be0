//! Signals of this node's programs, and the streams with guests that they concern.

use rustix::event::epoll;
use slipway_family::Family;

use super::carrying::{Carrying, SIGNALS};
use crate::remote::Line;

impl Carrying {
    /// Adds a family whose signals this thread takes.
    pub(super) fn join(&mut self, number: u32, family: Family) {
        let data = epoll::EventData::new_u64(number.into());
        // Without the watch, the family's signals are seen only while something else keeps this
        // thread awake.
        if epoll::add(&self.epoll, family.bell(), data, epoll::EventFlags::IN).is_ok() {
            self.families.insert(number, family);
        }
    }

    /// Removes a family that has ended.
    pub(super) fn part(&mut self, number: u32) {
        self.beside.remove(&number);
        if let Some(family) = self.families.remove(&number) {
            let _ = epoll::delete(&self.epoll, family.bell());
        }
    }

    /// Takes families' signals. Returns whether there were any.
    pub fn listen(&mut self) -> bool {
        let (mut stirred, mut some, mut spoiled) = (Vec::new(), false, None);
        for (number, family) in &mut self.families {
            for _ in 0..SIGNALS {
                match family.take() {
                    Ok(Some(entry)) => {
                        some = true;
                        let entry = u32::try_from(entry).ok();
                        stirred.extend(entry.and_then(|entry| self.entries.get(&(*number, entry))));
                    }
                    Ok(None) => break,
                    Err(_) => {
                        spoiled = Some(*number);
                        break;
                    }
                }
            }
            if family.overflowed() {
                some = true;
                let all = self.entries.iter().filter(|((of, _), _)| of == number);
                stirred.extend(all.map(|(_, pair)| *pair));
            }
        }
        stirred.into_iter().for_each(|pair| self.stir(pair));
        if let Some(number) = spoiled {
            self.spoiled(number);
        }
        some
    }

    /// Handles a signal of a family that the links' thread has taken.
    pub(super) fn stirred(&mut self, number: u32, entry: Option<u32>) {
        // Before the look, or a signal that comes meanwhile would be lost.
        if let Some(claims) = self.beside.get(&number) {
            claims.seen(entry);
        }
        let pairs: Vec<u32> = match entry {
            Some(entry) => self.entries.get(&(number, entry)).copied().into_iter().collect(),
            None => self.of_family(number),
        };
        pairs.into_iter().for_each(|pair| self.stir(pair));
    }

    /// Returns the pairs with programs of a family.
    fn of_family(&self, number: u32) -> Vec<u32> {
        let all = self.entries.iter().filter(|((of, _), _)| *of == number);
        all.map(|(_, pair)| *pair).collect()
    }

    /// Records that a pair has this end at a program.
    pub fn enter_host(&mut self, connection: u32, line: &Line, pair: u32) {
        self.hosts.insert(connection, pair);
        self.entries.insert((line.family, line.entry), pair);
        if let Some(claims) = self.beside.get(&line.family) {
            claims.claim(line.entry);
        }
    }

    /// Forgets a pair's end at a program.
    pub fn forget_host(&mut self, connection: u32, line: &Line) {
        self.hosts.remove(&connection);
        self.entries.remove(&(line.family, line.entry));
        if let Some(claims) = self.beside.get(&line.family) {
            claims.give_up(line.entry);
        }
    }

    /// Resets the streams of a family whose signals are invalid, since its events would not be
    /// noticed any more.
    pub(super) fn spoiled(&mut self, number: u32) {
        let text = "a program's signals cannot be: its streams to guests are broken off";
        self.log.line("family", format_args!("{text}"));
        self.part(number);
        for pair in self.of_family(number) {
            for end in 0..2 {
                self.reset(pair, end);
            }
            self.stir(pair);
        }
    }
}
