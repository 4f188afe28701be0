//! The console device (section 5.3).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U16, U32};

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 3;

bitflags::bitflags! {
    /// Feature bits of a console device (section 5.3.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Features: u64 {
        /// The configuration has the console's size.
        const SIZE = 1 << 0;
        /// The device has several ports, and control queues.
        const MULTIPORT = 1 << 1;
        /// The configuration has a register for early output.
        const EMERG_WRITE = 1 << 2;
    }
}

/// Queues (section 5.3.2). "Receive" is what the driver receives.
pub mod queue {
    /// The control receive queue.
    pub const CONTROL_RECEIVE: u16 = 2;
    /// The control transmit queue.
    pub const CONTROL_TRANSMIT: u16 = 3;

    /// Returns the receive queue of port `port`, below 32766.
    pub const fn receive(port: u16) -> u16 {
        if port == 0 { 0 } else { 2 * port + 2 }
    }

    /// Returns the transmit queue of port `port`, below 32766.
    pub const fn transmit(port: u16) -> u16 {
        receive(port) + 1
    }

    /// Returns the number of queues of a device with `ports` ports and control queues.
    pub const fn count(ports: u16) -> u16 {
        2 * ports + 2
    }
}

/// `struct virtio_console_config` (section 5.3.4).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Columns, with SIZE.
    pub cols: U16,
    /// Rows, with SIZE.
    pub rows: U16,
    /// Most ports, with MULTIPORT.
    pub max_nr_ports: U32,
    /// Early output, one character in the low byte, with EMERG_WRITE.
    pub emerg_wr: U32,
}

/// `struct virtio_console_control` (section 5.3.6.2): a message of the control queues.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Control {
    /// Port number.
    pub id: U32,
    /// The kind of message, see [`event`].
    pub event: U16,
    /// Extra information.
    pub value: U16,
}

/// Bytes of a [`Control`].
pub const CONTROL: usize = 8;

/// Kinds of control messages (section 5.3.6.2).
pub mod event {
    /// Driver: it is initialised (1), or failed (0).
    pub const DEVICE_READY: u16 = 0;
    /// Device: there is a port.
    pub const PORT_ADD: u16 = 1;
    /// Device: a port is gone.
    pub const PORT_REMOVE: u16 = 2;
    /// Driver: it has set a port up (1), or failed (0).
    pub const PORT_READY: u16 = 3;
    /// Device: the port is a console.
    pub const CONSOLE_PORT: u16 = 4;
    /// Device: a console has another size.
    pub const RESIZE: u16 = 5;
    /// Both: the sender's end of the port is open (1) or closed (0).
    pub const PORT_OPEN: u16 = 6;
    /// Device: the port's name, which follows the message.
    pub const PORT_NAME: u16 = 7;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_specification() {
        assert_eq!((size_of::<Config>(), size_of::<Control>()), (12, CONTROL));
        // Section 5.3.2: port 0, control, port 1, port 2.
        let queues = [0, 1, 2].map(|port| (queue::receive(port), queue::transmit(port)));
        assert_eq!(queues, [(0, 1), (4, 5), (6, 7)]);
        assert_eq!(queue::count(3), 8);
    }
}
