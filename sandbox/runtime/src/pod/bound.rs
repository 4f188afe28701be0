//! Memory that a container of a pod has for its own (CR-bind of RunD-V, VII), on stock kernels.
//!
//! The machine of a pod that binds memory has regions of hot-plug memory, each in a NUMA node of
//! its own, which hold what the guest's kernel can move alone. The steps are those of the paper's
//! figure 11. A container that is about to begin gets a region that no other one has; the VMM's
//! control group on the host gets room for it, and the guest plugs the container's limit there
//! ([`join`]). The agent makes the container's cgroup with its limits, binds it to the node, and
//! the first process waits there; then the process begins. After the container's end the guest
//! gives the whole region back, and the control group loses the room ([`leave`]).
//!
//! The control group gets room while the guest plugs, and loses it while the guest gives back, as
//! much as has gone: less would have the kernel of the host end the VMM. The room is recorded
//! before. An error of either side leaves it recorded, and the caller has the guest give back what
//! it took ([`fit`], [`leave`]).
//!
//! A guest changes one region at a time: its kernel adds and removes memory under one lock.

use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{MemoryDevice, Vm};

use crate::guests::Guests;
use crate::memory::of_host;
use crate::node::Node;
use crate::record::{BoundMemory, Limits, REGION_MARGIN, Record, SandboxState};
use crate::resize::{self, Follow};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::v1::RunSpec;
use crate::{Error, Result, cgroup};

/// The size of a region is a multiple of this, in bytes.
const UNIT: u64 = 128 << 20;
/// The most bytes of a region: an eighth of a machine's hot-plug memory.
const MOST: u64 = 32 << 30;
/// The longest time that a guest may take to follow a change of a region.
const LONGEST: Duration = Duration::from_secs(60);
/// The longest time that the removal of a container waits for the container's memory: longer than
/// the guest is waited for if it gives nothing back.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// The time between two looks at what has gone back.
const LOOK: Duration = Duration::from_millis(20);
/// The pauses before each time that a guest is asked to give back the regions of ended containers.
const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(15)];

impl Node {
    /// Removes a container that was added, as [`Node::remove_added`] does, and waits until the
    /// guest has given back the memory that the container had for its own, or has not within
    /// [`LONGEST_WAIT`].
    ///
    /// # Errors
    /// The errors of [`Node::remove_added`]. Memory that stays is no error.
    pub(crate) async fn remove_with_memory(&self, target: &Target, force: bool) -> Result<()> {
        let own = own(target);
        self.remove_added(target, force).await?;
        let Some((region, _)) = own else { return Ok(()) };
        let returned = async {
            while is_returning(&target.sandbox, region) {
                tokio::time::sleep(LOOK).await;
            }
        };
        // The task that asks the guest says what stays.
        let _ = tokio::time::timeout(LONGEST_WAIT, returned).await;
        Ok(())
    }
}

/// Returns the regions of a new sandbox on a host with `host` bytes of memory. A fork asks for
/// those of its template.
///
/// # Errors
/// [`Error::Invalid`] for a size that no region has, and for a sandbox that cannot have regions.
pub(crate) fn of_new(spec: &RunSpec, host: u64) -> Result<BoundMemory> {
    let asked = spec.bound_memory_bytes;
    if asked == 0 {
        return Ok(BoundMemory::default());
    }
    let refuse = |why: &str| Err(Error::Invalid(format!("--bind-memory {why}")));
    if !spec.makes_pod {
        return refuse("is for pods, whose containers have the memory");
    }
    if spec.max_memory_bytes != 0 {
        return refuse("and --max-memory cannot be had together");
    }
    if asked > MOST - REGION_MARGIN {
        let (asked, most) = (asked >> 20, (MOST - REGION_MARGIN) >> 20);
        return refuse(&format!("of {asked} MiB is too much for a container: at most {most} MiB"));
    }
    if asked > host {
        let (asked, host) = (asked >> 20, host >> 20);
        return refuse(&format!("of {asked} MiB is more than this host has, {host} MiB"));
    }
    Ok(BoundMemory::of_regions((asked + REGION_MARGIN).next_multiple_of(UNIT)))
}

