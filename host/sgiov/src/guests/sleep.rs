//! The way of the thread to sleep: streams make their wishes, and then all peers are asked to wake
//! the thread.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use slipway_family::Family;
use slipway_ring::cross::{heavy, is_told_surely};

use super::carrying::{BACKLOG, Carrying, News, WAKE};

/// The longest sleep where a program's wake-up is not reliable.
const NAP: Duration = Duration::from_millis(1);
/// The time for which a stream is idle before its memory is released.
const REST: Duration = Duration::from_secs(1);

impl Carrying {
    /// Arms the streams that had nothing to do for `looks` looks. They are not looked at any more.
    pub fn rest(&mut self, looks: u8) {
        // The number of a stream that has ended may have been reused.
        self.hot.sort_unstable();
        self.hot.dedup();
        let (rested, mut hot): (Vec<u32>, Vec<u32>) = std::mem::take(&mut self.hot)
            .into_iter()
            .partition(|number| self.pairs.get(*number).is_some_and(|pair| pair.idle >= looks));
        let mut sound = Vec::with_capacity(rested.len());
        for number in rested {
            let pair = self.pairs.get_mut(number);
            if pair.is_some_and(|pair| pair.wish(&self.guests)) {
                sound.push(number);
            } else {
                hot.push(number);
            }
        }
        if !sound.is_empty() {
            heavy();
        }
        let now = Instant::now();
        for number in sound {
            let Some(pair) = self.pairs.get_mut(number) else { continue };
            pair.idle = 0;
            if pair.settle(&self.guests) {
                hot.push(number);
                continue;
            }
            pair.hot = false;
            if pair.has_memory() {
                if pair.resting.is_none() {
                    self.resting.push_back((now, number));
                }
                let queued = pair.resting.map_or(now, |(queued, _)| queued);
                pair.resting = Some((queued, now));
            }
        }
        self.hot = hot;
        // Also done if the thread never sleeps, or the queue would grow.
        self.trim();
    }

    /// Releases memory of streams that have been idle for long enough. Returns the time until the
    /// next look.
    fn trim(&mut self) -> Option<Duration> {
        let now = Instant::now();
        while let Some((queued, number)) = self.resting.front().copied() {
            let rested = now.saturating_duration_since(queued);
            if rested < REST {
                return Some(REST - rested);
            }
            self.resting.pop_front();
            let Some(pair) = self.pairs.get_mut(number) else { continue };
            // Otherwise the number was reused for another pair.
            let Some((_, since)) = pair.resting.filter(|(of, _)| *of == queued) else { continue };
            if now.saturating_duration_since(since) < REST {
                // The pair has worked meanwhile, so it is queued behind those that are due.
                pair.resting = Some((now, since));
                self.resting.push_back((now, number));
                continue;
            }
            pair.resting = None;
            if !pair.hot {
                pair.trim(&self.guests);
            }
        }
        None
    }

    /// Sleeps until it is woken, unless something has happened meanwhile.
    pub fn sleep(&mut self) {
        self.look_for_vmms();
        let answer = self.give_up();
        self.rest(0);
        self.tell();
        if !self.hot.is_empty() {
            return;
        }
        self.families.values().for_each(|family| family.set_asleep(true));
        heavy();
        let channels = self.guests.values_mut().filter_map(|guest| guest.channel.as_mut());
        // All channels, so that the word of each is set.
        let quiet = channels
            .fold(true, |quiet, channel| channel.sleep(channel.backlog() < BACKLOG) & quiet);
        if quiet && !self.listen() {
            self.wait(answer);
        }
        self.families.values().for_each(|family| family.set_asleep(false));
        let channels = self.guests.values().filter_map(|guest| guest.channel.as_ref());
        channels.for_each(slipway_sgiov_function::Channel::awake);
    }

    /// Reports functions whose VMM has gone.
    pub fn look_for_vmms(&mut self) {
        for (number, guest) in &self.guests {
            if super::serve::is_over(&guest.control) {
                self.told |= self.news.send(News::Gone(*number)).is_ok();
            }
        }
    }

    fn wait(&mut self, answer: Option<Duration>) {
        let mut patience = [self.trim(), answer].into_iter().flatten().min();
        if !self.hosts.is_empty() && !is_told_surely() {
            patience = Some(NAP);
        }
        let napped = patience == Some(NAP);
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; 64];
        let count = epoll::wait(&self.epoll, &mut events, patience.as_ref()).unwrap_or(0);
        for event in &events[..count] {
            let drained = match event.data.u64() {
                WAKE => slipway_peer::eventfd::drain(self.wake.0.as_fd()),
                number => {
                    let family = u32::try_from(number).ok().and_then(|n| self.families.get(&n));
                    family.is_none_or(Family::lower_bell)
                }
            };
            if !drained {
                // The program itself keeps its bell from being armed, which costs only its own
                // share of wake-ups.
                std::thread::yield_now();
            }
        }
        if napped {
            let all: Vec<u32> = self.hosts.values().copied().collect();
            all.into_iter().for_each(|pair| self.stir(pair));
        }
    }
}
