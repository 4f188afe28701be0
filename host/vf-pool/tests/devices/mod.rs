//! Devices for tests of the pool, which note the calls and can be held up or made to fail.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(dead_code)] // each test uses a part

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use slipway_vf_pool::{Device, Fault, Ledger, Owner, Pool, Retries, Settings};

#[derive(Default)]
struct Script {
    calls: Vec<Vec<String>>,
    /// Operations and VFs that wait; no VF: all.
    held: HashSet<(&'static str, Option<u32>)>,
    /// Operations that fail once, and those that fail each time.
    failing: HashSet<(&'static str, u32)>,
    broken: HashSet<(&'static str, u32)>,
    set_resets: usize,
}

#[derive(Default)]
struct Shared {
    script: Mutex<Script>,
    changed: Condvar,
}

/// The devices' side of a test, with the ledger.
pub struct Bench {
    shared: Arc<Shared>,
    ledger: Ledger,
    _folder: Option<tempfile::TempDir>,
}

/// Operations go on when this is dropped.
pub struct Held {
    shared: Arc<Shared>,
    what: (&'static str, Option<u32>),
}

pub fn owner(id: &str) -> Owner {
    Owner::new("test", id).unwrap()
}

impl Bench {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&folder.path().join("ledger")).unwrap();
        Self { _folder: Some(folder), ..Self::with(ledger) }
    }

    pub fn with(ledger: Ledger) -> Self {
        Self { shared: Arc::default(), ledger, _folder: None }
    }

    /// Makes a pool called "test" on the bench's ledger, whose VFs are not tried again.
    pub fn pool(&self, count: u32, set: u32, workers: u32, deadline: Duration) -> Pool<Scripted> {
        let name = "test".into();
        let retries = Retries::NONE;
        self.pool_of(count, Settings { name, set_size: set, workers, deadline, retries })
    }

    /// Makes a pool with these settings on the bench's ledger.
    pub fn pool_of(&self, count: u32, settings: Settings) -> Pool<Scripted> {
        self.shared.script.lock().unwrap().calls.resize(count as usize, Vec::new());
        let device = |vf| Scripted { vf, shared: self.shared.clone() };
        Pool::new(settings, (0..count).map(device), self.ledger.clone()).unwrap()
    }

    pub fn calls(&self, vf: u32) -> Vec<String> {
        self.shared.script.lock().unwrap().calls[vf as usize].clone()
    }

    pub fn set_resets(&self) -> usize {
        self.shared.script.lock().unwrap().set_resets
    }

    pub fn recorded(&self) -> usize {
        self.ledger.records("test").unwrap().len()
    }

    pub fn hold(&self, operation: &'static str) -> Held {
        self.hold_one((operation, None))
    }

    pub fn hold_vf(&self, operation: &'static str, vf: u32) -> Held {
        self.hold_one((operation, Some(vf)))
    }

    fn hold_one(&self, what: (&'static str, Option<u32>)) -> Held {
        self.shared.script.lock().unwrap().held.insert(what);
        Held { shared: self.shared.clone(), what }
    }

    pub fn fail(&self, operation: &'static str, vf: u32) {
        self.shared.script.lock().unwrap().failing.insert((operation, vf));
    }

    /// Lets an operation of a VF fail until [`heal`](Self::heal).
    pub fn break_down(&self, operation: &'static str, vf: u32) {
        self.shared.script.lock().unwrap().broken.insert((operation, vf));
    }

    pub fn heal(&self) {
        let mut script = self.shared.script.lock().unwrap();
        script.failing.clear();
        script.broken.clear();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.script.lock().unwrap().held.remove(&self.what);
        self.shared.changed.notify_all();
    }
}

pub struct Scripted {
    vf: u32,
    shared: Arc<Shared>,
}

impl Scripted {
    fn call(&self, operation: &'static str) -> Result<(), Fault> {
        let mut script = self.shared.script.lock().unwrap();
        script.calls[self.vf as usize].push(operation.to_owned());
        drop(script);
        self.pass(operation)
    }

    /// Waits as long as an operation is held up, and fails if it is to fail.
    fn pass(&self, operation: &'static str) -> Result<(), Fault> {
        let script = self.shared.script.lock().unwrap();
        let is_held = |script: &mut Script| {
            let held = [(operation, None), (operation, Some(self.vf))];
            held.iter().any(|what| script.held.contains(what))
        };
        let mut script = self.shared.changed.wait_while(script, is_held).unwrap();
        let mut fails = |operation| script.failing.take(&(operation, self.vf)).is_some();
        let (fails, panics) = (fails(operation), operation == "reset" && fails("panic"));
        let fails = fails || script.broken.contains(&(operation, self.vf));
        drop(script);
        assert!(!panics, "as it is meant");
        if fails { Err(Fault(format!("{operation} went wrong"))) } else { Ok(()) }
    }
}

impl Device for Scripted {
    type Access = u32;

    fn open(&mut self) -> Result<(), Fault> {
        self.call("open")
    }

    fn adopt(&mut self) -> Result<(), Fault> {
        self.call("adopt")
    }

    fn reset(&mut self) -> Result<(), Fault> {
        self.call("reset")
    }

    fn scrub(&mut self) -> Result<(), Fault> {
        self.call("scrub")
    }

    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault> {
        devices[0].shared.script.lock().unwrap().set_resets += 1;
        devices[0].pass("reset_set")
    }

    fn admit(&mut self) -> Result<(), Fault> {
        self.call("admit")
    }

    fn expel(&mut self) {
        let _ = self.call("expel");
    }

    fn access(&self) -> u32 {
        self.vf
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.call("close")
    }
}
