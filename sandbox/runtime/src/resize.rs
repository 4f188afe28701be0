//! The memory of a running sandbox: `slipway update --memory`.
//!
//! A sandbox begins with some memory, which stays, and can be given more up to the size that its
//! machine was made for, in blocks of 2 MiB or more. For more, the limit of the VMM's control group
//! is raised first, then the guest is asked to plug blocks. For less, the guest is asked to give
//! back blocks, and the limit is lowered when it has. A guest is not asked for memory that its
//! programs use: what it could not give without ending them stays, and the error says so.
//!
//! The limit that is in force is recorded before it is raised. So a later daemon, which adopts the
//! sandbox while a guest follows, never sets a limit below what the guest was allowed to plug. The
//! VMM's word alone raises no limit: a VMM that its guest took over may claim anything.

use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{HotRegion, MemoryDevice, Vm, VmSpec};
use tokio::time::Instant;

use crate::agent::Agent;
use crate::cgroup;
use crate::node::Node;
use crate::record::{BoundMemory, Nic, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

const MIB: u64 = 1 << 20;
/// Room for more memory is a multiple of this, in bytes.
pub(crate) const ROOM_UNIT: u64 = 128 << 20;
/// The most bytes of room for more memory.
const MOST_ROOM: u64 = 256 << 30;
/// The number of the sandbox's device of hot-plug memory.
pub(crate) const DEVICE: usize = 0;
/// The time in which a guest that follows plugs or gives back at least one block more.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks at the VMM's list.
const LOOK: Duration = Duration::from_millis(20);
/// The part of a guest's memory that is left available when it gives memory back: so much, or a
/// 32nd of its memory if that is more.
const LEFT: u64 = 16 * MIB;

impl Node {
    /// Changes the memory of a running sandbox to `wanted` bytes, rounded up to whole blocks. The
    /// change goes on to its end if the caller stops waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the sandbox cannot have so much; [`Error::WrongState`] if its
    /// container does not run or its size is being changed; [`Error::Memory`], with the size that
    /// it has, if the guest gave back or took less, or the VMM failed.
    pub(crate) async fn set_memory(&self, sandbox: &Arc<Sandbox>, wanted: u64) -> Result<()> {
        let change = Change::of(sandbox, wanted)?;
        let turn = sandbox.change_size()?;
        let changed = self.guests.spawn(async move {
            let _turn = turn;
            let changed = change.run(wanted, None).await;
            let choose = |record: &mut Record| {
                record.memory.chosen_bytes = wanted.min(record.memory_bytes);
            };
            changed.and(change.sandbox.update(choose).await)
        });
        changed.await.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}

/// Changes the memory of a running sandbox to `wanted` bytes, rounded up to whole blocks, as far as
/// its guest follows within `longest`. The caller has the turn to change its size, and does not
/// stop waiting.
///
/// # Errors
/// The errors of [`Node::set_memory`].
pub(crate) async fn change_to(
    sandbox: &Arc<Sandbox>,
    wanted: u64,
    longest: Duration,
) -> Result<()> {
    Change::of(sandbox, wanted)?.run(wanted, Some(longest)).await
}

/// Returns the most memory in bytes that a pod which begins with `begin` bytes can have by a
/// setting of `percent`, with whole 128 MiB of room: `begin` if there is no room.
pub(crate) fn of_pod(begin: u64, percent: u32, host: u64) -> u64 {
    let more = u64::from(percent.saturating_sub(100));
    let wanted = (begin / 100).saturating_mul(more).min(MOST_ROOM).next_multiple_of(ROOM_UNIT);
    let free = host.saturating_sub(begin);
    begin + wanted.min(free - free % ROOM_UNIT)
}

/// Returns the most memory in bytes that a new sandbox can have, which begins with `begin` bytes:
/// `asked` rounded up to whole 128 MiB of room, or `begin` if `asked` is 0.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn of_new(begin: u64, asked: u64, host: u64) -> Result<u64> {
    if asked == 0 {
        return Ok(begin);
    }
    let refuse =
        |why: String| Err(Error::Invalid(format!("--max-memory of {} MiB{why}", asked / MIB)));
    if asked < begin {
        let least = begin / MIB;
        return refuse(format!(" is less than the {least} MiB that the sandbox begins with"));
    }
    if asked > host {
        return refuse(format!(" is more than this host has, {} MiB", host / MIB));
    }
    let room = asked - begin;
    if room > MOST_ROOM {
        let most = MOST_ROOM >> 30;
        return refuse(format!(": at most {most} GiB beside what the sandbox begins with"));
    }
    Ok(begin + room.next_multiple_of(ROOM_UNIT))
}

/// Returns whether a machine can have room for so many bytes.
pub(crate) fn is_room(bytes: u64) -> bool {
    bytes <= MOST_ROOM && bytes.is_multiple_of(ROOM_UNIT)
}

/// Returns whether a sandbox gets the room for more memory that the node's settings give: a pod
/// that names no most, binds no memory to containers, and neither is a fork nor becomes a template.
/// Room costs a guest with an e1000 64 MiB of what it begins with ([`kernel_words`]), so it has
/// none.
pub(crate) fn takes_room(record: &Record) -> bool {
    let is_open = !record.memory.is_named && record.bound.room() == 0;
    record.pod && record.has_own_machine() && is_open && !needs_low(record)
}

/// Returns whether a driver of the guest addresses 4 GiB only: that of an e1000.
fn needs_low(record: &Record) -> bool {
    record.network.as_ref().is_some_and(|one| one.nic != Nic::Virtio)
}

/// Returns the regions of a machine: one for the memory that a sandbox can be given, in the node of
/// its guest's other memory, or one for each container of a pod, in a node of its own.
pub(crate) fn hot_regions(record: &Record) -> Vec<HotRegion> {
    let bound = (0u32..).zip(&record.bound.granted_bytes).map(|(region, _)| HotRegion {
        bytes: record.bound.region_bytes,
        node: BoundMemory::node(region),
    });
    let common = Some(record.memory.room()).filter(|bytes| *bytes > 0);
    common.map(|bytes| HotRegion { bytes, node: 0 }).into_iter().chain(bound).collect()
}

/// Returns the words on the kernel's command line of a guest with room for more memory:
/// - `memhp_default_state=online_movable`: the kernel keeps nothing of its own there, which it
///   could not give back;
/// - `swiotlb=noforce`: Linux sets aside 64 MiB for bounce buffers where memory may come above
///   4 GiB. Only an e1000, whose driver addresses 4 GiB, needs them.
pub(crate) fn kernel_words(record: &Record) -> Vec<String> {
    if record.hot_bytes() == 0 {
        return Vec::new();
    }
    let mut words = vec!["memhp_default_state=online_movable".to_owned()];
    if !needs_low(record) {
        words.push("swiotlb=noforce".to_owned());
    }
    words
}

/// Checks that the VMM of a sandbox can give it the memory that it has room for.
///
/// # Errors
/// [`Error::Invalid`] if it cannot.
pub(crate) async fn check_vmm(node: &Node, record: &Record, spec: &VmSpec) -> Result<()> {
    if record.hot_bytes() == 0 || node.hypervisor.capabilities(spec).await?.plugs_memory {
        return Ok(());
    }
    let option = if record.bound.room() > 0 { "--bind-memory" } else { "--max-memory" };
    Err(Error::Invalid(format!(
        "{option} needs slipway-vmm, and so KVM (`slipway doctor`): its VMM is QEMU"
    )))
}

/// Records the memory that an adopted sandbox has, as its VMM lists it within what was granted, and
/// limits the VMM's control group to that. The guest of a daemon that ended between two steps is
/// asked to stay as it is.
///
/// # Errors
/// [`Error::Hypervisor`] if the VMM does not answer, errors of control groups.
pub(crate) async fn recount(sandbox: &Sandbox, vm: &dyn Vm) -> Result<()> {
    if sandbox.look(|record| record.memory.room()) == 0 {
        return Ok(());
    }
    let bytes = keep_plugged(sandbox, vm).await?;
    sandbox.note(|record| set_in_force(record, bytes));
    Ok(())
}

/// Asks the guest to stay at what it has plugged, and limits the VMM's control group to that.
/// Returns the sandbox's memory in bytes, at most what was granted.
async fn keep_plugged(sandbox: &Sandbox, vm: &dyn Vm) -> Result<u64> {
    let MemoryDevice { requested, mut plugged, .. } = memory_device(vm, DEVICE).await?;
    if requested != plugged {
        vm.set_memory(DEVICE, plugged).await?;
        // More may have come before that was asked for, and no more comes from now on.
        plugged = plugged.max(memory_device(vm, DEVICE).await?.plugged);
    }
    let bytes = sandbox.look(|record| {
        let bytes = record.memory.boot_bytes.saturating_add(plugged);
        bytes.min(record.memory.granted_bytes)
    });
    cgroup::limit_memory(sandbox, bytes).await?;
    Ok(bytes)
}

/// Records a size that is in force.
fn set_in_force(record: &mut Record, bytes: u64) {
    (record.memory_bytes, record.memory.granted_bytes) = (bytes, bytes);
}

/// Returns a device of hot-plug memory.
///
/// # Errors
/// [`Error::Hypervisor`] if the VMM does not answer, [`Error::Agent`] if it has no such device.
pub(crate) async fn memory_device(vm: &dyn Vm, device: usize) -> Result<MemoryDevice> {
    let devices = vm.memory_devices().await?;
    let missing = || Error::Agent("the VMM has no such device of hot-plug memory".to_owned());
    devices.into_iter().nth(device).ok_or_else(missing)
}

/// Asks the guest for a number of plugged bytes of a device, and waits until it has them or changes
/// nothing more. Returns those that it has.
///
/// # Errors
/// The errors of [`Follow::ask`] and [`Follow::advances`].
async fn follow(vm: &dyn Vm, device: usize, target: u64) -> Result<u64> {
    let mut guest = Follow::ask(vm, device, target).await?;
    while guest.advances().await? {}
    Ok(guest.plugged())
}

/// A guest that was asked for a number of plugged bytes of a device.
pub(crate) struct Follow<'a> {
    vm: &'a dyn Vm,
    device: usize,
    target: u64,
    /// The number that was nearest to the target.
    plugged: u64,
    changed: Instant,
}

