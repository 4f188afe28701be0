//! Child processes that share the launcher's memory until they run their program.
//!
//! fork(2) copies the page tables of a process, and exec(3) takes the copy apart: milliseconds for
//! a daemon that has the memory of many guests mapped. A child of [`Spawn::run`] is made as by
//! vfork(2) instead: it runs in the launcher's memory, on a stack of its own, while the calling
//! thread waits (clone(2), `CLONE_VM` and `CLONE_VFORK`). It is made in its control group of v2 and
//! in its process namespace: a process that is moved to a group later waits for all CPUs of the
//! host, for 7 ms where one is idle (Linux, `cgroup_attach_lock` and *kernel/rcu/sync.c*). It moves
//! its one thread to groups of v1, which has no such wait.
//!
//! Until it runs its program a child makes system calls on prepared data, and nothing else: other
//! threads of the launcher go on, and may have any lock. Signals are blocked meanwhile, and those
//! that the launcher handles have their default action in the child.
//!
//! When a child gives up its user, the kernel marks the memory that it runs in as not to be dumped
//! or traced by that user (prctl(2), `PR_SET_DUMPABLE`; with `fs.suid_dumpable` 0, the default, or
//! 2). The launcher stays marked: its memory has bytes of guests.

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// The exit status of a child that could not run its program. Nobody sees it.
const NOT_RUN: c_int = 127;
/// `CLONE_CLEAR_SIGHAND` (Linux 5.5).
const CLEAR_SIGHAND: u64 = 1 << 32;
/// `CLONE_INTO_CGROUP` (Linux 5.7).
const INTO_CGROUP: u64 = 1 << 33;
/// Bytes of a child's stack. Its steps take a few hundred.
const STACK: usize = 64 << 10;
/// Bytes below a stack that nothing can be written to.
const GUARD: usize = 64 << 10;

/// A program to be run in a child, with its arguments and an empty environment.
pub(crate) struct Spawn {
    program: CString,
    /// The name of the program and its arguments.
    words: Vec<CString>,
    directory: CString,
    /// Standard input, output and error.
    streams: [OwnedFd; 3],
    /// The child is the first process of a process namespace.
    namespace: bool,
    /// The directory of the child's control group, of cgroup v2.
    group: Option<OwnedFd>,
}

/// The data of a child until it runs its program. The launcher's memory, so that the launcher finds
/// the error there.
struct Birth<'a> {
    spawn: &'a Spawn,
    /// Pointers to the words, and a null pointer.
    words: Vec<*const c_char>,
    steps: &'a dyn Fn() -> io::Result<()>,
    /// The errno of the step that failed; 0 if none did.
    error: c_int,
}

impl Spawn {
    /// Prepares the program at the path `program`, run in `directory` with these `streams`.
    ///
    /// # Errors
    /// `InvalidInput` if a path or an argument has a zero byte.
    pub(crate) fn new(
        program: &Path,
        arguments: Vec<OsString>,
        directory: &Path,
        streams: [OwnedFd; 3],
    ) -> io::Result<Self> {
        let text = |path: &Path| CString::new(path.as_os_str().as_encoded_bytes());
        let words = arguments.into_iter().map(|word| CString::new(word.into_vec()));
        let words = std::iter::once(text(program)).chain(words).collect::<Result<_, _>>()?;
        let (program, directory) = (text(program)?, text(directory)?);
        Ok(Self { program, words, directory, streams, namespace: false, group: None })
    }

    /// Has the child be the first process of a new process namespace, which needs rights.
    pub(crate) fn set_new_namespace(&mut self) {
        self.namespace = true;
    }

    /// Has the child begin in the control group with the directory `group`, of cgroup v2.
    pub(crate) fn set_group(&mut self, group: OwnedFd) {
        self.group = Some(group);
    }

