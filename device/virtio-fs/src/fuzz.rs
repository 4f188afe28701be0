//! The body of the fuzz target: bytes become the actions of a hostile guest.

use std::collections::VecDeque;

use slipway_pci::Function;
use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::fs::FIRST_REQUEST_QUEUE;

use crate::driver::{Arena, Direct, Driver};
use crate::{
    FileServer, Fs, LONGEST_REPLY, LONGEST_REQUEST, MOST_REQUESTS, Parts, Reply, Request, VECTORS,
};

/// A file server that answers with the request's own bytes, the last request first, and every third
/// one later.
#[derive(Default)]
struct Echo {
    held: VecDeque<Request>,
    calls: usize,
}

impl FileServer for Echo {
    fn begin(&mut self, request: Request) {
        assert!((40..=LONGEST_REQUEST).contains(&request.message.len()));
        assert!(request.room <= LONGEST_REPLY);
        self.held.push_back(request);
        assert!(self.held.len() <= MOST_REQUESTS, "no more than the device may begin");
    }

    fn take_reply(&mut self) -> Option<Reply> {
        self.calls += 1;
        if self.calls.is_multiple_of(3) {
            return None;
        }
        let Request { ticket, mut message, room } = self.held.pop_back()?;
        message.truncate(room);
        Some(Reply { ticket, bytes: message })
    }

    fn end_session(&mut self) {}
}

impl Guest for Fs {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 1024;

    fn new(memory: &Memory) -> Self {
        let made = Self::new(Parts {
            memory: memory.clone(),
            interrupts: fuzz::interrupts(VECTORS),
            tag: "fuzz".into(),
            server: Box::new(Echo::default()),
            session: 1,
        });
        let Ok(fs) = made else { unreachable!("the parts fit together") };
        fs
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        drive(self, memory).registers.function
    }

    fn succeed(mut self, memory: &Memory) -> Self {
        // A state with requests under way is refused, as it should be.
        for _ in 0..3 * MOST_REQUESTS {
            self.finish_requests();
        }
        assert!(self.quiesce());
        let saved = self.save();
        let mut successor = <Self as Guest>::new(memory);
        assert_eq!(successor.restore(&saved), Ok(()));
        assert!(successor.save() == saved, "a state that says the same");
        successor
    }

    fn works(self, memory: &Memory) {
        let reply = drive(self, memory).call(FIRST_REQUEST_QUEUE, &[7; 64], &[16, 16]);
        assert!(reply.is_ok_and(|bytes| bytes == [7; 32]));
    }
}

fn drive(device: Fs, memory: &Memory) -> Driver<Direct<Fs>> {
    let arena = Arena::new(memory.clone(), 0, <Fs as Guest>::MEMORY as u64);
    let Ok(driver) = Driver::new(Direct::new(device), arena, 8) else {
        unreachable!("the device works")
    };
    driver
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Fs>(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        super::fuzz::survive(100, &[super::device]);
    }
}
