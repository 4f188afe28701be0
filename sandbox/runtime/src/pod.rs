//! Containers of a pod: added to a sandbox that runs, and removed from it.
//!
//! A pod is a sandbox without a container of its own. Each container that is added gets its root as
//! two more namespaces of the pod's first NVMe function, one for each of its volumes, and a cgroup
//! and namespaces in the guest.
//! When its first process ends, the guest forgets the container and the disks are detached. Its
//! record and its kept output stay until it is removed.
//!
//! An added container ends with its pod. Whatever ends the pod marks its containers as ended, so
//! the task of a container changes the container's record only while that says that it is live.

mod bound;
mod in_file;
mod memory;
mod output;
mod quota;
mod request;
mod sums;
mod update;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::Vm;
use slipway_sandbox_api::stop::KILLED;
use slipway_telemetry::realtime_ns;
use slipway_telemetry::trace::Call;

pub(crate) use self::bound::of_new as bound_of_new;
pub(crate) use self::in_file::settle_returned;
use self::request::{check_count, describe, refuse_machine};
pub(crate) use self::request::{check_huge_pages, limits, limits_of_new, max_containers, settings};
pub(crate) use self::update::{GivenBack, limit_in_guest};
use crate::agent::{Agent, Ended};
use crate::carrier::OutputCarrier;
use crate::container::Container;
use crate::life::Outcome;
use crate::node::Node;
use crate::record::{self, Added, SandboxState};
use crate::running::{Carry, blame, carried};
use crate::sandbox::Sandbox;
use crate::snapshot::LONGEST;
use crate::target::Target;
use crate::v1::RunSpec;
use crate::{
    Error, Result, copies, empty_dirs, function, log, oom_score, pause, placement, pod_disks,
    pod_functions, shares, traces, volume,
};

impl Node {
    /// Records a new container of a pod. Nothing is started.
    ///
    /// # Errors
    /// An error that says in one line what is wrong with `spec`. Nothing of the container is left
    /// then.
    pub(crate) async fn add(&self, spec: &RunSpec) -> Result<Target> {
        let sandbox = self.find(&spec.pod)?;
        if !sandbox.look(|record| record.pod) {
            let message = format!("{} is no pod; `slipway pod create` makes one", sandbox.name);
            return Err(Error::Invalid(message));
        }
        if sandbox.state() != SandboxState::Running {
            return Err(sandbox.wrong_state("containers are added to a pod that runs"));
        }
        // The guest may not have answered this daemon yet.
        sandbox.agent()?;
        refuse_machine(spec)?;
        let image = self.image(spec).await?;
        let copies = copies::check(spec)?;
        let (empty_dirs, shares) = empty_dirs::split(&sandbox, spec)?;
        let shares = shares::check(&sandbox.looks, &shares).await?;
        empty_dirs::check_apart(&empty_dirs, &shares)?;
        let placement = placement::of_new(spec.placement.as_ref(), &sandbox.lane).await?;
        let (volumes, store) = (spec.volumes.clone(), sandbox.store.clone());
        let volumes = sandbox.lane.run(move || volume::check_in_pod(&volumes, &store)).await?;
        let functions =
            sandbox.look(|record| pod_functions::check(&spec.functions, &volumes, record))?;
        check_target(&sandbox, &spec.processes_of)?;
        let sockets =
            sandbox.look(|record| pod_functions::check_sockets(&spec.socket_engine, record))?;
        let described = describe(spec, settings(&image, spec, placement)?)?;
        let added = Added { shares, empty_dirs, volumes, functions, sockets, ..described };
        let name = added.name.clone();
        let log = sandbox.store.added_log(&name);
        let container = Container::new(&name, log, SandboxState::Created);
        container.set_copies(copies);
        let (most, of_pod) = (self.config.log_bytes, self.config.pod_log_bytes);
        let describe = |others: &[Added]| {
            let log_bytes = output::part(others, most, of_pod);
            Added { log_bytes, ..added }
        };
        enter(&sandbox, &container, describe)?;
        let target = Target { sandbox, container };
        if let Err(error) = target.sandbox.update(|_| {}).await {
            target.sandbox.forget_added(&target.container);
            return Err(error);
        }
        Ok(target)
    }

    /// Starts a container that was added. Returns at once; a task on the guests' thread runs the
    /// container to its end. `call` is the span of the call that starts it, which ends with the
    /// start.
    pub(crate) fn start_added(self: &Arc<Self>, target: &Target, call: Call) {
        self.guests.spawn(live(Arc::clone(self), target.clone(), call));
    }

