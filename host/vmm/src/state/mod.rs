//! The saved state of a machine, as a file.
//!
//! A machine whose guest is stopped is saved ([`crate::Running::saver`]) into bytes, from which any
//! number of successors are made ([`crate::Start::Saved`]), each with a copy of the guest's memory:
//! the memory is not part of the state.
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 7 | `SLIPWAYM` |
//! | 8 to 11 | [`VERSION`], little-endian |
//! | 12 to 15 | zero |
//! | 16 to 23 | the number of bytes of the content, little-endian |
//! | 24 to 55 | SHA-256 of the content |
//! | from 56 on | the content: an [`Identity`] and a [`MachineState`], each a line of JSON |
//!
//! The checksum finds damage, and no intent: every byte is checked as hostile input. The identity
//! comes first, so that a state of another build or processor is refused by what differs. The
//! limit of the whole is [`MAX_STATE_BYTES`].
//!
//! A new field of `MachineState` or `OwnState` is `#[serde(default)]` if a state without it is one
//! that a machine can go on from; otherwise `VERSION` is raised, and templates and snapshots that
//! were saved before are refused. Those of another release are refused anyway (`Identity::build`),
//! but all builds of one release have the same number. What a saved machine and its successor must
//! have in common, such as an optional device, is in `Identity`, with its check in
//! `Identity::check`. Tests: `saved.rs` of `tests/guests`, and the fuzz target `vmm-state`, which
//! changes states.

mod functions;
mod shown;

use std::fmt::Display;
use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::SealFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use slipway_machine::MAX_STATE_BYTES;

use crate::board::BoardState;
use crate::hot_memory::HotMemory;
use crate::interrupts::InterruptsState;
use crate::memory::GuestRam;
use crate::registers::CpuState;
use crate::{Error, Result};

pub use functions::{FunctionState, LocalState, OwnRegisters, OwnState, RemoteState};
pub use shown::Shown;

/// The version of the format. A state of another version is refused.
pub const VERSION: u32 = 4;
const MAGIC: [u8; 8] = *b"SLIPWAYM";
/// Bytes before the content.
const HEADER: usize = 56;

/// The properties that a machine must have in common with a saved one to go on from its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The version of `slipway-vmm`, which all builds of a release share: it does not stand for
    /// [`VERSION`].
    pub build: String,
    /// The CPUs that the guest sees.
    pub shown: Shown,
    /// CPUs at the start, the most CPUs, and slots for hot plug.
    pub cpus: [u32; 3],
    /// Bytes of the guest's memory.
    pub memory: u64,
    /// The ranges of the memory: guest-physical address, bytes, offset in its file. Shared pages
    /// are the last one, if there are any.
    pub layout: Vec<[u64; 3]>,
    /// Bytes of shared pages; 0 if there are none.
    pub shared: u64,
    /// The regions of hot-plug memory: guest-physical address, bytes, node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hot_memory: Vec<[u64; 3]>,
    /// The numbers of the functions behind sockets, ascending.
    pub functions: Vec<usize>,
}

/// The saved state of a machine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// kvm-clock in nanoseconds.
    pub(crate) clock: u64,
    pub(crate) cpus: Vec<CpuState>,
    pub(crate) interrupts: InterruptsState,
    pub(crate) board: BoardState,
    /// The guest reads configuration space without leaving it.
    pub(crate) shows_configuration: bool,
    /// The machine's own functions.
    pub own: OwnState,
    /// The functions behind sockets, ascending by their numbers.
    pub functions: Vec<FunctionState>,
    /// The names of plugged CPUs, by their numbers.
    pub plugged_cpus: Vec<(u8, String)>,
}

/// A saved machine: its identity and its state.
#[derive(Debug, Serialize, Deserialize)]
pub struct Saved {
    /// The identity.
    pub identity: Identity,
    /// The state.
    pub machine: MachineState,
}

impl Identity {
    /// Returns the identity of a machine on this host, whose CPUs are `shown`.
    pub fn new(ram: &GuestRam, shown: &Shown, cpus: [u32; 3], functions: Vec<usize>) -> Self {
        let shared = ram.shared().map(|shared| &shared.part);
        let parts = ram.parts().iter().chain(shared);
        let region = |hot: &HotMemory| {
            let geometry = hot.geometry();
            [geometry.address, geometry.bytes, geometry.node.into()]
        };
        Self {
            build: env!("CARGO_PKG_VERSION").into(),
            shown: shown.clone(),
            cpus,
            memory: ram.bytes(),
            layout: parts.map(|part| [part.start, part.len, part.offset]).collect(),
            shared: shared.map_or(0, |part| part.len),
            hot_memory: ram.hot_memory().iter().map(region).collect(),
            functions,
        }
    }

