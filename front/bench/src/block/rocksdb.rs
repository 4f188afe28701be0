//! RocksDB as the load: `db_bench` on a file system on the disk, and operations per second over
//! time.
//!
//! The loads are those of the thesis's section 5.2: a sequential fill, random reads and sequential
//! reads of the same database; then random writes, and reads and writes half and half, each on a
//! fresh database; all with one and with ten compaction threads. Reads, flushes and compactions
//! bypass the page cache, as SPDK's file system did there.

use std::fmt::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::outside::Own;
use crate::turns::{Fault, Turns};
use crate::watch::Watch;

/// A load, under `db_bench`'s name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RocksLoad {
    /// Writes every key once, in order, into a fresh database.
    FillSeq,
    /// Reads random keys of the existing database.
    ReadRandom,
    /// Reads the existing database from its first key to its last.
    ReadSeq,
    /// Writes random keys into a fresh database.
    FillRandom,
    /// Reads and writes random keys, half of each, in a fresh database.
    ReadRandomWriteRandom,
}

impl RocksLoad {
    /// All loads, in an order in which each finds the database that it needs.
    pub const ALL: [Self; 5] = [
        Self::FillSeq,
        Self::ReadRandom,
        Self::ReadSeq,
        Self::FillRandom,
        Self::ReadRandomWriteRandom,
    ];

    /// Returns `db_bench`'s name of the load.
    pub fn name(self) -> &'static str {
        match self {
            Self::FillSeq => "fillseq",
            Self::ReadRandom => "readrandom",
            Self::ReadSeq => "readseq",
            Self::FillRandom => "fillrandom",
            Self::ReadRandomWriteRandom => "readrandomwriterandom",
        }
    }

    /// Returns whether the load reads the database of the load before it.
    pub fn needs_database(self) -> bool {
        matches!(self, Self::ReadRandom | Self::ReadSeq)
    }
}

impl fmt::Display for RocksLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The loads and times of a measurement with RocksDB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RocksPlan {
    /// Numbers of compaction threads; each number has turns of its own.
    pub compaction_threads: Vec<u32>,
    /// Keys of a database, 16 bytes each. Loads that go through all keys end with the last.
    pub keys: u64,
    /// Bytes of each value.
    pub value_bytes: u32,
    /// Longest time of a load with random keys.
    pub time: Duration,
    /// The number of turns of each subject.
    pub rounds: u32,
}

/// One load of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RocksJob {
    /// The load.
    pub load: RocksLoad,
    /// Threads that compact in the background.
    pub compaction_threads: u32,
}

impl fmt::Display for RocksJob {
    /// Formats as `fillseq-c10`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}-c{}", self.load, self.compaction_threads))
    }
}

/// The result of one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RocksMeasured {
    /// The number of operations done.
    pub operations: u64,
    /// The time that they took, ns.
    pub elapsed_ns: u64,
    /// Seconds since the start, and operations per second since the entry before.
    pub over_time: Vec<(f64, f64)>,
}

impl RocksMeasured {
    /// Returns the operations per second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }
}

/// One load of one turn of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RocksRun {
    /// The subject's name.
    pub subject: String,
    /// The load.
    #[serde(flatten)]
    pub job: RocksJob,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: RocksMeasured,
}

/// All results with RocksDB: a part of a [`BlockReport`](super::BlockReport).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RocksReport {
    /// The loads and times.
    pub plan: RocksPlan,
    /// The results, load by load.
    pub runs: Vec<RocksRun>,
}

impl RocksPlan {
    /// Returns the loads of all turns, each once.
    pub fn jobs(&self) -> impl Iterator<Item = RocksJob> {
        self.compaction_threads.iter().flat_map(|&compaction_threads| {
            RocksLoad::ALL.into_iter().map(move |load| RocksJob { load, compaction_threads })
        })
    }
}

/// A subject that can run a database.
pub trait RocksSubject {
    /// Returns the name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Runs one load. Jobs come in the order of [`RocksPlan::jobs`].
    ///
    /// # Errors
    /// A sentence about the failure.
    fn run(&mut self, plan: &RocksPlan, job: RocksJob) -> Result<RocksMeasured>;
}

