//! The ways to a VF that are compared.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use slipway_vf_pool::{Device, Devset, Fault, Ledger, Owner, Pool, Retries, Settings};
use tempfile::TempDir;

use super::hollow::{Hollow, Memory};
use super::{AttachLoad, AttachMeasured};
use crate::cpu_time::own_time;
use crate::gate::Gate;
use crate::measurement::Subject;
use crate::statistics::percentile;

/// The number of VFs that a pool resets at once.
const WORKERS: u32 = 16;
/// Bytes of a thread's stack.
const STACK: usize = 256 << 10;
/// The longest time for one VF's reset, and for those of all.
const RESET: Duration = Duration::from_secs(60);
const ALL: Duration = Duration::from_secs(600);

/// One mutex for the whole devset, held from the opening to the end of the scrub, as VFIO's driver
/// holds its own (FastIOV, section 3.2.2).
pub struct OneLock;

/// FastIOV's locks: those of [`Devset`]. Each VF is opened, reset and scrubbed when it is asked
/// for.
pub struct VfLocks;

/// A pool: each VF was reset and scrubbed before it is asked for.
pub struct Pooled;

impl Subject for OneLock {
    type Load = AttachLoad;
    type Measured = AttachMeasured;

    fn name(&self) -> &str {
        "one-lock"
    }

    fn about(&self) -> String {
        "one mutex for the devset; opening, reset and scrub when a VF is asked for".into()
    }

    fn run(&mut self, load: &AttachLoad) -> Result<AttachMeasured> {
        let (devices, resets) = Hollow::all(load);
        let devices: Vec<_> = devices.into_iter().map(Mutex::new).collect();
        let set = Mutex::new(());
        at_once(load, &resets, |vf| {
            let _alone = set.lock().unwrap_or_else(PoisonError::into_inner);
            prepare(&mut devices[vf as usize].lock().unwrap_or_else(PoisonError::into_inner))
        })
    }
}

impl Subject for VfLocks {
    type Load = AttachLoad;
    type Measured = AttachMeasured;

    fn name(&self) -> &str {
        "vf-locks"
    }

    fn about(&self) -> String {
        "a read/write lock for the devset and a mutex for each VF; opening, reset and scrub when \
         a VF is asked for"
            .into()
    }

    fn run(&mut self, load: &AttachLoad) -> Result<AttachMeasured> {
        let (devices, resets) = Hollow::all(load);
        let set = Devset::new(devices);
        at_once(load, &resets, |vf| {
            let attached = set.attach(vf as usize, prepare);
            let memory = attached.map_err(|_| anyhow!("VF {vf} is attached already"))??;
            Ok::<_, anyhow::Error>(memory)
        })
    }
}

impl Subject for Pooled {
    type Load = AttachLoad;
    type Measured = AttachMeasured;

    fn name(&self) -> &str {
        "pool"
    }

    fn about(&self) -> String {
        format!(
            "the pool, its ledger on a tmpfs; reset and scrub by {WORKERS} threads when a VF \
             returns, counted under \"refill\""
        )
    }

    fn run(&mut self, load: &AttachLoad) -> Result<AttachMeasured> {
        let (devices, resets) = Hollow::all(load);
        let (ledger, _folder) = ledger()?;
        let settings = Settings {
            name: "bench".into(),
            set_size: load.owners,
            workers: WORKERS,
            deadline: RESET,
            retries: Retries::NONE,
        };
        let pool = Pool::new(settings, devices, ledger)?;
        ensure!(pool.settle(ALL), "the pool did not become ready");
        let owner = |vf: u32| Owner::new("bench", vf.to_string());
        resets.store(0, Ordering::Relaxed);
        let leases = Mutex::new(Vec::new());
        let mut measured = at_once(load, &resets, |number| {
            let lease = pool.take(&owner(number)?)?;
            let memory = lease.access.clone();
            leases.lock().unwrap_or_else(PoisonError::into_inner).push((number, lease.vf));
            Ok::<_, anyhow::Error>(memory)
        })?;
        let (begun, used) = (Instant::now(), own_time());
        for (number, vf) in leases.into_inner().unwrap_or_else(PoisonError::into_inner) {
            pool.give_back(vf, &owner(number)?)?;
        }
        ensure!(pool.settle(ALL), "the pool did not become ready again");
        measured.refill_ns = Some(begun.elapsed().as_nanos() as u64);
        measured.refill_cpu_ns = Some(own_time().saturating_sub(used).as_nanos() as u64);
        ensure!(
            pool.counts().ready == load.owners as usize,
            "the pool lost VFs: {:?}",
            pool.counts()
        );
        Ok(measured)
    }
}

