//! The system calls that are refused to a caged process: those that reach beyond its namespaces.
//!
//! Namespaces do not cover everything. Sockets of most families (`AF_VSOCK`, `AF_ALG`, some of
//! netlink) belong to the whole machine, keyrings to a user id, the contexts of `io_setup` to all
//! processes; and a process without capabilities gets some in a user namespace that it makes. A VMM
//! needs none of this.
//!
//! io_uring makes sockets that no filter sees, so only a VMM that emulates disks may use it. Only
//! such a VMM may punch holes into files as it likes: a hole in guest memory makes a process that
//! copies from it wait until the kernel has made the hole. A VMM that gives hot-plug memory back
//! may punch holes that are made soon, of [`MAX_HOLE`] bytes at most.
//!
//! This filter belongs to the cage, independently of any filter that a VMM adds itself: the kernel
//! takes the stricter answer of the two.

use std::io;
use std::mem::offset_of;

use libc::{c_long, seccomp_data, sock_filter};
use slipway_machine::MAX_HOLE;

/// The calls that fail with EPERM.
const DENIED: [c_long; 17] = [
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    // A machine has few contexts for asynchronous I/O.
    libc::SYS_io_setup,
    libc::SYS_fanotify_init,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
];

/// The flags of clone(2) that make namespaces.
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// `AUDIT_ARCH_X86_64` of *linux/audit.h*.
const ARCHITECTURE: u32 = 0xc000_003e;
/// The first number of the x32 interface, whose calls have other numbers than the filter knows.
const X32: u32 = 0x4000_0000;

/// The modes of fallocate(2) that remove pages from a file.
const TAKES_PAGES: u32 = (libc::FALLOC_FL_PUNCH_HOLE
    | libc::FALLOC_FL_COLLAPSE_RANGE
    | libc::FALLOC_FL_ZERO_RANGE) as u32;

/// The mode of fallocate(2) that gives pages back.
const GIVES_BACK: u32 = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;

/// The holes that a VMM may punch into files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Holes {
    /// The VMM must not punch any.
    #[default]
    None,
    /// Of [`MAX_HOLE`] bytes at most: the VMM gives hot-plug memory back.
    Small,
}

/// Returns the offset of an argument of a call. Flags of clone, families of sockets, modes and
/// advice are 32 bits for the kernel as well: it ignores the upper half of the register, which is
/// stored after the lower one.
const fn argument(index: usize) -> usize {
    offset_of!(seccomp_data, args) + index * size_of::<u64>()
}

const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;

/// A classic BPF program for seccomp(2).
#[derive(Debug)]
pub(crate) struct Filter(Vec<sock_filter>);

