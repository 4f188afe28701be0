//! A port whose program is the test.

use std::os::fd::OwnedFd;

use slipway_ring::{Descriptor, Geometry, Link, Producer};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{Abilities, Mac, Port, PortConfig};

/// Sends a frame from station 1 to station 2 by the first slot of a ring, and wakes the switch.
pub fn send(output: &mut Producer, wake: &OwnedFd) {
    let stations = [Mac::local(2).0, Mac::local(1).0].concat();
    let frame = [&stations[..], &[0x88, 0xb5, 1, 2]].concat();
    output.free(1).unwrap();
    output.memory().write(output.place(0), &frame).unwrap();
    output.describe(0, Descriptor::new(frame.len() as u32));
    output.publish(1);
    rustix::io::write(wake, &1_u64.to_ne_bytes()).unwrap();
}

/// Makes a port whose program is this test, which wakes the port by its descriptor.
pub fn program(number: u64) -> (Box<dyn Port>, Link, OwnedFd, PortConfig) {
    let link = Link::new(Geometry::default()).unwrap();
    let tell = Tell::new().unwrap();
    let wake = tell.server.try_clone().unwrap();
    let port = MemoryPort::new(&link, tell, Abilities::NONE);
    let mac = Some(Mac::local(number));
    (Box::new(port), link, wake, PortConfig { mac, ..PortConfig::default() })
}