/// Opens a ledger in a folder of its own, which is removed with the second result.
fn ledger() -> Result<(Ledger, TempDir)> {
    let folder = TempDir::new_in("/dev/shm").context("a ledger needs a tmpfs at /dev/shm")?;
    Ok((Ledger::open(&folder.path().join("ledger"))?, folder))
}

/// Does on demand what a VF needs before an owner may have it.
fn prepare(device: &mut Hollow) -> Result<Memory, Fault> {
    device.open()?;
    device.reset()?;
    device.scrub()?;
    Ok(device.access())
}

/// Attaches a VF for each owner, all at once, each on a thread of its own. `attach` gets the
/// owner's number. Checks that no owner sees another one's bytes.
fn at_once<E: Into<anyhow::Error> + Send>(
    load: &AttachLoad,
    resets: &Arc<AtomicU64>,
    attach: impl Fn(u32) -> Result<Memory, E> + Sync,
) -> Result<AttachMeasured> {
    let gate = Gate::new(load.owners);
    let (begun, used, ends) = std::thread::scope(|scope| {
        let owner = |number: u32| {
            let (gate, attach) = (&gate, &attach);
            let run = move || -> Result<(Instant, Memory)> {
                gate.wait();
                let memory = attach(number).map_err(Into::into)?;
                Ok((Instant::now(), memory))
            };
            let builder = std::thread::Builder::new().stack_size(STACK);
            // A thread that is missing at the gate would have the others wait for ever.
            builder.spawn_scoped(scope, run).expect("a thread for each owner")
        };
        let owners: Vec<_> = (0..load.owners).map(owner).collect();
        gate.settle();
        // Before the owners are woken: this thread may be the last one to run again.
        let (begun, used) = (Instant::now(), own_time());
        gate.open();
        let ends = owners.into_iter().map(|owner| owner.join().expect("an owner panicked"));
        (begun, used, ends.collect::<Result<Vec<_>>>())
    });
    let cpu_ns = own_time().saturating_sub(used).as_nanos() as u64;
    let resets = resets.load(Ordering::Relaxed);
    let ends = ends?;
    for (number, (_, memory)) in ends.iter().enumerate() {
        ensure!(memory.is_clean_and_used(), "owner {number} got bytes of another one");
    }
    let took = |end: Instant| end.saturating_duration_since(begun).as_nanos() as u64;
    let times = ends.iter().map(|(end, _)| took(*end)).collect();
    Ok(AttachMeasured { cpu_ns, resets, ..of_times(times) })
}

/// Returns the percentiles of the times until owners had their VFs, ns.
fn of_times(mut times: Vec<u64>) -> AttachMeasured {
    times.sort_unstable();
    AttachMeasured {
        all_ns: times.last().copied().unwrap_or(0),
        p50_ns: percentile(&times, 50),
        p99_ns: percentile(&times, 99),
        cpu_ns: 0,
        resets: 0,
        refill_ns: None,
        refill_cpu_ns: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_gives_clean_vfs_and_the_pool_resets_none_meanwhile() {
        let load: AttachLoad = "n8-16k-1ms".parse().unwrap();
        let subjects: [(&mut crate::attach::AttachSubject, u64); 3] =
            [(&mut OneLock, 8), (&mut VfLocks, 8), (&mut Pooled, 0)];
        for (subject, resets) in subjects {
            let measured = subject.run(&load).unwrap();
            assert_eq!(measured.resets, resets, "{}", subject.name());
            assert!(measured.p50_ns <= measured.p99_ns && measured.p99_ns <= measured.all_ns);
            assert_eq!(measured.refill_ns.is_some(), subject.name() == "pool");
        }
    }
}
