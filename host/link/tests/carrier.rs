//! The carrier of an engine: its commands, its sleep and its end. One test, as it looks at the
//! threads of its process.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{certificates, left};
use slipway_link::{Carrier, Command, Links, News, start_carrier};

/// The longest time for which a test waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the folder in proc(5) of the carrier's thread. Returns `None` if there is none.
fn thread() -> Option<PathBuf> {
    let all = std::fs::read_dir("/proc/self/task").unwrap();
    let is_its = |folder: &PathBuf| {
        std::fs::read_to_string(folder.join("comm")).is_ok_and(|name| name == "slipway-link\n")
    };
    all.map(|entry| entry.unwrap().path()).find(is_its)
}

/// Returns how often a thread has fallen asleep.
fn sleeps(thread: &Path) -> u64 {
    let status = std::fs::read_to_string(thread.join("status")).unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

fn next(carrier: &Carrier) -> News {
    let begun = Instant::now();
    loop {
        if let Some(news) = carrier.news().next() {
            return news;
        }
        assert!(begun.elapsed() < LIMIT, "the carrier does not answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_carrier_obeys_sleeps_while_it_is_idle_and_ends_with_its_handle() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let links = Links::new(left(dir.path(), "127.0.0.1:1")).unwrap();
    let carrier = start_carrier(links).unwrap();
    let its = thread().expect("a thread of its own");
    carrier.command(Command::Report);
    assert_eq!(next(&carrier), News::Reports(Vec::new()));

    // After its last work the carrier polls for a moment, and then sleeps for good.
    let before = sleeps(&its);
    std::thread::sleep(Duration::from_secs(1));
    let wakes = sleeps(&its) - before;
    assert!(wakes < 100, "{wakes} wake-ups in an idle second");

    for _ in 0..100 {
        carrier.command(Command::Shares);
        assert!(matches!(next(&carrier), News::Shares(_)));
    }
    drop(carrier);
    let begun = Instant::now();
    while thread().is_some() {
        assert!(begun.elapsed() < LIMIT, "the thread has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}
