//! Saving a stopped machine for the control socket, and letting it go on afterwards.
//!
//! From the beginning of a save until the guest goes on, nothing of this process touches the
//! guest's memory: the client copies it meanwhile. The functions' servers may take their time, so a
//! thread of its own stops them, saves the machine and writes the file.

use std::fs::File;
use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::FileType;
use serde_json::Value;
use slipway_vmm::state::FunctionState;
use slipway_vmm::{Parts, Saver};

use crate::functions::Named;
use crate::jobs::Jobs;

/// The progress of a save.
enum Phase {
    /// The machine is not saved.
    None,
    /// A thread saves it.
    Saving,
    /// It was saved, or the attempt has failed. Its functions are stopped until the guest goes on.
    Stopped,
    /// A thread lets the functions go on.
    Starting,
}

/// The end of what a thread has done, for the event loop.
pub enum Finished {
    /// The machine was saved in so many bytes, or not, for the request with this identifier.
    Saved(Value, Result<usize, String>),
    /// The functions go on, and the guest may, or not, for the request with this identifier.
    Started(Value, Result<(), String>),
}

/// The saves of a machine.
pub struct Saves {
    phase: Phase,
    jobs: Jobs<Finished>,
}

/// The parts that a save needs.
pub struct Job {
    /// Saves the machine.
    pub saver: Saver,
    /// The functions behind sockets, ascending by their numbers.
    pub functions: Vec<Named>,
    /// The other parts. Its functions are added by the save.
    pub parts: Parts,
    /// The file.
    pub file: OwnedFd,
}

impl Saves {
    /// Makes the saves of a machine that is not saved.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn new() -> Result<Self, String> {
        Ok(Self { phase: Phase::None, jobs: Jobs::new()? })
    }

    /// Returns the descriptor that becomes readable when a thread has finished.
    pub fn finished(&self) -> BorrowedFd<'_> {
        self.jobs.ended()
    }

    /// Returns whether the guest's memory must not be touched.
    pub fn freezes(&self) -> bool {
        !matches!(self.phase, Phase::None)
    }

    /// Checks that no thread saves the machine, or lets it go on.
    ///
    /// # Errors
    /// The reason why a client has to wait.
    pub fn is_free(&self) -> Result<(), String> {
        match self.phase {
            Phase::None | Phase::Stopped => Ok(()),
            Phase::Saving => Err("the machine is being saved".into()),
            Phase::Starting => Err("the machine is about to go on after a save".into()),
        }
    }

    /// Saves the machine on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn begin(&mut self, id: Value, job: Job) -> Result<(), String> {
        self.jobs.spawn("save", move || Some(Finished::Saved(id, save(job))))?;
        self.phase = Phase::Saving;
        Ok(())
    }

    /// Lets the functions of a saved machine go on, on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn start(&mut self, id: Value, functions: Vec<Named>) -> Result<(), String> {
        let start = move || {
            let mut all = functions.iter();
            all.try_for_each(|Named { number, attached, .. }| attached.start(*number))
        };
        let text = |error: slipway_vmm::Error| error.to_string();
        self.jobs.spawn("start", move || Some(Finished::Started(id, start().map_err(text))))?;
        self.phase = Phase::Starting;
        Ok(())
    }

    /// Returns what a thread has finished: there is one at a time.
    pub fn take(&mut self) -> Option<Finished> {
        let finished = self.jobs.take().pop()?;
        self.phase = match finished {
            Finished::Started(_, Ok(())) => Phase::None,
            Finished::Saved(..) | Finished::Started(..) => Phase::Stopped,
        };
        Some(finished)
    }
}

/// Checks that a client has sent a file whose writes do not wait for anybody.
///
/// # Errors
/// The reason why the file cannot be used, in one line.
pub fn check_file(file: Option<OwnedFd>) -> Result<OwnedFd, String> {
    let file = file.ok_or("slipway-save needs a descriptor with its message")?;
    let found = rustix::fs::fstat(&file).map_err(|errno| errno.to_string())?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err("slipway-save needs a file, such as a memfd".into()),
    }
}

/// Stops the functions, and saves all into the file. Returns the number of bytes.
fn save(job: Job) -> Result<usize, String> {
    let Job { saver, functions, mut parts, file } = job;
    let text = |error: slipway_vmm::Error| error.to_string();
    for Named { number, name, attached } in functions {
        let state = attached.save(number).map_err(text)?;
        parts.functions.push(FunctionState { number, name, state });
    }
    let bytes = saver.save(parts).map_err(text)?;
    let written = File::from(file).write_all(&bytes);
    written.map_err(|error| format!("writing the state: {error}"))?;
    Ok(bytes.len())
}
