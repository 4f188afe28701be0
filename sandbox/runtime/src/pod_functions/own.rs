//! The hardware function of a sandbox that is no pod: one of the pool that `--vf` names, beside the
//! sandbox's other devices.
//!
//! Any function of the pool that is ready is taken, once the guest has booted, and added to the
//! machine as those of pods are. It is a block device of the container or a further network
//! interface, and goes back when the sandbox ends.
//!
//! The pool is in the sandbox's record from the start, and the sandbox is one owner. So the
//! function goes back even if a daemon is killed after it has taken the function and before it
//! records that.

use std::net::IpAddr;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_plane_api::vf_v1::template::Kind;

use super::{attach, block_device, hardware, nics, pools};
use crate::agent::Agent;
use crate::node::Node;
use crate::record::{Given, GivenNic, OwnFunction, Record, Volume, Wish};
use crate::sandbox::Sandbox;
use crate::templates::AUTO;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The VMM's name of the device.
const DEVICE: &str = "pool-1";

/// Returns the hardware function that `spec` asks for. Returns `None` if the pool of `spec` is of
/// another kind, or `spec` names none. `saves` is set for a machine that is to be saved.
///
/// # Errors
/// [`Error::Plane`] if there is no such pool; [`Error::Invalid`] if the sandbox can have no
/// hardware function, or an address is no address.
pub async fn chosen(node: &Node, spec: &RunSpec, saves: bool) -> Result<Option<OwnFunction>> {
    let addresses = spec.vf_addresses.iter().map(|text| address(text));
    let addresses = addresses.collect::<Result<Vec<_>>>()?;
    let invalid = |why: &str| Err(Error::Invalid(why.to_owned()));
    let kind = match spec.vf_pool.as_str() {
        "" => None,
        pool => pools::kind(node, pool).await?,
    };
    let Some(Kind::Hardware(_)) = kind else {
        return match addresses.is_empty() {
            true => Ok(None),
            false => invalid("--vf-address is for a network interface of hardware (--vf)"),
        };
    };
    if spec.makes_pod {
        return invalid("the containers of a pod have hardware functions: leave out --vf");
    }
    if saves || !["", AUTO].contains(&spec.template.as_str()) {
        let why = "a machine with a hardware function is no template's: leave out --from, or --vf";
        return invalid(why);
    }
    Ok(Some(OwnFunction { pool: spec.vf_pool.clone(), addresses }))
}

/// Parses an address with the length of its network's prefix.
fn address(text: &str) -> Result<(String, u32)> {
    let parsed = text.split_once('/').and_then(|(address, prefix)| {
        let (address, prefix) = (address.parse::<IpAddr>().ok()?, prefix.parse::<u32>().ok()?);
        let most = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= most).then(|| (address.to_string(), prefix))
    });
    let wrong = || Error::Invalid(format!("\"{text}\" is no address such as 10.1.0.2/24"));
    parsed.ok_or_else(wrong)
}

/// Returns `spec` without its hardware function.
pub fn without(spec: &RunSpec) -> RunSpec {
    let (vf_pool, vf_addresses, template) = (String::new(), Vec::new(), String::new());
    // It can be no fork, so it is not one of many that may be, and has an address of its own.
    let (at_once, boots, mac_at_port) = (0, true, false);
    RunSpec { vf_pool, vf_addresses, template, at_once, boots, mac_at_port, ..spec.clone() }
}

/// Checks that no volume has the name of the hardware function.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check(own: &OwnFunction, volumes: &[Volume]) -> Result<()> {
    let name = name(&own.pool);
    match volumes.iter().any(|volume| volume.name == name) {
        true => Err(Error::Invalid(format!(
            "a function of the pool {} and a volume are both called {name}: give the volume \
             another name",
            own.pool
        ))),
        false => Ok(()),
    }
}

/// Returns the name of the function's block device in the container.
fn name(pool: &str) -> String {
    format!("{pool}-0")
}

