//! Launches a VMM from a spec, and takes over one that another launcher left.

use std::ffi::OsString;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::unix::pipe;

use crate::assigned::GroupGrant;
use crate::cage::Cage;
use crate::console::{CappedLog, StderrTail, copy_to_log, make_fifo, open_fifo, read_tail};
use crate::control::{ANSWER_DEADLINE, connect};
use crate::exit::exit_of;
use crate::files::{RemoveOnDrop, elsewhere, listen};
use crate::process::{Launch, Process};
use crate::qmp::Qmp;
use crate::reconnect::Sockets;
use crate::spare::Spare;
use crate::unfinished::Unfinished;
use crate::vm::{LaunchedVm, Supervised};
use crate::{Accel, Error, LaunchTimes, LeftVm, Result, VmRecord, VmSpec, accel};

/// The time that a VMM that runs already may take to answer. On a busy machine it may stand still
/// for a while, and it is given up after this time. The wait ends with its process.
const ADOPT_DEADLINE: Duration = Duration::from_secs(600);

/// A VMM's program: the part of a launch that differs from one VMM to another.
pub(crate) trait Program: Clone + Send + Sync + 'static {
    /// The name of the hypervisor, in records and in logs.
    const NAME: &'static str;

    /// Says whether the VMM takes connections of functions while it runs, by the commands
    /// `slipway-reconnect` and `device_add`.
    const RECONNECTS: bool;

    /// The accelerator of a VM that says that it does not use KVM.
    const WITHOUT_KVM: Accel;

    /// Returns the path of the program.
    fn path(&self) -> &Path;

    /// Returns a text that changes when the program's file does.
    fn identity(&self) -> io::Result<String>;

    /// Refuses a spec that this VMM cannot run, beyond what [`VmSpec::check`] refuses.
    fn check(&self, spec: &VmSpec, accel: Accel) -> Result<()>;

    /// Opens what this VMM is given beyond `common`, passes it, and returns the arguments. Blocks
    /// on files.
    fn prepare(
        &self,
        spec: &VmSpec,
        accel: Accel,
        common: Common,
        launch: &mut Launch,
    ) -> Result<Vec<OsString>>;
}

/// The numbers of the descriptors that any VMM is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    /// The guest memory.
    pub(crate) memory: RawFd,
    /// The connection to the pool that gave the memory; `None` if no pool did.
    pub(crate) lease: Option<RawFd>,
    /// The listening socket of the control channel.
    pub(crate) control: RawFd,
    /// The listening socket of the agent's port.
    pub(crate) agent: RawFd,
    /// The KVM device; `None` under emulation.
    pub(crate) kvm: Option<RawFd>,
}

/// The paths in a VM's directory that a successor of its launcher uses. The directory is the
/// launcher's alone: the VMM gets all of these as descriptors.
struct Names {
    control: PathBuf,
    console: PathBuf,
    stderr: PathBuf,
}

impl Names {
    fn in_directory(directory: &Path) -> Self {
        let name = |name: &str| directory.join(name);
        Self {
            control: name("qmp.sock"),
            console: name("console.fifo"),
            stderr: name("stderr.fifo"),
        }
    }

    fn all(self, agent: &Path) -> Vec<PathBuf> {
        vec![self.control, self.console, self.stderr, agent.to_owned()]
    }
}

/// The resources that a launch makes before its process exists.
struct Prepared {
    launch: Launch,
    log: CappedLog,
    /// The console's FIFO: the VMM's end and the launcher's. The next field is that of standard
    /// error.
    console: (OwnedFd, pipe::Receiver),
    errors: (OwnedFd, pipe::Receiver),
    control: PathBuf,
    made: RemoveOnDrop,
    /// The right to open the group of a function of the host.
    grant: Option<GroupGrant>,
}

