//! The system calls that the process needs once it serves: what one that was taken over can still
//! ask of the kernel. All others fail with EPERM.
//!
//! Sockets cannot be made, programs not run, and memory not be made executable. Files are opened
//! beneath the process's root, which has the shares alone. Device nodes cannot be made, for lack of
//! the capability.
//!
//! A new call is in the list of its kind, or has a decision in `rules` if its arguments matter.
//! It must not be among those that the launcher refuses (`host/hypervisor`, `cage/filter.rs`). The
//! tests below make calls under the filter; `tests/serves_as_root.rs` of this crate and
//! `73-shares.sh` of `tests/e2e` find a call that is missing.

use libc::c_long;
use slipway_syscall_filter::{Action, Comparison, Decision, Rules};

/// Calls of any thread: locks, memory, signals, its end.
const THREADS: [c_long; 24] = [
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getrusage,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// Calls of the thread that serves the sockets, and of those that close what a client leaves.
const SOCKETS: [c_long; 23] = [
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
    libc::SYS_getsockopt,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_submit,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_preadv2,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Operations on files.
const FILES: [c_long; 44] = [
    libc::SYS_copy_file_range,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_tgkill,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Calls by which a thread acts as a user of the guest's.
const USERS: [c_long; 7] = [
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getuid,
    libc::SYS_setgroups,
];

/// Flags of clone(2) that give a new process or thread namespaces of its own.
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// Applies the list to the calling thread and to those that it starts, for good.
///
/// # Errors
/// The kernel has no filters of system calls.
pub fn apply() -> Result<(), String> {
    let applied = rustix::thread::set_no_new_privs(true).map_err(Into::into);
    let applied = applied.and_then(|()| rules().assemble().apply());
    applied.map_err(|error| format!("no list of system calls: {error}"))
}

fn rules() -> Rules {
    let mut rules = Rules::new(Action::REFUSE);
    let calls = THREADS.iter().chain(&SOCKETS).chain(&FILES).chain(&USERS);
    rules.set(calls, &Decision::Always(Action::ALLOW));
    // Its flags lie in memory and cannot be checked. After ENOSYS the C library uses clone(2).
    rules.set(&[libc::SYS_clone3], &Decision::Always(Action::MISSING));
    // A new thread is one of this process, in its namespaces: a new process could have a user
    // namespace of its own, and all rights there.
    let thread = libc::CLONE_VM | libc::CLONE_THREAD;
    let thread = Comparison::bits(0, thread | NEW_NAMESPACES, thread);
    rules.set(&[libc::SYS_clone], &Decision::allow_if([thread]));
    // Only the effective user changes: by the real one the daemon finds the process.
    let kept = [0, 2].map(|argument| Comparison::word(argument, -1));
    let kept = Decision::Cases(vec![(kept.to_vec(), Action::ALLOW)]);
    rules.set(&[libc::SYS_setresuid, libc::SYS_setresgid], &kept);
    // Memory may be readable and writable, and nothing else.
    let plain = Decision::allow_if([Comparison::bits(2, libc::PROT_EXEC, 0)]);
    rules.set(&[libc::SYS_mmap, libc::SYS_mprotect], &plain);
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` on a thread that has the list.
    fn listed<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        let thread = || {
            apply().unwrap();
            work()
        };
        std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
    }

    /// Returns the error of a clone(2) with these flags. If there is none, the new process ends.
    fn clone_error(flags: libc::c_int) -> Option<i32> {
        extern "C" fn end(_: *mut libc::c_void) -> libc::c_int {
            0
        }
        let mut stack = vec![0_u128; 4096];
        // SAFETY: the new process has a stack of its own, which is there until it ends: with
        // CLONE_VFORK this thread waits for that. It touches nothing else.
        unsafe {
            let top = stack.as_mut_ptr().add(stack.len()).cast();
            match libc::clone(end, top, flags | libc::CLONE_VFORK, std::ptr::null_mut()) {
                0.. => None,
                _ => std::io::Error::last_os_error().raw_os_error(),
            }
        }
    }

    #[test]
    fn the_real_user_stays() {
        const KEPT: libc::uid_t = libc::uid_t::MAX;
        // SAFETY: system calls of this thread alone, without memory effects.
        let call = |number, ids: [libc::uid_t; 3]| match unsafe {
            libc::syscall(number, ids[0], ids[1], ids[2])
        } {
            0 => None,
            _ => std::io::Error::last_os_error().raw_os_error(),
        };
        // SAFETY: they have no effects.
        let own = unsafe {
            [(libc::SYS_setresuid, libc::geteuid()), (libc::SYS_setresgid, libc::getegid())]
        };
        for (number, id) in own {
            assert_eq!(listed(|| call(number, [KEPT, id, KEPT])), None);
            for ids in [[id, KEPT, KEPT], [KEPT, KEPT, id], [id, id, id]] {
                assert_eq!(listed(|| call(number, ids)), Some(libc::EPERM), "{ids:?}");
            }
        }
    }

    #[test]
    fn a_new_thread_is_one_of_the_process() {
        let child = libc::CLONE_VM | libc::SIGCHLD;
        for flags in [0, libc::CLONE_NEWUSER, libc::CLONE_NEWUSER | libc::CLONE_NEWNS] {
            assert_eq!(listed(|| clone_error(child | flags)), Some(libc::EPERM), "{flags:x}");
        }
        assert_eq!(listed(|| clone_error(libc::SIGCHLD)), Some(libc::EPERM), "fork");
        let answer = listed(|| std::thread::scope(|scope| scope.spawn(|| 7).join().unwrap()));
        assert_eq!(answer, 7);
    }
}
