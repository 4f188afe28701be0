//! Pausing a sandbox to a file: its memory is saved, its VMM ends, and it comes back later.
//!
//! A pause writes a save to a directory of the sandbox's own, as a snapshot is written
//! ([`Templates`]), with the disks whose content is in the host's memory. The sandbox comes back as
//! a fork of its own save, with the same id, name, addresses and disks: a page is copied when the
//! guest first needs it, and the remaining pages meanwhile. Its guest is told the time and gets
//! random numbers; connections stay.
//!
//! `Saving::in_file` tells which of the two *is the sandbox*, the file or the VMM: the sandbox
//! goes on from that one. It is set when the file is on disk, before the VMM ends, and cleared when
//! the guest of a new VMM answers, before the guest's processes go on. So a daemon that was killed
//! leaves a sandbox that is paused in one of them. If that is the file, [`put_down`] ends a VMM
//! that was started for it. The kernel in that VMM may have written cached pages back to volumes;
//! the save has these pages, too, and the next guest writes them once more.
//!
//! A VMM that the host's kernel does not let end keeps nobody waiting: `pause` fails after a while
//! ([`rest`]), and the sandbox is in its file, from which it comes back once the VMM has ended.
//!
//! A sandbox that is asked to end in its file is `Stopping` on disk before the file is removed. A
//! daemon that finds such a record ends the sandbox, and one that finds no file ([`has_file`])
//! marks it as lost (`recover`).
//!
//! If the container or the VMM ends before `in_file` is set, the sandbox ends ([`note_in_file`],
//! [`ends`]) and cannot come back: its addresses may have been given to another sandbox.
//!
//! A pod is paused with all of its containers. The task of each waits for the pod to come back, and
//! none starts or is released meanwhile (`pod::in_file`).

mod checks;
mod moments;
mod resting;

use std::fs;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

use slipway_hypervisor::Vm;
use slipway_telemetry::{Timeline, monotonic_ns};

use self::checks::{check, check_disks, check_settled, identify, settles};
use self::resting::{VMM_LEFT, can_come_back, rest, returned};
use crate::agent::Agent;
use crate::carrier::OutputCarrier;
use crate::configure::configure;
use crate::node::Node;
use crate::pause::{containers, freeze_all};
use crate::record::{Origin, Record, SandboxState};
use crate::release::{Released, record_end, release_machine};
use crate::running::{Running, end, or_end};
use crate::sandbox::{Back, Sandbox};
use crate::snapshot::{
    Copied, MemoryFile, begin, copy_ahead, describe, discard, finish, host_files, resume,
    resume_later, save,
};
use crate::stages::Stages;
use crate::start::{Booted, boot_guest};
use crate::target::Target;
use crate::templates::{Choice, Templates, Unfinished, apart};
use crate::v1::ResumeReply;
use crate::{Error, Result};

pub(crate) use self::resting::{clear, has_file};

/// The name of the save's directory within the sandbox's own directory.
const NAME: &str = "paused";

/// Pauses the container of a sandbox, or all containers of a pod, writes the sandbox's memory to a
/// file, and ends its VMM. Returns when everything that the VMM had on the host is released. After
/// an error the sandbox runs on, unless the error says that it is in the file.
///
/// # Errors
/// [`Error::Invalid`] if the sandbox cannot come back from a file, with the reason;
/// [`Error::WrongState`] if its container does not run, or is paused, or one of a pod starts or
/// ends; the errors of [`rest`]; the error of the step that failed.
pub(crate) async fn pause(node: &Node, target: &Target) -> Result<()> {
    let sandbox = &target.sandbox;
    check(target)?;
    // Before anything is written: a file that was replaced is named at once.
    identify(sandbox).await?;
    settles(sandbox).await;
    check_disks(node, sandbox).await?;
    save_and_end_vmm(node, target).await
}

/// Returns the store of a sandbox's save, in the sandbox's own directory.
fn place(node: &Node, sandbox: &Sandbox) -> Templates {
    Templates::of_sandbox(sandbox.store.dir().to_owned(), node.plane.clone(), &sandbox.id)
}

