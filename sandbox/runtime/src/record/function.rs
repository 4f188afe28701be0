//! The functions of pools that a sandbox has: one as its interface, others as disks of a pod's
//! containers.

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

/// A function of a pool that a container of a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// The pool's name.
    pub pool: String,
    /// The function's number in the pool.
    pub number: u32,
    /// The name of the block device in the container, `/dev/slipway/NAME`.
    pub name: String,
}

/// A function of a pool that a pod was given for its containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// The pool's name.
    pub pool: String,
    /// The function's number in the pool.
    pub number: u32,
    /// The VMM's name of the device, which it may have as soon as this is recorded. An earlier
    /// version did not record it.
    #[serde(default)]
    pub device: String,
    /// The id of its endpoint, once the guest has it. An earlier version did not record it.
    #[serde(default)]
    pub id: String,
    /// Its socket, once the guest has it.
    #[serde(default)]
    pub socket: PathBuf,
    /// Its PCI address in the guest; empty: the guest does not have it.
    #[serde(default)]
    pub address: String,
}
