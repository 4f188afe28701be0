//! Where the kernel makes the pages of a mapping.
#![allow(unsafe_code)] // mbind(2), set_mempolicy(2)

use std::io;

use crate::NumaNode;

const WORD: usize = u64::BITS as usize;
/// The number of bits of a mask, which the kernel takes to be one less.
const BITS: usize = NumaNode::MOST + 1;

type Mask = [u64; NumaNode::MOST / WORD];

fn mask(node: NumaNode) -> Mask {
    let mut mask = Mask::default();
    let number = usize::from(node.number());
    mask[number / WORD] |= 1 << (number % WORD);
    mask
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the kernel make pages of `len` bytes from `address` on, whole pages of a mapping of this
/// process, on `node` from now on: those that a thread touches through this mapping
/// (`MPOL_PREFERRED` of mbind(2)). Pages that are there stay where they are, and other nodes' pages
/// are taken when the node has none left.
///
/// A file of base pages in memory (tmpfs, memfd) keeps this for the bytes that are mapped, whoever
/// makes their pages. A file of huge pages (hugetlbfs) does not: each mapping has its own.
///
/// # Errors
/// The errors of mbind(2): the process may not use the node's memory, the range is not mapped or
/// its address is no multiple of a page, or the kernel has no NUMA.
pub fn prefer(address: u64, len: u64, node: NumaNode) -> io::Result<()> {
    let nodes = mask(node);
    // Static: the home of memory is a node of the host, whatever nodes the process may use later.
    let policy = libc::MPOL_PREFERRED | libc::MPOL_F_STATIC_NODES;
    // SAFETY: the kernel reads the mask during the call. Without flags the call changes no byte and
    // no page of the range, only where pages are made later; no address is invalid for it.
    check(unsafe {
        libc::syscall(libc::SYS_mbind, address, len, policy, nodes.as_ptr(), BITS, 0_u32)
    })
}

/// Does `work` while the calling thread can have memory of `node` only (`MPOL_BIND` of
/// set_mempolicy(2)): where the kernel reserves huge pages, it heeds this and no mapping's policy.
///
/// # Errors
/// The errors of get_mempolicy(2) and set_mempolicy(2), before `work`: the process may not use the
/// node's memory, or the kernel has no NUMA.
pub fn bound_to<T>(node: NumaNode, work: impl FnOnce() -> T) -> io::Result<T> {
    let (mut mode, mut nodes) = (libc::MPOL_DEFAULT, Mask::default());
    let (none, mode_of, mask_of) = (0_usize, &raw mut mode, nodes.as_mut_ptr());
    // SAFETY: the kernel writes the mode and at most the bits of the mask during the call.
    check(unsafe { libc::syscall(libc::SYS_get_mempolicy, mode_of, mask_of, BITS, none, none) })?;
    let set = |mode: libc::c_int, nodes: &Mask| {
        // SAFETY: the kernel reads the mask during the call, which changes no memory.
        check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes.as_ptr(), BITS) })
    };
    set(libc::MPOL_BIND | libc::MPOL_F_STATIC_NODES, &mask(node))?;
    let result = work();
    // As it was before; refused only if a cpuset has changed meanwhile, and then the default.
    let _ = set(mode, &nodes).or_else(|_| set(libc::MPOL_DEFAULT, &Mask::default()));
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mapped_pages_and_nodes_of_the_host_are_taken() {
        let first = NumaNode::new(0).unwrap();
        let refused = prefer(4096, 4096, first).unwrap_err();
        if refused.raw_os_error() == Some(libc::ENOSYS) {
            println!("SKIPPED: only_mapped_pages_and_nodes_of_the_host_are_taken: needs NUMA");
            return;
        }
        let page = rustix::param::page_size() as u64;
        let (any, flags) = (std::ptr::null_mut(), rustix::mm::MapFlags::PRIVATE);
        let prot = rustix::mm::ProtFlags::READ;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(any, 2 * page as usize, prot, flags) };
        let start = start.unwrap().addr() as u64;
        prefer(start, 2 * page, first).unwrap();
        assert!(prefer(start + 1, page, first).is_err());
        assert!(prefer(start, page, NumaNode::new(1023).unwrap()).is_err());
    }

    #[test]
    fn a_thread_is_bound_for_a_while() {
        let (first, last) = (NumaNode::new(0).unwrap(), NumaNode::new(1023).unwrap());
        let name = "a_thread_is_bound_for_a_while";
        match bound_to(first, || 7) {
            Err(error) => println!("SKIPPED: {name}: needs NUMA: {error}"),
            Ok(result) => {
                assert_eq!(result, 7);
                let nested = bound_to(first, || bound_to(first, || 8).unwrap());
                assert_eq!(nested.unwrap(), 8);
                assert!(bound_to(last, || panic!("there is no such node")).is_err());
            }
        }
    }
}
