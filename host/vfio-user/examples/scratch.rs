//! Serves the test function on a socket, to point a VMM at:
//! `cargo run -p slipway-vfio-user --features testing --example scratch -- PATH [mapped]`.

use std::sync::Arc;
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Scratch};
use slipway_vfio_user::{Config, DoorbellMode, Endpoint, EndpointParts};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "/tmp/scratch.sock".into());
    let mut config = Config::at(path);
    if arguments.next().as_deref() == Some("mapped") {
        config.doorbells = DoorbellMode::Mapped;
    }
    let mut parts = EndpointParts::new(&config);
    let doorbells = parts.doorbells(DOORBELLS)?;
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
    let reactor = Reactor::spawn(Settings::default())?;
    let endpoint = Endpoint::new(config, parts, Box::new(function), Vec::new(), &reactor.handle())?;
    let control = endpoint.control();
    reactor.handle().add(Box::new(endpoint)).map_err(std::io::Error::other)?;
    let mut last = control.stats();
    while !control.wait_closed(Duration::from_millis(200)) {
        let now = control.stats();
        if now != last {
            println!("{now:?}");
            last = now;
        }
    }
    Ok(())
}
