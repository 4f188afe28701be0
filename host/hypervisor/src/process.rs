//! A process with as few rights as possible, and its end. The process is a child, or one that an
//! earlier process of ours started and left to init.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use rustix::event::PollFlags;
use rustix::fs::{Mode, OFlags};
use rustix::thread::CpuSet;
use slipway_syscall_filter::Program;
use tokio::io::unix::AsyncFd;

use crate::cage::{Cage, Holes, filter, on_a_thread_of_its_own};
use crate::child::{Child, Spawn};
use crate::reap::reap_elsewhere;
use crate::{Credentials, Error, Result, identity};

/// The type of the file system of cgroup v2 (`CGROUP2_SUPER_MAGIC`).
const CGROUP_V2: rustix::fs::FsWord = 0x6367_7270;
/// The type of the file systems of cgroup v1 (`CGROUP_SUPER_MAGIC`).
const CGROUP_V1: rustix::fs::FsWord = 0x0027_e0eb;

/// A process to be started.
#[derive(Debug)]
pub(crate) struct Launch {
    program: PathBuf,
    arguments: Vec<OsString>,
    directory: PathBuf,
    credentials: Option<Credentials>,
    /// The directory of the control group of cgroup v2 in which the process begins.
    group: Option<OwnedFd>,
    /// The files by which the process moves itself to its other control groups.
    entries: Vec<File>,
    cpus: Option<CpuSet>,
    passed: Vec<OwnedFd>,
    /// The number of the next descriptor in a process that runs already and is sent them.
    next: Option<RawFd>,
    cage: Option<Cage>,
    io_uring: bool,
    holes: Holes,
    filtered: bool,
    pins_memory: bool,
}