    /// Removes a container that was added and is not to be started.
    pub(crate) async fn abandon_added(&self, target: &Target) {
        target.sandbox.forget_added(&target.container);
        quota::leave(self, &target.sandbox);
        memory::leave(self, &target.sandbox);
        target.container.announce(SandboxState::Failed);
        target.container.fanout.close();
        if let Err(error) = target.sandbox.update(|_| {}).await {
            tracing::warn!(container = target.name(), %error, "left by a container not started");
        }
    }

    /// Removes a container that was added, with its kept output. With `force`, kills it first if
    /// it is live.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the container is live and `force` is not set, or its pod's memory
    /// is in a file; [`Error::Agent`] if it does not end.
    pub(crate) async fn remove_added(&self, target: &Target, force: bool) -> Result<()> {
        if target.container.state().is_live() {
            if !force {
                let advice = "`slipway stop` ends it, `slipway rm -f` removes it";
                return Err(target.wrong_state(advice));
            }
            // A guest that is being saved hears nothing until that is done.
            let _ = tokio::time::timeout(LONGEST, target.container.pausing.read()).await;
            kill(target).await?;
        }
        // Another call may have removed it meanwhile, and its name may be another container's now.
        let is_there = target.sandbox.find_added(&target.container.name);
        if !is_there.is_some_and(|found| Arc::ptr_eq(&found, &target.container)) {
            return Err(Error::NoSandbox(target.name()));
        }
        let path = target.container.log();
        let removed = target
            .sandbox
            .lane
            .run(move || log::remove(&path).map_err(Error::file("cannot remove", &path)));
        removed.await?;
        target.sandbox.forget_added(&target.container);
        match target.sandbox.update(|_| {}).await {
            // The pod was removed meanwhile, and its record with it.
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
            updated => updated,
        }
    }

    /// Goes on with the containers of an adopted pod that an earlier daemon `left`. Those that it
    /// was starting or releasing are released. CPUs and memory that no container needs go back to
    /// the host, and updates of limits that were cut off are settled.
    pub(crate) fn adopt_added(self: &Arc<Self>, sandbox: &Arc<Sandbox>, left: Vec<Arc<Container>>) {
        quota::leave(self, sandbox);
        memory::leave(self, sandbox);
        bound::leave(self, sandbox);
        update::settle(self, sandbox);
        for container in left.into_iter().filter(|one| one.state().is_live()) {
            let target = Target { sandbox: Arc::clone(sandbox), container };
            let node = Arc::clone(self);
            let runs = target.container.state() == SandboxState::Running;
            self.guests.spawn(async move {
                let joined = match runs {
                    true => rejoin(&node, &target).await,
                    false => Err(Error::Agent("the daemon ended while it started".to_owned())),
                };
                live_on(node, target, joined).await;
            });
        }
    }
}

/// Checks that the container whose processes a new one is to share is in the pod, and has not
/// ended. An empty name stands for none.
fn check_target(sandbox: &Sandbox, target: &str) -> Result<()> {
    let is_live =
        |record: &record::Record| record.added(target).is_some_and(|added| added.state.is_live());
    if target.is_empty() || sandbox.look(is_live) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "no container {target:?} runs in {}: the processes of one that runs can be shared",
        sandbox.name
    )))
}

/// Enters a container into its pod's record and table, so that its name is taken. `describe` makes
/// the container's record beside those of the others.
fn enter(
    sandbox: &Sandbox,
    container: &Arc<Container>,
    describe: impl FnOnce(&[Added]) -> Added,
) -> Result<()> {
    let name = container.name.clone();
    let mut outcome = Ok(());
    sandbox.note(|record| {
        if record.added(&name).is_some() {
            outcome =
                Err(Error::Invalid(format!("{} has a container {name} already", record.name)));
        } else if let Err(error) = check_count(record) {
            outcome = Err(error);
        } else {
            let added = describe(&record.added);
            record.added.push(added);
            outcome = record::check_size(record);
            if outcome.is_err() {
                record.added.pop();
            }
        }
    });
    outcome?;
    sandbox.insert_added(Arc::clone(container));
    Ok(())
}

/// Kills a container and waits for its end. One whose pod's memory is in a file takes no signal.
async fn kill(target: &Target) -> Result<()> {
    target.sandbox.check_in_no_file()?;
    let signal = libc::SIGKILL as u32;
    let process = target.container.process();
    let request = agent_v1::SignalRequest { process, signal, all: true };
    let ended = async {
        // A container that is being created in the guest takes no signal yet.
        while target.container.state().is_live() {
            if let Ok(agent) = target.sandbox.agent() {
                let request = request.clone();
                let _ = agent.call(|mut client| async move { client.signal(request).await }).await;
            }
            let ended = target.container.wait_state(|state| !state.is_live());
            let _ = tokio::time::timeout(Duration::from_secs(1), ended).await;
        }
    };
    let late = |_| Error::Agent(format!("{} does not end", target.name()));
    tokio::time::timeout(KILLED, ended).await.map_err(late)
}