/// Gives a container that is about to begin, and has a limit of memory, a region with that memory.
/// The container's record is live. Waits until no other call changes the microVM's size.
///
/// # Errors
/// [`Error::Invalid`] for a limit that is too much for a region or the host, and for huge pages;
/// [`Error::Busy`] if other containers have all regions; [`Error::Agent`] if the guest does not
/// take the memory.
pub(super) async fn join(target: &Target) -> Result<()> {
    let sandbox = &target.sandbox;
    if sandbox.look(|record| record.bound.room() == 0) {
        return Ok(());
    }
    let limits = target.look_added(|added| added.map(|one| one.limits)).unwrap_or_default();
    if limits.huge_bytes() > 0 {
        let why = "a pod that binds memory (--bind-memory) has no huge pages for its containers";
        return Err(Error::Invalid(why.to_owned()));
    }
    if limits.memory_bytes == 0 {
        return Ok(());
    }
    let _turn = sandbox.wait_to_change_size().await;
    let region = sandbox
        .look(|record| check(&record.bound, limits.memory_bytes).and_then(|()| choose(record)))?;
    let its = |record: &mut Record| {
        if let Some(added) = record.added_mut(&target.container.name) {
            added.region = Some(region);
        }
    };
    sandbox.update(its).await?;
    plug(sandbox, region, limits.memory_bytes).await
}

/// Has a task give the regions back to the host that no live container has.
pub(super) fn leave(node: &Node, sandbox: &Arc<Sandbox>) {
    leave_to(&node.guests, sandbox);
}

/// Has a task give the regions back, unless one waits for its first turn, which sees to this end,
/// too: a guest that does not answer would have as many tasks wait as its containers end.
fn leave_to(guests: &Guests, sandbox: &Arc<Sandbox>) {
    if !due(sandbox).is_empty() {
        sandbox.region_returns.spawn(guests, give_back(Arc::clone(sandbox)));
    }
}

/// Checks an update of a container's limits. Returns the limits of it that concern the memory and
/// the CPUs of all containers: no limit of memory for a container that has memory of its own.
///
/// # Errors
/// [`Error::Invalid`] if the container's region cannot have as much, and for no limit.
pub(super) fn of_others(record: &Record, name: &str, asked: Limits) -> Result<Limits> {
    if record.added(name).is_none_or(|added| added.region.is_none()) {
        return Ok(asked);
    }
    if asked.memory_bytes == u64::MAX {
        let why = "has memory of its own: its limit can be changed, and not taken away";
        return Err(Error::Invalid(format!("{}/{name} {why}", record.name)));
    }
    check(&record.bound, asked.memory_bytes)?;
    Ok(Limits { memory_bytes: 0, ..asked })
}

/// Gives the region of a container, if it has one, the memory for a limit that is to be raised. The
/// caller has the turn to change the microVM's size.
///
/// # Errors
/// [`Error::Agent`] if the guest does not take it; [`Error::Invalid`] if the host has not as much.
pub(super) async fn grow(target: &Target, asked: Limits) -> Result<()> {
    match own(target) {
        Some((region, has)) if asked.memory_bytes > has => {
            plug(&target.sandbox, region, asked.memory_bytes).await
        }
        _ => Ok(()),
    }
}

/// Sizes the region of a container, if it has one, for the container's recorded limit: the new one
/// after an update, the old one after an update that failed. The caller has the turn to change the
/// microVM's size. What the guest does not give up stays.
pub(super) async fn fit(target: &Target) {
    let Some((region, limit)) = own(target) else { return };
    if target.sandbox.look(|record| record.plugged.has_hardware()) {
        return;
    }
    if let Err(error) = set(&target.sandbox, region, limit).await {
        tracing::warn!(container = target.name(), %error, "its memory is as before its update");
    }
}

/// Has the VMM's control group of an adopted pod agree with the record, and the region of each
/// running container with the container's limit: the daemon before may have ended when it had
/// recorded room and not given it, or when the guest had changed and the record had not. The caller
/// has the turn to change the microVM's size.
pub(super) async fn settle(sandbox: &Arc<Sandbox>, running: &[Target]) {
    if sandbox.look(|record| record.bound.room() == 0) {
        return;
    }
    if let Err(error) = limit_group(sandbox).await {
        tracing::warn!(sandbox = sandbox.name, %error, "its limit of memory is as before");
    }
    for target in running {
        fit(target).await;
    }
}