/// Writes the save of a sandbox, and ends its VMM.
async fn save_and_end_vmm(node: &Node, target: &Target) -> Result<()> {
    let sandbox = &target.sandbox;
    // The machine keeps its size during the save. The lock also keeps another save out, and waits
    // until a sandbox that came back from a file has its last pages.
    let _size = sandbox.wait_to_change_size().await;
    let _network = sandbox.configuring.lock().await;
    sandbox.agent()?;
    let vm = sandbox.live_vm()?;
    clear(sandbox).await?;
    let unfinished = place(node, sandbox).begin(NAME).await?;
    let copied = copy_ahead(node, &*vm, &sandbox.record(), &unfinished).await;
    let (memory, unfinished) = or_discard(unfinished, copied).await?;
    // With these locks no command is started in a container, nobody else pauses one, and none
    // begins to start or to be released.
    let _turn = sandbox.own.pausing.write().await;
    let added = sandbox.added();
    let mut turns = Vec::new();
    for container in &added {
        turns.push(container.pausing.write().await);
    }
    let ready = async {
        // A container may have come since.
        check(target)?;
        sandbox.look(check_settled)?;
        check_disks(node, sandbox).await?;
        Ok::<_, Error>((identify(sandbox).await?, sandbox.agent()?))
    };
    let ((before, agent), unfinished) = or_discard(unfinished, ready.await).await?;
    let kept = write_save(node, sandbox, &before, (&*vm, &agent), (unfinished, memory)).await;
    if let Err(error) = kept {
        undo_save(sandbox, before, vm, agent).await;
        // The next save removes the files that are left.
        let _ = clear(sandbox).await;
        return Err(error);
    }
    // The file is the sandbox now. The task that runs the sandbox releases the VMM's resources.
    let has_ended = end(&*vm).await;
    let rested = rest(sandbox, has_ended).await;
    if matches!(rested, Err(Error::Stopped)) {
        // Files that cannot be removed now are removed with the sandbox.
        let _ = clear(sandbox).await;
    }
    rested
}

/// Returns the outcome of a step of a save with the save's files, which are removed after an error.
async fn or_discard<T>(unfinished: Unfinished, outcome: Result<T>) -> Result<(T, Unfinished)> {
    match outcome {
        Ok(done) => Ok((done, unfinished)),
        Err(error) => {
            discard(unfinished).await;
            Err(error)
        }
    }
}

/// Stops a sandbox's CPUs and processes, writes the files of its save, and notes in its record that
/// the file is the sandbox. The CPUs are stopped when this returns.
async fn write_save(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
    (vm, agent): (&dyn Vm, &Agent),
    (unfinished, memory): (Unfinished, MemoryFile),
) -> Result<()> {
    let begun = Instant::now();
    let saved = async {
        // If this daemon is killed, the next one finds this flag and has the sandbox go on.
        sandbox.update(|record| record.saving.under_way = true).await?;
        let files = (&unfinished, memory);
        let saved = save(node, record, (vm, agent), files, Copied::InMemory).await?;
        let (machine, volumes) = saved;
        let parts = describe(node, record, volumes, begun.elapsed()).await?;
        Ok::<_, Error>((machine, parts))
    };
    let (machine, (shape, snapshot)) = match saved.await {
        Ok(saved) => saved,
        Err(error) => {
            discard(unfinished).await;
            return Err(error);
        }
    };
    let (origin, its) = (snapshot.origin.clone(), record.clone());
    apart(move || finish(unfinished, &its, NAME, &machine, (shape, snapshot))).await?;
    let mut is_kept = false;
    let noted = sandbox.update(|record| is_kept = note_in_file(record, origin));
    noted.await?;
    if is_kept { Ok(()) } else { Err(Error::Stopped) }
}

/// Notes in the record that the file is the sandbox. Returns `false` and changes nothing if the
/// container or the VMM has ended while the file was written: the sandbox ends then.
fn note_in_file(record: &mut Record, origin: Origin) -> bool {
    if record.state != SandboxState::Running {
        return false;
    }
    (record.saving.under_way, record.run.paused, record.saving.in_file) = (false, true, true);
    (record.template, record.origin) = (Some(NAME.to_owned()), Some(origin));
    true
}

