//! The function that a sandbox has as its interface.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The pool of virtual functions that a sandbox has its interface of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionPool {
    /// The pool's name.
    pub name: String,
    /// Set if the sandbox does not start without a function of the pool.
    pub needed: bool,
    /// The function, from when the sandbox has it.
    pub taken: Option<TakenFunction>,
}

/// A virtual function that a sandbox has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenFunction {
    /// The plane's id of its endpoint.
    pub id: String,
    /// Its socket.
    pub socket: PathBuf,
    /// Its own MAC address, which the guest replaces by that of the sandbox's interface.
    pub mac: String,
}