/// Gives a sandbox whose guest has booted its hardware function, if it is to have one.
///
/// # Errors
/// [`Error::Plane`] if no function is ready, or it is of a class that no container can have;
/// [`Error::Invalid`] for addresses of a disk; [`Error::Hypervisor`] if the VMM does not take it;
/// [`Error::Agent`] if the guest does not configure the interface; [`Error::File`] if the record is
/// not saved.
pub async fn join(node: &Node, sandbox: &Sandbox, agent: &Agent) -> Result<()> {
    let Some(own) = sandbox.look(|record| record.plugged.own.clone()) else { return Ok(()) };
    let OwnFunction { pool, addresses } = own;
    let _turn = sandbox.functions.lock().await;
    let vm = sandbox.live_vm()?;
    let lease = pools::take_any(node, sandbox, &pool).await?;
    let host_address = lease.address.clone();
    if host_address.is_empty() {
        return Err(Error::Plane(format!("pool {pool} was made anew meanwhile: run it again")));
    }
    let nic = hardware::interface(sandbox, &host_address).await?;
    if nic.is_none() && !addresses.is_empty() {
        let why = format!("--vf-address: the functions of pool {pool} are disks");
        return Err(Error::Invalid(why));
    }
    let nic = nic.map(|nic| GivenNic { addresses, ..nic });
    let wish = Wish { name: name(&pool), number: lease.number, pool };
    let recorded = sandbox.update(|record| {
        let Wish { pool, number, .. } = wish.clone();
        let device = DEVICE.to_owned();
        record.plugged.functions =
            vec![Given { pool, number, device, nic, host_address, ..Given::default() }];
    });
    recorded.await?;
    attach(sandbox, &*vm, &wish, DEVICE, lease).await?;
    nics::configure(sandbox, agent, &wish).await
}

/// Returns the block device that the function of a sandbox is, if it is one.
pub fn volume(record: &Record) -> Option<agent_v1::Volume> {
    let own = record.plugged.own.as_ref()?;
    let given = record.plugged.functions.first().filter(|given| given.nic.is_none())?;
    Some(block_device(given, &name(&own.pool)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{given, pod};
    use super::*;

    fn record() -> Record {
        let mut record = Record { pod: false, ..pod(0) };
        record.plugged.own = Some(OwnFunction { pool: "fast".into(), addresses: Vec::new() });
        record
    }

    #[test]
    fn a_sandbox_with_a_function_has_a_slot_for_it() {
        assert_eq!((record().function_room(), super::super::plug_slots(&record())), (1, 1));
    }

    #[test]
    fn a_function_is_a_disk_of_the_container_with_any_namespace() {
        assert_eq!(volume(&record()), None);
        let host_address = "0000:01:10.0".to_owned();
        let own = Given { host_address, ..given("fast", 3, "0000:00:06.0") };
        let mut record = record();
        record.plugged.functions = vec![own.clone()];
        let volume_of = |record: &Record| volume(record).map(|one| (one.name, one.device));
        let (name, device) = volume_of(&record).unwrap();
        let device = device.unwrap();
        assert_eq!((name.as_str(), device.pci_address.as_str()), ("fast-0", "0000:00:06.0"));
        assert_eq!(device.nsid, u32::MAX);
        let nic = Given { nic: Some(GivenNic::default()), ..own };
        record.plugged.functions = vec![nic];
        assert_eq!(volume_of(&record), None);
    }

    #[test]
    fn addresses_have_prefixes() {
        assert_eq!(address("10.1.0.2/24").unwrap(), ("10.1.0.2".to_owned(), 24));
        assert_eq!(address("fd00::2/64").unwrap().1, 64);
        for wrong in ["", "10.1.0.2", "10.1.0.2/33", "10.1.0/8", "fd00::2/129", "10.1.0.2/-1"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_rest_of_a_specification_names_no_function() {
        let vf_addresses = vec!["10.1.0.2/24".to_owned()];
        let (vf_pool, template) = ("fast".to_owned(), AUTO.to_owned());
        let spec = RunSpec { cpus: 2, vf_pool, vf_addresses, template, ..Default::default() };
        assert_eq!(without(&spec), RunSpec { cpus: 2, boots: true, ..Default::default() });
    }
}
