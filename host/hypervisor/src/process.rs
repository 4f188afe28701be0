//! A process with as few rights as it can do with, and its end: a child, or one that an earlier
//! process of ours started and left to init.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;

use crate::cage::{Cage, Filter, Spawned};
use crate::{Credentials, Error, Result, identity};

/// A process about to be started.
#[derive(Debug)]
pub(crate) struct Launch {
    program: PathBuf,
    arguments: Vec<OsString>,
    directory: PathBuf,
    credentials: Option<Credentials>,
    cgroup_procs: Vec<File>,
    passed: Vec<OwnedFd>,
    cage: Option<Cage>,
    io_uring: bool,
}

impl Launch {
    /// A process that runs `program` in `directory`, or in the root of its cage.
    pub(crate) fn new(program: &Path, directory: &Path) -> Self {
        Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            directory: directory.to_owned(),
            credentials: None,
            cgroup_procs: Vec::new(),
            passed: Vec::new(),
            cage: Cage::of_launcher(),
            io_uring: false,
        }
    }

    /// The cage that it starts in, if the launcher can make one.
    pub(crate) fn cage(&self) -> Option<Cage> {
        self.cage
    }

    /// Whether it may use io_uring, which reaches past a cage's filter.
    pub(crate) fn allow_io_uring(&mut self, io_uring: bool) {
        self.io_uring = io_uring;
    }

    /// The user that it runs as.
    pub(crate) fn run_as(&mut self, credentials: Option<Credentials>) {
        self.credentials = credentials;
    }

    /// The cgroups that it joins before it runs. Opened here, with the launcher's rights.
    pub(crate) fn join(&mut self, cgroup_procs: &[PathBuf]) -> Result<()> {
        for path in cgroup_procs {
            let file = OpenOptions::new().write(true).open(path);
            self.cgroup_procs.push(file.map_err(|source| Error::file("join", path, source))?);
        }
        Ok(())
    }

    /// Hands a descriptor to the child and returns its number there, which is its number here: a
    /// fork copies the table, so nothing has to be moved.
    pub(crate) fn pass(&mut self, fd: OwnedFd) -> RawFd {
        let number = fd.as_raw_fd();
        self.passed.push(fd);
        number
    }

    /// Sets the arguments.
    pub(crate) fn arguments(&mut self, arguments: Vec<OsString>) {
        self.arguments = arguments;
    }

    /// Starts it: in a session of its own, so that no terminal's signals reach it, with an empty
    /// environment, standard input empty, these as its output and error, and no descriptor beyond
    /// those passed. If the future is dropped the process is killed.
    pub(crate) async fn spawn(self, stdout: OwnedFd, stderr: OwnedFd) -> Result<Process> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env_clear()
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr);
        let Self { program, credentials, cgroup_procs, passed, cage, io_uring, .. } = self;
        let caged = cage.map(|cage| (cage, Filter::new(io_uring)));
        let steps = ChildSteps { credentials, cgroup_procs, passed, caged };
        // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are
        // allowed. `ChildSteps::run` makes system calls only, on data prepared before the fork; it
        // does not allocate, take a lock or free anything.
        unsafe { command.pre_exec(move || steps.run()) };
        let spawned = match cage {
            Some(cage) => cage.spawn(command).await,
            None => command.spawn().map(Spawned::new),
        };
        Process::adopt(spawned.map_err(|source| Error::Spawn { program, source })?)
    }
}

/// What the child does between fork and exec.
struct ChildSteps {
    credentials: Option<Credentials>,
    cgroup_procs: Vec<File>,
    passed: Vec<OwnedFd>,
    caged: Option<(Cage, Filter)>,
}