/// Decides, when a VMM has ended, whether its sandbox ends as well. Returns `false` if the file is
/// the sandbox. Otherwise returns `true` and notes it in the record, so that the file cannot become
/// the sandbox any more.
fn ends(record: &mut Record) -> bool {
    if record.saving.in_file {
        return false;
    }
    record.state = SandboxState::Stopping;
    true
}

/// Undoes a save that failed: restores the record `before`, and has the guest go on.
async fn undo_save(sandbox: &Arc<Sandbox>, before: Record, vm: Arc<dyn Vm>, agent: Agent) {
    sandbox.note(|record| {
        (record.saving.under_way, record.run.paused, record.saving.in_file) = (true, false, false);
        (record.template, record.origin) = (before.template, before.origin);
    });
    if let Err(error) = resume(sandbox, &*vm, &agent).await {
        tracing::warn!(sandbox = sandbox.name, %error, "it does not go on yet");
        tokio::spawn(resume_later(Arc::clone(sandbox), vm, agent));
    }
}

/// Waits for the end of a sandbox's container and returns the exit status. Goes on waiting while
/// the sandbox's memory is in a file, and after it has come back.
///
/// # Errors
/// The errors of [`Running::wait`]; [`Error::Stopped`] if the sandbox is asked to end while it
/// is in a file.
pub(crate) async fn wait(node: &Node, sandbox: &Arc<Sandbox>, mut running: Running) -> Result<u32> {
    loop {
        let ended = running.wait(sandbox).await;
        let mut has_ended = true;
        if ended.is_err() {
            sandbox.note(|record| has_ended = ends(record));
        }
        if has_ended {
            return ended;
        }
        running.end_carry().await;
        put_down(node, sandbox).await;
        running = returned(sandbox).await?;
    }
}

/// Does what [`wait`] does, for a sandbox whose memory is in a file ([`put_down`]).
///
/// # Errors
/// The errors of [`wait`].
pub(crate) async fn wait_in_file(node: &Node, sandbox: &Arc<Sandbox>) -> Result<u32> {
    let running = returned(sandbox).await?;
    wait(node, sandbox, running).await
}

/// Ends the VMM of a sandbox whose memory is in a file, and releases the VMM's resources on the
/// host. The VMM may be the one that was saved, or one that was started to have the sandbox come
/// back. The sandbox keeps its addresses, volumes and published ports, and *rests*: its record says
/// that it is in the file.
pub(crate) async fn put_down(node: &Node, sandbox: &Sandbox) {
    sandbox.set_agent(None);
    let Released { processes_gone, outcome } = release_machine(node, sandbox).await;
    let mark_in_file = |record: &mut Record| {
        record.state = SandboxState::Running;
        (record.run.paused, record.saving.in_file) = (true, true);
        record.confinement.lift();
    };
    let noted = record_end(node, sandbox, processes_gone, mark_in_file).await;
    if let Err(error) = outcome.and(noted) {
        tracing::warn!(sandbox = sandbox.name, %error, "while its memory is in a file");
    }
    sandbox.come_to_rest();
}

