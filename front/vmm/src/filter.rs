//! The system calls of each thread: what a VMM that was taken over can still ask of the kernel.
//!
//! Beside the launcher's filter, which refuses what reaches beyond the process for every VMM, each
//! thread of this one has a list of the calls that it needs once the machine is made. All others
//! fail with EPERM. No thread can open a file, make a socket, run a program, or make memory
//! executable.
//!
//! The faults of memory that a pool gave are served for this process's mappings, as they are. A
//! copy of them, in a child process or moved by mremap(2), would show what pages held before, and
//! so would pages that madvise(2) collapses into a huge one: no thread can do any of this.
//!
//! A new call is in the list of the thread that makes it, whose comment says what for; a call whose
//! arguments matter has a decision in `rules`. It must not be among those that the launcher
//! refuses (`host/hypervisor`, `cage/filter.rs`). What it gives to a VMM that was taken over is in
//! `SECURITY.md`. The tests below make calls under the filter; `tests/process` of this crate and
//! `70-kvm.sh` of `tests/e2e` find a call that is missing.

use libc::c_long;
use slipway_syscall_filter::{Action, Comparison, Decision, Operator, Rules};
use slipway_virtio_mem::PIECE;

/// A thread's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs a CPU.
    Cpu,
    /// Serves the control socket, the guest's ports and the connections of functions.
    Events,
    /// Makes huge pages of the guest's memory, which is not a pool's, and ends.
    Memory,
}

/// Calls of every thread: locks, memory, signals, its end, messages to the functions' servers, and
/// threads that close what servers have sent.
const EVERYWHERE: [c_long; 29] = [
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_munmap,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_preadv2,
    libc::SYS_read,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_write,
];

/// Advice on memory: what the C library gives back, and what core dumps leave out.
const ADVICE: [libc::c_int; 3] = [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_DONTDUMP];

/// Commands of fcntl(2): copies and flags of descriptors, seals of servers' files. No locks and no
/// leases, which other VMMs would notice on a file that they share.
const DESCRIPTORS: [libc::c_int; 6] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GET_SEALS,
];

/// Further calls of the event loop: clients, watches of connections, the eventfd of a new
/// function's pin, statistics, a socket's path that is removed at the end, a barrier for threads
/// that write to the guest's memory when their writes are noted.
const EVENTS: [c_long; 13] = [
    libc::SYS_accept4,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_getrusage,
    libc::SYS_getsockopt,
    libc::SYS_membarrier,
    libc::SYS_set_robust_list,
    libc::SYS_setsockopt,
    libc::SYS_unlink,
];

/// Further calls of a CPU's thread: the eventfd of a vector that the guest uses for the first time.
const CPU: [c_long; 3] = [libc::SYS_eventfd2, libc::SYS_epoll_ctl, libc::SYS_set_robust_list];

/// KVM's requests after the start (linux/kvm.h). Requests with `GET` in their names only read.
mod kvm {
    pub const GET_DIRTY_LOG: u64 = 0x4010_ae42;
    pub const GET_CLOCK: u64 = 0x8030_ae7c;
    pub const RUN: u64 = 0xae80;
    pub const GET_REGS: u64 = 0x8090_ae81;
    pub const SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
    pub const SET_GSI_ROUTING: u64 = 0x4008_ae6a;
    pub const IRQFD: u64 = 0x4020_ae76;
    pub const IOEVENTFD: u64 = 0x4040_ae79;
    pub const SIGNAL_MSI: u64 = 0x4020_aea5;
}