impl Filter {
    /// Builds the filter of a cage. With `own_disks`, the VMM emulates disks itself, and may do
    /// more than `holes` says.
    pub(crate) fn new(own_disks: bool, holes: Holes) -> Self {
        let mut filter = Self(Vec::new());
        filter.load(offset_of!(seccomp_data, arch));
        filter.answer_unless(ARCHITECTURE, libc::SECCOMP_RET_KILL_PROCESS);
        filter.load(offset_of!(seccomp_data, nr));
        filter.answer_if(libc::BPF_JGE, X32, libc::SECCOMP_RET_KILL_PROCESS);
        for call in DENIED {
            filter.answer_if(libc::BPF_JEQ, call as u32, fails_with(libc::EPERM));
        }
        if !own_disks {
            let call = libc::SYS_io_uring_setup as u32;
            filter.answer_if(libc::BPF_JEQ, call, fails_with(libc::ENOSYS));
            let refuse = fails_with(libc::EOPNOTSUPP);
            filter.with_argument((libc::SYS_fallocate, 1), |filter| match holes {
                Holes::None => filter.answer_if(libc::BPF_JSET, TAKES_PAGES, refuse),
                Holes::Small => filter.small_holes(refuse),
            });
            filter.with_argument((libc::SYS_madvise, 2), |filter| {
                for advice in [libc::MADV_REMOVE, libc::MADV_COLD, libc::MADV_PAGEOUT] {
                    filter.answer_if(libc::BPF_JEQ, advice as u32, fails_with(libc::EINVAL));
                }
            });
        }
        // The flags of clone3 lie in memory, which a filter cannot read. After ENOSYS the C library
        // uses clone.
        let call = libc::SYS_clone3 as u32;
        filter.answer_if(libc::BPF_JEQ, call, fails_with(libc::ENOSYS));
        filter.with_argument((libc::SYS_clone, 0), |filter| {
            filter.answer_if(libc::BPF_JSET, NAMESPACES, fails_with(libc::EPERM));
        });
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            filter.with_argument((call, 0), |filter| {
                filter.answer_unless(libc::AF_UNIX as u32, fails_with(libc::EAFNOSUPPORT));
            });
        }
        filter.answer(ALLOWED);
        filter
    }

    /// Applies the filter to the calling process for good. The process must have set
    /// `no_new_privs`. Makes a system call only.
    pub(crate) fn apply(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: self.0.len() as u16,
            // The kernel copies the program and does not write to it.
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: `program` describes the whole vector, which the kernel only reads.
        let applied = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if applied < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Ends with `refuse` for a call of fallocate(2), whose mode is loaded, that takes pages from a
    /// file and is not a hole of [`MAX_HOLE`] bytes at most.
    fn small_holes(&mut self, refuse: u32) {
        self.push(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, TAKES_PAGES, (1, 0));
        self.answer(ALLOWED);
        self.answer_unless(GIVES_BACK, refuse);
        // The length has 64 bits, lower half first.
        self.load(argument(3) + size_of::<u32>());
        self.answer_unless(0, refuse);
        self.load(argument(3));
        self.answer_if(libc::BPF_JGT, MAX_HOLE as u32, refuse);
    }

    fn push(&mut self, code: u32, k: u32, (jt, jf): (u8, u8)) {
        self.0.push(sock_filter { code: code as u16, jt, jf, k });
    }

    /// Loads 32 bits of `seccomp_data`.
    fn load(&mut self, offset: usize) {
        self.push(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32, (0, 0));
    }

    fn answer(&mut self, answer: u32) {
        self.push(libc::BPF_RET | libc::BPF_K, answer, (0, 0));
    }

    /// Ends with `answer` if `test` holds for the loaded value and `k`.
    fn answer_if(&mut self, test: u32, k: u32, answer: u32) {
        self.push(libc::BPF_JMP | test | libc::BPF_K, k, (0, 1));
        self.answer(answer);
    }

    /// Ends with `answer` if the loaded value is not `k`.
    fn answer_unless(&mut self, k: u32, answer: u32) {
        self.push(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, (1, 0));
        self.answer(answer);
    }

    /// Filters the call `number` by its argument `index`: `look` adds the tests of the argument,
    /// and the call is allowed if none of them ends. Other calls continue behind, with their number
    /// loaded.
    fn with_argument(&mut self, (number, index): (c_long, usize), look: impl FnOnce(&mut Self)) {
        let jump = self.0.len();
        self.push(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number as u32, (0, 0));
        self.load(argument(index));
        look(self);
        self.answer(ALLOWED);
        self.0[jump].jf = (self.0.len() - jump - 1) as u8;
    }
}

fn fails_with(errno: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno as u32
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

    use super::*;

    /// Returns which of these lengths can be made holes of by a thread with the filter, and whether
    /// the thread can collapse a range.
    fn holes(allowed: Holes) -> (Vec<bool>, bool) {
        let run = move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            Filter::new(false, allowed).apply().unwrap();
            let file = memfd_create(c"file", MemfdFlags::CLOEXEC).unwrap();
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let lengths = [1, 2 << 20, (2 << 20) + 1, 1 << 32];
            assert!(fallocate(&file, FallocateFlags::empty(), 0, 4096).is_ok(), "takes no page");
            let done = lengths.map(|len| fallocate(&file, punch, 0, len).is_ok()).to_vec();
            let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            (done, fallocate(&file, zero, 0, 4096).is_ok())
        };
        std::thread::spawn(run).join().unwrap()
    }

    #[test]
    fn holes_are_small_if_there_are_any() {
        assert_eq!(holes(Holes::None), (vec![false; 4], false));
        assert_eq!(holes(Holes::Small), (vec![true, true, false, false], false));
    }
}