/// A container that runs.
struct Running {
    vm: Arc<dyn Vm>,
    agent: Agent,
    carry: Carry,
}

/// Runs a container from its start to its end.
async fn live(node: Arc<Node>, target: Target, mut call: Call) {
    let started = start(&node, &target).await;
    traces::end(&mut call, started.as_ref().err());
    live_on(node, target, started).await;
}

/// Runs a started container to its end, and [releases](end) it.
async fn live_on(node: Arc<Node>, target: Target, started: Result<Running>) {
    let ended = match started {
        Ok(running) => in_file::wait(&node, &target, Some(running)).await,
        Err(error) => Err(error),
    };
    end(node, target, ended).await;
}

/// Releases what an ended container held, and removes it if that was asked for.
async fn end(node: Arc<Node>, target: Target, ended: Result<u32>) {
    in_file::begin_release(&target).await;
    release(&node, &target).await;
    // The status may be known from an earlier daemon, which ended before it had released all.
    let known = target.look_added(|added| added?.run.exit_status);
    let ended = match (ended, known) {
        (Err(_), Some(status)) => Ok(status),
        (ended, _) => ended,
    };
    let outcome = Outcome::of(ended, target.sandbox.is_stopping());
    change(&target, |added| {
        (added.state, added.disks) = (outcome.state, None);
        added.run.finish(outcome.exit_status, outcome.reason);
    })
    .await;
    if !target.sandbox.is_in_file() {
        give_back(&node, &target).await;
    }
    if target.look_added(|added| added.is_some_and(|added| added.remove))
        && let Err(error) = node.remove_added(&target, false).await
    {
        tracing::warn!(container = target.name(), %error, "it is not removed");
    }
    // Its clients hear of its end, and find nothing of a container that was to be removed.
    target.container.fanout.close();
}

/// Gives back the part of the host that the VMM of a pod had for an ended container.
async fn give_back(node: &Node, target: &Target) {
    if let Err(error) = placement::apply(&target.sandbox).await {
        tracing::warn!(container = target.name(), %error, "its pod's CPUs are as before its end");
    }
    oom_score::apply(node, &target.sandbox).await;
    quota::leave(node, &target.sandbox);
    memory::leave(node, &target.sandbox);
    bound::leave(node, &target.sandbox);
}

/// Changes the record of a live container and saves it.
async fn change(target: &Target, change: impl FnOnce(&mut Added)) {
    let name = &target.container.name;
    let changed = target.sandbox.update(|record| {
        if let Some(added) = record.added_mut(name).filter(|added| added.state.is_live()) {
            change(added);
        }
    });
    if let Err(error) = changed.await {
        tracing::warn!(container = target.name(), %error, "its record is not saved");
    }
}

/// Starts a container. When this returns, its process runs.
async fn start(node: &Node, target: &Target) -> Result<Running> {
    in_file::begin_start(target).await?;
    let (sandbox, container) = (&target.sandbox, &target.container);
    placement::apply(sandbox).await?;
    bound::join(target).await?;
    memory::join(target).await?;
    quota::join(target).await;
    let (vm, agent) = (sandbox.live_vm()?, sandbox.agent()?);
    let session = agent.session(&sandbox.name)?;
    let gone = || Error::NoSandbox(target.name());
    let root =
        target.look_added(|added| added.map(|one| (one.settings.clone(), one.volumes.clone())));
    let (settings, volumes) = root.ok_or_else(gone)?;
    let disks = pod_disks::attach(node, target, &settings, &volumes).await?;
    shares::join(node, target).await?;
    oom_score::apply(node, sandbox).await;
    empty_dirs::join(node, target).await?;
    pod_functions::join(node, target).await?;
    pod_functions::join_sockets(node, target).await?;
    let copies = container.take_copies();
    let request = sandbox.look(|record| {
        let added = record.added(&container.name)?;
        Some(function::create_added(record, added, &disks, copies))
    });
    let request = request.ok_or_else(gone)?;
    agent.check_container(&request)?;
    copies::create(&agent, request).await?;
    let carrier =
        OutputCarrier::attach(target, &agent, log_bytes(node, target), Some(session)).await?;
    let start = agent_v1::StartContainerRequest { id: container.name.clone() };
    agent.call(|mut client| async move { client.start_container(start).await }).await?;
    let carry = carrier.carry(target, &agent);
    change(target, |added| {
        (added.state, added.started_ns) = (SandboxState::Running, Some(realtime_ns()));
    })
    .await;
    Ok(Running { vm, agent, carry })
}

