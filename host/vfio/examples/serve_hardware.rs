//! Serves a hardware function on a vfio-user socket until its input ends, without a daemon:
//! `serve_hardware 0000:01:10.0 /run/vf.sock`. Needs root, VFIO and an IOMMU.

use std::sync::Arc;
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};
use slipway_vfio::{Driver, HardwareFunction, Host};
use slipway_vfio_user::{Config, Endpoint, EndpointParts};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(socket)) = (arguments.next(), arguments.next()) else {
        return Err("usage: serve_hardware ADDRESS SOCKET".into());
    };
    let (address, host) = (address.parse()?, Host::default());
    host.sysfs().check(address)?;
    let prior = host.sysfs().driver_state(address)?;
    let binding = host.sysfs().bind(address, prior)?;
    let outcome = serve(&host, address, &socket);
    host.sysfs().give_back(binding)?;
    outcome
}

fn serve(
    host: &Host,
    address: slipway_vfio::PciAddress,
    socket: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let device = Arc::new(host.open(address)?);
    device.reset()?;
    let config = Config::at(socket);
    let mut parts = EndpointParts::new(&config);
    parts.set_hardware(Box::new(Driver::new(device.clone())));
    let function = Box::new(HardwareFunction::new(device)?);
    let home = Reactor::spawn(Settings::default())?;
    let endpoint = Endpoint::new(config, parts, function, Vec::new(), &home.handle())?;
    let control = endpoint.control();
    endpoint.serve_alone("hardware")?;
    println!("{address} is served at {socket}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    control.close();
    let closed = control.wait_closed(Duration::from_secs(30));
    if closed { Ok(()) } else { Err("the function is not cut off from its client".into()) }
}