impl Launch {
    /// Prepares a process that runs `program` in `directory`, or in the root of its cage.
    pub(crate) fn new(program: &Path, directory: &Path) -> Self {
        Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            directory: directory.to_owned(),
            credentials: None,
            group: None,
            entries: Vec::new(),
            cpus: None,
            passed: Vec::new(),
            next: None,
            cage: Cage::of_launcher(),
            io_uring: false,
            holes: Holes::None,
            filtered: true,
            pins_memory: false,
        }
    }

    /// Returns the cage that the process starts in, or `None` if the launcher cannot make one.
    pub(crate) fn cage(&self) -> Option<Cage> {
        self.cage
    }

    /// Sets whether the process may use io_uring, which bypasses a cage's filter.
    pub(crate) fn allow_io_uring(&mut self, io_uring: bool) {
        self.io_uring = io_uring;
    }

    /// Sets the holes that the process may punch into files.
    pub(crate) fn allow_holes(&mut self, holes: Holes) {
        self.holes = holes;
    }

    /// Leaves out the cage's filter of system calls: the process sets a stricter one itself, once
    /// it has given up the rest.
    pub(crate) fn filters_itself(&mut self) {
        self.filtered = false;
    }

    /// Lets the process pin any amount of memory, as VFIO does for it.
    pub(crate) fn allow_pinned_memory(&mut self, pins_memory: bool) {
        self.pins_memory = pins_memory;
    }

    /// Sets the user that the process runs as.
    pub(crate) fn run_as(&mut self, credentials: Option<Credentials>) {
        self.credentials = credentials;
    }

    /// Sets the cgroups that the process joins before it runs, by their files `cgroup.procs`. They
    /// are opened here, with the launcher's rights. It begins in the one of cgroup v2, and moves
    /// itself to those of v1.
    pub(crate) fn join(&mut self, cgroup_procs: &[PathBuf]) -> Result<()> {
        for path in cgroup_procs {
            let failed = |source| Error::file("join", path, source);
            let file = OpenOptions::new().write(true).open(path).map_err(failed)?;
            let system = rustix::fs::fstatfs(&file).map_err(|errno| failed(errno.into()))?;
            match path.parent() {
                Some(group) if system.f_type == CGROUP_V2 && self.group.is_none() => {
                    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                    let opened = rustix::fs::open(group, flags, Mode::empty());
                    self.group = Some(opened.map_err(|errno| failed(errno.into()))?);
                }
                _ => {
                    let file = OpenOptions::new().write(true).open(entry(path, system.f_type));
                    self.entries.push(file.map_err(failed)?);
                }
            }
        }
        Ok(())
    }

    /// Sets the CPUs that the process runs on; `None` leaves it the launcher's. CPUs that its
    /// control groups do not allow are left out; if none is left, the control groups decide alone.
    pub(crate) fn run_on(&mut self, cpus: Option<CpuSet>) {
        self.cpus = cpus;
    }

    /// Has a process that runs already be sent all of this. Its descriptors are numbered from
    /// `first` on.
    pub(crate) fn number_from(&mut self, first: RawFd) {
        self.next = Some(first);
    }

    /// Returns the arguments, the descriptors and the CPUs, for a process that runs already.
    pub(crate) fn into_message(self) -> (Vec<OsString>, Vec<OwnedFd>, Option<CpuSet>) {
        (self.arguments, self.passed, self.cpus)
    }

    /// Passes a descriptor to the child and returns its number there. A child that is yet to start
    /// has a copy of the table, so the number is the same as here, and no descriptor has to be
    /// moved.
    pub(crate) fn pass(&mut self, fd: OwnedFd) -> RawFd {
        let number = self.next.unwrap_or_else(|| fd.as_raw_fd());
        self.next = self.next.map(|next| next + 1);
        self.passed.push(fd);
        number
    }

    /// Sets the arguments.
    pub(crate) fn arguments(&mut self, arguments: Vec<OsString>) {
        self.arguments = arguments;
    }

    /// Starts the process: in a session of its own, so that it gets no terminal's signals, with an
    /// empty environment and empty standard input, with `stdout` and `stderr`, and with no
    /// descriptors beyond those passed. If the future is dropped, the process is killed.
    pub(crate) async fn spawn(self, stdout: OwnedFd, stderr: OwnedFd) -> Result<Process> {
        let program = self.program.clone();
        let failed = move |source| Error::Spawn { program, source };
        // The calling thread waits until the program runs, or loads from a disk.
        let born = on_a_thread_of_its_own("vmm-spawn", move || {
            Ok(Unwatched(Some(self.spawn_here(stdout, stderr)?)))
        });
        Process::watch(born.await.map_err(failed)?)
    }

    fn spawn_here(self, stdout: OwnedFd, stderr: OwnedFd) -> io::Result<Child> {
        let Self { credentials, group, entries, cpus, passed, cage, io_uring, .. } = self;
        let pins_memory = self.pins_memory;
        let caged = cage.map(|cage| (cage, self.filtered.then(|| filter(io_uring, self.holes))));
        let null = rustix::fs::open(c"/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let streams = [null, stdout, stderr];
        let mut spawn = Spawn::new(&self.program, self.arguments, &self.directory, streams)?;
        if caged.is_some() {
            spawn.set_new_namespace();
        }
        if let Some(group) = group {
            spawn.set_group(group);
        }
        let steps = ChildSteps { credentials, entries, cpus, passed, caged, pins_memory };
        // SAFETY: `ChildSteps::run` makes system calls on prepared data only; it does not allocate,
        // take a lock or free anything.
        unsafe { spawn.run(&|| steps.run()) }
    }
}

/// The steps of a child before it runs its program.
struct ChildSteps {
    credentials: Option<Credentials>,
    entries: Vec<File>,
    cpus: Option<CpuSet>,
    passed: Vec<OwnedFd>,
    caged: Option<(Cage, Option<Program>)>,
    pins_memory: bool,
}