/// Gives every subject its turns, round after round. Calls `begins` at the start of each, with the
/// subject, the load, the number of loads done and the number of all loads. Returns the results,
/// and the turns that are void.
///
/// # Errors
/// The first error of a subject.
pub fn measure_rocksdb(
    subjects: &mut [Box<dyn RocksSubject>],
    plan: &RocksPlan,
    mut begins: impl FnMut(&str, RocksJob, usize, usize),
) -> Result<Turns<RocksRun>> {
    let turns = plan.jobs().count() * subjects.len() * plan.rounds as usize;
    let (mut runs, mut faults) = (Vec::with_capacity(turns), Vec::new());
    for &compaction_threads in &plan.compaction_threads {
        for round in 0..plan.rounds {
            for subject in subjects.iter_mut() {
                // One subject fills and reads a database before the next has its turn.
                for load in RocksLoad::ALL {
                    let job = RocksJob { load, compaction_threads };
                    let name = subject.name().to_owned();
                    begins(&name, job, runs.len(), turns);
                    let watch = Watch::begin(Own::Node);
                    let measured = subject.run(plan, job);
                    let measured = measured.with_context(|| format!("{name}, {job}"))?;
                    faults.extend(watch.end(None).map(|reason| {
                        let (subject, load) = (name.clone(), job.to_string());
                        Fault { subject, load, round, reason, failed: false }
                    }));
                    runs.push(RocksRun { subject: name, job, round, measured });
                }
            }
        }
    }
    Ok(Turns { runs, faults })
}

/// The place of a database.
#[derive(Clone, Copy, Debug)]
pub enum RocksPlace<'a> {
    /// This folder, which holds nothing else.
    Directory(&'a str),
    /// A file system that is made on this device, and mounted in this folder.
    Device(&'a str, &'a str),
}

/// The line that separates `db_bench`'s output from the file that it writes.
const MARK: &str = "--- slipway: over time ---";

/// Returns a script for `sh` that runs `job` and prints the output that [`rocks_measured`] parses.
/// The caller guarantees that the names in `place` contain no shell syntax.
pub fn rocks_script(plan: &RocksPlan, job: RocksJob, place: RocksPlace<'_>) -> String {
    let (RocksPlace::Directory(dir) | RocksPlace::Device(_, dir)) = place;
    let fresh = !job.load.needs_database();
    let mut script = "set -e\n".to_owned();
    if let RocksPlace::Device(device, _) = place {
        _ = writeln!(script, "mkdir -p {dir}");
        if fresh {
            let lazy = "lazy_itable_init=0,lazy_journal_init=0";
            _ = writeln!(script, "mkfs.ext4 -q -F -E nodiscard,{lazy} {device}");
        }
        // Unmounted at the end, since the next guest's turn uses the same medium.
        _ = writeln!(script, "mount {device} {dir}\ntrap 'umount {dir} || true' EXIT");
    } else if fresh {
        _ = writeln!(script, "rm -rf {dir}/db");
    }
    let options = options(plan, job, dir);
    _ = write!(
        script,
        "db_bench {options} 2>{dir}/errors || {{ tail -n 3 {dir}/errors >&2; exit 1; }}\n\
         echo '{MARK}'\ncat {dir}/over-time.csv\n"
    );
    if let RocksPlace::Device(..) = place {
        _ = writeln!(script, "trap - EXIT\numount {dir}");
    }
    script
}

/// Returns the options of `db_bench` for `job` in the directory `dir`.
fn options(plan: &RocksPlan, job: RocksJob, dir: &str) -> String {
    let threads = job.compaction_threads;
    let options = [
        format!("--benchmarks={}", job.load),
        format!("--db={dir}/db"),
        format!("--use_existing_db={}", job.load.needs_database()),
        format!("--num={}", plan.keys),
        "--key_size=16".to_owned(),
        format!("--value_size={}", plan.value_bytes),
        format!(
            "--duration={}",
            if job.load == RocksLoad::ReadSeq { 0 } else { seconds(plan.time) }
        ),
        "--threads=1".to_owned(),
        format!("--max_background_compactions={threads}"),
        "--max_background_flushes=1".to_owned(),
        // The default would cache a fifth of a database, whatever its size.
        "--cache_size=8388608".to_owned(),
        "--compression_type=none".to_owned(),
        "--use_direct_reads=true".to_owned(),
        "--use_direct_io_for_flush_and_compaction=true".to_owned(),
        "--report_interval_seconds=1".to_owned(),
        format!("--report_file={dir}/over-time.csv"),
    ];
    options.join(" ")
}

fn seconds(time: Duration) -> u64 {
    time.as_secs().max(1)
}