/// Has a sandbox come back from its file. Returns, when the guest has all of its memory, how long
/// the steps took. Returns zeros at once if the sandbox has come back already.
///
/// # Errors
/// [`Error::Invalid`] if its files are not as they were written; [`Error::WrongState`] if the VMM
/// that was saved has not ended, or the sandbox is asked to end; [`Error::Stopped`] if it is asked
/// to end meanwhile; the error of the step that failed.
/// The sandbox stays paused if its guest had not answered yet; if its container does not go on
/// then, it ends. What fails after that is logged.
pub(crate) async fn come_back(node: &Node, sandbox: &Arc<Sandbox>) -> Result<ResumeReply> {
    let since = monotonic_ns();
    let _size = sandbox.wait_to_change_size().await;
    let turn = sandbox.own.pausing.write().await;
    if !can_come_back(sandbox)? {
        return Ok(ResumeReply::default());
    }
    let place = place(node, sandbox);
    let timeline = sandbox.look(|record| record.timeline.clone());
    let booted = match begin_again(node, sandbox, &place).await {
        Ok(booted) => booted,
        Err(error) => {
            drop(sandbox.take_begins());
            sandbox.note(|record| record.timeline = timeline);
            put_down(node, sandbox).await;
            place.unload(NAME).await;
            return Err(error);
        }
    };
    let ready_ns = booted.at_ns.saturating_sub(since);
    let gone_on = go_on(node, sandbox, booted.vm, booted.agent).await;
    let agent = match gone_on {
        Ok(back) => {
            let agent = back.1.clone();
            sandbox.give_back(Ok(back));
            agent
        }
        Err(error) => {
            sandbox.give_back(Err(Error::Agent(error.to_string())));
            place.unload(NAME).await;
            return Err(error);
        }
    };
    // Clients' commands may run at the same time as this one. Until it has answered, nobody pauses
    // the container.
    let turn = turn.downgrade();
    let answered_ns = moments::first_exec(sandbox, &agent).await.map_or(0, |at_ns| at_ns - since);
    drop(turn);
    moments::learn(node, sandbox, &place).await;
    let last_page_ns = moments::last_page(node, sandbox).await.map_or(0, |at_ns| at_ns - since);
    if let Err(error) = place.remove(NAME).await {
        tracing::warn!(sandbox = sandbox.name, %error, "the file of its memory is left");
    }
    Ok(ResumeReply { ready_ns, answered_ns, last_page_ns })
}

/// Starts a VMM with the memory in a sandbox's file, and notes in the record that the VMM is the
/// sandbox. When this returns, the guest answers and the container's processes are still stopped.
async fn begin_again(node: &Node, sandbox: &Arc<Sandbox>, place: &Templates) -> Result<Booted> {
    if sandbox.look(|record| record.vmm_uid.is_some()) {
        put_down(node, sandbox).await;
    }
    if sandbox.look(|record| record.vmm_uid.is_some()) {
        return Err(sandbox.wrong_state(VMM_LEFT));
    }
    take_files(sandbox, place).await?;
    moments::copy_ahead(node, sandbox, place).await?;
    sandbox.own.renew_input();
    sandbox.note(|record| record.timeline = Timeline::new(record.name.clone()));
    let booted = boot_guest(node, sandbox, &Stages::of(sandbox)).await?;
    let record = sandbox.record();
    or_end(&*booted.vm, configure(&booted.agent, &record)).await?;
    let noted = sandbox.update(|record| {
        (record.state, record.saving.in_file) = (SandboxState::Running, false);
    });
    noted.await?;
    Ok(booted)
}

/// Checks the files of a sandbox's save, and makes the save the template of the sandbox's next VMM.
async fn take_files(sandbox: &Sandbox, place: &Templates) -> Result<()> {
    let template = tokio::select! {
        biased;
        // The check of the memory, which may have many gigabytes, ends with that call.
        () = sandbox.stopped() => Err(Error::Stopped),
        template = place.get(NAME) => template,
    };
    let template = template.map_err(|error| match error {
        Error::Template { why, .. } => {
            let name = &sandbox.name;
            Error::Invalid(format!("{name} cannot come back from the file of its memory: {why}"))
        }
        error => error,
    })?;
    let (mut volumes, mut names) = (Vec::new(), Vec::new());
    if let Some(snapshot) = &template.manifest.snapshot {
        volumes.clone_from(&snapshot.volumes);
        names.extend(snapshot.files.iter().map(|file| file.name.clone()));
    }
    host_files::check(&sandbox.looks, &volumes).await?;
    let (from, to) = (place.place(NAME), sandbox.store.dir().to_owned());
    apart(move || {
        for name in names {
            let path = to.join(&name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed.map_err(Error::file("cannot replace", &path))?,
            }
            begin::link_one(&from.join(name), &path)?;
        }
        Ok(())
    })
    .await?;
    sandbox.set_begins(Some(template));
    // The node may have chosen the template with which the sandbox began at first.
    sandbox.set_choice(Choice::Request);
    Ok(())
}

