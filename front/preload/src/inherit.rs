//! Resumes, in a new image of a process, the connections that survived execve(2). See
//! [`exec`](crate::exec).

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use libc::c_int;
use slipway_socket::hidden::{self, Hidden, Survivor};
use slipway_socket::{Address, Family, Listening, Opened, option};

use crate::descriptors::{self, What};
use crate::fds::{self, DescriptorKind, Stream};
use crate::listener::Listener;
use crate::numbers::Numbers;
use crate::open::own_address;
use crate::real::{self, sys};
use crate::taken::Taken;
use crate::{attach, session};

/// Resumes the connections of the previous image, if it left a ticket.
pub fn begin() {
    let (_, places) = Survivor::Ticket.places();
    if let Some(number) = places.into_iter().find(|number| descriptors::is_ticket(*number)) {
        go_on(real::inherited(number));
    }
}

/// The surviving descriptors: eventfds with their kernel ids, and listening sockets.
#[derive(Default)]
struct Survivors {
    eventfds: Vec<(c_int, u32)>,
    listeners: Vec<c_int>,
    /// The previous image's list of which descriptor is which endpoint of a shared eventfd.
    numbers: Option<Numbers>,
}

fn go_on(ticket: OwnedFd) {
    let (_, places) = Survivor::Numbers.places();
    let left = places.into_iter().find(|number| descriptors::are_numbers(*number));
    let numbers = left.map(|file| {
        let numbers = Numbers::read(file);
        real::close(file);
        numbers
    });
    let mut found = Survivors { numbers, ..Survivors::default() };
    descriptors::surviving(|fd, what| match what {
        What::Eventfd => {
            found.eventfds.extend(descriptors::eventfd_of("self", fd).map(|number| (fd, number)));
        }
        What::Listener => found.listeners.push(fd),
    });
    if found.eventfds.is_empty() && found.listeners.is_empty() {
        return hidden::close(ticket);
    }
    match Family::resume(ticket) {
        Ok(family) => {
            attach::adopt(&family);
            connections(&family, &found);
            listeners(&family, found.listeners);
        }
        Err(error) => session::log(format_args!("what survived execve is lost: {error}")),
    }
}

fn connections(family: &Arc<Family>, found: &Survivors) {
    let mut from = 0;
    while let Ok(Opened { endpoint, eventfd }) = family.held(from) {
        from = endpoint.number() + 1;
        let number = descriptors::eventfd_of("self", eventfd.as_raw_fd());
        hidden::close(eventfd);
        let (entry, shared) = (endpoint.number(), endpoint.is_shared());
        let is_noted = |fd| found.numbers.as_ref().and_then(|all| all.entry(fd)) == Some(entry);
        let is_its = |(fd, own): &&(c_int, u32)| Some(*own) == number && (!shared || is_noted(*fd));
        let mut its = found.eventfds.iter().filter(is_its).peekable();
        if its.peek().is_none() {
            endpoint.close();
            continue;
        }
        let domain = if endpoint.has(option::SIX) { libc::AF_INET6 } else { libc::AF_INET };
        let object = fds::make(DescriptorKind::Stream(Stream::new(endpoint, domain)));
        its.for_each(|(fd, _)| fds::put(*fd, &object));
    }
}

fn listeners(family: &Arc<Family>, mut sockets: Vec<c_int>) {
    let mut from = 0;
    while let Ok(Listening { listener: number, at, eventfd }) = family.held_listener(from) {
        from = number + 1;
        let is_its = |fd: &c_int| own_address(*fd).is_some_and(|own| is_same(&own, &at));
        let mut its: Vec<c_int> = Vec::new();
        if let Some(first) = sockets.iter().position(is_its) {
            let first = sockets.swap_remove(first);
            // Copies of the socket have the same inode.
            let socket = inode(first);
            its.extend(sockets.iter().filter(|fd| inode(**fd) == socket));
            its.push(first);
            sockets.retain(|fd| !its.contains(fd));
        }
        let Some(fd) = its.first().copied() else {
            hidden::close(eventfd);
            family.unlisten(number);
            continue;
        };
        let flags = sys!(SYS_fcntl, eventfd.as_raw_fd(), libc::F_GETFL, 0) as c_int;
        let Ok(eventfd) = Hidden::new(eventfd) else { continue };
        let listener = Listener {
            family: family.clone(),
            number,
            eventfd,
            // The program's backlog is not known any more; the engine has the kernel's limit.
            backlog: libc::SOMAXCONN,
            not_before: 0.into(),
            domain: real::tcp_domain(fd).unwrap_or(libc::AF_INET),
            nonblock: AtomicBool::new(flags & libc::O_NONBLOCK != 0),
            options: Taken::of(fd),
            has_ended: false.into(),
        };
        let object = fds::make(DescriptorKind::Listener(listener));
        its.iter().for_each(|fd| fds::put(*fd, &object));
    }
}

fn is_same(a: &Address, b: &Address) -> bool {
    a.port == b.port && (a.ip == b.ip || a.is_unspecified() && b.is_unspecified())
}

fn inode(fd: c_int) -> u64 {
    rustix::fs::fstat(real::borrowed(fd)).map_or(0, |stat| stat.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_all_addresses_is_itself_in_both_domains() {
        let v6 = Address { ip: [0; 16], port: 80 };
        let v4 = Address::v4([0; 4], 80);
        assert!(is_same(&v6, &v4) && is_same(&v4, &v6));
        assert!(!is_same(&v6, &Address { port: 81, ..v6 }));
        let one = Address::v4([127, 0, 0, 1], 80);
        assert!(is_same(&one, &one));
        assert!(!is_same(&one, &v4) && !is_same(&one, &Address::v4([127, 0, 0, 2], 80)));
    }

    #[test]
    fn copies_of_a_socket_have_its_inode() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (copy, other) =
            (socket.try_clone().unwrap(), std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap());
        assert_eq!(inode(socket.as_raw_fd()), inode(copy.as_raw_fd()));
        assert_ne!(inode(socket.as_raw_fd()), inode(other.as_raw_fd()));
        assert_ne!(inode(socket.as_raw_fd()), 0);
    }
}
