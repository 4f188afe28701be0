//! The ledger's file: damaged, foreign, in use, and left by a process that was killed.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

mod devices;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use devices::owner;
use redb::TableDefinition;
use slipway_vf_pool::{Ledger, LedgerError, Record, Standing};

/// Says to the child process where its ledger is and where it is to stop.
const ROLE: &str = "SLIPWAY_VF_LEDGER_TEST";
/// Longer than any test takes on any machine.
const PATIENCE: Duration = Duration::from_secs(100);

fn taken(id: &str) -> Record {
    Record { standing: Standing::Taken { owner: owner(id) }, since_ns: 1 }
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    (folder, path)
}

/// Makes a ledger with records of 300 VFs.
fn filled(path: &Path) {
    let ledger = Ledger::open(path).unwrap();
    for vf in 0..300 {
        ledger.write("pool", vf, Some(&taken(&vf.to_string()))).unwrap();
    }
    ledger.set_template("pool", Some(b"template")).unwrap();
}

#[test]
fn records_and_templates_are_there_after_a_restart() {
    let (_folder, path) = folder();
    filled(&path);
    {
        let ledger = Ledger::open(&path).unwrap();
        ledger.write("pool", 7, None).unwrap();
        ledger.write("other", 7, Some(&taken("x"))).unwrap();
        for vf in [9, 4, 5] {
            ledger.set_drain("pool", vf, true).unwrap();
        }
        ledger.set_drain("pool", 5, false).unwrap();
    }
    let ledger = Ledger::open(&path).unwrap();
    let records = ledger.records("pool").unwrap();
    assert_eq!((records.len(), &records[7]), (299, &(8, taken("8"))));
    assert_eq!(ledger.records("other").unwrap(), [(7, taken("x"))]);
    assert_eq!(ledger.templates().unwrap(), [("pool".to_owned(), b"template".to_vec())]);
    assert_eq!(
        (ledger.drains("pool").unwrap(), ledger.drains("other").unwrap()),
        (vec![4, 9], vec![])
    );
    ledger.set_template("pool", None).unwrap();
    assert!(ledger.drains("pool").unwrap().is_empty());
    assert_eq!((ledger.records("pool").unwrap(), ledger.templates().unwrap()), (vec![], vec![]));
    assert_eq!(ledger.records("other").unwrap().len(), 1);
}

#[test]
fn a_ledger_that_is_cut_is_an_error_that_names_it_and_the_next_step() {
    let (_folder, path) = folder();
    filled(&path);
    let whole = std::fs::read(&path).unwrap();
    let cuts =
        [0, 1, 63, 64, 320, 4095, 4096, 8192, whole.len() / 4, whole.len() / 2, whole.len() - 1];
    for cut in cuts {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let error =
            Ledger::open(&path).err().unwrap_or_else(|| panic!("a cut at {cut} is not seen"));
        let text = error.to_string();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{cut}: {text}");
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains("slipway vf rebuild"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
        // The file is as it was, and nobody has it open.
        assert_eq!(std::fs::read(&path).unwrap().len(), cut);
    }
    let (ledger, aside) = Ledger::rebuild(&path).unwrap();
    assert_eq!(std::fs::read(aside.unwrap()).unwrap().len(), whole.len() - 1);
    ledger.write("pool", 1, Some(&taken("a"))).unwrap();
    drop(ledger);
    assert_eq!(Ledger::open(&path).unwrap().records("pool").unwrap().len(), 1);
}

#[test]
fn a_ledger_that_is_overwritten_is_an_error_or_reads_as_before() {
    let (_folder, path) = folder();
    filled(&path);
    let whole = std::fs::read(&path).unwrap();
    let mut seen = 0;
    // A page here and there, in all of the file.
    for at in (0..whole.len()).step_by(whole.len() / 60) {
        let mut bad = whole.clone();
        let end = (at + 256).min(bad.len());
        bad[at..end].fill(0x5a);
        std::fs::write(&path, &bad).unwrap();
        match Ledger::open(&path) {
            // The bytes were in a page that nothing uses.
            Ok(ledger) => assert_eq!(ledger.records("pool").unwrap().len(), 300, "at {at}"),
            Err(LedgerError::Damaged { .. }) => seen += 1,
            Err(other) => panic!("at {at}: {other}"),
        }
    }
    assert!(seen > 0);
}

#[test]
fn a_file_of_something_else_or_of_another_version_is_refused() {
    let (_folder, path) = folder();
    for text in ["hello", &"x".repeat(100_000)] {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Ledger::open(&path), Err(LedgerError::Damaged { .. })));
    }
    std::fs::remove_file(&path).unwrap();
    let with = |table: TableDefinition<'_, &str, u32>, format: u32| {
        let database = redb::Database::create(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(table).unwrap().insert("format", format).unwrap();
        transaction.commit().unwrap();
    };
    with(TableDefinition::new("somebody-elses"), 1);
    let error = Ledger::open(&path).err().unwrap().to_string();
    assert!(error.contains("a database of something else"), "{error}");
    with(TableDefinition::new("slipway-vf-ledger"), 99);
    let error = Ledger::open(&path).err().unwrap().to_string();
    assert!(error.contains("has format 99 and this slipway reads format 1"), "{error}");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(matches!(Ledger::open(&path), Err(LedgerError::Io { .. })));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(Ledger::open(&path).is_err());
}

