//! `slipway vf`: manages pools of virtual functions.

use std::time::Duration;

use anyhow::{Result, bail};
use slipway_plane_api::vf_v1::{self, template};
use slipway_plane_api::{VfClient, v1};
use slipway_runtime::Config;

use crate::args::{NodeArgs, VfCommand, VfCreateArgs, VfNumberArgs};
use crate::client::{answer, connect_functions, refused};
use crate::endpoint::owner;
use crate::{pci, table};

/// The time between two looks at functions that are being made.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `slipway vf …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &VfCommand) -> Result<i32> {
    let mut client = connect_functions(node, config).await?;
    match command {
        VfCommand::Create(args) => create(&mut client, config, args).await?,
        VfCommand::Ls { json } => list(&mut client, *json).await?,
        VfCommand::Inspect { pools, .. } => {
            let mut all = Vec::new();
            for name in pools {
                all.push(as_json(&pool(&mut client, name).await?));
            }
            crate::out::json(&all)?;
        }
        VfCommand::Take { pool, owner, json } => take(&mut client, pool, owner, *json).await?,
        VfCommand::Return { pool, owner } => {
            let request = vf_v1::ReturnRequest { pool: pool.clone(), owner: owner.clone() };
            crate::say!("{}", answer(client.r#return(request).await)?.number);
        }
        VfCommand::Reconcile { kind, ids } => {
            let request = vf_v1::ReconcileRequest { kind: kind.clone(), ids: ids.clone() };
            let reply = answer(client.reconcile(request).await)?;
            reply.returned.iter().for_each(|vf| crate::say!("{vf}"));
        }
        VfCommand::Drain(VfNumberArgs { pool, vf }) => {
            let request = vf_v1::DrainRequest { pool: pool.clone(), number: *vf };
            client.drain(request).await.map_err(refused)?;
            crate::say!("{pool}");
        }
        VfCommand::Resume(VfNumberArgs { pool, vf }) => {
            let request = vf_v1::ResumeRequest { pool: pool.clone(), number: *vf };
            client.resume(request).await.map_err(refused)?;
            crate::say!("{pool}");
        }
        VfCommand::Reset { pool, set } => {
            let request = vf_v1::ResetSetRequest { pool: pool.clone(), set: *set };
            client.reset_set(request).await.map_err(refused)?;
            crate::say!("{pool}");
        }
        VfCommand::Rm { pools } => {
            for name in pools {
                remove(&mut client, name).await?;
                crate::say!("{name}");
            }
        }
        VfCommand::Rebuild => {
            let moved_to = answer(client.rebuild(vf_v1::RebuildRequest {}).await)?.moved_to;
            crate::say!("the damaged ledger is now {moved_to}");
        }
    }
    Ok(0)
}

async fn create(client: &mut VfClient, config: &Config, args: &VfCreateArgs) -> Result<()> {
    make(client, &args.pool, template_of(args, config)?).await?;
    crate::say!("{}", args.pool);
    Ok(())
}

/// Gives an owner a function of a pool, and prints where it is.
async fn take(client: &mut VfClient, pool: &str, owner: &str, json: bool) -> Result<()> {
    let (pool, owner) = (pool.to_owned(), owner.to_owned());
    let request = vf_v1::TakeRequest { pool, owner, client: None, number: None };
    let vf_v1::Lease { number, id, socket_path, mac, .. } = answer(client.take(request).await)?;
    if json {
        let lease = serde_json::json!({
            "number": number, "endpoint": id, "socket_path": socket_path, "mac": mac,
        });
        return crate::out::json(&lease);
    }
    crate::say!("{number} {socket_path}");
    Ok(())
}

/// Returns the template of the pool that is asked for.
///
/// # Errors
/// The user is no user; a layer has no bound or one that does not fit the disk; the physical
/// function has no virtual ones.
fn template_of(args: &VfCreateArgs, config: &Config) -> Result<vf_v1::Template> {
    let mut count = args.count;
    let kind = match (&args.disk, &args.switch) {
        (Some(disk), _) => {
            let disk = disk.disk();
            let layers_bytes = layers_of(&disk, args.layers, config)?;
            template::Kind::Nvme(template::Nvme { disk: Some(disk), layers_bytes })
        }
        (None, Some(switch)) => {
            let mtu = args.mtu.unwrap_or(0);
            template::Kind::Nic(template::Nic { switch: switch.clone(), mtu })
        }
        (None, None) => {
            let addresses = match &args.pci_of {
                Some(physical) => pci::virtual_functions(pci::DEVICES.as_ref(), physical)?,
                None => args.pci.clone(),
            };
            count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
            let (vlan, max_rate) = (args.vlan.unwrap_or(0), args.max_rate.unwrap_or(0));
            template::Kind::Hardware(template::Hardware { addresses, vlan, max_rate })
        }
    };
    Ok(vf_v1::Template {
        kind: Some(kind),
        count,
        set_size: args.set_size.unwrap_or(0),
        user: args.user.as_deref().map(owner).transpose()?,
    })
}

/// Returns the most bytes of memory that a function's layer on `disk` holds; 0 for a disk without
/// a layer.
fn layers_of(disk: &v1::Disk, asked: Option<u64>, config: &Config) -> Result<u64> {
    let is_overlay = matches!(disk.kind, Some(v1::disk::Kind::Overlay(_)));
    match asked {
        Some(_) if !is_overlay => bail!("--layers is for --disk overlay:PATH"),
        Some(bytes) => Ok(bytes.max(1)),
        None if is_overlay => Ok(slipway_runtime::layers_by_default(config)?),
        None => Ok(0),
    }
}

/// Makes a pool, and waits until its functions are ready.
///
/// # Errors
/// A function cannot be made; the pool is removed then.
async fn make(client: &mut VfClient, name: &str, template: vf_v1::Template) -> Result<()> {
    let request = vf_v1::CreatePoolRequest { name: name.to_owned(), template: Some(template) };
    client.create_pool(request).await.map_err(refused)?;
    let made = wait_until_ready(client, name).await?;
    if let Some(vf) = made.vfs.iter().find(|vf| !vf.reason.is_empty()) {
        // The template is at fault: with the next daemon it would fail again.
        remove(client, name).await?;
        bail!("function {} could not be made: {}; the pool was removed", vf.number, vf.reason);
    }
    Ok(())
}

/// Makes a pool of `count` network interfaces on a switch, and waits until they are ready.
///
/// # Errors
/// An interface cannot be made; the pool is removed then.
pub async fn make_nics(
    client: &mut VfClient,
    name: &str,
    switch: &str,
    count: u32,
    mtu: u32,
) -> Result<()> {
    let nic = template::Nic { switch: switch.to_owned(), mtu };
    let kind = Some(template::Kind::Nic(nic));
    make(client, name, vf_v1::Template { kind, count, ..Default::default() }).await
}

/// Makes a pool of the hardware function at a PCI address of the host, and waits until it is ready.
///
/// # Errors
/// The function cannot be had; the pool is removed then.
pub async fn make_hardware(client: &mut VfClient, name: &str, address: &str) -> Result<()> {
    let addresses = vec![address.to_owned()];
    let hardware = template::Hardware { addresses, ..Default::default() };
    let kind = Some(template::Kind::Hardware(hardware));
    make(client, name, vf_v1::Template { kind, count: 1, ..Default::default() }).await
}

/// Waits until no function of a pool is being reset. Returns the pool.
///
/// # Errors
/// The daemon refuses or goes away.
pub async fn wait_until_ready(client: &mut VfClient, name: &str) -> Result<vf_v1::Pool> {
    loop {
        let found = pool(client, name).await?;
        if count(&found, "being reset") == 0 {
            return Ok(found);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Removes a pool.
///
/// # Errors
/// The daemon refuses or goes away.
pub async fn remove(client: &mut VfClient, name: &str) -> Result<()> {
    let request = vf_v1::RemovePoolRequest { name: name.to_owned() };
    client.remove_pool(request).await.map_err(refused)?;
    Ok(())
}

async fn pool(client: &mut VfClient, name: &str) -> Result<vf_v1::Pool> {
    answer(client.get_pool(vf_v1::GetPoolRequest { name: name.to_owned() }).await)
}

async fn list(client: &mut VfClient, json: bool) -> Result<()> {
    let pools = answer(client.list_pools(vf_v1::ListPoolsRequest {}).await)?.pools;
    let header = ["POOL", "KIND", "FUNCTIONS", "READY", "TAKEN", "RESETTING", "FAILED", "DRAINED"];
    table::list(&pools, json, as_json, header, row)
}

fn count(pool: &vf_v1::Pool, state: &str) -> usize {
    pool.vfs.iter().filter(|vf| vf.state == state).count()
}

fn row(pool: &vf_v1::Pool) -> [String; 8] {
    let count = |state| count(pool, state);
    [
        pool.name.clone(),
        shown_kind(pool),
        pool.vfs.len().to_string(),
        count("ready").to_string(),
        count("taken").to_string(),
        count("being reset").to_string(),
        shown_failures(pool),
        count("drained").to_string(),
    ]
}

/// Returns the number of functions that failed, with the next try of one of them.
fn shown_failures(pool: &vf_v1::Pool) -> String {
    let failed = count(pool, "failed") + count(pool, "not answering");
    let tries = pool.vfs.iter().filter_map(|vf| Some((vf.next_try_ms?, vf.tries + 1)));
    match tries.min() {
        Some((ms, number)) => format!("{failed} (try {number} in {} s)", ms.div_ceil(1000)),
        None => failed.to_string(),
    }
}

fn kind(pool: &vf_v1::Pool) -> &'static str {
    match pool.template.as_ref().and_then(|template| template.kind.as_ref()) {
        Some(template::Kind::Nvme(_)) => "nvme",
        Some(template::Kind::Nic(_)) => "nic",
        Some(template::Kind::Hardware(_)) => "hardware",
        None => "",
    }
}

/// Returns the PCI addresses of a pool's functions by their numbers, or none if they are no
/// hardware.
fn addresses(pool: &vf_v1::Pool) -> &[String] {
    match pool.template.as_ref().and_then(|template| template.kind.as_ref()) {
        Some(template::Kind::Hardware(hardware)) => &hardware.addresses,
        _ => &[],
    }
}

/// Returns the kind with the address of the first function, and the number of further functions.
fn shown_kind(pool: &vf_v1::Pool) -> String {
    match addresses(pool) {
        [] => kind(pool).to_owned(),
        [only] => format!("{} {only}", kind(pool)),
        [first, more @ ..] => format!("{} {first}+{}", kind(pool), more.len()),
    }
}

fn as_json(pool: &vf_v1::Pool) -> serde_json::Value {
    let vf = |vf: &vf_v1::Vf| {
        serde_json::json!({
            "number": vf.number,
            "pci_address": addresses(pool).get(vf.number as usize),
            "devset": vf.set,
            "state": vf.state,
            "reason": vf.reason,
            "owner": vf.owner,
            "since_ns": vf.since_ns,
            "draining": vf.draining,
            "takes": vf.takes,
            "tries": vf.tries,
            "next_try_ms": vf.next_try_ms,
            "socket_path": vf.socket_path,
        })
    };
    let vf_v1::Pool { name, template, vfs, resets, failures, unwritten, refusals, retries } = pool;
    let template = template.clone().unwrap_or_default();
    let v1::Owner { uid, gid } = template.user.unwrap_or_default();
    let layers_bytes = match &template.kind {
        Some(template::Kind::Nvme(nvme)) => nvme.layers_bytes,
        _ => 0,
    };
    let (vlan, max_rate) = match &template.kind {
        Some(template::Kind::Hardware(hardware)) => (hardware.vlan, hardware.max_rate),
        _ => (0, 0),
    };
    serde_json::json!({
        "name": name,
        "kind": kind(pool),
        "count": template.count,
        "devset_size": if template.set_size == 0 { template.count } else { template.set_size },
        "user": format!("{uid}:{gid}"),
        "layers_bytes": layers_bytes,
        "vlan": vlan,
        "max_rate": max_rate,
        "resets": resets,
        "failures": failures,
        "unwritten": unwritten,
        "refusals": refusals,
        "retries": retries,
        "functions": vfs.iter().map(vf).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template_of_disk(disk: &str, layers: Option<u64>) -> Result<vf_v1::Template> {
        let args = VfCreateArgs {
            pool: "a".into(),
            disk: Some(disk.parse().unwrap()),
            layers,
            switch: None,
            mtu: None,
            pci: Vec::new(),
            pci_of: None,
            vlan: None,
            max_rate: None,
            count: 2,
            set_size: None,
            user: None,
        };
        let config = Config { layers_bytes: 64 << 20, ..Config::default() };
        template_of(&args, &config)
    }

    #[test]
    fn layers_are_bounded_by_the_settings_or_as_asked() {
        let bytes = |disk, layers| match template_of_disk(disk, layers).unwrap().kind {
            Some(template::Kind::Nvme(nvme)) => nvme.layers_bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(bytes("overlay:/a", None), 64 << 20);
        assert_eq!(bytes("overlay:/a", Some(1 << 20)), 1 << 20);
        // 0 has the meaning of no bound for the plane.
        assert_eq!(bytes("overlay:/a", Some(0)), 1);
        assert_eq!(bytes("ram:1M", None), 0);
        assert!(template_of_disk("ram:1M", Some(1 << 20)).is_err());
    }

    #[test]
    fn a_pool_of_hardware_has_a_function_for_each_address() {
        let pci = vec!["0000:01:10.0".to_owned(), "0000:01:10.2".to_owned()];
        let args = VfCreateArgs {
            pool: "a".into(),
            disk: None,
            layers: None,
            switch: None,
            mtu: None,
            pci: pci.clone(),
            pci_of: None,
            vlan: None,
            max_rate: None,
            count: 8,
            set_size: None,
            user: None,
        };
        let template = template_of(&args, &Config::default()).unwrap();
        assert_eq!(template.count, 2);
        let vf = |number| vf_v1::Vf { number, ..Default::default() };
        let template = Some(template);
        let pool = vf_v1::Pool { template, vfs: vec![vf(0), vf(1)], ..Default::default() };
        assert_eq!(row(&pool)[1], "hardware 0000:01:10.0+1");
        let json = as_json(&pool);
        let address = |number: usize| json["functions"][number]["pci_address"].as_str();
        assert_eq!((json["kind"].as_str(), address(1)), (Some("hardware"), Some(&*pci[1])));
    }

    #[test]
    fn rows_count_states() {
        let vf = |state: &str| vf_v1::Vf { state: state.into(), ..Default::default() };
        let states = ["ready", "ready", "taken", "failed", "not answering", "drained"];
        let kind = Some(template::Kind::Nic(template::Nic::default()));
        let pool = vf_v1::Pool {
            name: "a".into(),
            template: Some(vf_v1::Template { kind, count: 6, ..Default::default() }),
            vfs: states.map(vf).to_vec(),
            ..Default::default()
        };
        assert_eq!(row(&pool), ["a", "nic", "6", "2", "1", "0", "2", "1"]);
        let mut waiting = pool.clone();
        waiting.vfs[3] = vf_v1::Vf { tries: 2, next_try_ms: Some(3001), ..vf("failed") };
        assert_eq!(row(&waiting)[6], "2 (try 3 in 4 s)");
        assert_eq!(as_json(&waiting)["functions"][3]["next_try_ms"], 3001);
        let json = as_json(&pool);
        assert_eq!(
            (json["devset_size"].as_u64(), json["functions"][2]["state"].as_str()),
            (Some(6), Some("taken"))
        );
    }
}
