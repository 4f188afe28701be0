//! Launches a QEMU from a spec, and takes over one that another launcher left.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::unix::pipe;

use super::args::{self, Passed};
use super::console::{CappedLog, copy_to_log, make_fifo, open_fifo, read_tail};
use super::control::{ANSWER_DEADLINE, connect};
use super::exit::{StderrTail, exit_of};
use super::files::{RemoveOnDrop, listen, open_disk, open_socket};
use super::qmp::Qmp;
use super::vm::{QemuVm, Supervised};
use crate::cage::Cage;
use crate::process::{Launch, Process};
use crate::{Accel, Error, LaunchTimes, LeftVm, Result, VmRecord, VmSpec, accel};

/// The time that a QEMU that runs already may take to answer.
const ADOPT_DEADLINE: Duration = Duration::from_secs(10);

/// The time that a killed QEMU may take to end.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// The paths in a VM's directory that a successor of its launcher uses. The directory is the
/// launcher's alone: QEMU gets all of these as descriptors.
struct Names {
    qmp: PathBuf,
    console: PathBuf,
    stderr: PathBuf,
}

impl Names {
    fn in_directory(directory: &Path) -> Self {
        let name = |name: &str| directory.join(name);
        Self { qmp: name("qmp.sock"), console: name("console.fifo"), stderr: name("stderr.fifo") }
    }

    fn all(self, agent: &Path) -> Vec<PathBuf> {
        vec![self.qmp, self.console, self.stderr, agent.to_owned()]
    }
}

/// The resources that a launch makes before its process exists.
struct Prepared {
    launch: Launch,
    log: CappedLog,
    /// The console's FIFO: QEMU's end and the launcher's. The next field is that of standard error.
    console: (OwnedFd, pipe::Receiver),
    errors: (OwnedFd, pipe::Receiver),
    control: PathBuf,
    made: RemoveOnDrop,
}

/// Opens and makes the resources that QEMU is given. Blocks on files; needs tokio's runtime.
fn prepare(program: &Path, spec: &VmSpec, accel: Accel) -> Result<Prepared> {
    let log = CappedLog::create(&spec.console_log, VmSpec::CONSOLE_CAP)?;
    let mut launch = Launch::new(program, &spec.run_dir);
    launch.run_as(spec.credentials);
    launch.allow_io_uring(!spec.disks.is_empty());
    launch.join(&spec.cgroup_procs)?;
    let kvm = match accel {
        Accel::Kvm => {
            Some(accel::open_kvm().map_err(|error| Error::file("open", accel::KVM_DEVICE, error))?)
        }
        Accel::Tcg => None,
    };
    let functions = spec.vfio_user_sockets.iter().map(|path| open_socket(path));
    let functions = functions.collect::<Result<Vec<_>>>()?;
    let disks = spec.disks.iter().map(open_disk).collect::<Result<Vec<_>>>()?;
    let names = Names::in_directory(&spec.run_dir);
    let qmp = listen(&names.qmp)?;
    let mut made = RemoveOnDrop(vec![names.qmp.clone()]);
    let agent = listen(&spec.agent_socket)?;
    made.0.push(spec.agent_socket.clone());
    let fifo = |path: &Path, made: &mut RemoveOnDrop| {
        let theirs = make_fifo(path)?;
        made.0.push(path.to_owned());
        Ok::<_, Error>((theirs, open_fifo(path)?))
    };
    let console = fifo(&names.console, &mut made)?;
    let errors = fifo(&names.stderr, &mut made)?;
    let passed = Passed {
        memory: launch.pass(spec.memory.descriptor()?),
        qmp: launch.pass(qmp),
        agent: launch.pass(agent),
        functions: functions.into_iter().map(|fd| launch.pass(fd)).collect(),
        disks: disks.into_iter().map(|(fd, device)| (launch.pass(fd), device)).collect(),
        kvm: kvm.map(|fd| launch.pass(fd)),
    };
    launch.arguments(args::build(spec, accel, &passed));
    Ok(Prepared { launch, log, console, errors, control: names.qmp, made })
}

/// Runs `work`, which blocks on files, on a thread for blocking work.
async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::system("a file operation", io::Error::other(error))))
}

pub(super) async fn launch(program: &Path, spec: &VmSpec, accel: Accel) -> Result<QemuVm> {
    args::check(spec)?;
    let (program, spec) = (program.to_owned(), spec.clone());
    let prepared = elsewhere(move || prepare(&program, &spec, accel)).await?;
    let Prepared { launch, log, console, errors, control, made } = prepared;
    let spawned = Instant::now();
    let cage = launch.cage();
    let mut process = Unfinished(Some(launch.spawn(console.0, errors.0).await?));
    let console = tokio::spawn(copy_to_log(console.1, log));
    let started = start_up(process.get(), errors.1, &control, cage).await;
    let (record, qmp, stderr) = match started {
        Ok(started) => started,
        Err(error) => {
            process.end().await;
            return Err(error);
        }
    };
    let times = LaunchTimes { spawned, ready: Instant::now() };
    let (process, made) = (process.finish(), made.finish());
    let supervised = Supervised { process, stderr, console, made };
    QemuVm::new(record, Some(times), accel, qmp, supervised)
}