/// Requests that change interrupts and notifications, which guests make happen on a CPU's thread
/// and servers on the other.
const KVM_SHARED: [u64; 4] = [kvm::SET_GSI_ROUTING, kvm::IRQFD, kvm::IOEVENTFD, kvm::SIGNAL_MSI];
/// Further requests of a CPU's thread. Memory slots: the copy of configuration space is taken away
/// from a guest that uses virtio's window. They add nothing to a process that can write to all of
/// the guest's memory.
const KVM_CPU: [u64; 3] = [kvm::RUN, kvm::GET_REGS, kvm::SET_USER_MEMORY_REGION];
/// Further requests of a CPU's thread, which saves the CPU's state.
const KVM_CPU_STATE: [u64; 10] = [
    0x8138_ae83, // KVM_GET_SREGS
    0xc008_ae88, // KVM_GET_MSRS
    0x8400_ae8e, // KVM_GET_LAPIC
    0x8004_ae98, // KVM_GET_MP_STATE
    0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    0x8080_aea1, // KVM_GET_DEBUGREGS
    0xaea3,      // KVM_GET_TSC_KHZ
    0x9000_aea4, // KVM_GET_XSAVE
    0x8188_aea6, // KVM_GET_XCRS
    0x9000_aecf, // KVM_GET_XSAVE2
];
/// Further requests of the event loop and its threads, of which one saves the machine, and has KVM
/// note what is written to the memory slots meanwhile.
const KVM_EVENTS: [u64; 3] = [kvm::GET_CLOCK, kvm::GET_DIRTY_LOG, kvm::SET_USER_MEMORY_REGION];

/// Applies the role's list to the calling thread for good. Threads that it starts later have it as
/// well.
///
/// # Errors
/// The reason in one line.
pub fn apply(role: Role) -> Result<(), String> {
    let applied = rustix::thread::set_no_new_privs(true).map_err(Into::into);
    let applied = applied.and_then(|()| rules(role).assemble().apply());
    applied.map_err(|error| format!("the filter of system calls: {error}"))
}

fn rules(role: Role) -> Rules {
    let (calls, requests): (&[c_long], &[&[u64]]) = match role {
        Role::Cpu => (&CPU, &[&KVM_CPU, &KVM_SHARED, &KVM_CPU_STATE]),
        Role::Events => (&EVENTS, &[&KVM_SHARED, &KVM_EVENTS]),
        Role::Memory => (&[], &[&KVM_SHARED]),
    };
    let requests: Vec<_> = requests.concat().iter().map(|request| *request as i32).collect();
    let mut advice = ADVICE.to_vec();
    if role == Role::Memory {
        // In memory of a pool this would show what pages held before.
        advice.extend([libc::MADV_POPULATE_WRITE, libc::MADV_COLLAPSE]);
    }
    let mut rules = Rules::new(Action::REFUSE);
    rules.set(EVERYWHERE.iter().chain(calls), &Decision::Always(Action::ALLOW));
    rules.set(&[libc::SYS_ioctl], &one_of(1, &requests));
    rules.set(&[libc::SYS_fcntl], &one_of(1, &DESCRIPTORS));
    let mut advised = one_of(2, &advice);
    if let (Role::Events, Decision::Cases(cases)) = (role, &mut advised) {
        cases.push(gives_back());
    }
    rules.set(&[libc::SYS_madvise], &advised);
    // A new thread shares all memory.
    let thread = Comparison::bits(0, libc::CLONE_VM, libc::CLONE_VM);
    rules.set(&[libc::SYS_clone], &Decision::allow_if([thread]));
    // Its flags lie in memory and cannot be checked. The C library uses clone(2) then.
    rules.set(&[libc::SYS_clone3], &Decision::Always(Action::MISSING));
    // Memory may be readable and writable, and nothing else.
    let plain = Decision::allow_if([Comparison::bits(2, libc::PROT_EXEC, 0)]);
    rules.set(&[libc::SYS_mmap, libc::SYS_mprotect], &plain);
    rules
}

/// Returns the rule for a call that is allowed if an argument is one of these values.
fn one_of(index: u32, values: &[i32]) -> Decision {
    Decision::allow_if(values.iter().map(|value| Comparison::word(index, *value)))
}