/// Goes on with a container that runs since an earlier daemon, or before its pod's memory was in a
/// file.
async fn rejoin(node: &Node, target: &Target) -> Result<Running> {
    let (vm, agent) = (target.sandbox.live_vm()?, target.sandbox.agent()?);
    let session = match target.container.take_session() {
        Some(session) => session,
        None => agent.session(&target.sandbox.name)?,
    };
    let carrier =
        OutputCarrier::reattach(target, &agent, log_bytes(node, target), Some(session)).await?;
    pause::settle(node, target.clone());
    let carry = carrier.carry(target, &agent);
    Ok(Running { vm, agent, carry })
}

/// Returns the most bytes of a container's kept output.
fn log_bytes(node: &Node, target: &Target) -> u64 {
    let most = node.config.log_bytes;
    target.look_added(|added| added.map_or(most, |one| output::bytes(one, most)))
}

/// Waits for the end of the first process, at most until that of the VMM. Returns its exit status.
/// After an error its output may still be carried.
async fn wait(target: &Target, running: &mut Running) -> Result<u32> {
    let Running { vm, agent, carry } = running;
    let ended = tokio::select! {
        ended = agent.wait(target.container.process()) => ended,
        ended = vm.wait() => return Err(Error::vm_ended(&ended)),
    };
    let Ended { status, out_of_memory, message } = match ended {
        Ok(ended) => ended,
        Err(error) => return Err(blame(&**vm, error).await),
    };
    carried(carry, &target.name()).await;
    change(target, |added| {
        let killed = "it reached its memory limit, or the pod's";
        added.run.exit(status, out_of_memory.then_some(killed));
        added.message = message;
    })
    .await;
    Ok(status)
}

/// Releases what a container holds in the guest and in the plane. Missing resources are no error.
async fn release(node: &Node, target: &Target) {
    let warn = |error: Error| {
        tracing::warn!(container = target.name(), %error, "while it ended");
    };
    if let Ok(agent) = target.sandbox.agent() {
        let request = agent_v1::RemoveContainerRequest { id: target.container.name.clone() };
        let removed = agent.call(|mut client| async move {
            match client.remove_container(request).await {
                Err(status) if status.code() == tonic::Code::NotFound => {
                    Ok(tonic::Response::new(agent_v1::RemoveContainerReply {}))
                }
                removed => removed,
            }
        });
        removed.await.map_or_else(warn, drop);
    }
    shares::leave(node, target).await;
    let disks = target.look_added(|added| added?.disks.clone());
    if let Some(disks) = disks {
        pod_disks::detach(node, &target.sandbox, &disks).await.unwrap_or_else(warn);
    }
    in_file::remove_layer(target).await.unwrap_or_else(warn);
}

/// Ends all containers of a pod: the stop signal of each, then SIGKILL after `patience`.
pub(crate) async fn stop_all(sandbox: &Arc<Sandbox>, patience: Duration) {
    let live = sandbox.added().into_iter().filter(|container| container.state().is_live());
    let mut stopping = tokio::task::JoinSet::new();
    for container in live {
        let target = Target { sandbox: Arc::clone(sandbox), container };
        stopping.spawn(async move {
            if let Err(error) = stop(&target, patience).await {
                tracing::warn!(container = target.name(), %error, "it ends with its pod");
            }
        });
    }
    while stopping.join_next().await.is_some() {}
}

/// Ends a container of a pod: its stop signal, then SIGKILL after `patience`.
///
/// # Errors
/// [`Error::Agent`] if the container does not end.
pub(crate) async fn stop(target: &Target, patience: Duration) -> Result<()> {
    let signal = target.look_added(|added| match added {
        Some(added) => added.settings.stop_signal,
        None => libc::SIGTERM as u32,
    });
    let asked = async {
        pause::resume_paused(target).await?;
        let request =
            agent_v1::SignalRequest { process: target.container.process(), signal, all: false };
        let agent = target.sandbox.agent()?;
        agent.call(|mut client| async move { client.signal(request).await }).await?;
        target.container.wait_state(|state| !state.is_live()).await;
        Ok::<_, Error>(())
    };
    match tokio::time::timeout(patience, asked).await {
        Ok(Ok(())) => Ok(()),
        _ => kill(target).await,
    }
}
