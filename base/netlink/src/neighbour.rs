//! Neighbours: the hardware addresses of IP addresses on a link.

use std::io;
use std::net::IpAddr;

use rustix::io::Errno;

use crate::message::{Request, attributes, u32_at};
use crate::{Netlink, family, ip, octets, unless};

// linux/rtnetlink.h, linux/neighbour.h.
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;

/// A permanent entry of the neighbour table: the hardware address of an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Number of the link.
    pub index: u32,
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// The neighbour's hardware address.
    pub mac: [u8; 6],
}

impl Netlink {
    /// Returns the permanent neighbours of all links.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn neighbours(&mut self) -> io::Result<Vec<Neighbour>> {
        self.dump(RTM_GETNEIGH, &[0; 12], RTM_NEWNEIGH, parse)
    }

    /// Adds a permanent neighbour, or replaces the entry of the same IP address.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link.
    pub fn add_neighbour(&mut self, neighbour: &Neighbour) -> io::Result<()> {
        let mut request = Request::replace(RTM_NEWNEIGH);
        header(&mut request, neighbour.index, neighbour.address, NUD_PERMANENT);
        request.attribute(NDA_LLADDR, &neighbour.mac);
        self.exchange(request, |_, _| {})
    }

    /// Removes all neighbours of a link, permanent ones and those that the kernel has found.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link.
    pub fn remove_neighbours(&mut self, index: u32) -> io::Result<()> {
        let mut all = self.dump(RTM_GETNEIGH, &[0; 12], RTM_NEWNEIGH, parse_place)?;
        all.retain(|(link, _)| *link == index);
        for (_, address) in all {
            let mut request = Request::new(RTM_DELNEIGH);
            header(&mut request, index, address, 0);
            // The kernel removes entries itself, too.
            unless(Errno::NOENT, self.exchange(request, |_, _| {}))?;
        }
        Ok(())
    }
}

/// Lays out the part of a request that names a neighbour.
fn header(request: &mut Request, index: u32, address: IpAddr, state: u16) {
    // struct ndmsg: family, padding, index, state, flags, type.
    request.body(&[family(address), 0, 0, 0]);
    request.body(&index.to_ne_bytes());
    request.body(&state.to_ne_bytes());
    request.body(&[0, 0]);
    request.attribute(NDA_DST, &octets(address));
}

/// Reads link and address of a neighbour of any state. Returns `None` if it has no IP address.
fn parse_place(body: &[u8]) -> Option<(u32, IpAddr)> {
    let destination = attributes(body.get(12..)?).find(|(kind, _)| *kind == NDA_DST);
    Some((u32_at(body, 4)?, destination.and_then(|(_, value)| ip(value))?))
}

/// Reads a neighbour. Returns `None` if it is not a permanent one, or has no Ethernet address.
fn parse(body: &[u8]) -> Option<Neighbour> {
    let (index, address) = parse_place(body)?;
    let state = u16::from_ne_bytes(body.get(8..10)?.try_into().ok()?);
    if state & NUD_PERMANENT == 0 {
        return None;
    }
    let mut all = attributes(body.get(12..)?);
    let (_, mac) = all.find(|(kind, _)| *kind == NDA_LLADDR)?;
    Some(Neighbour { index, address, mac: mac.try_into().ok()? })
}
