//! The ticket by which the next image of a process takes over this image's connections.

use std::os::fd::AsRawFd;

use libc::c_int;
use slipway_socket::Endpoint;
use slipway_socket::hidden::{self, Survivor};

use crate::numbers::Numbers;
use crate::real::{self, sys};
use crate::{descriptors, fds, session};

/// A ticket at the number where the next image looks for it.
pub struct Ticket {
    number: c_int,
    /// The number of the memfd that says which descriptor is which endpoint.
    numbers: Option<c_int>,
    /// Set if each connection has the child as one more holder.
    for_child: bool,
}

impl Ticket {
    /// Places a ticket and `numbers` for the next image of this process. Returns `None` if there is
    /// no family or no ticket, or if the ticket's number is in use or beyond the program's limit.
    pub fn place(numbers: &Numbers) -> Option<Self> {
        let (number, _) = Survivor::Ticket.places();
        // The number is in use by the program, or by another thread's ticket for its child.
        if sys!(SYS_fcntl, number, libc::F_GETFD, 0) >= 0 {
            return None;
        }
        let ticket = session::known()?.ticket().ok()?;
        let placed = sys!(SYS_dup3, ticket.as_raw_fd(), number, 0);
        hidden::close(ticket);
        if placed < 0 {
            return None;
        }
        Some(Self { number, numbers: numbers.leave(), for_child: false })
    }

    /// Places a ticket and `numbers` for a child, which becomes the next image in the place of the
    /// process that has the table. Returns `None` as [`Ticket::place`] does.
    pub fn place_for_child(numbers: &Numbers) -> Option<Self> {
        let ticket = Self::place(numbers)?;
        fds::streams_of_all(Endpoint::hold);
        Some(Self { for_child: true, ..ticket })
    }

    /// Returns whether the list of numbers is there.
    pub fn has_numbers(&self) -> bool {
        self.numbers.is_some()
    }

    /// Closes this process's copies.
    pub fn close(&self) {
        real::close(self.number);
        self.numbers.into_iter().for_each(|number| _ = real::close(number));
    }

    /// Removes the ticket after the call failed.
    pub fn take_back(self) {
        self.close();
        if self.for_child {
            fds::streams_of_all(Endpoint::let_go);
        }
    }
}

/// Closes a ticket and a list of numbers that another thread placed for its own child.
pub fn forget_ticket() {
    let (file, _) = Survivor::Numbers.places();
    if descriptors::are_numbers(file) {
        real::close(file);
    }
    let (number, _) = Survivor::Ticket.places();
    if descriptors::is_ticket(number) {
        hidden::close(real::inherited(number));
    }
}
