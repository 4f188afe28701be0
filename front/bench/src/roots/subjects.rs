//! The ways to a root that are compared.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::owner::{Connected, memory};
use super::turn::at_once;
use super::{RootFiles, RootLoad, RootMeasured};
use crate::cpu_time::own_time;
use crate::measurement::Subject;

/// Makes functions of roots.
pub trait RootServer: Send + Sync {
    /// Serves a function at `socket`, with the image of `files` as namespace 1, read-only, and a
    /// volatile layer on their template as namespace 2. The socket listens when this returns.
    ///
    /// # Errors
    /// A sentence about the obstacle; nothing is left then.
    fn make(&self, id: &str, files: &RootFiles, socket: &Path) -> Result<()>;

    /// Ends a function and waits until nothing of it is left.
    ///
    /// # Errors
    /// There is no such function, or it does not end.
    fn remove(&self, id: &str) -> Result<()>;
}

/// The state of a function before the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is not there.
    Made,
    /// It is made: its disks are open, its socket listens.
    Ready,
    /// It is also connected to its owner's memory and brought up.
    Floor,
}

/// A way to a root.
pub struct RootWay {
    way: Way,
    server: Arc<dyn RootServer>,
    files: Arc<RootFiles>,
}

impl RootWay {
    /// Makes the subject. All subjects may share server and files: they take turns.
    pub fn new(way: Way, server: Arc<dyn RootServer>, files: Arc<RootFiles>) -> Self {
        Self { way, server, files }
    }

    fn make(&self, number: u32) -> Result<()> {
        let id = id(number);
        self.server.make(&id, &self.files, &self.files.socket(&id))
    }

    /// Prepares what the way has ahead, and serves the owners. Functions stay.
    fn serve(&self, load: &RootLoad) -> Result<RootMeasured> {
        let all = || 0..load.owners;
        let memories = all().map(|_| memory()).collect::<Result<Vec<_>>>()?;
        let memory = |number: u32| memories.get(number as usize).context("an owner too many");
        let connect = |number: u32| -> Result<Connected> {
            Connected::to(&self.files.socket(&id(number)), memory(number)?)
        };
        let used = own_time();
        if self.way != Way::Made {
            all().try_for_each(|number| self.make(number))?;
        }
        // A connection for each owner that has one ahead.
        let ahead = if self.way == Way::Floor { all() } else { 0..0 };
        let connected = |number| -> Result<_> { Ok(Mutex::new(Some(connect(number)?))) };
        let ahead = ahead.map(connected).collect::<Result<Vec<_>>>()?;
        let taken = |number: u32| {
            ahead.get(number as usize)?.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let other = own_time().saturating_sub(used);
        if load.cold {
            self.files.cool()?;
        }
        let (measured, roots) = at_once(load, &self.files.disk, |number| {
            if self.way == Way::Made {
                self.make(number)?;
            }
            let mut root = match taken(number) {
                Some(root) => root,
                None => connect(number)?,
            };
            root.read()?;
            Ok(root)
        })?;
        drop(roots);
        Ok(RootMeasured { other_cpu_ns: other.as_nanos() as u64, ..measured })
    }
}

impl Subject for RootWay {
    type Load = RootLoad;
    type Measured = RootMeasured;

    fn name(&self) -> &str {
        match self.way {
            Way::Made => "made",
            Way::Ready => "ready",
            Way::Floor => "floor",
        }
    }

    fn about(&self) -> String {
        match self.way {
            Way::Made => "the function is made when it is asked for, connected, and brought up",
            Way::Ready => "the function was made before; it is connected and brought up",
            Way::Floor => "the function was made, connected and brought up before; two reads",
        }
        .to_owned()
    }

    fn run(&mut self, load: &RootLoad) -> Result<RootMeasured> {
        let measured = self.serve(load);
        let used = own_time();
        // All of them, also after an error: the next turn has functions of the same ids.
        let removed = (0..load.owners).map(|number| self.server.remove(&id(number)));
        let removed: Vec<_> = removed.collect();
        let mut measured = measured?;
        removed.into_iter().collect::<Result<()>>()?;
        measured.other_cpu_ns += own_time().saturating_sub(used).as_nanos() as u64;
        Ok(measured)
    }
}

/// Returns the id of an owner's function.
fn id(number: u32) -> String {
    format!("root-{number}")
}