/// Takes over a QEMU whose launcher has ended. After an error it continues to run unchanged.
pub(super) async fn adopt(left: &LeftVm) -> Result<QemuVm> {
    let record = &left.record;
    let gone = || Error::Control("its process has ended".into());
    let pidfd = record.running()?.ok_or_else(gone)?;
    let process = Process::of_another(record.pid, pidfd)?;
    let names = Names::in_directory(&left.run_dir);
    let qmp = tokio::time::timeout(ADOPT_DEADLINE, connect(&names.qmp)).await;
    let timeout = ADOPT_DEADLINE;
    let qmp = qmp.map_err(|_| Error::Timeout { command: "query-status".into(), timeout })??;
    let accel = match qmp.execute("query-kvm", ADOPT_DEADLINE).await?.get("enabled") {
        Some(serde_json::Value::Bool(true)) => Accel::Kvm,
        _ => Accel::Tcg,
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
    let supervised = Supervised { process, stderr, console, made };
    QemuVm::new(record.clone(), None, accel, qmp, supervised)
}

/// Waits until QEMU answers, closes its cage, and has its guest run.
async fn start_up(
    process: &mut Process,
    errors: pipe::Receiver,
    control: &Path,
    cage: Option<Cage>,
) -> Result<(VmRecord, Qmp, StderrTail)> {
    let started = answer(process, errors, control).await?;
    // QEMU has opened all that it needs, and its guest waits.
    if let Some(cage) = cage {
        cage.empty_root(process.pid(), process.pidfd()?).await?;
    }
    started.1.execute("cont", ANSWER_DEADLINE).await?;
    Ok(started)
}

/// Waits until QEMU answers.
async fn answer(
    process: &mut Process,
    errors: pipe::Receiver,
    control: &Path,
) -> Result<(VmRecord, Qmp, StderrTail)> {
    let record = VmRecord::of("qemu", process.pid())?;
    let mut stderr = tokio::spawn(read_tail(errors));
    tokio::select! {
        answer = tokio::time::timeout(ANSWER_DEADLINE, connect(control)) => {
            let command = || "qmp_capabilities".to_owned();
            match answer {
                Ok(Ok(qmp)) => return Ok((record, qmp, stderr)),
                // A dying QEMU closes the channel a moment before it ends: its standard error says
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

/// A process whose launch is not finished. Dropping this kills the process.
struct Unfinished(Option<Process>);

impl Unfinished {
    fn get(&mut self) -> &mut Process {
        self.0.as_mut().expect("present until finish, which consumes self")
    }

    /// Kills the process and waits until it has ended.
    async fn end(&mut self) {
        let process = self.get();
        if process.kill().is_ok() {
            // A process that does not end in time is reaped on another thread.
            let _ = tokio::time::timeout(END_DEADLINE, process.exited()).await;
        }
    }

    fn finish(mut self) -> Process {
        self.0.take().expect("present until finish, which consumes self")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            process.end_elsewhere();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::qemu::args::tests::spec;

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
        launch(Path::new(program), spec, Accel::Tcg).await.err().expect("no launch")
    }

    #[tokio::test]
    async fn a_program_that_ends_is_reported_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec_in(directory.path());
        // ls rejects the first of QEMU's options and reports it on standard error.
        let error = failure("ls", &spec).await;
        let Error::Died { exit } = &error else { panic!("{error}") };
        assert_eq!(exit.code, Some(2));
        assert!(exit.stderr.contains("ls"), "{}", exit.stderr);
        // Only the console's log stays.
        let left = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        assert_eq!(left.collect::<Vec<_>>(), [spec.console_log]);
    }

    #[tokio::test]
    async fn what_is_missing_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = spec_in(directory.path());
        let error = failure("/nonexistent/qemu", &spec).await.to_string();
        assert!(error.starts_with("cannot start /nonexistent/qemu"), "{error}");
        assert!(!spec.agent_socket.exists());
        spec.vfio_user_sockets = vec![directory.path().join("absent")];
        let error = failure("true", &spec).await.to_string();
        assert!(error.contains("cannot use the vfio-user socket") && error.contains("absent"));
        spec.vfio_user_sockets = vec![directory.path().join("console")];
        assert!(failure("true", &spec).await.to_string().contains("it is no socket"));
    }
}