/// Returns the region and the limit of memory in bytes of a container that has a region.
fn own(target: &Target) -> Option<(u32, u64)> {
    target.look_added(|added| added.and_then(|one| Some((one.region?, one.limits.memory_bytes))))
}

/// Checks that a region can have the memory for a limit, in bytes.
fn check(bound: &BoundMemory, limit: u64) -> Result<()> {
    let most = bound.most_limit();
    if limit <= most {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "a limit of {} MiB is more than the {} MiB that a container of the pod can have; make a \
         pod with a larger --bind-memory",
        limit.div_ceil(1 << 20),
        most >> 20
    )))
}

/// Checks that a pod's guest can be given `more` bytes on a host with `host` bytes of memory. The
/// limit of its control group is no such check: it rises with what the guest is given.
fn check_host(record: &Record, more: u64, host: u64) -> Result<()> {
    let wanted = record.guest_bytes().saturating_add(more);
    if wanted <= host {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "with the container's memory, pod {} would have {} MiB, and this host has {} MiB; give its \
         containers less",
        record.name,
        wanted >> 20,
        host >> 20
    )))
}

/// Returns a region for a new container: one with nothing plugged, or one of which an ended
/// container's memory has not gone back yet.
///
/// # Errors
/// [`Error::Busy`] if live containers have all of them.
fn choose(record: &Record) -> Result<u32> {
    let regions = (0u32..).zip(&record.bound.granted_bytes);
    let free = regions.filter(|(region, _)| !is_owned(record, *region));
    let chosen = free.min_by_key(|(_, granted)| **granted > 0).map(|(region, _)| region);
    chosen.ok_or_else(|| Error::Busy {
        name: record.name.clone(),
        what: "containers with memory of their own",
        most: record.bound.granted_bytes.len(),
    })
}

/// Returns whether a live container has the region.
fn is_owned(record: &Record, region: u32) -> bool {
    record.added.iter().any(|added| added.state.is_live() && added.region == Some(region))
}

/// Returns the regions that no live container has, and that can go back to the host. A pod with a
/// function of hardware keeps its memory.
fn spare(record: &Record) -> Vec<u32> {
    if record.plugged.has_hardware() {
        return Vec::new();
    }
    let regions = (0u32..).zip(&record.bound.granted_bytes);
    let spare = regions.filter(|(region, granted)| **granted > 0 && !is_owned(record, *region));
    spare.map(|(region, _)| region).collect()
}

/// Returns the regions that a pod which runs on has to give back.
fn due(sandbox: &Sandbox) -> Vec<u32> {
    let runs = sandbox.state() == SandboxState::Running && !sandbox.is_stopping();
    if runs { sandbox.look(spare) } else { Vec::new() }
}

/// Returns whether the guest is still to give back a region of an ended container.
fn is_returning(sandbox: &Sandbox, region: u32) -> bool {
    due(sandbox).contains(&region)
}

/// Gives the regions back that no live container has. The guest may count pages as used for a
/// moment after the container's end, so it is asked again.
async fn give_back(sandbox: Arc<Sandbox>) {
    for pause in PAUSES {
        tokio::time::sleep(pause).await;
        let _turn = sandbox.wait_to_change_size().await;
        // Another container may have a region by now.
        let regions = due(&sandbox);
        if regions.is_empty() {
            return;
        }
        for region in regions {
            if let Err(error) = set(&sandbox, region, 0).await {
                tracing::warn!(sandbox = sandbox.name, %error, region, "its memory stays");
            }
        }
    }
    if !due(&sandbox).is_empty() {
        tracing::info!(sandbox = sandbox.name, "memory of an ended container stays for now");
    }
}

/// Gives a region the memory for a limit.
async fn plug(sandbox: &Arc<Sandbox>, region: u32, limit: u64) -> Result<()> {
    let (wanted, plugged) = set(sandbox, region, limit).await?;
    if plugged >= wanted {
        return Ok(());
    }
    Err(Error::Agent(format!(
        "the guest took {} of the {} MiB of memory that the container is to have; does its kernel \
         have virtio_mem, and memory for its tables?",
        plugged >> 20,
        wanted >> 20
    )))
}

