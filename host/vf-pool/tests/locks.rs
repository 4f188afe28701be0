//! Loom tests of the pool's locks: the interleavings (up to 2 preemptions) of owners, workers and a
//! reset of the set, with the crate's own files on loom's locks. A thread that waits for what never
//! ends is a deadlock here.
#![allow(dead_code)] // the modules are used in part
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/device.rs"]
mod device;
#[path = "../src/devset.rs"]
mod devset;
#[path = "../src/owner.rs"]
mod owner;
#[path = "../src/shelf.rs"]
mod shelf;
#[path = "../src/table.rs"]
mod table;

/// The locks that `devset` and `shelf` use, as loom's.
mod outside {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock};
}

use device::{Device, Fault};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use owner::Owner;
use shelf::{NotTaken, Shelf};
use table::{DeviceOperation, Refusal};

/// The operations that all devices of a set count.
#[derive(Default)]
struct Seen {
    /// Operations on VFs that run.
    operations: AtomicUsize,
    /// VFs that owners use.
    users: AtomicUsize,
    resets: AtomicUsize,
}

struct Checked {
    seen: Arc<Seen>,
    /// An owner may use it.
    is_open: bool,
    /// Loom finds two threads that have the device at once.
    own: loom::cell::Cell<u32>,
}

impl Checked {
    fn operate(&mut self) -> Result<(), Fault> {
        self.seen.operations.fetch_add(1, SeqCst);
        self.own.set(self.own.get() + 1);
        self.seen.operations.fetch_sub(1, SeqCst);
        Ok(())
    }
}

impl Device for Checked {
    type Access = Arc<Seen>;

    fn open(&mut self) -> Result<(), Fault> {
        self.operate()
    }

    fn adopt(&mut self) -> Result<(), Fault> {
        self.operate()
    }

    fn reset(&mut self) -> Result<(), Fault> {
        assert!(!self.is_open, "a VF was reset under an owner");
        self.seen.resets.fetch_add(1, SeqCst);
        self.operate()
    }

