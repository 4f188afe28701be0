//! The descriptors that an endpoint watches.

use slipway_reactor::Context;

pub const CONTROL: u32 = 0;
pub const LISTENER: u32 = 1;
pub const CLIENT: u32 = 2;
pub const UNMASK: u32 = 3;
pub const BELL: u32 = 4;
pub const FIRST_WAKE: u32 = 5;

/// The descriptors of the endpoint that are ready.
#[derive(Clone, Copy, Default)]
pub struct Ready {
    pub control: bool,
    pub listener: bool,
    /// Readable, or broken.
    pub client: bool,
    /// The client's socket has room for output again.
    pub output: bool,
    /// The client has signalled the eventfd that unmasks the pin.
    pub unmask: bool,
    /// The client has raised the eventfd that takes the place of messages.
    pub bell: bool,
    pub wake: bool,
}

impl Ready {
    pub fn new(context: &Context<'_>) -> Self {
        let mut ready = Self::default();
        for event in context.events() {
            match event.token {
                CONTROL => ready.control = true,
                LISTENER => ready.listener = true,
                CLIENT => {
                    ready.client |= event.readable;
                    ready.output |= event.writable;
                }
                UNMASK => ready.unmask = true,
                BELL => ready.bell = true,
                _ => ready.wake = true,
            }
        }
        ready
    }
}