/// Opens and makes the resources that the VMM is given, which runs already if it `is_spare`. Blocks
/// on files; needs tokio's runtime.
fn prepare<P: Program>(
    program: &P,
    spec: &VmSpec,
    accel: Accel,
    is_spare: bool,
) -> Result<Prepared> {
    let log = CappedLog::create(&spec.console_log, VmSpec::CONSOLE_CAP)?;
    let mut launch = Launch::new(program.path(), &spec.run_dir);
    launch.allow_io_uring(!spec.disks.is_empty());
    launch.allow_pinned_memory(spec.assigned.is_some());
    launch.run_on(spec.memory.cpus_for(spec.cpus.saturating_add(spec.plug_cpus)));
    let mut kvm = None;
    if is_spare {
        // It has its user, its control groups and its virtual machine.
        launch.number_from(slipway_machine::spare::FIRST_FILE);
    } else {
        launch.run_as(spec.credentials);
        launch.join(&spec.cgroup_procs)?;
        if accel == Accel::Kvm {
            let failed = |error| Error::file("open", accel::KVM_DEVICE, error);
            kvm = Some(accel::open_kvm().map_err(failed)?);
        }
    }
    let names = Names::in_directory(&spec.run_dir);
    let control = listen(&names.control)?;
    let mut made = RemoveOnDrop(vec![names.control.clone()]);
    let agent = listen(&spec.agent_socket)?;
    made.0.push(spec.agent_socket.clone());
    let fifo = |path: &Path, made: &mut RemoveOnDrop| {
        let theirs = make_fifo(path)?;
        made.0.push(path.to_owned());
        Ok::<_, Error>((theirs, open_fifo(path)?))
    };
    let console = fifo(&names.console, &mut made)?;
    let errors = fifo(&names.stderr, &mut made)?;
    let common = Common {
        memory: launch.pass(spec.memory.descriptor()?),
        lease: spec.memory.take_lease().map(|fd| launch.pass(fd)),
        control: launch.pass(control),
        agent: launch.pass(agent),
        kvm: kvm.map(|fd| launch.pass(fd)),
    };
    let arguments = program.prepare(spec, accel, common, &mut launch)?;
    launch.arguments(arguments);
    let function = spec.assigned.as_ref();
    let grant = function.map(|one| GroupGrant::new(one, spec.credentials)).transpose()?;
    Ok(Prepared { launch, log, console, errors, control: names.control, made, grant })
}

/// Starts a VM, and returns once its guest runs. After an error nothing of it is left.
pub(crate) async fn launch<P: Program>(
    program: &P,
    spec: &VmSpec,
    accel: Accel,
) -> Result<LaunchedVm> {
    launch_in(program, spec, accel, None).await
}

/// Starts a VM, in a VMM that was started ahead if there is one. It must fit the VM.
pub(crate) async fn launch_in<P: Program>(
    program: &P,
    spec: &VmSpec,
    accel: Accel,
    spare: Option<Spare>,
) -> Result<LaunchedVm> {
    spec.check()?;
    program.check(spec, accel)?;
    let (program, its) = (program.clone(), spec.clone());
    let is_spare = spare.is_some();
    let prepared = elsewhere(move || prepare(&program, &its, accel, is_spare)).await?;
    let Prepared { launch, log, console, errors, control, made, grant } = prepared;
    let spawned = Instant::now();
    let cage = launch.cage().map(|cage| (cage, spec.plug_slots > 0));
    let (mut process, cage) = match spare {
        // Its cage is closed.
        Some(spare) => (spare.begin(launch, console.0, errors.0).await?, None),
        None => (Unfinished::new(launch.spawn(console.0, errors.0).await?), cage),
    };
    let console = tokio::spawn(copy_to_log(console.1, log));
    let started = start_up::<P>(process.get(), errors.1, &control, cage).await;
    // The VMM has opened the group by now, or it ends.
    drop(grant);
    let (record, qmp, stderr) = match started {
        Ok(started) => started,
        Err(error) => {
            process.end().await;
            return Err(error);
        }
    };
    let times = LaunchTimes { spawned, ready: Instant::now() };
    let (process, made) = (process.finish(), made.finish());
    let functions = reconnectable::<P>(&spec.vfio_user_sockets, &record);
    let supervised = Supervised { process, stderr, console, made, functions };
    LaunchedVm::new(record, Some(times), accel, qmp, supervised)
}

/// Returns the sockets from which a VMM gets connections of its functions while it runs.
fn reconnectable<P: Program>(first: &[PathBuf], record: &VmRecord) -> Option<Sockets> {
    P::RECONNECTS.then(|| Sockets::new(first, record.plugged.clone()))
}

/// Takes over a VMM whose launcher has ended. After an error it continues to run unchanged.
pub(crate) async fn adopt<P: Program>(left: &LeftVm) -> Result<LaunchedVm> {
    let record = &left.record;
    if record.hypervisor != P::NAME {
        let what = format!("the VM is one of '{}', not of {}", record.hypervisor, P::NAME);
        return Err(Error::BadSpec { what });
    }
    let gone = || Error::Control("its process has ended".into());
    let pidfd = record.running()?.ok_or_else(gone)?;
    let process = Process::of_another(record.pid, pidfd)?;
    let names = Names::in_directory(&left.run_dir);
    let qmp = tokio::time::timeout(ADOPT_DEADLINE, connect(&names.control)).await;
    let timeout = ADOPT_DEADLINE;
    let qmp = qmp.map_err(|_| Error::Timeout { command: "query-status".into(), timeout })??;
    let accel = match qmp.execute("query-kvm", ADOPT_DEADLINE).await?.get("enabled") {
        Some(serde_json::Value::Bool(true)) => Accel::Kvm,
        _ => P::WITHOUT_KVM,
    };
    let console_log = left.console_log.clone();
    let (names, console, errors, log) = elsewhere(move || {
        let (console, errors) = (open_fifo(&names.console)?, open_fifo(&names.stderr)?);
        let log = CappedLog::go_on(&console_log, VmSpec::CONSOLE_CAP)?;
        Ok((names, console, errors, log))
    })
    .await?;
    let console = tokio::spawn(copy_to_log(console, log));
    let stderr = tokio::spawn(read_tail(errors));
    let made = names.all(&left.agent_socket);
    let functions = reconnectable::<P>(&left.vfio_user_sockets, record);
    let supervised = Supervised { process, stderr, console, made, functions };
    LaunchedVm::new(record.clone(), None, accel, qmp, supervised)
}

