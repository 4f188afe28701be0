//! Loom tests of the mailbox: every interleaving (up to 3 preemptions) of messages to a reactor
//! that falls asleep, with `src/mailbox.rs` itself on loom's locks. A lost wake-up is a deadlock
//! here.
#![allow(dead_code)] // the module is used in part
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/mailbox.rs"]
mod mailbox;

mod outside {
    pub use loom::sync::{Arc, Mutex, MutexGuard};

    /// A model of the eventfd: readable until it is silenced, and waited for level-triggered, like
    /// epoll.
    pub struct Bell {
        rung: Mutex<bool>,
        told: loom::sync::Condvar,
    }

    impl Bell {
        pub fn new() -> std::io::Result<Self> {
            Ok(Self { rung: Mutex::new(false), told: loom::sync::Condvar::new() })
        }

        pub fn ring(&self) {
            *self.rung.lock().unwrap() = true;
            self.told.notify_one();
        }

        pub fn silence(&self) {
            *self.rung.lock().unwrap() = false;
        }

        pub fn wait(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.told.wait(rung).unwrap();
            }
        }
    }
}

use loom::sync::atomic::{AtomicU64, Ordering};
use mailbox::{Mailbox, Message};
use outside::Arc;

trait Task: Send {}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct TaskId(u64);

#[test]
fn no_message_is_slept_over() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let senders = [1, 2].map(|id| {
            let mailbox = mailbox.clone();
            loom::thread::spawn(move || mailbox.push(Message::Wake(TaskId(id))).unwrap())
        });
        let mut got = 0;
        while got < 2 {
            mailbox.bell().wait();
            got += mailbox.take().len();
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

/// Two senders wake the same task, each after work for it, and one of them another task in between:
/// whether the second wake is kept or not, the reactor sees both pieces of work.
#[test]
fn a_wake_that_is_not_kept_is_not_slept_over() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let work = Arc::new(AtomicU64::new(0));
        let senders = [2, 1].map(|first| {
            let (mailbox, work) = (mailbox.clone(), work.clone());
            loom::thread::spawn(move || {
                mailbox.push(Message::Wake(TaskId(first))).unwrap();
                work.fetch_add(1, Ordering::Relaxed);
                mailbox.push(Message::Wake(TaskId(1))).unwrap();
            })
        });
        while work.load(Ordering::Relaxed) < 2 {
            mailbox.bell().wait();
            mailbox.take();
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

#[test]
fn a_task_that_is_woken_again_and_again_takes_one_place() {
    loom::model(|| {
        let mailbox = Mailbox::new().unwrap();
        for id in [1, 1, 2, 1, 2, 2, 1] {
            mailbox.push(Message::Wake(TaskId(id))).unwrap();
        }
        assert_eq!(mailbox.take().len(), 2);
        mailbox.push(Message::Wake(TaskId(2))).unwrap();
        assert_eq!(mailbox.take().len(), 1, "a wake that was taken covers no later one");
    });
}
