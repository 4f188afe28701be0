//! The network interface of the VM, driven by Slipway's own driver.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, bail, ensure};
use slipway_agent_protocol::v1::ConfigureNetworkRequest;
use slipway_ethernet_spec::{ArpPacket, EthernetFrame, MIN_FRAME, Mac, ethertype};
use slipway_pci::driver::RegisterAccess;
use slipway_vfio_user_client::Registers;
use slipway_virtio_net::driver::{Arena, Driver, Options};
use slipway_virtio_spec::net::{Header, control};

use crate::place::DriverMemory;

/// The network interface, before or after its driver is in place.
pub enum Nic {
    /// Nobody has looked at it.
    Found(Box<(Registers, DriverMemory)>),
    /// Its driver is in place, and its connection is held.
    Driven(#[allow(dead_code)] Box<Driver<Registers>>),
    /// Its driver has failed.
    Lost,
}

impl Nic {
    /// Makes the interface with these registers.
    pub fn new(registers: Registers, place: DriverMemory) -> Self {
        Self::Found(Box::new((registers, place)))
    }

    /// Brings the interface up, and sends the frame by which a host tells others its addresses.
    /// Returns when the function has taken the frame.
    ///
    /// # Errors
    /// The interface does not answer, or has another MAC address than it should.
    pub fn configure(&mut self, wanted: &ConfigureNetworkRequest) -> Result<()> {
        let Self::Found(found) = std::mem::replace(self, Self::Lost) else {
            bail!("the interface is configured already");
        };
        let address_of = |text: &str| text.parse::<Mac>().with_context(|| format!("{text:?}"));
        let mac = address_of(&wanted.mac)?;
        // The function of a pool may have another address so far, which its driver replaces.
        let first = if wanted.saved_mac.is_empty() { mac } else { address_of(&wanted.saved_mac)? };
        let mut addresses = wanted.addresses.iter().filter_map(|one| one.address.parse().ok());
        let address = addresses.next().unwrap_or(Ipv4Addr::UNSPECIFIED);
        let (registers, DriverMemory { memory, base, len }) = *found;
        let arena = Arena::new(memory, base, len);
        let mut driver = Driver::new(registers, arena, Options::default())?;
        let own = Mac(driver.mac()?);
        ensure!(own == first, "the interface has the address {own}, not {first}");
        if own != mac {
            driver.command(control::MAC, control::MAC_ADDR_SET, &mac.0)?;
        }
        let Driver { transmit, arena, .. } = &mut driver;
        let queue = transmit.first_mut().context("an interface without queues")?;
        queue.push(arena, &Header::default(), &announcement(mac, address), &[])?;
        driver.flush(0)?;
        // The switch takes it at its own time, and a guest would send no message meanwhile.
        while driver.transmit[0].reap()? > 0 {
            if let Err(error) = driver.registers.idle() {
                driver.needs_no_reset()?;
                return Err(error).context("no switch takes the frame");
            }
        }
        *self = Self::Driven(Box::new(driver));
        Ok(())
    }
}

/// Makes a gratuitous ARP request (RFC 5227, section 3): a host's announcement of its address.
fn announcement(mac: Mac, address: Ipv4Addr) -> [u8; MIN_FRAME] {
    let mut bytes = [0; MIN_FRAME];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
    frame.set_destination(Mac::BROADCAST);
    frame.set_source(mac);
    frame.set_ethertype(ethertype::ARP);
    ArpPacket::new_unchecked(frame.payload_mut()).set_request(mac, address, address);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_names_its_sender_twice() {
        let frame = announcement(Mac([2, 0, 0, 0, 0, 9]), Ipv4Addr::new(10, 1, 2, 3));
        assert_eq!(frame[..6], Mac::BROADCAST.0);
        assert_eq!(frame[6..12], [2, 0, 0, 0, 0, 9]);
        // An ARP request for IPv4 over Ethernet.
        assert_eq!(frame[12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!((&frame[22..28], &frame[28..32]), (&frame[6..12], &[10, 1, 2, 3][..]));
        assert_eq!((&frame[32..38], &frame[38..42]), (&[0; 6][..], &[10, 1, 2, 3][..]));
    }
}