/// Waits until the VMM answers, closes its cage, which comes with whether the VMM can be given
/// functions, and has its guest run.
async fn start_up<P: Program>(
    process: &mut Process,
    errors: pipe::Receiver,
    control: &Path,
    cage: Option<(Cage, bool)>,
) -> Result<(VmRecord, Qmp, StderrTail)> {
    let started = answer::<P>(process, errors, control).await?;
    // The VMM has opened all that it needs, and its guest waits.
    if let Some((cage, takes_functions)) = cage {
        cage.empty_root(process.pid(), process.pidfd()?, takes_functions).await?;
    }
    started.1.execute("cont", ANSWER_DEADLINE).await?;
    Ok(started)
}

/// Waits until the VMM answers.
async fn answer<P: Program>(
    process: &mut Process,
    errors: pipe::Receiver,
    control: &Path,
) -> Result<(VmRecord, Qmp, StderrTail)> {
    let record = VmRecord::of(P::NAME, process.pid())?;
    let mut stderr = tokio::spawn(read_tail(errors));
    tokio::select! {
        answer = tokio::time::timeout(ANSWER_DEADLINE, connect(control)) => {
            let command = || "qmp_capabilities".to_owned();
            match answer {
                Ok(Ok(qmp)) => return Ok((record, qmp, stderr)),
                // A dying VMM closes the channel a moment before it ends: its standard error says
                // more than the closed channel does.
                Ok(Err(error @ Error::Control(_))) => {
                    let limit = Duration::from_secs(2);
                    if tokio::time::timeout(limit, process.exited()).await.is_err() {
                        return Err(error);
                    }
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    return Err(Error::Timeout { command: command(), timeout: ANSWER_DEADLINE });
                }
            }
        }
        _ = process.exited() => {}
    }
    Err(Error::Died { exit: Box::new(exit_of(process, &mut stderr, None).await) })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::spec::tests::spec;

    /// Any program in a VMM's place.
    #[derive(Clone)]
    struct Any(PathBuf);

    impl Program for Any {
        const NAME: &'static str = "any";
        const RECONNECTS: bool = false;
        const WITHOUT_KVM: Accel = Accel::Tcg;

        fn path(&self) -> &Path {
            &self.0
        }

        fn identity(&self) -> io::Result<String> {
            Ok(String::new())
        }

        fn check(&self, _: &VmSpec, _: Accel) -> Result<()> {
            Ok(())
        }

        fn prepare(
            &self,
            _: &VmSpec,
            _: Accel,
            _: Common,
            _: &mut Launch,
        ) -> Result<Vec<OsString>> {
            Ok(vec!["--no-option-of-ls".into()])
        }
    }

    /// Returns a spec whose paths are all in `directory`.
    fn spec_in(directory: &Path) -> VmSpec {
        VmSpec {
            agent_socket: directory.join("agent"),
            vfio_user_sockets: Vec::new(),
            console_log: directory.join("console"),
            run_dir: directory.to_owned(),
            ..spec()
        }
    }

    async fn failure(program: &str, spec: &VmSpec) -> Error {
        launch(&Any(program.into()), spec, Accel::Tcg).await.err().expect("no launch")
    }

    #[tokio::test]
    async fn a_program_that_ends_is_reported_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec_in(directory.path());
        // ls rejects the option and reports it on standard error.
        let error = failure("/bin/ls", &spec).await;
        let Error::Died { exit } = &error else { panic!("{error}") };
        assert_eq!(exit.code, Some(2));
        assert!(exit.stderr.contains("ls"), "{}", exit.stderr);
        // Only the console's log stays.
        let left = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        assert_eq!(left.collect::<Vec<_>>(), [spec.console_log]);
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec_in(directory.path());
        let error = failure("/nonexistent/vmm", &spec).await.to_string();
        assert!(error.starts_with("cannot start /nonexistent/vmm"), "{error}");
        assert!(!spec.agent_socket.exists());
    }

    #[tokio::test]
    async fn a_vm_of_another_program_is_not_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec_in(directory.path());
        let record = VmRecord::of("another", std::process::id() as i32).unwrap();
        let left = LeftVm {
            record,
            run_dir: spec.run_dir,
            agent_socket: spec.agent_socket,
            vfio_user_sockets: Vec::new(),
            console_log: spec.console_log,
        };
        let error = adopt::<Any>(&left).await.err().expect("not taken over").to_string();
        assert_eq!(error, "the VM is one of 'another', not of any");
    }
}
