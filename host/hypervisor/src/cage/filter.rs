//! The system calls that are refused to a caged process: those that reach beyond its namespaces.
//!
//! Namespaces do not cover everything. Sockets of most families (`AF_VSOCK`, `AF_ALG`, some of
//! netlink) belong to the whole machine, keyrings to a user id, the contexts of `io_setup` to all
//! processes; and a process without capabilities gets some in a user namespace that it makes. A VMM
//! needs none of this.
//!
//! io_uring makes sockets that no filter sees, so only a VMM that emulates disks may use it. Only
//! such a VMM may punch holes into files as it likes: a hole in guest memory makes a process that
//! copies from it wait until the kernel has made the hole. A VMM that gives its guest's memory back
//! may punch holes that are made soon, of [`MAX_HOLE`] bytes at most, and by its mappings alone: a
//! descriptor of memory that a pool serves cannot be written to.
//!
//! This filter belongs to the cage, independently of any filter that a VMM adds itself: the kernel
//! takes the stricter answer of the two.
//!
//! A further call that is refused is in `DENIED`, or has a decision in `filter`. Neither
//! `slipway-vmm` (`front/vmm`, `filter`) nor `slipway-fs` (`front/fs`, `filter`) nor QEMU may need
//! it. Tests: `tests/cage_as_root`, whose program makes the calls within a cage. `SECURITY.md` says
//! what a caged process can do.

use libc::c_long;
use slipway_machine::MAX_HOLE;
use slipway_syscall_filter::{Action, Comparison, Decision, Operator, Program, Rules, any_bit};

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
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// The modes of fallocate(2) that remove pages from a file.
const TAKES_PAGES: libc::c_int =
    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_ZERO_RANGE;

/// The holes that a VMM may punch into files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Holes {
    /// The VMM must not punch any.
    #[default]
    None,
    /// Of [`MAX_HOLE`] bytes at most: the VMM gives memory back that the guest has
    /// unplugged, or reported as free.
    Small,
}

impl Holes {
    /// Returns the holes that a VMM may punch, which gives memory back or does not.
    pub(crate) fn of(gives_back: bool) -> Self {
        if gives_back { Self::Small } else { Self::None }
    }
}

/// Returns the filter of a cage. With `own_disks`, the VMM emulates disks itself, and may do more
/// than `holes` says.
pub(crate) fn filter(own_disks: bool, holes: Holes) -> Program {
    let mut rules = Rules::new(Action::ALLOW);
    rules.set(&DENIED, &Decision::Always(Action::REFUSE));
    if !own_disks {
        rules.set(&[libc::SYS_io_uring_setup], &Decision::Always(Action::MISSING));
        let refuse = Action::errno(libc::EOPNOTSUPP as u32);
        let taken = any_bit(1, TAKES_PAGES, refuse).collect();
        rules.set(&[libc::SYS_fallocate], &Decision::Cases(taken));
        rules.set(&[libc::SYS_madvise], &advice(holes));
    }
    // The flags of clone3 lie in memory, which a filter cannot read. After ENOSYS the C library
    // uses clone.
    rules.set(&[libc::SYS_clone3], &Decision::Always(Action::MISSING));
    let namespaces = any_bit(0, NAMESPACES, Action::REFUSE).collect();
    rules.set(&[libc::SYS_clone], &Decision::Cases(namespaces));
    rules.set(&[libc::SYS_socket, libc::SYS_socketpair], &families());
    rules.assemble()
}

/// Returns the decision about madvise(2), of which advice can take pages away.
fn advice(holes: Holes) -> Decision {
    let small = vec![
        Comparison::word(2, libc::MADV_REMOVE),
        Comparison::new(1, Operator::LessOrEqual, MAX_HOLE),
    ];
    let small = (holes == Holes::Small).then_some((small, Action::ALLOW));
    let refused = [libc::MADV_REMOVE, libc::MADV_COLD, libc::MADV_PAGEOUT];
    let refuse = Action::errno(libc::EINVAL as u32);
    let case = |advice| (vec![Comparison::word(2, advice)], refuse);
    Decision::Cases(small.into_iter().chain(refused.map(case)).collect())
}

/// Returns the decision about sockets: they are of the family `AF_UNIX`.
fn families() -> Decision {
    let unix = vec![Comparison::word(0, libc::AF_UNIX)];
    let others = (Vec::new(), Action::errno(libc::EAFNOSUPPORT as u32));
    Decision::Cases(vec![(unix, Action::ALLOW), others])
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

    use super::*;

    /// Returns which of these lengths can be made holes of by a thread with the filter, and whether
    /// the thread can make a hole by a descriptor.
    fn holes(allowed: Holes) -> (Vec<bool>, bool) {
        let run = move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            filter(false, allowed).apply().unwrap();
            let file = memfd_create(c"file", MemfdFlags::CLOEXEC).unwrap();
            let (len, any) = (8 << 20, std::ptr::null_mut());
            ftruncate(&file, len as u64).unwrap();
            let both = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a fresh mapping at an address of the kernel's choice, which ends with the
            // process.
            let base = unsafe { mmap(any, len, both, MapFlags::SHARED, &file, 0) }.unwrap();
            // SAFETY: the range is the mapping's, and nobody uses its bytes.
            let remove = |len| unsafe { madvise(base, len, Advice::LinuxRemove) }.is_ok();
            let done = [1, 2 << 20, (2 << 20) + 1, len].map(remove).to_vec();
            assert!(fallocate(&file, FallocateFlags::empty(), 0, 4096).is_ok(), "takes no page");
            let modes = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE];
            let punch = |mode| fallocate(&file, mode | FallocateFlags::KEEP_SIZE, 0, 4096).is_ok();
            (done, modes.into_iter().any(punch))
        };
        std::thread::spawn(run).join().unwrap()
    }

    #[test]
    fn holes_are_small_if_there_are_any() {
        assert_eq!(holes(Holes::None), (vec![false; 4], false));
        assert_eq!(holes(Holes::Small), (vec![true, true, false, false], false));
    }
}
