//! Saved state: the transport's, and what each port and the driver have told each other. The first
//! chain of a transmit queue that was not given back is begun again, behind the bytes that the host
//! has read.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio::state::{decode, encode};

use crate::Console;
use crate::port::Dialogue;
use crate::stream::Source;

/// Version of the types in this module. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-console";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PortState {
    name: String,
    is_console: bool,
    dialogue: Dialogue,
    /// Bytes that the host has read of the oldest chain that was not given back.
    taken: u64,
}

pub(crate) fn save(console: &Console) -> Vec<u8> {
    let port = |port: &crate::console::Port| PortState {
        name: port.settings.name.clone(),
        is_console: port.settings.is_console,
        dialogue: port.dialogue,
        taken: port.source.taken(),
    };
    let ports: Vec<PortState> = console.ports.iter().map(port).collect();
    encode(DEVICE, STATE_VERSION, console.local.transport.save(), ports)
}

pub(crate) fn restore(console: &mut Console, bytes: &[u8]) -> Result<(), StateError> {
    let (transport, ports): (_, Vec<PortState>) = decode(DEVICE, STATE_VERSION, bytes)?;
    let inconsistent = |what: &str| Err(StateError::Inconsistent(what.into()));
    let same = |(saved, own): (&PortState, &crate::console::Port)| {
        saved.name == own.settings.name && saved.is_console == own.settings.is_console
    };
    if ports.len() != console.ports.len() || !ports.iter().zip(&console.ports).all(same) {
        return inconsistent("other ports");
    }
    console.local.restore(transport)?;
    let started = console.local.transport.registers.has_started();
    let multiport = console.is_multiport();
    let sound = |port: &PortState| {
        port.dialogue.is_sound()
            && (started || port.taken == 0)
            && (started && multiport || port.dialogue == Dialogue::START)
    };
    if !ports.iter().all(sound) {
        return inconsistent("a port that cannot be");
    }
    for (port, saved) in console.ports.iter_mut().zip(ports) {
        port.reset();
        (port.dialogue, port.source) = (saved.dialogue, Source::resume(saved.taken));
    }
    Ok(())
}
