//! Serves a RAM disk of 64 MiB as an NVMe controller on a vfio-user socket, until killed: `cargo
//! run -p slipway-vfio-user --example ramdisk -- /tmp/ramdisk.sock`. QEMU from 10.1 on attaches it:
//! `-device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"…"}}'`, with guest memory
//! that is shared (`memory-backend-memfd,share=on`).

use std::time::Duration;

use slipway_block::RamDisk;
use slipway_nvme::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};
use slipway_pci::Interrupt;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts};

/// The number of queue pairs that the guest may have; each has an interrupt vector, and so has the
/// admin queue.
const QUEUES: u16 = 8;

/// Serves on a thread of `reactor`. The returned handle closes the endpoint.
pub fn serve(path: &str, reactor: &Reactor) -> Result<Control, Box<dyn std::error::Error>> {
    let config = Config::at(path);
    let mut parts = EndpointParts::new(&config);
    let disk = RamDisk::new(64 << 20, 512)?;
    let sink = parts.interrupts();
    let controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: (0..=QUEUES).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        doorbells: parts.doorbells(doorbell_count(QUEUES))?,
        namespaces: vec![Namespace::new(1, Box::new(disk), [1; 16])],
        clock: parts.clock(),
        identity: Identity::new("RAMDISK0"),
        limits: Limits { queue_pairs: QUEUES, ..Limits::default() },
        journal: None,
    })?;
    let wakes = Vec::new(); // a RAM disk completes at once: nothing to wait for
    let endpoint = Endpoint::new(config, parts, Box::new(controller), wakes, &reactor.handle())?;
    let control = endpoint.control();
    reactor.handle().add(Box::new(endpoint)).map_err(std::io::Error::other)?;
    Ok(control)
}

#[allow(dead_code)] // the test that includes this file serves by itself
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("ramdisk PATH")?;
    let reactor = Reactor::spawn(Settings::default())?;
    let control = serve(&path, &reactor)?;
    println!("serving {path}");
    while !control.wait_closed(Duration::from_secs(3600)) {}
    Ok(())
}