impl ChildSteps {
    /// Runs the steps. Async-signal-safe: makes system calls on prepared data only.
    fn run(&self) -> io::Result<()> {
        for entry in &self.entries {
            // "0" means the writer, which has one thread here, so all of the process moves.
            rustix::io::write(entry, b"0")?;
        }
        if let Some(cpus) = &self.cpus {
            // After the control groups, whose cpuset replaces what was set before. Refused if it
            // has none of the CPUs: the process is then slower, and runs all the same.
            let _ = rustix::thread::sched_setaffinity(None, cpus);
        }
        rustix::process::setsid()?;
        self.place_descriptors()?;
        // A core file would leak guest memory, and be as large as the guest.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        rustix::process::setrlimit(rustix::process::Resource::Core, none)?;
        if self.pins_memory {
            let any = rustix::process::Rlimit { current: None, maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Memlock, any)?;
        }
        // Done after joining the cgroups, which become the root of what the cgroup namespace shows,
        // and before giving up the user, since namespaces need rights.
        if let Some((cage, _)) = &self.caged {
            cage.enter()?;
        }
        if let Some(credentials) = self.credentials {
            give_up_user(credentials)?;
        }
        rustix::thread::set_no_new_privs(true)?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        match &self.caged {
            Some((_, Some(filter))) => filter.apply(),
            _ => Ok(()),
        }
    }