    /// Runs the program in a child once `steps` have succeeded there. Waits until it runs.
    ///
    /// # Errors
    /// That of a step, of making the process, or of running the program.
    ///
    /// # Safety
    /// `steps` make system calls on data that they borrow, and do nothing else: they do not
    /// allocate, lock, or free anything, and do not panic.
    pub(crate) unsafe fn run(&self, steps: &dyn Fn() -> io::Result<()>) -> io::Result<Child> {
        let words = self.words.iter().map(|word| word.as_ptr());
        let words = words.chain(std::iter::once(std::ptr::null())).collect();
        let mut birth = Birth { spawn: self, words, steps, error: 0 };
        let stack = Stack::new()?;
        let blocked = Blocked::all()?;
        // SAFETY: the stack and the data outlive the call, which returns once the child has left
        // this memory.
        let made = unsafe { self.clone_into(&stack, &mut birth) };
        drop(blocked);
        let child = made?;
        match birth.error {
            0 => Ok(child),
            errno => {
                // It has ended by itself.
                let mut child = child;
                let _ = child.wait();
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }

    /// Returns the arguments of clone3(2) for a child on `stack`. The kernel stores a descriptor of
    /// the child's process at `pidfd`.
    fn clone_arguments(&self, stack: &Stack, pidfd: &mut c_int) -> libc::clone_args {
        let flags = [
            libc::CLONE_VM as u64,
            libc::CLONE_VFORK as u64,
            libc::CLONE_PIDFD as u64,
            CLEAR_SIGHAND,
            if self.namespace { libc::CLONE_NEWPID as u64 } else { 0 },
            if self.group.is_some() { INTO_CGROUP } else { 0 },
        ];
        libc::clone_args {
            flags: flags.into_iter().fold(0, |all, flag| all | flag),
            pidfd: (&raw mut *pidfd).expose_provenance() as u64,
            child_tid: 0,
            parent_tid: 0,
            exit_signal: libc::SIGCHLD as u64,
            stack: stack.lowest().expose_provenance() as u64,
            stack_size: STACK as u64,
            tls: 0,
            set_tid: 0,
            set_tid_size: 0,
            cgroup: self.group.as_ref().map_or(0, |group| group.as_raw_fd() as u64),
        }
    }

    /// Makes the child, which begins in [`begin`].
    ///
    /// # Safety
    /// `birth` is valid, and `stack` is used by nobody else.
    unsafe fn clone_into(&self, stack: &Stack, birth: &mut Birth<'_>) -> io::Result<Child> {
        let mut pidfd: c_int = -1;
        let arguments = self.clone_arguments(stack, &mut pidfd);
        let birth: *mut c_void = (&raw mut *birth).cast();
        let result: i64;
        // SAFETY: clone3(2) returns twice. In the child, whose stack is the new one and empty, the
        // next instructions call `begin`, which never returns. In this thread, which has waited
        // until the child left this memory, only the result has changed, and what the kernel
        // clobbers.
        unsafe {
            std::arch::asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r12",
                "call r13",
                "ud2",
                "2:",
                inlateout("rax") libc::SYS_clone3 => result,
                in("rdi") &raw const arguments,
                in("rsi") size_of::<libc::clone_args>(),
                in("r12") birth,
                in("r13") begin as extern "C" fn(*mut c_void) -> !,
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        if result <= 0 {
            return Err(io::Error::from_raw_os_error(-result as i32));
        }
        let pid = i32::try_from(result).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("the kernel gave no process id"))?;
        // SAFETY: the kernel has just made this descriptor for the caller.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        Ok(Child { pid, pidfd, status: None })
    }
}

/// The first function of a child.
extern "C" fn begin(birth: *mut c_void) -> ! {
    // SAFETY: the launcher's thread, which waits, has made it and uses it afterwards only.
    let birth = unsafe { &mut *birth.cast::<Birth<'_>>() };
    let error = match birth.prepare() {
        Ok(()) => birth.execute(),
        Err(error) => error,
    };
    birth.error = error.raw_os_error().unwrap_or(libc::EIO);
    // SAFETY: ends this process alone, which has one thread; no memory effects.
    unsafe { libc::_exit(NOT_RUN) }
}

impl Birth<'_> {
    fn prepare(&self) -> io::Result<()> {
        for (stream, number) in self.spawn.streams.iter().zip(0 as RawFd..) {
            // The standard library has opened these numbers before `main`, so that no other
            // descriptor has one of them.
            place(stream.as_fd(), number)?;
        }
        rustix::process::chdir(self.spawn.directory.as_c_str())?;
        (self.steps)()
    }

    /// Runs the program. Returns if that fails.
    fn execute(&self) -> io::Error {
        let none = [std::ptr::null::<c_char>()];
        // The standard library ignores this one, and what is ignored stays so.
        default_action(libc::SIGPIPE);
        unblock();
        // SAFETY: all pointers are to strings that end with zero, and to lists that end with null.
        unsafe { libc::execve(self.spawn.program.as_ptr(), self.words.as_ptr(), none.as_ptr()) };
        io::Error::last_os_error()
    }
}

/// Gives a descriptor the number `to` as well, where it stays open for the program.
fn place(from: BorrowedFd<'_>, to: RawFd) -> io::Result<()> {
    // SAFETY: the table of descriptors is the child's own, and nothing in it uses the number.
    let placed = unsafe {
        if from.as_raw_fd() == to {
            // dup2(2) onto the same number does nothing, so close-on-exec would stay.
            libc::fcntl(to, libc::F_SETFD, 0)
        } else {
            libc::dup2(from.as_raw_fd(), to)
        }
    };
    if placed < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a signal its default action in the calling process.
fn default_action(signal: c_int) {
    // SAFETY: all zeros is the default action, without flags; the old one is not asked for.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

/// Has no signal blocked in the calling thread.
fn unblock() {
    // SAFETY: an empty set; the old one is not asked for.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// A child's stack, with pages below it that cannot be written to.
struct Stack(*mut c_void);

impl Stack {
    fn new() -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            let (none, private) = (ProtFlags::empty(), MapFlags::PRIVATE);
            mmap_anonymous(std::ptr::null_mut(), GUARD + STACK, none, private)?
        };
        let stack = Self(base);
        // SAFETY: a part of the mapping just made, which nothing refers to yet.
        unsafe { mprotect(stack.lowest(), STACK, MprotectFlags::READ | MprotectFlags::WRITE)? };
        Ok(stack)
    }

    /// Returns its lowest byte.
    fn lowest(&self) -> *mut c_void {
        self.0.wrapping_byte_add(GUARD)
    }
}

impl Drop for Stack {
    #[allow(clippy::disallowed_methods)] // small, and of no client's file
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and no child runs on it any more.
        let _ = unsafe { munmap(self.0, GUARD + STACK) };
    }
}

/// All signals are blocked in a thread until this is dropped. A handler would run in a child on the
/// launcher's memory.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> io::Result<Self> {
        // SAFETY: both sets are valid; the kernel writes the old one.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(Self(before)),
                errno => Err(io::Error::from_raw_os_error(errno)),
            }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is valid; the old one is not asked for.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

/// A child that only this object waits for.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    status: Option<ExitStatus>,
}

