//! Requests of many owners at the same time: [`at_once`] has threads wait at a [`Gate`], opens it,
//! and sums up what they measured ([`AllServed`]).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::disk::{Disk, DiskUse};
use super::{RootLoad, RootMeasured};
use crate::cpu_time::own_time;
use crate::gate::Gate;
use crate::statistics::percentile;

/// Bytes of a thread's stack.
const STACK: usize = 256 << 10;

/// A request that was served.
struct Served<K> {
    begun: Instant,
    ended: Instant,
    /// The root, which its owner keeps until all are served.
    kept: K,
}

/// The requests of all owners, once they were served.
struct AllServed<K> {
    /// The start, which was the same for all.
    begun: Instant,
    requests: Vec<Served<K>>,
    cpu_ns: u64,
    disk: Option<DiskUse>,
}

/// Calls `request` with the number of each owner, all of which ask at the same time: on a thread
/// for each, or, in the order of the numbers, on as many threads as requests are served at once.
///
/// Returns the times, and what the requests gave.
pub(super) fn at_once<K: Send>(
    load: &RootLoad,
    disk: &Disk,
    request: impl Fn(u32) -> Result<K> + Sync,
) -> Result<(RootMeasured, Vec<K>)> {
    let served = serve_all(*load, disk, request)?;
    let measured = served.sum_up();
    Ok((measured, served.requests.into_iter().map(|one| one.kept).collect()))
}

/// Starts the threads, has them begin together, and waits for them.
fn serve_all<K: Send>(
    load: RootLoad,
    disk: &Disk,
    request: impl Fn(u32) -> Result<K> + Sync,
) -> Result<AllServed<K>> {
    let (threads, each) = match load.at_once {
        0 => (load.owners, 1),
        some => (some.min(load.owners), usize::MAX),
    };
    let (next, gate) = (AtomicU32::new(0), Gate::new(threads));
    let serve = |number: u32| -> Result<Served<K>> {
        let begun = Instant::now();
        let kept = request(number)?;
        Ok(Served { begun, ended: Instant::now(), kept })
    };
    let work = || -> Result<Vec<Served<K>>> {
        gate.wait();
        let number = || Some(next.fetch_add(1, Ordering::Relaxed));
        let numbers = std::iter::from_fn(number).take_while(|number| *number < load.owners);
        numbers.take(each).map(&serve).collect()
    };
    let (begun, used, counts, ended) = std::thread::scope(|scope| {
        let thread = |_: u32| {
            let builder = std::thread::Builder::new().stack_size(STACK);
            // A thread that is missing at the barrier would have the others wait for ever.
            builder.spawn_scoped(scope, work).expect("a thread for each owner")
        };
        let threads: Vec<_> = (0..threads).map(thread).collect();
        gate.settle();
        let counts = disk.counts();
        // Before the threads are woken: this thread may be the last one to run again.
        let (begun, used) = (Instant::now(), own_time());
        gate.open();
        let ended = threads.into_iter().map(|one| one.join().expect("an owner panicked"));
        (begun, used, counts, ended.collect::<Result<Vec<_>>>())
    });
    let cpu_ns = own_time().saturating_sub(used).as_nanos() as u64;
    let disk = disk.counts().zip(counts).map(|(now, before)| now.since(before));
    let requests = ended?.into_iter().flatten().collect();
    Ok(AllServed { begun, requests, cpu_ns, disk })
}

impl<K> AllServed<K> {
    /// Returns the percentiles of the times since the common start, and of those since a thread
    /// began with a request.
    fn sum_up(&self) -> RootMeasured {
        let all = self.sorted(|one| one.ended.saturating_duration_since(self.begun));
        let alone = self.sorted(|one| one.ended.saturating_duration_since(one.begun));
        RootMeasured {
            p50_ns: percentile(&all, 50),
            p99_ns: percentile(&all, 99),
            most_ns: percentile(&all, 100),
            service_p50_ns: percentile(&alone, 50),
            service_p99_ns: percentile(&alone, 99),
            cpu_ns: self.cpu_ns,
            other_cpu_ns: 0,
            disk: self.disk,
        }
    }

    fn sorted(&self, time: impl Fn(&Served<K>) -> Duration) -> Vec<u64> {
        let times = self.requests.iter().map(|one| time(one).as_nanos() as u64);
        let mut times: Vec<u64> = times.collect();
        times.sort_unstable();
        times
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn each_owner_is_served_once_and_no_more_than_allowed_at_once() {
        let disk = Disk::of(std::path::Path::new("/")).unwrap();
        for (text, most) in [("n20", 20), ("n20-a3", 3), ("n2-a9", 2)] {
            let load: RootLoad = text.parse().unwrap();
            let (now, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let request = |number: u32| -> Result<u32> {
                let running = now.fetch_add(1, Ordering::SeqCst) + 1;
                seen.fetch_max(running, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(number)
            };
            let (measured, numbers) = at_once(&load, &disk, request).unwrap();
            assert_eq!(numbers.len(), load.owners as usize, "{text}");
            let numbers: BTreeSet<u32> = numbers.into_iter().collect();
            assert!(numbers.iter().copied().eq(0..load.owners), "{text}");
            assert!(seen.into_inner() <= most, "{text}");
            assert!(measured.p50_ns <= measured.p99_ns && measured.p99_ns <= measured.most_ns);
            assert!(measured.service_p50_ns >= 1_000_000, "{measured:?}");
        }
    }

    #[test]
    fn the_error_of_one_owner_is_that_of_the_turn() {
        let disk = Disk::of(std::path::Path::new("/")).unwrap();
        for text in ["n4", "n4-a2"] {
            let load: RootLoad = text.parse().unwrap();
            let refuse = |number: u32| -> Result<()> {
                anyhow::ensure!(number != 2, "no root");
                Ok(())
            };
            assert_eq!(at_once(&load, &disk, refuse).unwrap_err().to_string(), "no root");
        }
    }
}