    /// Lets the passed descriptors through exec, and no other above standard error.
    fn place_descriptors(&self) -> io::Result<()> {
        // Marked close-on-exec rather than closed: the launcher's objects, in whose memory this
        // runs, have these numbers.
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

/// Returns the file by which a process of one thread moves itself to the control group with the
/// file `procs`, in a file system of the type `system`.
///
/// A write to the file `cgroup.procs` moves all threads of a process, so the kernel first has all
/// forks and exits of the host wait. That takes a grace period of RCU, 8 to 20 ms, in which no
/// process of the host changes its group. A thread that moves itself alone, by v1's file `tasks`,
/// has no such wait (Linux 5.5, `cgroup_procs_write_start`). v2 has no such file: `cgroup.threads`
/// moves no thread out of its process's group.
fn entry(procs: &Path, system: rustix::fs::FsWord) -> PathBuf {
    if system == CGROUP_V1 { procs.with_file_name("tasks") } else { procs.to_owned() }
}

/// Changes to another user for good: without supplementary groups, and with the same real,
/// effective and saved ids.
fn give_up_user(credentials: Credentials) -> io::Result<()> {
    let Credentials { uid, gid } = credentials;
    // SAFETY: an empty list is never read. The raw system calls act on this thread only, which is
    // the only thread of the child.
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

/// A running process: a child that only this object reaps, or a child of another process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    pidfd: AsyncFd<OwnedFd>,
    /// The child; `None` if the process that started it has ended, and init reaps it.
    child: Option<Child>,
}

impl Process {
    /// Takes over a child that was not waited for.
    fn watch(mut born: Unwatched) -> Result<Self> {
        let child = born.child();
        let pidfd = child.pidfd().try_clone_to_owned();
        let failed = |source| Error::system("duplicating a descriptor", source);
        let (pid, pidfd) = (child.pid(), watch(pidfd.map_err(failed)?)?);
        Ok(Self { pid: pid.as_raw_nonzero().get(), pidfd, child: born.0.take() })
    }

    /// Wraps a process that another process of ours started; `pidfd` is `pid`'s.
    pub(crate) fn of_another(pid: i32, pidfd: OwnedFd) -> Result<Self> {
        Ok(Self { pid, pidfd: watch(pidfd)?, child: None })
    }

    /// Returns the process id. A child's id is valid until [`Process::exited`] returned.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns a duplicate of the pidfd, for killing without owning the process.
    pub(crate) fn pidfd(&self) -> Result<OwnedFd> {
        self.pidfd
            .get_ref()
            .try_clone()
            .map_err(|source| Error::system("duplicating a descriptor", source))
    }

    /// Kills the process at once; it still has to be waited for.
    pub(crate) fn kill(&self) -> Result<()> {
        identity::kill(self.pidfd.get_ref())
    }

    /// Returns whether the process has ended, without waiting.
    pub(crate) fn has_ended(&self) -> bool {
        !slipway_peer::ready(self.pidfd.get_ref(), PollFlags::IN).is_empty()
    }

    /// Waits for the end of the process and reaps it. Returns `None` if it is no child of ours:
    /// only the parent learns the status. May be cancelled and called again.
    pub(crate) async fn exited(&mut self) -> io::Result<Option<ExitStatus>> {
        let _ = self.pidfd.readable().await?;
        self.child.as_mut().map(Child::wait).transpose()
    }

    /// Kills the process and has it reaped without waiting: the kernel frees its memory first.
    pub(crate) fn end_elsewhere(&mut self) {
        if self.kill().is_ok()
            && let Some(child) = self.child.take()
        {
            reap_elsewhere(child);
        }
    }
}

/// A child that is killed and reaped when it is dropped.
struct Unwatched(Option<Child>);

impl Unwatched {
    fn child(&self) -> &Child {
        self.0.as_ref().expect("present until Process::watch, which consumes self")
    }
}

impl Drop for Unwatched {
    fn drop(&mut self) {
        if let Some(child) = self.0.take() {
            let _ = identity::kill(child.pidfd());
            reap_elsewhere(child);
        }
    }
}

/// Watches a descriptor for bytes, or for the end of its process.
pub(crate) fn watch(pidfd: OwnedFd) -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: the OwnedFd moves into the AsyncFd, which hands out shared references only, so it
    // stays open and the same until the AsyncFd is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) };
    watched.map_err(|source| Error::system("watching a process", source))
}

/// Returns the exit code and the signal of a status.
pub(crate) fn code_and_signal(status: ExitStatus) -> (Option<i32>, Option<i32>) {
    (status.code(), status.signal())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::thread::sched_getaffinity;

    use super::*;

    /// Returns the list of CPUs that a process which is started on `cpus` may run on.
    async fn cpus_of_a_process(cpus: Option<CpuSet>) -> String {
        let mut launch = Launch::new(Path::new("/bin/grep"), Path::new("/"));
        launch.arguments(vec!["Cpus_allowed_list".into(), "/proc/self/status".into()]);
        launch.run_on(cpus);
        output(launch).await.split_whitespace().nth(1).unwrap().to_owned()
    }

    /// Returns what a process without a cage prints until its end.
    async fn output(mut launch: Launch) -> String {
        launch.cage = None;
        let (from, to) = rustix::pipe::pipe().unwrap();
        let errors = to.try_clone().unwrap();
        let mut process = launch.spawn(to, errors).await.unwrap();
        process.exited().await.unwrap();
        let mut text = String::new();
        File::from(from).read_to_string(&mut text).unwrap();
        text
    }

    #[tokio::test]
    async fn a_process_runs_on_the_cpus_that_it_is_given() {
        let before = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| before.is_set(*cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(last);
        assert_eq!(cpus_of_a_process(Some(one)).await, last.to_string());
        let all = cpus_of_a_process(None).await;
        // No CPU that exists: the process runs where its launcher does.
        let mut absent = CpuSet::new();
        absent.set(CpuSet::MAX_CPU - 1);
        assert_eq!(cpus_of_a_process(Some(absent)).await, all);
        assert_eq!(sched_getaffinity(None).unwrap(), before, "the launcher's own stay");
    }

    #[test]
    fn a_process_enters_groups_of_version_1_by_its_one_thread() {
        let procs = Path::new("/groups/one/cgroup.procs");
        assert_eq!(entry(procs, CGROUP_V1), Path::new("/groups/one/tasks"));
        assert_eq!(entry(procs, CGROUP_V2), procs);
    }

    #[tokio::test]
    async fn a_process_is_in_its_group_of_version_1_before_it_runs() {
        let name = format!("slipway-test-{}-launch", std::process::id());
        let group = Path::new("/sys/fs/cgroup/pids").join(&name);
        if std::fs::create_dir(&group).is_err() {
            return println!("SKIPPED: a group of version 1: needs root and the hierarchy pids");
        }
        let mut launch = Launch::new(Path::new("/bin/cat"), Path::new("/"));
        launch.arguments(vec!["/proc/self/cgroup".into()]);
        launch.join(&[group.join("cgroup.procs")]).unwrap();
        let groups = output(launch).await;
        // A group empties a moment after the end of its last process.
        while std::fs::remove_dir(&group).is_err() {
            std::thread::yield_now();
        }
        assert!(groups.lines().any(|line| line.ends_with(&format!(":pids:/{name}"))), "{groups}");
    }
}
