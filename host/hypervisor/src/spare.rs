//! VMMs that are started ahead of their VMs.
//!
//! A [`Spare`] is a `slipway-vmm` in its cage and its control groups, which has made an empty
//! virtual machine and waits for a command line (`slipway_machine::spare`). The launch of a VM in
//! it does without what takes longest: the process, its namespaces, and the kernel's wait when it
//! makes a virtual machine, which is a wait of the control group that the process is in. The host's
//! files are taken away from a spare as soon as it waits.
//!
//! The parts of a process that it cannot change later are the spare's from its start: its user, its
//! control groups, and the cage's filter of system calls. So a spare [fits](Spare::fits) a VM that
//! has the same ones, and each spare runs one VM, once.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use rustix::process::Pid;
use rustix::thread::CpuSet;
use slipway_machine::spare;
use slipway_peer::{Bin, receive};
use tokio::net::unix::pipe;

use crate::cage::{Cage, Holes};
use crate::console::{StderrTail, last_words, read_tail};
use crate::files::elsewhere;
use crate::process::{Launch, code_and_signal, watch};
use crate::unfinished::Unfinished;
use crate::{Accel, AccelChoice, Credentials, Error, Result, VmExit, VmSpec, accel};

/// The most descriptors of a message.
const MOST_FILES: usize = spare::STREAMS + spare::MAX_FILES;

/// The time that a spare may take until it waits.
const READY_DEADLINE: Duration = Duration::from_secs(60);

/// The description of a spare: the parts of a [`VmSpec`] that a process has from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpareSpec {
    /// The user that runs the VMM, [`VmSpec::credentials`].
    pub credentials: Option<Credentials>,
    /// The control groups of the VMM, [`VmSpec::cgroup_procs`].
    pub cgroup_procs: Vec<PathBuf>,
    /// The VMM may give memory of its guest back to the host, as one has to whose VM has
    /// [hot-plug memory](VmSpec::hot_memory), or reports free pages that are
    /// [given back](crate::FreePages::GivenBack).
    pub gives_back: bool,
}

/// A VMM without a VM. Dropping it kills the process, and so does the end of its launcher.
pub struct Spare {
    process: Unfinished,
    /// The socket over which the VMM is given its VM. The VMM ends with it.
    socket: OwnedFd,
    errors: StderrTail,
    spec: SpareSpec,
}

/// The resources of a spare that is to be started.
struct Prepared {
    launch: Launch,
    socket: OwnedFd,
    /// Standard output, and standard error with its reader.
    output: OwnedFd,
    errors: OwnedFd,
    tail: pipe::Receiver,
}

fn prepare(program: &Path, spec: &SpareSpec) -> Result<Prepared> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
    let (socket, theirs) = pair.map_err(|errno| Error::system("making a socket", errno))?;
    let (from, errors) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|errno| Error::system("making a pipe", errno))?;
    let tail = pipe::Receiver::from_owned_fd(from)
        .map_err(|source| Error::system("watching a pipe", source))?;
    let null = Path::new("/dev/null");
    let output = rustix::fs::open(null, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::file("open", null, errno))?;
    let kvm = accel::open_kvm().map_err(|error| Error::file("open", accel::KVM_DEVICE, error))?;
    let mut launch = Launch::new(program, Path::new("/"));
    launch.run_as(spec.credentials);
    launch.join(&spec.cgroup_procs)?;
    launch.allow_holes(Holes::of(spec.gives_back));
    let words = [("--spare", theirs), ("--kvm", kvm)];
    let words = words.map(|(option, fd)| [option.into(), format!("fd:{}", launch.pass(fd)).into()]);
    launch.arguments(words.into_iter().flatten().collect());
    Ok(Prepared { launch, socket, output, errors, tail })
}

impl Spare {
    /// Starts `program`, a `slipway-vmm`, and returns once it waits in its closed cage. After an
    /// error nothing of it is left.
    pub(crate) async fn start(program: &Path, spec: &SpareSpec) -> Result<Self> {
        let (path, its) = (program.to_owned(), spec.clone());
        let prepared = elsewhere(move || prepare(&path, &its)).await?;
        let Prepared { launch, socket, output, errors, tail } = prepared;
        let cage = launch.cage();
        let process = Unfinished::new(launch.spawn(output, errors).await?);
        let errors = tokio::spawn(read_tail(tail));
        let mut spare = Self { process, socket, errors, spec: spec.clone() };
        let waits = spare.enter(cage).await;
        if let Ok(true) = waits {
            return Ok(spare);
        }
        spare.process.end().await;
        waits?;
        let stderr = last_words(&mut spare.errors).await;
        let (code, signal) = match spare.process.get().exited().await {
            Ok(Some(status)) => code_and_signal(status),
            _ => (None, None),
        };
        Err(Error::Died { exit: Box::new(VmExit { code, signal, reason: None, stderr }) })
    }

    /// Waits until the spare has its virtual machine, and closes its cage. Returns `false` if it
    /// has ended instead.
    async fn enter(&mut self, cage: Option<Cage>) -> Result<bool> {
        if !self.is_ready().await? {
            return Ok(false);
        }
        if let Some(cage) = cage {
            let process = self.process.look();
            cage.empty_root(process.pid(), process.pidfd()?, false).await?;
        }
        Ok(true)
    }

