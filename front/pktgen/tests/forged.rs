//! A ping whose replies are forged.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use slipway_ethernet_spec::Mac;
use slipway_pktgen::{Limits, Plan, SHORTEST, Sizes, Vary, Wire, ping};

/// The position of the frame's number.
const NUMBER: std::ops::Range<usize> = 44..52;

/// Answers each frame with frames of other numbers.
struct Forger<F> {
    /// Returns the numbers of the replies to a frame with this number.
    replies: F,
    waiting: Vec<Vec<u8>>,
}

impl<F: Fn(u64) -> Vec<u64>> Wire for Forger<F> {
    fn send(&mut self, count: usize, make: &mut dyn FnMut(&mut [u8]) -> usize) -> Result<usize> {
        let mut frame = vec![0; SHORTEST];
        for _ in 0..count {
            make(&mut frame);
            let number = u64::from_be_bytes(frame[NUMBER].try_into().unwrap());
            for forged in (self.replies)(number) {
                frame[NUMBER].copy_from_slice(&forged.to_be_bytes());
                self.waiting.push(frame.clone());
            }
        }
        Ok(count)
    }

    fn receive(&mut self, limit: usize, look: &mut dyn FnMut(&[u8], usize)) -> Result<usize> {
        let count = limit.min(self.waiting.len());
        self.waiting.drain(..count).for_each(|frame| look(&frame, frame.len()));
        Ok(count)
    }

    fn wait(&mut self, _: Duration) -> Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn mac(&self) -> Option<Mac> {
        None
    }

    fn reserve(&mut self, _: usize) -> Result<()> {
        Ok(())
    }
}

/// Sends two frames. Returns the numbers of frames that came back, were lost, and belong to no run.
fn two(replies: impl Fn(u64) -> Vec<u64>, patience: Duration) -> (u64, u64, u64) {
    let plan = Plan {
        to: Mac::local(1),
        from: Some(Mac::local(2)),
        sizes: Sizes::Cycle(vec![SHORTEST]),
        rate: None,
        burst: 1,
        flows: 1,
        vary: Vary { mac: false, ip: false, port: false },
        id: 7,
    };
    let stop = AtomicBool::new(false);
    let limits = Limits { count: Some(2), time: None, stop: &stop };
    let mut wire = Forger { replies, waiting: Vec::new() };
    let figures = ping(&mut wire, &plan, patience, limits, &mut |_| ()).unwrap();
    (figures.frames, figures.lost.unwrap(), figures.others.unwrap())
}

#[test]
fn numbers_that_were_not_sent_are_nobodys() {
    assert_eq!(two(|number| vec![number + 1, u64::MAX, u64::MAX], Duration::ZERO), (0, 2, 6));
}

#[test]
fn more_replies_than_frames_are_no_losses() {
    // The first reply has the second frame's number, so those with the first frame's are late and
    // not duplicates.
    let late = |number| if number == 0 { vec![] } else { vec![1, 0, 0, 0, 0] };
    assert_eq!(two(late, Duration::ZERO), (5, 0, 0));
}

#[test]
fn patience_may_be_as_long_as_can_be() {
    assert_eq!(two(|number| vec![number], Duration::MAX), (2, 0, 0));
}