    /// Checks that a machine of this identity can go on from a state of the identity `saved`.
    ///
    /// # Errors
    /// [`Error::State`] with what differs.
    pub fn check(&self, saved: &Self) -> Result<()> {
        differs("slipway-vmm", &saved.build, &self.build)?;
        let ([cpus, most, slots], [own_cpus, own_most, own_slots]) = (saved.cpus, self.cpus);
        differs("--cpus", cpus, own_cpus)?;
        differs("--max-cpus", most, own_most)?;
        differs("--slots", slots, own_slots)?;
        // The features depend on the number of CPUs.
        self.shown.check(&saved.shown)?;
        differs("bytes of memory", saved.memory, self.memory)?;
        differs("bytes of shared pages", saved.shared, self.shared)?;
        if saved.hot_memory != self.hot_memory {
            let what = "--hotplug-memory: it was saved with other regions than this machine has";
            return Err(Error::State(what.into()));
        }
        if saved.layout != self.layout {
            return Err(Error::State("it has another layout of memory than this machine".into()));
        }
        Ok(())
    }
}

fn differs<T: PartialEq + Display>(what: &str, saved: T, own: T) -> Result<()> {
    if saved == own {
        return Ok(());
    }
    Err(Error::State(format!("{what}: it was saved with {saved}, and this machine has {own}")))
}

impl Saved {
    /// Returns the file.
    ///
    /// # Errors
    /// [`Error::State`]: it would be larger than [`MAX_STATE_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        let failed = |error: serde_json::Error| Error::State(error.to_string());
        let mut file = vec![0; HEADER];
        serde_json::to_writer(&mut file, &self.identity).map_err(failed)?;
        file.push(b'\n');
        serde_json::to_writer(&mut file, &self.machine).map_err(failed)?;
        file.push(b'\n');
        if file.len() > MAX_STATE_BYTES {
            return Err(Error::State(format!("{} bytes, more than {MAX_STATE_BYTES}", file.len())));
        }
        let header = header(&file[HEADER..]);
        file[..HEADER].copy_from_slice(&header);
        Ok(file)
    }

    /// Reads a file. Its parts are checked by those that go on from it.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn decode(file: &[u8]) -> Result<Self> {
        let (start, content) = split(file)?;
        match start[24..] == *Sha256::digest(content) {
            true => Self::parse(content),
            false => Err(Error::State("it is damaged: its checksum differs".into())),
        }
    }

    /// Parses the content of a file whose header is right.
    pub(crate) fn parse(content: &[u8]) -> Result<Self> {
        let failed = |error: serde_json::Error| Error::State(format!("it cannot be read: {error}"));
        let end = content.iter().position(|byte| *byte == b'\n').unwrap_or(content.len());
        let (identity, machine) = content.split_at(end);
        let identity: Identity = serde_json::from_slice(identity).map_err(failed)?;
        differs("slipway-vmm", identity.build.as_str(), env!("CARGO_PKG_VERSION"))?;
        Ok(Self { identity, machine: serde_json::from_slice(machine).map_err(failed)? })
    }

    /// Reads a file from its beginning. The position of the descriptor stays, so that several
    /// processes can share it. The checksum of a file in memory that is sealed against writes is
    /// not computed: it cannot have been damaged since its maker has checked it.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::System`].
    pub fn read(file: &File) -> Result<Self> {
        let failed = || Error::system("reading the saved state");
        let len = usize::try_from(file.metadata().map_err(failed())?.len()).unwrap_or(usize::MAX);
        if len > MAX_STATE_BYTES {
            return Err(Error::State(format!("{len} bytes; it has at most {MAX_STATE_BYTES}")));
        }
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0).map_err(failed())?;
        let seals = rustix::fs::fcntl_get_seals(file);
        match seals.is_ok_and(|seals| seals.contains(SealFlags::WRITE)) {
            true => Self::parse(split(&bytes)?.1),
            false => Self::decode(&bytes),
        }
    }
}

/// Returns the header of a file and its content. The checksum is not looked at.
fn split(file: &[u8]) -> Result<(&[u8], &[u8])> {
    let refused = |what: &str| Err(Error::State(what.into()));
    let Some((start, content)) = file.split_at_checked(HEADER) else {
        return refused("it is cut off");
    };
    if start[..8] != MAGIC {
        return refused("the file is none of slipway-vmm's");
    }
    let expected = unsummed(content);
    if start[8..16] != expected[8..16] {
        return refused("it has another format; save the machine again with this build");
    }
    if start[16..24] != expected[16..24] {
        return refused("it is cut off, or something is behind its end");
    }
    Ok((start, content))
}

fn header(content: &[u8]) -> [u8; HEADER] {
    let mut header = unsummed(content);
    header[24..].copy_from_slice(&Sha256::digest(content));
    header
}

/// Returns the header of a content without its checksum.
fn unsummed(content: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&(content.len() as u64).to_le_bytes());
    header
}
