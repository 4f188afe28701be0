//! Saving a stopped machine for the control socket, and letting it go on afterwards.
//!
//! From the beginning of a save until the guest goes on, nothing of this process changes the
//! guest's memory: the client copies it meanwhile, or is sent it. The functions' servers may take
//! their time, and so may the reader of the memory: a thread of its own stops the functions, saves
//! the machine, and writes the file and the memory.
//!
//! A client may be sent the memory before, while the guest runs ([`Written`]). Pages that are
//! written from then on are noted until the guest goes on after the save, or another client comes.

use std::fs::File;
use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FileType;
use serde_json::Value;
use slipway_vmm::state::FunctionState;
use slipway_vmm::written::Written;
use slipway_vmm::{Chassis, Parts, Saver};

use crate::functions::NamedFunction;
use crate::jobs::WorkerThreads;

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
    /// The memory was copied ahead, with so many pages in the last round, or not, for the request
    /// with this identifier.
    Copied(Value, Result<(Written, usize), String>),
    /// The machine was saved in so many bytes, or not, for the request with this identifier.
    Saved(Value, Result<usize, String>),
    /// The functions go on, and the guest may, or not, for the request with this identifier.
    Started(Value, Result<(), String>),
}

/// The saves of a machine.
pub struct Saves {
    phase: Phase,
    /// A thread copies the memory ahead.
    copying: bool,
    /// The pages that were written to since the memory was copied ahead.
    written: Option<Arc<Written>>,
    /// Takes logs that are to end before another one begins. Never waits for logs that end.
    leave: Sender<Arc<Written>>,
    leaving: Arc<Mutex<Receiver<Arc<Written>>>>,
    jobs: WorkerThreads<Finished>,
}

/// Ends all logs that were sent. Waits for another thread that ends some, and for the servers of
/// functions.
fn end(logs: &Mutex<Receiver<Arc<Written>>>) {
    // Changed in single calls: a panic leaves it consistent.
    let logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
    logs.try_iter().for_each(drop);
}

/// The parts that a save needs.
pub struct SaveRequest {
    /// Saves the machine.
    pub saver: Saver,
    /// The functions behind sockets, ascending by their numbers.
    pub functions: Vec<NamedFunction>,
    /// The other parts. Its functions are added by the save.
    pub parts: Parts,
    /// The file.
    pub file: OwnedFd,
    /// The pipe for the memory, if the client wants it.
    pub pages: Option<OwnedFd>,
    /// The pages that the client has not had yet; `None` for all.
    pub rest: Option<Arc<Written>>,
}

impl Saves {
    /// Makes the saves of a machine that is not saved.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn new() -> Result<Self, String> {
        let (leave, leaving) = mpsc::channel();
        let (leaving, jobs) = (Arc::new(Mutex::new(leaving)), WorkerThreads::new()?);
        Ok(Self { phase: Phase::None, copying: false, written: None, leave, leaving, jobs })
    }

    /// Returns the descriptor that becomes readable when a thread has finished.
    pub fn finished(&self) -> BorrowedFd<'_> {
        self.jobs.ended()
    }

    /// Returns whether the guest's memory must not be changed.
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

    /// Checks that the memory is not being copied.
    ///
    /// # Errors
    /// The reason why a client has to wait.
    pub fn copies_nothing(&self) -> Result<(), String> {
        if self.copying { Err("the machine's memory is being copied".into()) } else { Ok(()) }
    }

    /// Returns the pages that were written to since the memory was copied ahead.
    ///
    /// # Errors
    /// The memory was not copied ahead for this client.
    pub fn written(&self) -> Result<Arc<Written>, String> {
        self.written.clone().ok_or_else(|| "the machine's memory was not copied ahead".into())
    }

    /// Copies the memory of a guest that runs to the pipe `pages`, on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn copy_ahead(
        &mut self,
        id: Value,
        chassis: Chassis,
        functions: Vec<NamedFunction>,
        pages: OwnedFd,
    ) -> Result<(), String> {
        self.abandon();
        let leaving = Arc::clone(&self.leaving);
        let copy = move || {
            end(&leaving);
            Some(Finished::Copied(id, copy_ahead(&chassis, functions, pages)))
        };
        self.jobs.spawn("copy", copy)?;
        self.copying = true;
        Ok(())
    }

    /// Marks the log, if there is one, as one that is to end. Returns whether there is one.
    fn abandon(&mut self) -> bool {
        // The receiver lives as long as this sender.
        self.written.take().is_some_and(|log| self.leave.send(log).is_ok())
    }

    /// Ends the log of what is written to the memory. A thread of its own asks the functions'
    /// servers.
    pub fn forget(&mut self) {
        if self.abandon() {
            let leaving = Arc::clone(&self.leaving);
            // Without a thread the log stays, which costs the guest some time and nothing else.
            let _ = self.jobs.spawn("forget", move || {
                end(&leaving);
                None
            });
        }
    }

    /// Saves the machine on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn begin(&mut self, id: Value, job: SaveRequest) -> Result<(), String> {
        self.jobs.spawn("save", move || Some(Finished::Saved(id, save(job))))?;
        self.phase = Phase::Saving;
        Ok(())
    }

    /// Lets the functions of a saved machine go on, on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn start(&mut self, id: Value, functions: Vec<NamedFunction>) -> Result<(), String> {
        let start = move || {
            let mut all = functions.iter();
            all.try_for_each(|NamedFunction { number, attached, .. }| attached.start(*number))
        };
        self.jobs
            .spawn("start", move || Some(Finished::Started(id, start().map_err(String::from))))?;
        self.phase = Phase::Starting;
        Ok(())
    }

    /// Returns what a thread has finished, until `None` says that this was all.
    pub fn take(&mut self) -> Option<Finished> {
        let finished = self.jobs.take_one()?;
        match finished {
            Finished::Copied(..) => self.copying = false,
            Finished::Started(_, Ok(())) => self.phase = Phase::None,
            Finished::Saved(..) | Finished::Started(..) => self.phase = Phase::Stopped,
        }
        Some(finished)
    }

    /// Keeps the pages that are written to from now on.
    pub fn keep(&mut self, written: Written) {
        self.written = Some(Arc::new(written));
    }
}