impl<'a> Follow<'a> {
    /// Asks a guest for `target` bytes.
    ///
    /// # Errors
    /// The errors of [`memory_device`]; [`Error::Hypervisor`] if the device cannot have so many.
    pub(crate) async fn ask(vm: &'a dyn Vm, device: usize, target: u64) -> Result<Self> {
        vm.set_memory(device, target).await?;
        let plugged = memory_device(vm, device).await?.plugged;
        Ok(Self { vm, device, target, plugged, changed: Instant::now() })
    }

    /// Returns the plugged bytes at the last look.
    pub(crate) fn plugged(&self) -> u64 {
        self.plugged
    }

    /// Waits until the guest is nearer to the target. Returns `false` if it has the target or has
    /// changed nothing for [`PATIENCE`].
    ///
    /// # Errors
    /// The errors of [`memory_device`].
    pub(crate) async fn advances(&mut self) -> Result<bool> {
        while self.plugged != self.target && self.changed.elapsed() < PATIENCE {
            tokio::time::sleep(LOOK).await;
            let now = memory_device(self.vm, self.device).await?.plugged;
            // A guest that goes back and forth does not hold up the caller for ever.
            if now.abs_diff(self.target) < self.plugged.abs_diff(self.target) {
                (self.plugged, self.changed) = (now, Instant::now());
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Checks that a sandbox can have `wanted` bytes.
fn check_range(record: &Record, wanted: u64) -> Result<()> {
    if record.bound.room() > 0 {
        let name = &record.name;
        let why = "gives memory to each container (--bind-memory): change the containers' limits";
        return Err(Error::Invalid(format!("pod {name} {why}")));
    }
    let (name, least, most) = (&record.name, record.memory.boot_bytes, record.memory.max_bytes);
    let shown = wanted.div_ceil(MIB);
    if wanted < least {
        return Err(Error::Invalid(format!(
            "{shown} MiB of memory is too little for sandbox {name}: the {} MiB that it began \
             with cannot be taken away",
            least / MIB
        )));
    }
    if wanted > most {
        return Err(Error::Invalid(format!(
            "{shown} MiB of memory is too much for sandbox {name}: at most {} MiB; `slipway run \
             --max-memory` makes one that can have more",
            most / MIB
        )));
    }
    Ok(())
}

/// A change of a running sandbox's memory.
struct Change {
    sandbox: Arc<Sandbox>,
    agent: Agent,
    vm: Arc<dyn Vm>,
}

impl Change {
    /// Checks a change to `wanted` bytes.
    fn of(sandbox: &Arc<Sandbox>, wanted: u64) -> Result<Self> {
        let agent = sandbox.agent()?;
        sandbox.look(|record| check_range(record, wanted))?;
        Ok(Self { sandbox: Arc::clone(sandbox), agent, vm: sandbox.live_vm()? })
    }

    async fn run(&self, wanted: u64, longest: Option<Duration>) -> Result<()> {
        let change = self.ask(wanted);
        let changed = match longest {
            None => change.await,
            Some(longest) => tokio::time::timeout(longest, change).await.unwrap_or_else(|_| {
                Ok(Some(format!("its guest has not followed within {} s", longest.as_secs())))
            }),
        };
        let settled = keep_plugged(&self.sandbox, &*self.vm).await;
        let bytes = match (&changed, settled) {
            (_, Ok(bytes)) => bytes,
            (Ok(_), Err(error)) => return Err(error),
            // The limit stays as it was granted, and is recorded so.
            (Err(error), Err(_)) => return Err(self.has_now(None, error.to_string())),
        };
        self.sandbox.update(|record| set_in_force(record, bytes)).await?;
        match changed {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => Err(self.has_now(Some(bytes), reason)),
            Err(error) => Err(self.has_now(Some(bytes), error.to_string())),
        }
    }

    /// Returns the error of a sandbox that has so many bytes, or as many as it is recorded to have.
    fn has_now(&self, bytes: Option<u64>, reason: String) -> Error {
        let bytes = bytes.unwrap_or_else(|| self.sandbox.look(|record| record.memory_bytes));
        Error::Memory { name: self.sandbox.name.clone(), bytes, reason }
    }

    /// Has the guest follow. Returns the reason why it has another size than the wanted one, if it
    /// has.
    async fn ask(&self, wanted: u64) -> Result<Option<String>> {
        let device = memory_device(&*self.vm, DEVICE).await?;
        let bounds = self.sandbox.look(|record| record.memory);
        let begin = bounds.boot_bytes;
        // Whatever block the VMM tells of, its control group gets no more than the room.
        let target = whole(wanted.saturating_sub(begin), device.block).min(bounds.room());
        if target > device.bytes {
            return Err(Error::Agent("the VMM has less room than it was made with".to_owned()));
        }
        if target >= device.plugged {
            return self.grow(begin, target).await;
        }
        if self.sandbox.look(|record| record.plugged.has_hardware()) {
            let why = "it has a function of hardware, which reaches all of its memory";
            return Ok(Some(why.to_owned()));
        }
        let stats = self.agent.stats("").await?.machine;
        let free = free(stats.memory_total_bytes, stats.memory_available_bytes);
        let used = whole(device.plugged.saturating_sub(free), device.block);
        let asked = target.max(used).min(device.plugged);
        let left = follow(&*self.vm, DEVICE, asked).await?;
        Ok((left > target).then(|| {
            let in_use = stats.memory_total_bytes.saturating_sub(stats.memory_available_bytes);
            format!("its programs use {} MiB, and what is free can be given back", in_use / MIB)
        }))
    }

    async fn grow(&self, begin: u64, target: u64) -> Result<Option<String>> {
        let granted = begin.saturating_add(target);
        let before = self.sandbox.look(|record| record.memory.granted_bytes);
        if granted > before {
            self.sandbox.update(|record| record.memory.granted_bytes = granted).await?;
        }
        // Also if the record has the room: a lower limit that nobody waited for to its end may be
        // in force, and the record has the one before.
        cgroup::limit_memory(&self.sandbox, granted.max(before)).await?;
        if granted > before {
            cgroup::look_above(&self.sandbox, granted).await;
        }
        let plugged = follow(&*self.vm, DEVICE, target).await?;
        Ok((plugged < target).then(|| {
            "its guest took no more; does its kernel have virtio_mem, and memory for its tables?"
                .to_owned()
        }))
    }
}

/// Returns the bytes of the blocks that so many bytes need.
fn whole(bytes: u64, block: u64) -> u64 {
    bytes.div_ceil(block).saturating_mul(block)
}

/// Returns the bytes that a guest can give back without ending programs. Its word harms itself
/// only.
fn free(total: u64, available: u64) -> u64 {
    available.min(total).saturating_sub(LEFT.max(total / 32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{MemoryBounds, SandboxState};

    fn record(boot_mib: u64, max_mib: u64) -> Record {
        let record = crate::adopt::tests::record_of(SandboxState::Running);
        let (boot, max) = (boot_mib * MIB, max_mib * MIB);
        Record { memory_bytes: boot, memory: MemoryBounds::new(boot, max), ..record }
    }

    #[test]
    fn room_is_whole_units_within_the_host() {
        let of = |begin: u64, most: u64| of_new(begin * MIB, most * MIB, 1 << 40);
        assert_eq!(of(256, 0).unwrap(), 256 * MIB);
        assert_eq!(of(256, 256).unwrap(), 256 * MIB);
        assert_eq!(of(256, 257).unwrap(), 384 * MIB);
        assert_eq!(of(256, 1024).unwrap(), 1024 * MIB);
        let refused = |outcome: Result<u64>| outcome.unwrap_err().to_string();
        assert!(refused(of(256, 255)).contains("255 MiB is less than the 256 MiB"));
        assert!(refused(of(256, 300 << 10)).contains("at most 256 GiB beside"));
        let small = of_new(256 * MIB, 512 * MIB, 400 * MIB);
        assert!(refused(small).contains("more than this host has, 400 MiB"));
        assert!(refused(of_new(MIB, u64::MAX, u64::MAX)).contains("at most 256 GiB"));
    }

    #[test]
    fn a_pod_has_room_by_the_setting_within_the_host() {
        let of = |begin: u64, percent, host: u64| of_pod(begin * MIB, percent, host * MIB) / MIB;
        assert_eq!(of(256, 200, 1 << 20), 512);
        assert_eq!(of(192, 200, 1 << 20), 448, "whole 128 MiB");
        for percent in [0, 99, 100] {
            assert_eq!(of(256, percent, 1 << 20), 256);
        }
        assert_eq!(of(256, 1000, 700), 640, "no more than the host has");
        assert_eq!((of(256, 200, 300), of(256, 200, 1)), (256, 256));
        assert_eq!(of(1 << 20, u32::MAX, u64::MAX / MIB), (1 << 20) + (256 << 10));
    }

    #[test]
    fn room_is_for_pods_that_boot_and_name_no_most() {
        let pod = Record { pod: true, ..record(256, 256) };
        assert!(takes_room(&pod) && !takes_room(&record(256, 256)));
        assert!(!takes_room(&Record { template: Some("web".to_owned()), ..pod.clone() }));
        let mut saved = pod.clone();
        saved.saving.as_template = Some("web".to_owned());
        assert!(!takes_room(&saved));
        let memory = MemoryBounds { is_named: true, ..pod.memory };
        assert!(!takes_room(&Record { memory, ..pod }));
    }

    #[test]
    fn a_machine_has_a_region_and_words_only_if_it_has_room() {
        let fixed = record(256, 256);
        assert_eq!((hot_regions(&fixed), kernel_words(&fixed)), (Vec::new(), Vec::new()));
        let grows = record(256, 1024);
        assert_eq!(hot_regions(&grows), [HotRegion { bytes: 768 * MIB, node: 0 }]);
        let granted_bytes = vec![0, 4 * MIB];
        let bound = BoundMemory { region_bytes: 128 * MIB, granted_bytes };
        let binds = Record { bound, ..record(256, 256) };
        let region = |node| HotRegion { bytes: 128 * MIB, node };
        assert_eq!(hot_regions(&binds), [region(1), region(2)]);
        assert_eq!(kernel_words(&binds), kernel_words(&grows));
        let refused = check_range(&binds, 256 * MIB).unwrap_err().to_string();
        assert!(refused.contains("change the containers' limits"), "{refused}");
        assert_eq!(kernel_words(&grows), ["memhp_default_state=online_movable", "swiotlb=noforce"]);
    }

    #[test]
    fn a_size_out_of_range_is_refused_with_the_range() {
        check_range(&record(256, 1024), 256 * MIB).unwrap();
        check_range(&record(256, 1024), 1024 * MIB).unwrap();
        let refused = |wanted| check_range(&record(256, 1024), wanted).unwrap_err().to_string();
        assert!(refused(1).contains("1 MiB of memory is too little for sandbox one: the 256 MiB"));
        assert!(refused(1024 * MIB + 1).contains("1025 MiB of memory is too much"));
        assert!(refused(u64::MAX).contains("at most 1024 MiB; `slipway run --max-memory`"));
        let fixed = check_range(&record(256, 256), 512 * MIB).unwrap_err().to_string();
        assert!(fixed.contains("at most 256 MiB"), "{fixed}");
    }

    #[test]
    fn a_guest_keeps_something_of_what_is_available() {
        assert_eq!(free(1024 * MIB, 500 * MIB), 468 * MIB);
        assert_eq!(free(256 * MIB, 100 * MIB), 84 * MIB);
        assert_eq!(free(256 * MIB, 10 * MIB), 0);
        assert_eq!(free(0, u64::MAX), 0);
    }
}
