//! All CPUs of a machine: when they run, pause and end.
//!
//! A CPU's thread asks the [`Seats`] before each entry to the guest. A change of their state kicks
//! all threads out of KVM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::board::Board;
use crate::cpu::Cpu;
use crate::registers::CpuState;
use crate::seat::{Seats, Wanted};
use crate::{Error, Result, kick};

/// The threads of all CPUs. Dropping this ends them.
pub struct Cpus {
    seats: Seats,
    threads: Vec<Thread>,
}

/// The thread of a CPU.
struct Thread {
    target: kick::Thread,
    handle: JoinHandle<()>,
    /// The processor time in microseconds that the thread had used when it ended.
    used: Arc<AtomicU64>,
}

impl Thread {
    /// Returns the processor time that the thread has used.
    fn time(&self) -> Duration {
        // The thread stores its time before its clock stops.
        let now = self.target.time();
        now.max(Duration::from_micros(self.used.load(Ordering::Relaxed)))
    }
}

impl Cpus {
    /// Starts a thread for each CPU, which calls `begin` first. All CPUs are paused. Those that are
    /// not in `present`, a bit each, are not there until they are [plugged](Cpus::plug).
    ///
    /// # Errors
    /// [`Error::System`]: no handler or thread can be made.
    pub fn start(
        cpus: Vec<Cpu>,
        present: u32,
        board: &Arc<Board>,
        begin: impl Fn() + Clone + Send + 'static,
    ) -> Result<Self> {
        kick::install()?;
        let mut all = Self { seats: Seats::new(board, present), threads: Vec::new() };
        for (number, cpu) in cpus.into_iter().enumerate() {
            let (seats, board) = (all.seats.clone(), Arc::clone(board));
            let (tell, told) = std::sync::mpsc::sync_channel(1);
            let begin = begin.clone();
            let used = Arc::new(AtomicU64::new(0));
            let its = Arc::clone(&used);
            let run = move || {
                begin();
                let _ = tell.send(kick::Thread::current());
                cpu.run(&board, &seats);
                let time = kick::Thread::current().time().as_micros();
                its.store(time as u64, Ordering::Relaxed);
                seats.leave();
            };
            let builder = std::thread::Builder::new().name(format!("cpu{number}"));
            let handle = builder.spawn(run).map_err(Error::system("starting a CPU's thread"))?;
            let target = told.recv().map_err(|_| {
                Error::system("starting a CPU's thread")(std::io::Error::other("it ended"))
            })?;
            all.threads.push(Thread { target, handle, used });
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

    /// Returns the processor time that each CPU's thread has used, in the guest and for its exits.
    pub fn times(&self) -> Vec<Duration> {
        self.threads.iter().map(Thread::time).collect()
    }

    /// Returns whether no CPU is in the guest, or serves an exit of it.
    pub fn are_parked(&self) -> bool {
        self.seats.parked() == self.threads.len()
    }

    /// Returns whether the guest may run.
    pub fn is_running(&self) -> bool {
        self.seats.is(Wanted::Running)
    }

    /// Returns what saves the state of the CPUs.
    pub fn saver(&self) -> CpuSaver {
        CpuSaver { seats: self.seats.clone(), count: self.threads.len() as u32 }
    }

    /// Adds CPU `cpu`: its thread enters the guest, which starts it by INIT and SIPI.
    pub fn plug(&self, cpu: u8) {
        self.seats.set_present(cpu.into(), true);
    }

    /// Takes CPU `cpu` away: its thread leaves the guest, and waits until it is plugged again.
    pub fn unplug(&self, cpu: u8) {
        self.seats.set_present(cpu.into(), false);
        if let Some(thread) = self.threads.get(usize::from(cpu)) {
            thread.target.kick();
        }
    }

    fn set(&self, wanted: Wanted) {
        if self.seats.set(wanted) && wanted != Wanted::Running {
            for thread in &self.threads {
                thread.target.kick();
            }
        }
    }
}

/// Saves the state of all CPUs of a machine, on any thread.
pub struct CpuSaver {
    seats: Seats,
    count: u32,
}

impl CpuSaver {
    /// Returns the state of each CPU, in their order. Waits for the CPUs' threads.
    ///
    /// # Errors
    /// [`Error::State`] if the guest is not stopped, or is told to run meanwhile; [`Error::Kvm`].
    pub fn save(&self) -> Result<Vec<CpuState>> {
        self.seats.save(self.count)
    }
}

impl Drop for Cpus {
    fn drop(&mut self) {
        self.set(Wanted::Ended);
        for thread in self.threads.drain(..) {
            let _ = thread.handle.join();
        }
    }
}
