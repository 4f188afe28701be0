//! The functions that a sandbox's machine is given while its guest runs, as its record has them.

use serde::{Deserialize, Serialize};

use super::{ClientMemory, Given, GivenSockets, OwnFunction, Wish};

/// The functions that are plugged into the machine of a sandbox: functions of pools, and a socket
/// function that it does not begin with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PluggedFunctions {
    /// The number of functions of pools that a pod's machine has room for.
    #[serde(rename = "function_slots")]
    pub slots: u32,
    /// Set if the machine, when it boots, has room for a socket function that it does not begin
    /// with: a pod's for its containers, a template's for its forks. Of a fork it says nothing:
    /// earlier versions set it in pods that are forks as the node's settings were.
    pub socket_slot: bool,
    /// Set if the machine of a fork has that room, as its template has. Known when the fork starts.
    pub fork_socket_slot: bool,
    /// The socket function that a fork or the containers of a pod were given, from before it is
    /// added.
    #[serde(rename = "given_sockets")]
    pub sockets: Option<GivenSockets>,
    /// The functions of pools that the containers of a pod were given, from before they are taken.
    pub functions: Vec<Given>,
    /// The hardware function that the sandbox asks for, if it is no pod.
    #[serde(rename = "own_function")]
    pub own: Option<OwnFunction>,
    /// The number of functions of pools and of sockets that were added to the machine, or would
    /// have been.
    pub plugs: u32,
    /// The guest's memory, as servers of functions that are added later know it, once the VMM is
    /// started.
    pub client_memory: Option<ClientMemory>,
}

impl PluggedFunctions {
    /// Returns the part of a new sandbox's record, whose machine is to have this room for functions
    /// of pools and of sockets.
    pub fn of_new(slots: u32, socket_slot: bool) -> Self {
        Self { slots, socket_slot, ..Self::default() }
    }

    /// Counts one more attempt to add a function, and returns the VMM's name of the device, which
    /// begins with `kind`. Each attempt has a name of its own: a VMM that was slow may have the
    /// device of the one before.
    pub fn next_device(&mut self, kind: &str) -> String {
        self.plugs = self.plugs.wrapping_add(1);
        format!("{kind}-{}", self.plugs)
    }

    /// Returns the function that the sandbox was given for such a wish.
    pub fn given(&self, wish: &Wish) -> Option<&Given> {
        self.functions.iter().find(|given| given.is(wish))
    }

    /// Returns the function that the sandbox was given for such a wish, to change it.
    pub fn given_mut(&mut self, wish: &Wish) -> Option<&mut Given> {
        self.functions.iter_mut().find(|given| given.is(wish))
    }

    /// Takes the function that the sandbox was given for such a wish out of the record.
    pub fn forget(&mut self, wish: &Wish) {
        self.functions.retain(|given| !given.is(wish));
    }

    /// Returns the functions of pools that the guest has.
    pub fn in_guest(&self) -> impl Iterator<Item = &Given> {
        self.functions.iter().filter(|given| !given.address.is_empty())
    }

    /// Returns whether the guest has a function of hardware, or is being given one. The device
    /// reaches the pages that the machine's memory had when the device came: memory that is given
    /// back and comes again has others, which the device would never see.
    pub fn has_hardware(&self) -> bool {
        self.functions.iter().any(|given| !given.host_address.is_empty())
    }

    /// Returns whether the guest's engine serves the socket function that the sandbox was given.
    pub fn serves_sockets(&self) -> bool {
        self.sockets.as_ref().is_some_and(|given| given.serves)
    }
}