/// Parses the output of [`rocks_script`] about `load`.
///
/// # Errors
/// If the output has no result of `load`.
pub fn rocks_measured(text: &str, load: RocksLoad) -> Result<RocksMeasured> {
    let (printed, series) = text.split_once(MARK).context("db_bench did not come to its end")?;
    let line = printed.lines().find_map(|line| {
        let (name, rest) = line.split_once(':')?;
        (name.trim() == load.name()).then_some(rest)
    });
    let line = line.with_context(|| format!("db_bench says nothing of {load}"))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|word| word.trim_end_matches(';') == unit)?;
        words.get(at.checked_sub(1)?)?.parse::<f64>().ok().filter(|value| value.is_finite())
    };
    let not_read = || format!("db_bench's line is not as expected: {line}");
    let operations = before("operations").with_context(not_read)?;
    let elapsed = before("seconds").with_context(not_read)?;
    ensure!(operations >= 1.0 && elapsed > 0.0, "{}", not_read());
    let over_time = series.lines().filter_map(|line| {
        let (at, rate) = line.split_once(',')?;
        Some((at.trim().parse().ok()?, rate.trim().parse().ok()?))
    });
    Ok(RocksMeasured {
        operations: operations as u64,
        elapsed_ns: (elapsed * 1e9) as u64,
        over_time: over_time.collect(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan() -> RocksPlan {
        RocksPlan {
            compaction_threads: vec![1, 10],
            keys: 1_000,
            value_bytes: 1024,
            time: Duration::from_secs(3),
            rounds: 2,
        }
    }

    #[test]
    fn output_is_read() {
        let text = format!(
            "Keys:       16 bytes each\nreadrandom   :       8.759 micros/op 114165 ops/sec 3.004 \
             seconds 342999 operations;  113.2 MB/s (342999 of 342999 found)\n\n{MARK}\n\
             secs_elapsed,interval_qps\n1,39486\n2,146879\n"
        );
        let measured = rocks_measured(&text, RocksLoad::ReadRandom).unwrap();
        assert_eq!((measured.operations, measured.elapsed_ns), (342_999, 3_004_000_000));
        assert_eq!(measured.over_time, [(1.0, 39_486.0), (2.0, 146_879.0)]);
        assert!((measured.rate() - 114_180.8).abs() < 1.0);
        assert!(rocks_measured(&text, RocksLoad::FillSeq).is_err());
        assert!(rocks_measured(text.split(MARK).next().unwrap(), RocksLoad::ReadRandom).is_err());
        let garbled = text.replace("342999 operations", "many operations");
        assert!(rocks_measured(&garbled, RocksLoad::ReadRandom).is_err());
    }

    #[test]
    fn what_reads_keeps_the_database_and_what_fills_makes_one() {
        for load in RocksLoad::ALL {
            let job = RocksJob { load, compaction_threads: 10 };
            let script = rocks_script(&plan(), job, RocksPlace::Device("/dev/x", "/m"));
            assert_eq!(script.contains("mkfs.ext4"), !load.needs_database(), "{script}");
            assert!(script.contains("--max_background_compactions=10"), "{script}");
            assert!(script.contains("mount /dev/x /m") && script.ends_with("umount /m\n"));
            let script = rocks_script(&plan(), job, RocksPlace::Directory("/m"));
            assert_eq!(script.contains("rm -rf /m/db"), !load.needs_database(), "{script}");
        }
    }

    struct Counting(&'static str);

    impl RocksSubject for Counting {
        fn name(&self) -> &str {
            self.0
        }

        fn about(&self) -> String {
            String::new()
        }

        fn run(&mut self, _: &RocksPlan, _: RocksJob) -> Result<RocksMeasured> {
            Ok(RocksMeasured { operations: 1, elapsed_ns: 1, over_time: Vec::new() })
        }
    }

    #[test]
    fn a_subject_reads_the_database_that_it_filled() {
        let mut subjects: Vec<Box<dyn RocksSubject>> =
            vec![Box::new(Counting("a")), Box::new(Counting("b"))];
        let mut begun = 0;
        let runs = measure_rocksdb(&mut subjects, &plan(), |_, _, done, turns| {
            assert_eq!((done, turns), (begun, 40));
            begun += 1;
        });
        let runs = runs.unwrap().runs;
        assert_eq!(runs.len(), 40);
        for turn in runs.chunks(5) {
            let loads: Vec<RocksLoad> = turn.iter().map(|run| run.job.load).collect();
            assert_eq!(loads, RocksLoad::ALL);
            assert!(turn.iter().all(|run| run.subject == turn[0].subject));
        }
        assert_eq!(
            [&runs[0], &runs[5], &runs[10]].map(|run| run.subject.as_str()),
            ["a", "b", "a"]
        );
    }
}
