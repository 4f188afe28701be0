//! Mixes: executors, and tenants on them.

use serde::{Deserialize, Serialize};

/// Bytes per second for one unit of the slides' figures.
pub const UNIT: f64 = 1e6;
/// Bytes of a job.
pub const JOB: usize = 8192;

/// An executor's work on bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Copies the bytes.
    Copy,
    /// Copies the bytes and computes a CRC32C.
    Check,
    /// Seals the bytes with AES-GCM. Only as the first in a chain.
    Seal,
}

/// A simulated executor; each is a resource of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfExecutor {
    /// The name for display.
    pub name: String,
    /// The kind of work.
    pub work: Work,
    /// Bytes per second.
    pub capacity: f64,
}

/// A tenant that always has something to send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfTenant {
    /// Indexes of the tenant's executors, from source to sink.
    pub executors: Vec<usize>,
    /// The weight of the tenant's share.
    pub weight: f64,
    /// The number of streams.
    pub streams: usize,
    /// The number of jobs that wait at the beginning of each stream.
    pub queued: usize,
}

impl DrfTenant {
    fn on(executors: &[usize]) -> Self {
        Self { executors: executors.to_vec(), weight: 1.0, streams: 1, queued: 16 }
    }
}

/// Executors and the tenants that share them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// The executors.
    pub executors: Vec<DrfExecutor>,
    /// The tenants.
    pub tenants: Vec<DrfTenant>,
}

/// Pseudo-random numbers, the same in every run (splitmix64).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `limit`, which is small.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit.max(1) as u64) as usize
    }
}

impl Mix {
    /// Returns the slides' example: A uses transport and crypto, B uses transport, with capacities
    /// of 100 and 60.
    pub fn talk() -> Self {
        let executor = |name: &str, work, units: f64| DrfExecutor {
            name: name.into(),
            work,
            capacity: units * UNIT,
        };
        Self {
            executors: vec![
                executor("transport", Work::Copy, 100.0),
                executor("crypto", Work::Seal, 60.0),
            ],
            tenants: vec![DrfTenant::on(&[1, 0]), DrfTenant::on(&[0])],
        }
    }

    /// Returns 2 to 8 tenants on 2 to 5 executors of 20 to 100 units, with chains in any order. The
    /// result depends only on `seed`.
    pub fn random(seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let count = 2 + numbers.below(4);
        let executors = (0..count).map(|at| DrfExecutor {
            name: format!("executor {at}"),
            work: if at % 2 == 0 { Work::Copy } else { Work::Check },
            capacity: (20 + numbers.below(81)) as f64 * UNIT,
        });
        let executors = executors.collect();
        let tenants = 2 + numbers.below(7);
        let tenants = (0..tenants).map(|_| DrfTenant::on(&chain(&mut numbers, count))).collect();
        Self { executors, tenants }
    }

    /// Returns this mix with a first tenant that floods: 64 times as many streams, and four times
    /// as much queued in each.
    pub fn flooded(&self) -> Self {
        let mut mix = self.clone();
        if let Some(first) = mix.tenants.first_mut() {
            first.streams *= 64;
            first.queued *= 4;
        }
        mix
    }
}

/// Returns some of `count` executors, in any order.
fn chain(numbers: &mut Numbers, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        all.swap(at, numbers.below(at + 1));
    }
    all.truncate(1 + numbers.below(count));
    all
}
