//! Several requests in one message to the kernel.

use std::io;

use crate::exchange::outcome;
use crate::message::{Answer, Request};
use crate::{Address, LinkChange, Netlink, Route, address_request, change_request, route_request};

/// Most requests that are sent together. The kernel's answers have room in the socket's receive
/// buffer even if all of them fail: an answer takes some 1 KiB of 208 KiB.
const TOGETHER: usize = 64;

/// Requests that the kernel carries out one after the other, also after one that fails.
#[derive(Default)]
pub struct Batch {
    requests: Vec<Request>,
}

impl Batch {
    /// Adds the change of the link number `index`, as [`Netlink::change`] makes it.
    pub fn change(&mut self, index: u32, change: LinkChange) {
        self.requests.push(change_request(index, change));
    }

    /// Adds a new address, as [`Netlink::add_address`] gives it.
    pub fn add_address(&mut self, address: &Address) {
        self.requests.push(address_request(address, 0));
    }

    /// Adds a new route, as [`Netlink::add_route`] does.
    pub fn add_route(&mut self, route: &Route) {
        self.requests.push(route_request(route));
    }
}

impl Netlink {
    /// Sends the requests of a batch and returns the outcome of each, in their order.
    ///
    /// # Errors
    /// The errors of sendto(2) and recv(2); the outcomes are unknown then.
    pub fn send_batch(&mut self, batch: Batch) -> io::Result<Vec<io::Result<()>>> {
        let mut outcomes = Vec::with_capacity(batch.requests.len());
        let mut rest = batch.requests.into_iter();
        loop {
            let together: Vec<Request> = rest.by_ref().take(TOGETHER).collect();
            if together.is_empty() {
                return Ok(outcomes);
            }
            outcomes.extend(self.send_together(together)?);
        }
    }

    /// Sends at least one request, and at most [`TOGETHER`], in one message. Only the last one is
    /// answered if it succeeds: the kernel answers in order, so those without an answer before it
    /// have succeeded.
    fn send_together(
        &mut self,
        requests: Vec<Request>,
    ) -> io::Result<impl Iterator<Item = io::Result<()>>> {
        let last = requests.len() - 1;
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        for (at, request) in requests.into_iter().enumerate() {
            let request = if at < last { request.only_failure() } else { request };
            bytes.extend(request.finish(self.next_sequence()));
        }
        self.send(&bytes)?;
        let mut errnos = vec![0; last + 1];
        self.receive(|reply| {
            // That of an earlier request is far beyond the last one.
            let at = reply.sequence.wrapping_sub(first) as usize;
            let Answer::End(errno) = reply.answer else { return None };
            *errnos.get_mut(at)? = errno;
            (at == last).then_some(())
        })?;
        Ok(errnos.into_iter().map(outcome))
    }
}
