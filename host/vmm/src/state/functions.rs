//! The saved states of functions, as data.

use serde::{Deserialize, Serialize};

use crate::pci::SlotState;

/// The saved state of a function in this process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalState {
    pub(crate) slot: SlotState,
    /// The function's own state.
    #[serde(with = "hex")]
    pub(crate) function: Vec<u8>,
}

/// The saved registers of configuration space that are the machine's own, of a function behind a
/// socket: each byte in which the guest may change a bit, with its offset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnRegisters(pub(crate) Vec<(usize, u8)>);

/// The saved state of a function behind a socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteState {
    pub(crate) slot: SlotState,
    pub(crate) registers: OwnRegisters,
    /// The state that the server gave.
    #[serde(with = "hex")]
    pub(crate) function: Vec<u8>,
}

/// The saved states of the machine's own functions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnState {
    /// The console.
    pub console: LocalState,
    /// The source of random numbers.
    pub rng: LocalState,
    /// The shared pages, if there are any.
    pub pmem: Option<LocalState>,
    /// The devices of hot-plug memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<LocalState>,
    /// The device that free pages are reported to, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<LocalState>,
}

/// The saved state of a function behind a socket, with what the program knows of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    /// The number of the function, from 0.
    pub number: usize,
    /// The name by which it can be removed.
    pub name: String,
    /// The state.
    pub state: RemoteState,
}
