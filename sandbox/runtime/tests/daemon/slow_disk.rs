//! Disks that do not answer, simulated by FIFOs in place of one sandbox's files.

use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::{Daemon, exit_of};

fn fifo(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Reads from a FIFO, so that its writer continues.
fn release(path: &Path) -> std::os::fd::OwnedFd {
    rustix::fs::open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .unwrap()
}

/// The record of one sandbox and the kept output of another cannot be written. These two wait, and
/// everybody else continues. The two continue once the disk answers.
#[tokio::test]
async fn a_disk_that_does_not_answer_holds_up_its_own_sandbox() {
    let guests = Arc::new(|listener, _: &str| {
        Guest { exit_status: 7, ..Guest::default() }.speak(listener);
    });
    let (gate, closed) = watch::channel(false);
    let daemon = Daemon::start(guests, closed).await;
    let (record_id, record_out) = daemon.run("record").await;
    let (log_id, log_out) = daemon.run("log").await;
    for name in ["record", "log"] {
        daemon.wait_state(name, "starting").await;
    }
    let record = daemon.sandbox_dir(&record_id).join("record.json.new");
    let log = daemon.sandbox_dir(&log_id).join("output.log");
    // Nothing of either sandbox is written before the VMM runs: both wait at the gate, and their
    // first records are saved.
    settled(&daemon.sandbox_dir(&record_id)).await;
    settled(&daemon.sandbox_dir(&log_id)).await;
    std::fs::remove_file(&record).unwrap();
    fifo(&record);
    fifo(&log);
    gate.send_replace(true);
    let listed = daemon.list(200).await;
    for number in 0..5 {
        let name = format!("honest-{number}");
        assert_eq!(daemon.run_to_end(&name).await.status, 7);
    }
    println!("list of sandboxes: {listed}");
    for name in ["record", "log"] {
        assert_eq!(daemon.state(name).await.state, "starting", "{name}");
    }
    // A later open of the log by name finds a regular file.
    let held = log.with_extension("held");
    std::fs::hard_link(&log, &held).unwrap();
    std::fs::remove_file(&log).unwrap();
    std::fs::write(&log, "").unwrap();
    let (_record, _log) = (release(&record), release(&held));
    assert_eq!(exit_of(record_out).await.status, 7);
    assert_eq!(exit_of(log_out).await.status, 125);
    let reason = daemon.state("log").await.reason;
    assert!(reason.contains("output.log"), "{reason}");
}

/// Waits until the saved record says `starting`, which is the last version before the VMM's.
async fn settled(dir: &Path) {
    loop {
        let text = std::fs::read_to_string(dir.join("record.json")).unwrap_or_default();
        if text.contains("\"starting\"") {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