    fn scrub(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault> {
        let seen = devices[0].seen.clone();
        assert_eq!(seen.users.load(SeqCst), 0, "a set was reset under an owner");
        for device in devices.iter_mut() {
            device.own.set(device.own.get() + 1);
        }
        assert_eq!(seen.operations.load(SeqCst), 0, "an operation ran beside that on the set");
        assert_eq!(seen.users.load(SeqCst), 0, "a set was reset under an owner");
        Ok(())
    }

    fn admit(&mut self) -> Result<(), Fault> {
        assert!(!self.is_open, "a VF has two owners");
        self.is_open = true;
        Ok(())
    }

    fn expel(&mut self) {
        self.is_open = false;
    }

    fn access(&self) -> Arc<Seen> {
        self.seen.clone()
    }

    fn close(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

/// Makes a set of `count` VFs, all ready.
fn ready(count: u32) -> Arc<Shelf<Checked>> {
    let seen = Arc::new(Seen::default());
    let device = |_| Checked { seen: seen.clone(), is_open: false, own: loom::cell::Cell::new(0) };
    let shelf = Arc::new(Shelf::new((0..count).map(device), count));
    for vf in 0..count {
        assert_eq!(shelf.table().done(vf, Ok(())), None);
    }
    shelf
}

fn owner(id: &str) -> Owner {
    Owner::new("test", id).unwrap()
}

/// Does what a worker of the pool does.
fn work(shelf: &Shelf<Checked>, job: DeviceOperation) {
    let outcome = shelf.operate(job).map_err(|Fault(why)| why);
    match job {
        DeviceOperation::ResetSet(set) => assert_eq!(shelf.table().release_set(set, &outcome), []),
        DeviceOperation::Return(vf) => assert_eq!(shelf.table().done(vf, outcome), None),
        _ => unreachable!("no such job here"),
    }
}

/// Takes a VF, uses it and returns it. Returns `false` if none was ready.
fn use_one(shelf: &Shelf<Checked>, owner: &Owner) -> bool {
    match shelf.take(owner, 0, |_| Ok::<_, ()>(()), |_| {}) {
        Ok((vf, seen)) => {
            seen.users.fetch_add(1, SeqCst);
            seen.users.fetch_sub(1, SeqCst);
            let job = shelf.begin_return(vf, owner).unwrap();
            work(shelf, job.unwrap());
            true
        }
        Err(NotTaken::Refused(Refusal::Empty(_))) => false,
        Err(other) => panic!("{other:?}"),
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn no_set_is_reset_under_an_owner_or_beside_an_operation() {
    check(|| {
        let shelf = ready(2);
        let resetter = {
            let shelf = shelf.clone();
            loom::thread::spawn(move || {
                let job = shelf.table().claim_set(0);
                match job {
                    Ok(job) => work(&shelf, job),
                    Err(Refusal::InUse(..)) => {}
                    Err(other) => panic!("{other:?}"),
                }
            })
        };
        let user = {
            let shelf = shelf.clone();
            loom::thread::spawn(move || use_one(&shelf, &owner("a")))
        };
        use_one(&shelf, &owner("b"));
        resetter.join().unwrap();
        user.join().unwrap();
        assert_eq!(shelf.table().counts().ready, 2);
    });
}

#[test]
fn a_vf_has_one_owner_and_is_reset_between_two() {
    check(|| {
        let shelf = ready(1);
        let users = ["a", "b"].map(|id| {
            let shelf = shelf.clone();
            loom::thread::spawn(move || use_one(&shelf, &owner(id)))
        });
        let served = users.map(|user| user.join().unwrap());
        let uses = served.iter().filter(|served| **served).count();
        let (vf, seen) = shelf.take(&owner("c"), 0, |_| Ok::<_, ()>(()), |_| {}).unwrap();
        assert_eq!((vf, seen.resets.load(SeqCst)), (0, uses));
        assert!(uses >= 1);
    });
}

#[test]
fn a_take_waits_for_no_reset_of_another_vf() {
    check(|| {
        let shelf = ready(2);
        let (vf, _) = shelf.take(&owner("a"), 0, |_| Ok::<_, ()>(()), |_| {}).unwrap();
        let job = shelf.begin_return(vf, &owner("a")).unwrap().unwrap();
        assert_eq!(job, DeviceOperation::Return(vf));
        // A reset that ends when another owner has got a VF: a take that waited for it would be a
        // deadlock.
        let (told, got) = loom::sync::mpsc::channel();
        let hanging = {
            let shelf = shelf.clone();
            loom::thread::spawn(move || shelf.with(vf, |_| got.recv().unwrap()))
        };
        let (other, _) = shelf.take(&owner("b"), 0, |_| Ok::<_, ()>(()), |_| {}).unwrap();
        assert_ne!(other, vf);
        assert!(matches!(shelf.table().claim_set(0), Err(Refusal::InUse(..))));
        told.send(()).unwrap();
        hanging.join().unwrap();
    });
}

#[test]
fn a_take_that_was_not_written_leaves_nothing() {
    check(|| {
        let shelf = ready(1);
        let drainer = {
            let shelf = shelf.clone();
            loom::thread::spawn(move || shelf.table().drain(0))
        };
        let taken = shelf.take(&owner("a"), 0, |_| Err("full"), |_| {});
        let later = match taken {
            Err(NotTaken::Unwritten("full", job)) => job,
            Err(NotTaken::Refused(Refusal::Empty(_))) => None,
            other => panic!("{:?}", other.map(|(vf, _)| vf)),
        };
        // Exactly one of the two is to close the VF.
        let now = drainer.join().unwrap();
        assert_eq!(
            [now, later].into_iter().flatten().collect::<Vec<_>>(),
            [DeviceOperation::Close(0)]
        );
        assert_eq!(shelf.table().of(&owner("a")), None);
    });
}

/// The record of a VF in the ledger.
const NONE: usize = 0;
const TAKEN: usize = 1;
const RETURNING: usize = 2;

/// Goes on with a return as the pool does.
fn go_on(shelf: &Shelf<Checked>, ledger: &AtomicUsize, job: DeviceOperation) {
    ledger.store(RETURNING, SeqCst);
    let outcome = shelf.operate(job).map_err(|Fault(why)| why);
    ledger.store(NONE, SeqCst);
    assert_eq!(shelf.table().done(0, outcome), None);
}

/// Takes the only VF for an owner and writes that down. Returns `false` if it was returned before
/// the owner got it.
fn take_one(shelf: &Shelf<Checked>, ledger: &AtomicUsize, id: &str) -> bool {
    let write = |_| {
        ledger.store(TAKEN, SeqCst);
        Ok::<_, ()>(())
    };
    match shelf.take(&owner(id), 0, write, |_| {}) {
        Ok(_) => true,
        Err(NotTaken::Lost(vf, None)) => {
            go_on(shelf, ledger, DeviceOperation::Return(vf));
            false
        }
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn a_client_that_is_let_in_while_its_vf_returns_is_expelled() {
    check(|| {
        let shelf = ready(1);
        assert!(shelf.take(&owner("a"), 0, |_| Ok::<_, ()>(()), |_| {}).is_ok());
        let returner = {
            let shelf = shelf.clone();
            loom::thread::spawn(move || {
                let job = shelf.begin_return(0, &owner("a")).unwrap();
                work(&shelf, job.unwrap());
            })
        };
        // The device takes a second client for a second owner.
        let admitted = shelf.admit(0, &owner("a"), |device| device.is_open = false);
        assert!(admitted.is_none_or(|admitted| admitted.is_ok()));
        returner.join().unwrap();
        assert!(!shelf.with(0, |device| device.is_open));
        assert!(shelf.admit(0, &owner("a"), |_| {}).is_none());
    });
}

#[test]
fn a_vf_that_returns_while_it_is_taken_is_nobodys() {
    check(|| {
        let (shelf, ledger) = (ready(1), Arc::new(AtomicUsize::new(NONE)));
        // Returns it in the name of the first owner, and takes it for another one.
        let returner = {
            let (shelf, ledger) = (shelf.clone(), ledger.clone());
            loom::thread::spawn(move || match shelf.begin_return(0, &owner("a")) {
                Ok(Some(job)) => {
                    go_on(&shelf, &ledger, job);
                    assert!(take_one(&shelf, &ledger, "b"));
                }
                // The taker goes on with the return.
                Ok(None) | Err(Refusal::NotTaken(_)) => {}
                Err(other) => panic!("{other:?}"),
            })
        };
        take_one(&shelf, &ledger, "a");
        returner.join().unwrap();
        let has = |id| shelf.table().of(&owner(id)) == Some((0, true));
        let is_taken = has("a") || has("b");
        assert_eq!(shelf.with(0, |device| device.is_open), is_taken);
        assert_eq!(ledger.load(SeqCst), if is_taken { TAKEN } else { NONE });
        let next =
            ["c", "d"].map(|id| shelf.take(&owner(id), 0, |_| Ok::<_, ()>(()), |_| {}).is_ok());
        assert_eq!(next, [!is_taken, false]);
    });
}
