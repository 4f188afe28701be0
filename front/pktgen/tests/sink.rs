//! A sink on a wire that also carries frames of others.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use slipway_ethernet_spec::Mac;
use slipway_pktgen::{Limits, Plan, SHORTEST, Sizes, Vary, Wire, sink, source};

/// The time for which frames of others come after the frame of the run.
const OTHERS: Duration = Duration::from_millis(20);

/// A wire that keeps the frames that are sent. It gives back the first one, then frames of others
/// for [`OTHERS`], and then ends the run.
struct Loop<'a> {
    sent: Vec<Vec<u8>>,
    calls: u64,
    /// The time at which the first frame of others is asked for.
    others_since: Option<Instant>,
    stop: &'a AtomicBool,
}

impl<'a> Loop<'a> {
    fn new(stop: &'a AtomicBool) -> Self {
        Self { sent: Vec::new(), calls: 0, others_since: None, stop }
    }
}

impl Wire for Loop<'_> {
    fn send(&mut self, count: usize, make: &mut dyn FnMut(&mut [u8]) -> usize) -> Result<usize> {
        for _ in 0..count {
            let mut frame = vec![0; SHORTEST];
            make(&mut frame);
            self.sent.push(frame);
        }
        Ok(count)
    }

    fn receive(&mut self, _: usize, look: &mut dyn FnMut(&[u8], usize)) -> Result<usize> {
        self.calls += 1;
        if self.calls == 1 {
            look(&self.sent[0], SHORTEST);
            return Ok(1);
        }
        let since = *self.others_since.get_or_insert_with(Instant::now);
        look(&[0; SHORTEST], SHORTEST);
        self.stop.store(since.elapsed() >= OTHERS, Ordering::Relaxed);
        Ok(1)
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

#[test]
fn frames_of_others_do_not_extend_the_time_of_a_run() {
    let stop = AtomicBool::new(false);
    let mut wire = Loop::new(&stop);
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
    let one = Limits { count: Some(1), time: None, stop: &stop };
    assert_eq!(source(&mut wire, &plan, one, &mut |_| ()).unwrap().frames, 1);
    let until_stopped = Limits { count: None, time: None, stop: &stop };
    let begin = Instant::now();
    let figures = sink(&mut wire, Mac::local(1), until_stopped, &mut |_| ()).unwrap();
    assert_eq!((figures.frames, figures.others.unwrap()), (1, wire.calls - 1));
    // The frame of the run was there before the first one of others was asked for.
    let most = wire.others_since.unwrap() - begin;
    assert!(figures.seconds <= most.as_secs_f64(), "{} s of {most:?}", figures.seconds);
}