impl Child {
    /// Returns the process id, which is valid until [`Child::wait`] has returned.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the pidfd.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Waits for the end of the child and reaps it.
    ///
    /// # Errors
    /// The errors of waitid(2).
    pub(crate) fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        let options = WaitIdOptions::EXITED;
        let ended = rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(self.pidfd()), options))?;
        // As wait(2) gives it.
        let status =
            ended.map_or(0, |ended| match (ended.exit_status(), ended.terminating_signal()) {
                (Some(code), _) => code << 8,
                (None, Some(signal)) => signal,
                (None, None) => 0,
            });
        let status = ExitStatus::from_raw(status);
        self.status = Some(status);
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    /// Prepares a shell that runs `script`. Returns its output's other end as well.
    fn shell(script: &str) -> (Spawn, File) {
        let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = File::open("/dev/null").unwrap();
        let streams = [null.into(), to.try_clone().unwrap(), to];
        let words = vec!["-c".into(), script.into()];
        (Spawn::new(Path::new("/bin/sh"), words, Path::new("/"), streams).unwrap(), from.into())
    }

    fn run(spawn: &Spawn) -> io::Result<Child> {
        // SAFETY: no step at all.
        unsafe { spawn.run(&|| Ok(())) }
    }

    fn text(mut from: File, spawn: Spawn) -> String {
        drop(spawn);
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_child_ends_with_its_status_or_signal() {
        let mut child = run(&shell("exit 7").0).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert_eq!(child.wait().unwrap().code(), Some(7), "once it is reaped as well");
        let mut child = run(&shell("kill -9 $$").0).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_child_has_no_environment_no_handler_and_no_blocked_signal() {
        let (spawn, from) = shell("pwd; env; cat /proc/self/status");
        let mut child = run(&spawn).unwrap();
        assert!(child.wait().unwrap().success());
        let text = text(from, spawn);
        assert!(text.starts_with("/\n"), "{text}");
        // The shell sets the last two itself.
        let own = |line: &&str| line.starts_with("PWD=") || line.starts_with("_=");
        assert!(!text.lines().any(|line| line.contains('=') && !own(&line)), "{text}");
        let mask = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
        };
        assert_eq!((mask("SigBlk:"), mask("SigCgt:")), (0, 0));
        // Whoever started this process may have it ignore others.
        assert_eq!(mask("SigIgn:") & 1 << (libc::SIGPIPE - 1), 0, "{text}");
    }

    #[test]
    fn the_launcher_is_told_why_no_program_runs() {
        let (mut spawn, _from) = shell("true");
        // SAFETY: makes one system call.
        let refused = unsafe { spawn.run(&|| Ok(rustix::process::chdir(c"/nonexistent")?)) };
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::NotFound);
        spawn.program = c"/".into();
        assert_eq!(run(&spawn).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let null = || File::open("/dev/null").unwrap().into();
        let words = vec!["a\0b".into()];
        let refused = Spawn::new(Path::new("/"), words, Path::new("/"), [null(), null(), null()]);
        assert_eq!(refused.err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_process_that_is_not_made_is_an_error() {
        let (mut spawn, _from) = shell("true");
        // No control group, so that the kernel makes no process.
        spawn.set_group(File::open("/dev/null").unwrap().into());
        assert_eq!(run(&spawn).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_descriptor_that_has_its_number_already_stays_open_for_the_program() {
        let (spawn, from) = shell("echo here >&9");
        // SAFETY: makes system calls. They change the child's table of descriptors, not this one's.
        let ran = unsafe {
            spawn.run(&|| {
                let kept = libc::dup3(1, 9, libc::O_CLOEXEC);
                place(BorrowedFd::borrow_raw(kept), kept)
            })
        };
        assert!(ran.unwrap().wait().unwrap().success());
        assert_eq!(text(from, spawn), "here\n");
    }

    #[test]
    fn signals_of_the_launchers_thread_are_as_before() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            status.lines().find(|line| line.starts_with("SigBlk")).unwrap().to_owned()
        };
        let before = blocked();
        run(&shell("true").0).unwrap().wait().unwrap();
        assert_eq!(blocked(), before);
    }
}
