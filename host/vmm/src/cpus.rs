//! All CPUs of a machine: when they run, pause and end.
//!
//! A CPU's thread asks its [`Seat`] before each entry to the guest. [`Cpus::pause`] and
//! [`Cpus::stop`] change the state and kick all threads out of KVM.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crate::board::Board;
use crate::cpu::Cpu;
use crate::{Error, Result, kick};

/// The state that all CPUs are to be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Wanted {
    Running,
    Paused,
    Ended,
}

struct Shared {
    /// A [`Wanted`]. It is stored under the lock of `parked`, so that no CPU misses a change while
    /// it goes to sleep, and read without the lock before each entry to the guest.
    wanted: AtomicU8,
    /// CPUs that are outside of the guest: they wait, or their threads have ended.
    parked: Mutex<usize>,
    changed: Condvar,
}

impl Shared {
    fn parked(&self) -> MutexGuard<'_, usize> {
        self.parked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wants(&self, wanted: Wanted) -> bool {
        self.wanted.load(Ordering::SeqCst) == wanted as u8
    }
}

/// The answer to a CPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Enter the guest.
    Run,
    /// End the thread.
    End,
}

/// One CPU's view of the state.
#[derive(Clone)]
pub struct Seat {
    shared: Arc<Shared>,
    board: Arc<Board>,
}

impl Seat {
    /// Waits until the CPU may run. Returns `End` once the machine ends.
    pub fn next(&self) -> Next {
        if self.shared.wants(Wanted::Running) {
            return Next::Run;
        }
        let mut parked = self.shared.parked();
        *parked += 1;
        self.board.tell();
        while self.shared.wants(Wanted::Paused) {
            parked = self.shared.changed.wait(parked).unwrap_or_else(|p| p.into_inner());
        }
        *parked -= 1;
        if self.shared.wants(Wanted::Running) { Next::Run } else { Next::End }
    }

    /// Returns whether the CPU must not enter the guest.
    pub fn is_wanted_elsewhere(&self) -> bool {
        !self.shared.wants(Wanted::Running)
    }

    /// Counts the CPU as one that is outside of the guest for good.
    fn leave(&self) {
        *self.shared.parked() += 1;
        self.board.tell();
    }
}

/// The threads of all CPUs. Dropping this ends them.
pub struct Cpus {
    shared: Arc<Shared>,
    threads: Vec<(kick::Thread, JoinHandle<()>)>,
}

impl Cpus {
    /// Starts a thread for each CPU. All are paused.
    ///
    /// # Errors
    /// [`Error::System`]: no handler or thread can be made.
    pub fn start(cpus: Vec<Cpu>, board: &Arc<Board>) -> Result<Self> {
        kick::install()?;
        let shared = Arc::new(Shared {
            wanted: AtomicU8::new(Wanted::Paused as u8),
            parked: Mutex::new(0),
            changed: Condvar::new(),
        });
        let mut all = Self { shared, threads: Vec::new() };
        for (number, cpu) in cpus.into_iter().enumerate() {
            let seat = Seat { shared: Arc::clone(&all.shared), board: Arc::clone(board) };
            let board = Arc::clone(board);
            let (tell, told) = std::sync::mpsc::sync_channel(1);
            let run = move || {
                let _ = tell.send(kick::Thread::current());
                cpu.run(&board, &seat);
                seat.leave();
            };
            let builder = std::thread::Builder::new().name(format!("cpu{number}"));
            let handle = builder.spawn(run).map_err(Error::system("starting a CPU's thread"))?;
            let thread = told.recv().map_err(|_| {
                Error::system("starting a CPU's thread")(std::io::Error::other("it ended"))
            })?;
            all.threads.push((thread, handle));
        }
        Ok(all)
    }

    /// Lets the guest run.
    pub fn resume(&self) {
        self.set(Wanted::Running);
    }

    /// Asks all CPUs to leave the guest. The board tells when they have ([`Cpus::are_parked`]): one
    /// that waits for a function's server leaves when the server has answered.
    pub fn pause(&self) {
        self.set(Wanted::Paused);
    }

    /// Returns whether no CPU is in the guest, or serves an exit of it.
    pub fn are_parked(&self) -> bool {
        *self.shared.parked() == self.threads.len()
    }

    /// Returns whether the guest may run.
    pub fn is_running(&self) -> bool {
        self.shared.wants(Wanted::Running)
    }

    fn set(&self, wanted: Wanted) {
        let parked = self.shared.parked();
        if self.shared.wants(Wanted::Ended) {
            return;
        }
        self.shared.wanted.store(wanted as u8, Ordering::SeqCst);
        drop(parked);
        self.shared.changed.notify_all();
        if wanted != Wanted::Running {
            for (thread, _) in &self.threads {
                thread.kick();
            }
        }
    }
}

impl Drop for Cpus {
    fn drop(&mut self) {
        self.set(Wanted::Ended);
        for (_, thread) in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