/// Has the guest plug the memory for a limit in a region, or give up what is more. The limit of the
/// VMM's control group changes meanwhile. Returns the bytes that the guest was asked for, and the
/// bytes that it has plugged.
async fn set(sandbox: &Arc<Sandbox>, region: u32, limit: u64) -> Result<(u64, u64)> {
    let vm = sandbox.live_vm()?;
    let device = region as usize;
    let MemoryDevice { block, plugged: had, .. } = resize::memory_device(&*vm, device).await?;
    let wanted = size(sandbox.look(|record| record.bound.region_bytes), limit, block);
    let before = sandbox.look(|record| granted(record, device));
    // As with other memory, the limit of the host's control group is recorded before it is raised.
    let room = before.max(wanted);
    if room > before {
        sandbox.look(|record| check_host(record, room - before, of_host()))?;
        record_granted(sandbox, device, room).await?;
    }
    let late = |_| {
        let within = LONGEST.as_secs();
        Err(Error::Agent(format!("the guest has not followed a change of memory in {within} s")))
    };
    let guest = async {
        let followed = follow(sandbox, &*vm, device, wanted);
        tokio::time::timeout(LONGEST, followed).await.unwrap_or_else(late)
    };
    // Also if it was recorded by a daemon that ended before it raised the limit.
    let group = async { if wanted > had { limit_group(sandbox).await } else { Ok(()) } };
    let ((), plugged) = tokio::try_join!(group, guest)?;
    // A guest that has less now may still plug what it was asked for.
    let left = room.min(plugged.max(wanted));
    if left < room {
        record_granted(sandbox, device, left).await?;
        limit_group(sandbox).await?;
    }
    Ok((wanted, plugged))
}

/// Asks the guest for so many plugged bytes of a region, and waits until it has them or changes
/// nothing more. What it gives back meanwhile is taken from the control group's limit at once; the
/// record has the old limit until the end. Returns the bytes that the guest has.
async fn follow(sandbox: &Sandbox, vm: &dyn Vm, device: usize, wanted: u64) -> Result<u64> {
    let mut guest = Follow::ask(vm, device, wanted).await?;
    while guest.advances().await? {
        let left = guest.plugged().max(wanted);
        let gone = sandbox.look(|record| granted(record, device).saturating_sub(left));
        if gone == 0 {
            continue;
        }
        let bytes = sandbox.look(Record::guest_bytes).saturating_sub(gone);
        // Version 1 of control groups refuses a limit while more is in use; the last one counts.
        if let Err(error) = cgroup::limit_memory(sandbox, bytes).await {
            tracing::debug!(sandbox = sandbox.name, %error, "its limit follows later");
        }
    }
    Ok(guest.plugged())
}

/// Returns the bytes of a region for a limit, in whole blocks; none for no limit.
fn size(region_bytes: u64, limit: u64, block: u64) -> u64 {
    match limit {
        0 => 0,
        limit => {
            let wanted = limit.saturating_add(REGION_MARGIN);
            wanted.div_ceil(block).saturating_mul(block).min(region_bytes)
        }
    }
}

/// Returns the bytes of a region that the VMM's control group has room for.
fn granted(record: &Record, device: usize) -> u64 {
    record.bound.granted_bytes.get(device).copied().unwrap_or(0)
}

/// Records the bytes of a region that the VMM's control group is to have room for.
async fn record_granted(sandbox: &Sandbox, device: usize, bytes: u64) -> Result<()> {
    let change = |record: &mut Record| {
        if let Some(granted) = record.bound.granted_bytes.get_mut(device) {
            *granted = bytes;
        }
    };
    sandbox.update(change).await
}

/// Limits the VMM's control group to the memory that is recorded.
async fn limit_group(sandbox: &Sandbox) -> Result<()> {
    cgroup::limit_memory(sandbox, sandbox.look(Record::guest_bytes)).await
}

#[cfg(test)]
mod tests;
