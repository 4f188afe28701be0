//! Serves one NVMe function with mapped doorbells on `DIR/cntrl`, where SPDK's initiator looks,
//! until it is killed: `cargo run --release -p slipway-plane --example serve_nvme -- DIR [MIB
//! [BLOCK [ram|null|FILE]]]`. FILE, a path that begins with a slash, is served whole and read-only,
//! with doorbells that are rung, as sandboxes have their images.
//!
//! `spdk_nvme_identify -g -r 'trtype:VFIOUSER traddr:DIR
//! subnqn:nqn.2026-01.dev.slipway:nvme:serve'` then shows it. SPDK's tools need some `subnqn` in
//! the address and do nothing at all without one. They also need `-g`: without it, their memory
//! lies in one file for each huge page, and the initiator passes the first file for a whole range.
//! Such a range is refused.

use std::time::Duration;

use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::{self, disk::Kind, nvme_controller::DoorbellMode};

const ID: &str = "serve";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = arguments.first().ok_or("serve DIR [MIB [BLOCK [ram|null|FILE]]]")?;
    let mebibytes = arguments.get(1).map_or(Ok(256), |text| text.parse::<u64>())?;
    let block_size = arguments.get(2).map_or(Ok(4096), |text| text.parse::<u32>())?;
    let kind = arguments.get(3).map_or("ram", String::as_str);

    std::fs::create_dir_all(directory)?;
    let socket = std::path::absolute(directory)?.join("cntrl");
    let kind = disk(kind, mebibytes << 20)?;
    let is_file = matches!(kind, Kind::File(_));
    let doorbells = if is_file { DoorbellMode::Rung } else { DoorbellMode::Mapped };
    let disk = v1::Disk { block_size, kind: Some(kind) };
    let plane = Plane::new(Settings::default())?;
    let served = plane.create(&v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: ID.into(),
        socket_path: socket.to_str().ok_or("the path is not UTF-8")?.into(),
        owner: None,
        nvme: Some(v1::NvmeController {
            serial: ID.into(),
            namespaces: vec![v1::Namespace { nsid: 1, disk: Some(disk), ..Default::default() }],
            doorbells: doorbells.into(),
            ..Default::default()
        }),
    })?;
    println!("serving {}", served.socket_path);
    watch(&plane)
}

fn disk(kind: &str, size_bytes: u64) -> Result<Kind, String> {
    match kind {
        "ram" => Ok(Kind::Ram(v1::RamDisk { size_bytes })),
        "null" => Ok(Kind::Null(v1::NullDisk { size_bytes })),
        path if path.starts_with('/') => {
            let (path, read_only) = (path.to_owned(), true);
            Ok(Kind::File(v1::FileDisk { path, read_only, ..Default::default() }))
        }
        _ => Err(format!("\"{kind}\" is neither ram nor null, nor the path of a file")),
    }
}

/// Prints a line whenever a client connected, disconnected or was refused something.
fn watch(plane: &Plane) -> Result<(), Box<dyn std::error::Error>> {
    let mut last = None;
    loop {
        let now = plane.get(ID)?;
        let counters = now.counters.unwrap_or_default();
        let seen = (now.client_pid, counters.clients, counters.errors);
        if last != Some(seen) {
            let maps = now.dma_regions.len();
            let bytes: u64 = now.dma_regions.iter().map(|region| region.size_bytes).sum();
            println!(
                "client {} (number {}), {} messages, {} refused, {maps} DMA maps of {bytes} bytes",
                now.client_pid, counters.clients, counters.messages, counters.errors
            );
            last = Some(seen);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