/// Lets the processes of a sandbox run again. The guest answers already. The tasks of a pod's
/// containers carry their output from here, which the guest keeps until they do.
async fn go_on(node: &Node, sandbox: &Arc<Sandbox>, vm: Arc<dyn Vm>, agent: Agent) -> Result<Back> {
    let own = Target::own(Arc::clone(sandbox));
    let (is_pod, stopped) = sandbox.look(|record| (record.pod, containers(record)));
    let gone_on = async {
        let carrier = match is_pod {
            true => None,
            false => Some(OutputCarrier::attach(&own, &agent, node.config.log_bytes, None).await?),
        };
        freeze_all(&agent, &stopped, false).await?;
        Ok(carrier)
    };
    let carrier = Stages::of(sandbox).run("container", or_end(&*vm, gone_on)).await?;
    let carry = carrier.map(|carrier| carrier.carry(&own, &agent));
    sandbox.take_sessions(&agent);
    sandbox.set_agent(Some(agent.clone()));
    note_gone_on(sandbox).await;
    Ok((vm, agent, carry))
}

/// Notes in the record that the processes of a sandbox run again. A record that cannot be written
/// is no reason to end them: the next change of it is written with this one.
async fn note_gone_on(sandbox: &Sandbox) {
    if let Err(error) = sandbox.update(|record| record.run.paused = false).await {
        tracing::warn!(sandbox = sandbox.name, %error, "it goes on; its record is not written");
    }
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::PlaneClient;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::VERSION;
    use crate::adopt::tests::{record_of, sandbox_of};
    use crate::snapshot::begin::tests::snapshot;

    pub(super) fn record() -> Record {
        Record {
            booted: Some(crate::templates::manifest::tests::shape().booted()),
            version: VERSION.to_owned(),
            ..record_of(SandboxState::Running)
        }
    }

    #[test]
    fn a_vmm_that_ends_takes_the_sandbox_with_it_until_the_file_is_the_sandbox() {
        let origin = || snapshot().origin;
        let mut kept = record();
        assert!(note_in_file(&mut kept, origin()));
        assert!(kept.saving.in_file && kept.run.paused && kept.origin == Some(origin()));
        assert!(!ends(&mut kept), "the file is the sandbox");
        assert_eq!(kept.state, SandboxState::Running);
        let mut lost = record();
        assert!(ends(&mut lost));
        assert_eq!(lost.state, SandboxState::Stopping);
        let before = lost.clone();
        assert!(!note_in_file(&mut lost, origin()), "its addresses may be another's by now");
        assert_eq!(
            (lost.saving.in_file, lost.run.paused, &lost.origin),
            (false, false, &before.origin)
        );
        let mut exited = Record { state: SandboxState::Exited, ..record() };
        assert!(!note_in_file(&mut exited, origin()) && !exited.saving.in_file);
    }

    #[tokio::test]
    async fn a_sandbox_that_is_asked_to_end_waits_for_no_check_of_its_memory() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(record(), dir.path());
        let nobody = Endpoint::from_static("http://[::1]:1").connect_lazy();
        let store = sandbox.store.dir().to_owned();
        let place = Templates::of_sandbox(store, PlaneClient::new(nobody), &sandbox.id);
        assert!(matches!(take_files(&sandbox, &place).await, Err(Error::NoTemplate(_))));
        sandbox.kill();
        assert!(matches!(take_files(&sandbox, &place).await, Err(Error::Stopped)));
    }

    #[tokio::test]
    async fn a_sandbox_goes_on_although_its_record_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record();
        record.run.paused = true;
        let sandbox = sandbox_of(record, dir.path());
        fs::remove_dir(sandbox.store.dir()).unwrap();
        note_gone_on(&sandbox).await;
        assert!(!sandbox.look(|record| record.run.paused));
        // The next change has the disk say so, too.
        sandbox.store.create().unwrap();
        sandbox.update(|_| {}).await.unwrap();
        assert!(!sandbox.store.load().unwrap().unwrap().run.paused);
    }
}