/// Checks that a client has sent a file whose writes do not wait for anybody, and at most a pipe
/// beside it.
///
/// # Errors
/// The reason why the files cannot be used, in one line.
pub fn check_files(files: Vec<OwnedFd>) -> Result<(OwnedFd, Option<OwnedFd>), String> {
    let mut files = files.into_iter();
    let file = files.next().ok_or("slipway-save needs a descriptor with its message")?;
    let pages = files.next();
    if !is(&file, FileType::RegularFile) {
        return Err("slipway-save needs a file, such as a memfd".into());
    }
    if pages.as_ref().is_some_and(|pages| !is(pages, FileType::Fifo)) || files.next().is_some() {
        return Err("slipway-save takes a file, and a pipe for the memory".into());
    }
    Ok((file, pages))
}

/// Checks that a client has sent a pipe, and nothing else.
///
/// # Errors
/// The reason why the files cannot be used, in one line.
pub fn check_pipe(files: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    let wrong = || "slipway-copy-ahead needs a pipe for the memory with its message".to_owned();
    let [pages] = <[OwnedFd; 1]>::try_from(files).map_err(|_| wrong())?;
    is(&pages, FileType::Fifo).then_some(pages).ok_or_else(wrong)
}

fn is(file: &OwnedFd, kind: FileType) -> bool {
    let found = rustix::fs::fstat(file);
    found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == kind)
}

/// Writes the memory of a guest that runs to the pipe. Returns the pages that are written to from
/// then on, and the number of pages of the last round.
fn copy_ahead(
    chassis: &Chassis,
    functions: Vec<NamedFunction>,
    pages: OwnedFd,
) -> Result<(Written, usize), String> {
    let functions = functions.into_iter().map(|named| (named.number, named.attached));
    let written = Written::begin(chassis, functions.collect())?;
    let copied = written.copy(&mut File::from(pages));
    copied.map(|last| (written, last)).map_err(|error| format!("writing the memory: {error}"))
}

/// Stops the functions, saves all into the file, and writes the memory to the pipe. Returns the
/// number of bytes of the file.
fn save(job: SaveRequest) -> Result<usize, String> {
    let SaveRequest { saver, functions, mut parts, file, pages, rest } = job;
    for NamedFunction { number, name, attached } in functions {
        let state = attached.save(number)?;
        parts.functions.push(FunctionState { number, name, state });
    }
    let bytes = saver.save(parts)?;
    let written = File::from(file).write_all(&bytes);
    written.map_err(|error| format!("writing the state: {error}"))?;
    if let Some(pages) = pages {
        // Rust's runtime ignores SIGPIPE: a reader that goes away is an error.
        let mut pages = File::from(pages);
        let written = match rest {
            Some(rest) => rest.copy_rest(&mut pages),
            None => saver.write_pages(&mut pages),
        };
        written.map_err(|error| format!("writing the memory: {error}"))?;
    }
    Ok(bytes.len())
}