impl ChildSteps {
    /// Async-signal-safe: system calls on prepared data only.
    fn run(&self) -> io::Result<()> {
        for procs in &self.cgroup_procs {
            // "0" means the writing process; it has one thread here, so all of it moves.
            rustix::io::write(procs, b"0")?;
        }
        rustix::process::setsid()?;
        self.place_descriptors()?;
        // Guest memory in a core file would be a leak, and as large as the guest.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        rustix::process::setrlimit(rustix::process::Resource::Core, none)?;
        // In its control groups, which are the root of what its namespace shows of them, and still
        // with the rights that namespaces take.
        if let Some((cage, _)) = &self.caged {
            cage.enter()?;
        }
        if let Some(credentials) = self.credentials {
            give_up_user(credentials)?;
        }
        rustix::thread::set_no_new_privs(true)?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        match &self.caged {
            Some((_, filter)) => filter.apply(),
            None => Ok(()),
        }
    }

    /// Lets the passed descriptors through exec and no other one above standard error.
    fn place_descriptors(&self) -> io::Result<()> {
        // Marked close-on-exec rather than closed: should exec fail, the standard library still
        // reports that to the parent through a pipe of its own.
        // SAFETY: close_range has no memory effects; with CLOEXEC it closes nothing before exec.
        check(unsafe {
            libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
        })?;
        for fd in &self.passed {
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    }
}

/// Becomes another user for good: no supplementary group, real, effective and saved ids alike.
fn give_up_user(credentials: Credentials) -> io::Result<()> {
    let Credentials { uid, gid } = credentials;
    // SAFETY: an empty list is never read. The raw system calls act on this thread only, which is
    // all of the child after fork.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<libc::gid_t>()) })?;
    // SAFETY: no memory effects.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: no memory effects.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
    Ok(())
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A running process: a child that nobody else reaps, or somebody else's.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    pidfd: AsyncFd<OwnedFd>,
    /// None: whoever started it has ended, and init reaps it.
    child: Option<Child>,
}

impl Process {
    /// Takes a child over that nobody has waited for.
    fn adopt(spawned: Spawned) -> Result<Self> {
        let pid = Pid::from_child(spawned.child());
        let pidfd = pidfd_open(pid, PidfdFlags::empty());
        let pidfd = watch(pidfd.map_err(|errno| Error::system("pidfd_open", errno))?)?;
        let child = Some(spawned.into_child());
        Ok(Self { pid: pid.as_raw_nonzero().get(), pidfd, child })
    }

    /// A process that another one of ours started; `pidfd` is `pid`'s.
    pub(crate) fn of_another(pid: i32, pidfd: OwnedFd) -> Result<Self> {
        Ok(Self { pid, pidfd: watch(pidfd)?, child: None })
    }

    /// Process id; a child's is valid until [`Process::exited`] returned.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// A duplicate of the pidfd, for killing without owning the process.
    pub(crate) fn pidfd(&self) -> Result<OwnedFd> {
        self.pidfd
            .get_ref()
            .try_clone()
            .map_err(|source| Error::system("duplicating a descriptor", source))
    }

    /// Kills it at once; it still has to be waited for.
    pub(crate) fn kill(&self) -> Result<()> {
        identity::kill(self.pidfd.get_ref())
    }

    /// Waits for its end and reaps it; `None`: how it ended, only its parent knows. May be cancelled
    /// and called again.
    pub(crate) async fn exited(&mut self) -> io::Result<Option<ExitStatus>> {
        let _ = self.pidfd.readable().await?;
        self.child.as_mut().map(Child::wait).transpose()
    }

    /// Kills it and has it reaped without waiting: the kernel frees its memory first.
    pub(crate) fn end_elsewhere(&mut self) {
        if self.kill().is_ok()
            && let Some(child) = self.child.take()
        {
            reap_elsewhere(child);
        }
    }
}

/// Reaps a killed child on a thread of its own. It stays a zombie where there is none to be had.
pub(crate) fn reap_elsewhere(mut child: Child) {
    let reap = move || drop(child.wait());
    let _ = std::thread::Builder::new().name("vmm-reap".into()).spawn(reap);
}

fn watch(pidfd: OwnedFd) -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: the OwnedFd moves into the AsyncFd, which hands out shared references only, so it
    // stays open and the same until the AsyncFd is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) };
    watched.map_err(|source| Error::system("watching a process", source))
}

/// Exit code and signal of a status.
pub(crate) fn code_and_signal(status: ExitStatus) -> (Option<i32>, Option<i32>) {
    (status.code(), status.signal())
}