#[test]
fn a_ledger_of_a_version_without_drains_gets_them() {
    let (_folder, path) = folder();
    let database = redb::Database::create(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    let format = TableDefinition::<&str, u32>::new("slipway-vf-ledger");
    transaction.open_table(format).unwrap().insert("format", Ledger::FORMAT).unwrap();
    transaction.open_table(TableDefinition::<(&str, u32), &[u8]>::new("vfs")).unwrap();
    transaction.open_table(TableDefinition::<&str, &[u8]>::new("pools")).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let ledger = Ledger::open(&path).unwrap();
    assert!(ledger.drains("pool").unwrap().is_empty());
    ledger.set_drain("pool", 3, true).unwrap();
    assert_eq!(ledger.drains("pool").unwrap(), [3]);
}

#[test]
fn one_process_has_the_ledger_at_a_time() {
    let (_folder, path) = folder();
    let ledger = Ledger::open(&path).unwrap();
    assert!(matches!(Ledger::open(&path), Err(LedgerError::InUse { .. })));
    assert!(matches!(Ledger::rebuild(&path), Err(LedgerError::InUse { .. })));
    drop(ledger);
    Ledger::open(&path).unwrap();
}

/// Starts this test's program again as a process with the role `role`, and waits until it says that
/// it has come to its end.
fn child(path: &Path, role: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_killed_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{role}:{}", path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("here")), "{role}");
    child
}

/// Not a test by itself: the process that [`child`] starts. It stops at a step and is killed there.
#[test]
fn the_killed_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (step, path) = role.split_once(':').unwrap();
    let ledger = Ledger::open(Path::new(path)).unwrap();
    let stop = || -> ! {
        println!("here");
        loop {
            std::thread::park();
        }
    };
    if step == "opened" {
        stop();
    }
    let bench = devices::Bench::with(ledger.clone());
    if step == "written" {
        // The step between the record and the hand-over.
        ledger.write("test", 0, Some(&taken("gone"))).unwrap();
        stop();
    }
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let lease = pool.take(&owner("gone")).unwrap();
    assert_eq!(lease.vf, 0);
    if step == "handed" {
        stop();
    }
    let _held = bench.hold("reset");
    pool.give_back(lease.vf, &owner("gone")).unwrap();
    if step == "returned" {
        stop();
    }
    drop(_held);
    assert!(pool.settle(PATIENCE));
    stop();
}

#[test]
fn a_process_killed_at_any_step_leaves_a_ledger_that_says_so() {
    let steps = [
        ("opened", vec![]),
        ("written", vec![(0, "taken")]),
        ("handed", vec![(0, "taken")]),
        ("returned", vec![(0, "returning")]),
        ("ready", vec![]),
    ];
    for (step, expected) in steps {
        let (_folder, path) = folder();
        let mut child = child(&path, step);
        child.kill().unwrap();
        child.wait().unwrap();
        let ledger = Ledger::open(&path).unwrap();
        let records = ledger.records("test").unwrap();
        let word = |standing: &Standing| match standing {
            Standing::Taken { .. } => "taken",
            Standing::Returning => "returning",
            _ => "other",
        };
        let found: Vec<_> = records.iter().map(|(vf, one)| (*vf, word(&one.standing))).collect();
        assert_eq!(found, expected, "{step}");
        // The next process gives everything back: each VF is reset before it is ready.
        let bench = devices::Bench::with(ledger);
        let pool = bench.pool(2, 2, 1, PATIENCE);
        let found = pool.reconcile(|_| false);
        let was_taken = expected.iter().any(|(_, word)| *word == "taken");
        assert_eq!(found.returned.len(), usize::from(was_taken), "{step}");
        assert!(pool.settle(PATIENCE));
        assert_eq!((pool.counts().ready, bench.recorded()), (2, 0), "{step}");
        for vf in 0..2 {
            assert!(bench.calls(vf).ends_with(&["reset".into(), "scrub".into()]), "{step}");
        }
    }
}

#[test]
fn writes_from_many_threads_are_all_there() {
    let (_folder, path) = folder();
    let ledger = Ledger::open(&path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let ledger = &ledger;
            scope.spawn(move || {
                for n in 0..10 {
                    let id = format!("{thread}-{n}");
                    ledger.write("pool", thread * 10 + n, Some(&taken(&id))).unwrap();
                }
            });
        }
    });
    drop(ledger);
    let records = Ledger::open(&path).unwrap().records("pool").unwrap();
    assert_eq!(records.len(), 160);
    assert!(records.iter().all(|(vf, one)| *one == taken(&format!("{}-{}", vf / 10, vf % 10))));
}
