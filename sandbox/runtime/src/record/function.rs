//! The functions of pools that a sandbox has: one as its interface, others as disks and further
//! interfaces that the containers of a pod ask for, or the sandbox itself of a pool of hardware.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Record;

/// The pool of virtual functions that a sandbox has its interface of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionPool {
    /// The pool's name.
    pub name: String,
    /// Set if the sandbox does not start without a function of the pool.
    pub needed: bool,
    /// The owner in whose name the function is taken already, a container's attachment; empty: the
    /// sandbox takes one itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
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
    /// The MAC address that it had when it was taken: that of the sandbox's interface, or another
    /// one, which the guest replaces.
    pub mac: String,
}

/// The hardware function that a sandbox which is no pod has beside its other devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnFunction {
    /// The pool's name.
    pub pool: String,
    /// The addresses of a function that is a network interface, with the lengths of their prefixes.
    pub addresses: Vec<(String, u32)>,
}

/// A function of a pool that a container of a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// The pool's name.
    pub pool: String,
    /// The function's number in the pool.
    pub number: u32,
    /// The name of the block device in the container, `/dev/slipway/NAME`; unused if the function
    /// is an interface.
    pub name: String,
}

/// A function of a pool that a sandbox was given for its containers.
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
    /// The interface that it is, or `None` if it is a disk.
    #[serde(default)]
    pub nic: Option<GivenNic>,
    /// The PCI address on the host of a hardware function; empty: it is the plane's own device.
    #[serde(default)]
    pub host_address: String,
}

impl Given {
    /// Returns whether the function is the one of such a wish.
    pub fn is(&self, wish: &Wish) -> bool {
        (&self.pool, self.number) == (&wish.pool, wish.number)
    }
}

/// The socket function that a fork, or a pod for its containers, was given while its guest ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenSockets {
    /// The socket of the engine that serves it.
    pub engine: PathBuf,
    /// The VMM's name of the device, which it may have as soon as this is recorded.
    pub device: String,
    /// Its PCI address in the guest; empty: the guest does not have it.
    pub address: String,
    /// Set once the guest's engine serves.
    pub serves: bool,
}

impl Record {
    /// Returns the number of functions of pools that the sandbox's machine has room for. The
    /// machine of a template has none, and neither has a fork's.
    pub fn function_room(&self) -> usize {
        if self.pod && self.has_own_machine() {
            self.plugged.slots as usize
        } else {
            usize::from(self.plugged.own.is_some())
        }
    }

    /// Returns whether the machine has room for a socket function that it does not begin with.
    pub fn has_socket_slot(&self) -> bool {
        let has = if self.template.is_some() {
            self.plugged.fork_socket_slot
        } else {
            self.plugged.socket_slot
        };
        has && !self.begins_with_sockets()
    }

    /// Returns whether the machine has a socket function, or room for one.
    pub fn may_have_sockets(&self) -> bool {
        self.sockets.is_some() || self.has_socket_slot()
    }

    /// Returns whether the sandbox's socket function is there from its start.
    pub fn begins_with_sockets(&self) -> bool {
        self.sockets.is_some() && self.template.is_none()
    }

    /// Returns whether the sandbox is given its socket function once its guest goes on, as its
    /// template has no such function.
    pub fn forks_with_sockets(&self) -> bool {
        self.sockets.is_some() && self.template.is_some()
    }

    /// Returns the record of a machine that is saved as a template. It has no socket function,
    /// since each fork has one of its own, but room for one if `has_room` is set.
    pub fn saved_without_sockets(mut self, has_room: bool) -> Self {
        self.plugged.socket_slot = has_room;
        self.sockets = None;
        self
    }
}

/// A function of a pool as a further network interface of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenNic {
    /// The switch that it is on. A network's switch has the network's name. Empty: it is hardware.
    pub switch: String,
    /// The MAC address of the interface in the guest; empty: the function's own.
    pub mac: String,
    /// The function's own MAC address, once the guest has it.
    pub own_mac: String,
    /// The pod's addresses in the network of the switch, with the lengths of its prefixes. Empty
    /// if no network is on the switch.
    pub addresses: Vec<(String, u32)>,
    /// The largest packet in bytes; 0: the interface's own.
    pub mtu: u32,
    /// The interface's name in the guest; empty: it is not configured.
    pub interface: String,
}
