//! Forks of a VM whose guest has booted.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_hypervisor::{
    GuestMemory, Hypervisor, Spare, SpareSpec, TemplateName, Topology, Vm, VmSpec,
};
use slipway_keeper::Keeper;
use slipway_pool::{Pool, SLOTS, Settings, Shelves};
use tokio::net::UnixStream;

use super::agent;

/// The time between the end of a VM and the begin of the next one: the kernel takes namespaces and
/// memory of a process apart when it is gone already, and a server of one processor would do so
/// while the next VM begins.
const AFTERMATH: Duration = Duration::from_millis(500);

/// Boots a VM, saves it once its agent has prepared the guest for that and the guest rests, and
/// starts `count` VMs that begin with it, one after the other. Prints the microseconds from asking
/// for memory to the agent's first byte, of the boot and of each fork. Pages that the first fork
/// has touched are copied ahead for the next ones, as a node has it. With `ahead`, each fork has a
/// VMM that was started before its memory was asked for. Returns `false` if an agent did not answer
/// within `limit`.
pub async fn measure(
    hypervisor: &dyn Hypervisor,
    spec: VmSpec,
    count: usize,
    ahead: bool,
    limit: Duration,
) -> bool {
    let bytes = spec.memory.bytes();
    let begun = Instant::now();
    let booted = VmSpec { memory: GuestMemory::new(bytes).unwrap(), ..spec.clone() };
    let vm = hypervisor.launch(&booted).await.unwrap();
    let Some(mut agent) = answer(&spec.agent_socket, limit).await else { return false };
    println!("boot={}", begun.elapsed().as_micros());
    agent::prepare(&mut agent).await;
    drop(agent);
    vm.rest().await;
    vm.pause().await.unwrap();
    let mut state = memory_file();
    state.write_all(&vm.save().await.unwrap()).unwrap();
    // Without a place at a keeper, all of a fork's memory would be copied before it begins.
    let shelves = Some(Shelves::new(Arc::new(keeper(&spec.run_dir)), 0..2 * SLOTS));
    let pool = Pool::new(Settings { limit: 0, shelves, ..Settings::default() }).unwrap();
    let socket = spec.run_dir.with_extension("pool");
    let _server = pool.listen(&socket).unwrap();
    let name = TemplateName::new("booted").unwrap();
    let memory = File::from(booted.memory.descriptor().unwrap());
    let template = pool.freeze(std::os::fd::AsFd::as_fd(&memory)).unwrap();
    println!("touched={}", template.held());
    pool.add_template(name, template).unwrap();
    end(&*vm).await;
    let (state, topology) = (Arc::new(state), Topology::of_host());
    let VmSpec { credentials, cgroup_procs, .. } = spec.clone();
    let spare_spec = SpareSpec { credentials, cgroup_procs, gives_back: false };
    for number in 0..count {
        let spare = match ahead {
            true => Some(hypervisor.launch_spare(&spare_spec).await.unwrap()),
            false => None,
        };
        tokio::time::sleep(AFTERMATH).await;
        let begun = Instant::now();
        let memory = GuestMemory::of_template(&socket, bytes, name, &topology).unwrap();
        let identity = memory.identity().unwrap();
        let fork = VmSpec { memory, restore: Some(Arc::clone(&state)), ..spec.clone() };
        let process = spare.as_ref().map(Spare::pid);
        let vm = match spare {
            Some(spare) => hypervisor.launch_in(spare, &fork).await.unwrap(),
            None => hypervisor.launch(&fork).await.unwrap(),
        };
        let launched = begun.elapsed();
        if answer(&spec.agent_socket, limit).await.is_none() {
            return false;
        }
        let name_of = if number == 0 { "first" } else { "fork" };
        println!("{name_of}={}", begun.elapsed().as_micros());
        println!("{name_of}-vmm={}", launched.as_micros());
        assert!(process.is_none_or(|pid| vm.record().pid == pid), "another VMM was started");
        if number == 0 {
            let touched = pool.copied(identity).unwrap();
            let sum: u64 = touched.iter().map(|range| range.end - range.start).sum();
            println!("first-copied={sum}");
            assert!(pool.copy_ahead(name, &touched));
        }
        end(&*vm).await;
    }
    true
}

/// Returns the connection to the agent after its first byte, or `None` if it comes too late.
async fn answer(socket: &Path, limit: Duration) -> Option<UnixStream> {
    tokio::time::timeout(limit, agent::greet(socket)).await.ok()
}

async fn end(vm: &dyn Vm) {
    vm.kill().unwrap();
    vm.wait().await;
}

/// Starts a keeper on a thread of this process.
pub(crate) fn keeper(run_dir: &Path) -> Keeper {
    let path = run_dir.with_extension("keeper");
    let theirs = path.clone();
    std::thread::spawn(move || slipway_keeper::serve(&theirs));
    let keeper = loop {
        if let Ok(keeper) = Keeper::connect(&path) {
            break keeper;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    keeper.take(Duration::from_secs(10)).unwrap();
    keeper
}

/// Makes an empty file in memory.
fn memory_file() -> File {
    rustix::fs::memfd_create(c"state", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
}