    /// Waits until the spare has its virtual machine. Returns `false` if it has ended instead.
    async fn is_ready(&self) -> Result<bool> {
        let failed = |source| Error::system("reading a spare's socket", source);
        let socket = watch(self.socket.try_clone().map_err(failed)?)?;
        let timeout = READY_DEADLINE;
        let readable = tokio::time::timeout(timeout, socket.readable()).await;
        let late = |_| Error::Timeout { command: "--spare".into(), timeout };
        let _ready = readable.map_err(late)?.map_err(failed)?;
        let mut byte = [0];
        let mut parts = [IoSliceMut::new(&mut byte)];
        let received = receive(&self.socket, &mut parts, &Bin::new(), RecvFlags::DONTWAIT);
        Ok(received.is_ok_and(|received| received.bytes == 1) && byte == [spare::READY])
    }

    /// Returns the process id.
    pub fn pid(&self) -> i32 {
        self.process.look().pid()
    }

    /// Returns whether a VM can be launched in this process: it waits, and is as the VM's has to
    /// be.
    pub fn fits(&self, spec: &VmSpec) -> bool {
        let on_kvm = matches!(spec.accel, AccelChoice::Auto | AccelChoice::Only(Accel::Kvm));
        let SpareSpec { credentials, cgroup_procs, gives_back } = &self.spec;
        let same = (*credentials, cgroup_procs) == (spec.credentials, &spec.cgroup_procs);
        let filtered = !spec.emulates_devices() && spec.makes_holes() == *gives_back;
        on_kvm && same && filtered && !self.process.look().has_ended()
    }

    /// Returns a future that waits for the end of the process.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn ended(&self) -> Result<impl Future<Output = ()> + Send + use<>> {
        let pidfd = watch(self.process.look().pidfd()?)?;
        Ok(async move {
            let _ = pidfd.readable().await;
        })
    }

    /// Ends the process. Returns whether it has ended: the kernel may need longer than this waits.
    pub async fn end(mut self) -> bool {
        self.process.end().await
    }

    /// Gives the process its VM: what `launch` has, and its standard streams. After an error it is
    /// dead.
    pub(crate) async fn begin(
        self,
        launch: Launch,
        output: OwnedFd,
        errors: OwnedFd,
    ) -> Result<Unfinished> {
        let Self { mut process, socket, .. } = self;
        let (pid, (words, files, cpus)) = (process.get().pid(), launch.into_message());
        let sent = elsewhere(move || {
            run_on(pid, cpus.as_ref());
            let files: Vec<_> = [&output, &errors].into_iter().chain(&files).collect();
            send(&socket, &words, &files)
                .map_err(|source| Error::system("giving a spare VMM its VM", source))
        });
        match sent.await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.end().await;
                Err(error)
            }
        }
    }
}

impl std::fmt::Debug for Spare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spare").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

/// Sets the CPUs that a process of one thread runs on. If its control groups allow none of them, it
/// runs where they let it, as any VMM does.
fn run_on(pid: i32, cpus: Option<&CpuSet>) {
    if let (Some(pid), Some(cpus)) = (Pid::from_raw(pid), cpus) {
        let _ = rustix::thread::sched_setaffinity(Some(pid), cpus);
    }
}

/// Sends a command line, with the descriptors that it names behind the standard streams.
fn send(socket: &OwnedFd, words: &[OsString], files: &[&OwnedFd]) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let message = spare::encode(words).ok_or_else(invalid)?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    if files.len() > MOST_FILES || !attached.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(invalid());
    }
    // There is room: it is the only message.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&message)], &mut attached, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SpareSpec {
        SpareSpec { credentials: None, cgroup_procs: Vec::new(), gives_back: false }
    }

    #[tokio::test]
    async fn a_spare_that_does_not_come_to_wait_is_quoted() {
        if accel::open_kvm().is_err() {
            return println!("SKIPPED: a_spare_that_does_not_come_to_wait_is_quoted: /dev/kvm");
        }
        // ls rejects the option and reports it on standard error.
        let error = Spare::start(Path::new("/bin/ls"), &spec()).await.unwrap_err();
        let Error::Died { exit } = &error else { panic!("{error}") };
        assert_eq!(exit.code, Some(2));
        assert!(exit.stderr.contains("--spare"), "{}", exit.stderr);
        let error = Spare::start(Path::new("/nonexistent/vmm"), &spec()).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot start /nonexistent/vmm"), "{error}");
    }

    #[test]
    fn a_message_has_the_streams_before_the_other_descriptors() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
        let (ours, theirs) = pair.unwrap();
        let pipes = [(); 3].map(|()| rustix::pipe::pipe().unwrap());
        let words = ["--memory".into(), "fd:128".into()];
        send(&ours, &words, &pipes.each_ref().map(|(reader, _)| reader)).unwrap();
        let mut bytes = vec![0; spare::MAX_BYTES];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = receive(&theirs, &mut parts, &Bin::new(), RecvFlags::empty()).unwrap();
        assert_eq!(spare::decode(&bytes[..received.bytes]), Some(words.to_vec()));
        for (file, (_, writer)) in received.files.iter().zip(&pipes) {
            rustix::io::write(writer, b"x").unwrap();
            assert_eq!(rustix::io::read(file.as_fd(), &mut [0; 2]).unwrap(), 1);
        }
        assert_eq!(received.files.len(), 3);
        let many = vec![&pipes[0].0; MOST_FILES + 1];
        let refused = send(&ours, &words, &many).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        let refused = send(&ours, &["a\0b".into()], &[]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        drop(theirs);
        let gone = send(&ours, &words, &[&pipes[0].0]).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }
}
