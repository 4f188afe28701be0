//! `slipway disk`: manages named disks, which endpoints share.

use anyhow::Result;
use slipway_plane_api::v1;
use slipway_runtime::Config;

use crate::args::{DiskCommand, NodeArgs};
use crate::client::{answer, connect_plane, refused};
use crate::size::show;
use crate::table;

/// Runs `slipway disk …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &DiskCommand) -> Result<i32> {
    let mut plane = connect_plane(node, config).await?;
    match command {
        DiskCommand::Create { name, disk, block_size } => {
            let disk = v1::Disk { block_size: block_size.unwrap_or(0), ..disk.disk() };
            let request = v1::CreateDiskRequest { name: name.clone(), disk: Some(disk) };
            crate::say!("{}", answer(plane.create_disk(request).await)?.name);
        }
        DiskCommand::Ls { json } => {
            let disks = answer(plane.list_disks(v1::ListDisksRequest {}).await)?.disks;
            let header = ["NAME", "KIND", "SIZE", "BLOCK", "USED BY", "PATH"];
            table::list(&disks, *json, as_json, header, row)?;
        }
        DiskCommand::Resize { name, size, shrink } => {
            let request = v1::ResizeDiskRequest {
                name: name.clone(),
                size_bytes: size.unwrap_or(0),
                shrink: *shrink,
            };
            anyhow::ensure!(*size != Some(0), "a disk has at least one block");
            crate::say!("{}", answer(plane.resize_disk(request).await)?.size_bytes);
        }
        DiskCommand::Rm { names } => {
            for name in names {
                let request = v1::RemoveDiskRequest { name: name.clone() };
                plane.remove_disk(request).await.map_err(refused)?;
                crate::say!("{name}");
            }
        }
    }
    Ok(0)
}

fn row(disk: &v1::NamedDisk) -> [String; 6] {
    let read_only = if disk.read_only { ", read-only" } else { "" };
    let users = disk.users.iter().map(|user| {
        let read_only = if user.read_only { " (read-only)" } else { "" };
        format!("{}/{}{read_only}", user.endpoint_id, user.nsid)
    });
    [
        disk.name.clone(),
        format!("{}{read_only}", disk.kind),
        show(disk.size_bytes),
        disk.block_size.to_string(),
        users.collect::<Vec<_>>().join(", "),
        disk.path.clone(),
    ]
}

fn as_json(disk: &v1::NamedDisk) -> serde_json::Value {
    let users = disk.users.iter().map(|user| {
        serde_json::json!({
            "endpoint": user.endpoint_id,
            "nsid": user.nsid,
            "read_only": user.read_only,
        })
    });
    serde_json::json!({
        "name": disk.name,
        "kind": disk.kind,
        "path": (!disk.path.is_empty()).then_some(&disk.path),
        "size_bytes": disk.size_bytes,
        "block_size": disk.block_size,
        "read_only": disk.read_only,
        "users": users.collect::<Vec<_>>(),
    })
}