/// Returns the case of madvise(2) that gives back at most a piece of the guest's memory. Others
/// that copy from the memory wait while a hole is made there.
fn gives_back() -> (Vec<Comparison>, Action) {
    let len = Comparison::new(1, Operator::LessOrEqual, PIECE);
    (vec![Comparison::word(2, libc::MADV_REMOVE), len], Action::ALLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` on a thread with the filter of `role`.
    fn filtered<T: Send + 'static>(role: Role, work: impl FnOnce() -> T + Send + 'static) -> T {
        let run = move || {
            apply(role).unwrap();
            work()
        };
        std::thread::spawn(run).join().unwrap()
    }

    #[test]
    fn a_thread_reaches_no_file_no_socket_and_no_program() {
        for role in [Role::Cpu, Role::Events] {
            let denied = |error: std::io::Error| error.raw_os_error() == Some(libc::EPERM);
            assert!(filtered(role, move || std::fs::File::open("/").err().is_some_and(denied)));
            assert!(filtered(role, move || {
                std::net::UdpSocket::bind("127.0.0.1:0").err().is_some_and(denied)
            }));
            assert!(filtered(role, move || {
                std::process::Command::new("/bin/true").spawn().err().is_some_and(denied)
            }));
            assert!(filtered(role, move || {
                // SAFETY: a fresh mapping at an address of the kernel's choice.
                let at = unsafe {
                    let prot = libc::PROT_READ | libc::PROT_EXEC;
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0)
                };
                at == libc::MAP_FAILED && denied(std::io::Error::last_os_error())
            }));
            // Copies of memory whose faults a pool serves.
            assert!(filtered(role, move || {
                // SAFETY: a child, if there were one, ends at once.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: ends this process without touching anything.
                    unsafe { libc::_exit(0) };
                }
                child < 0 && denied(std::io::Error::last_os_error())
            }));
            assert!(filtered(role, move || {
                // SAFETY: no mapping is at the null address.
                let moved = unsafe { libc::mremap(std::ptr::null_mut(), 4096, 8192, 0) };
                moved == libc::MAP_FAILED && denied(std::io::Error::last_os_error())
            }));
            assert!(filtered(role, move || {
                let advice = libc::MADV_COLLAPSE;
                // SAFETY: no mapping is at the null address.
                let collapsed = unsafe { libc::madvise(std::ptr::null_mut(), 4096, advice) };
                collapsed < 0 && denied(std::io::Error::last_os_error())
            }));
        }
    }

    /// Returns which of four holes the calling thread can make in a file of two pieces: by its
    /// mapping of one piece and of two, by its descriptor, or a page in place of a hole.
    fn makes_holes(file: &std::os::fd::OwnedFd) -> [bool; 4] {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let (piece, any) = (PIECE as usize, std::ptr::null_mut());
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody unmaps.
        let base = unsafe { mmap(any, 2 * piece, both, MapFlags::SHARED, file, 0) }.unwrap();
        // SAFETY: the range is the mapping's, and nobody uses its bytes.
        let remove = |len| unsafe { madvise(base, len, Advice::LinuxRemove) }.is_ok();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let allocate = |flags, len| fallocate(file, flags, 0, len).is_ok();
        let by_file = [allocate(punch, PIECE), allocate(FallocateFlags::empty(), 1)];
        [remove(piece), remove(2 * piece), by_file[0], by_file[1]]
    }

    #[test]
    fn holes_are_small_and_made_by_the_event_loop_alone() {
        let file = || {
            let file = rustix::fs::memfd_create(c"file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 2 * PIECE).unwrap();
            file
        };
        assert_eq!(makes_holes(&file()), [true; 4]);
        for (role, expected) in
            [(Role::Events, [true, false, false, false]), (Role::Cpu, [false; 4])]
        {
            let file = file();
            assert_eq!(filtered(role, move || makes_holes(&file)), expected, "{role:?}");
        }
    }

    #[test]
    fn a_thread_can_do_its_work() {
        let work = || {
            let memory = vec![1u8; 8 << 20];
            let (sender, receiver) = std::sync::mpsc::channel();
            sender.send(memory.len()).unwrap();
            receiver.recv().unwrap()
        };
        assert_eq!(filtered(Role::Cpu, work), 8 << 20);
        assert_eq!(
            filtered(Role::Events, move || std::thread::spawn(work).join().unwrap()),
            8 << 20
        );
    }
}
