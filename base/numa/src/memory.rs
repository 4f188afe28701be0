//! Where the kernel makes the pages of a mapping.
#![allow(unsafe_code)] // mbind(2)

use std::io;

use crate::NumaNode;

const WORD: usize = u64::BITS as usize;

/// Has the kernel make pages of `len` bytes from `address` on, whole pages of a mapping of this
/// process, on `node` from now on: those that a thread touches through this mapping
/// (`MPOL_PREFERRED` of mbind(2)). Pages that are there stay where they are, and other nodes' pages
/// are taken when the node has none left.
///
/// A file of base pages in memory (tmpfs, memfd) keeps this for the bytes that are mapped, whoever
/// makes their pages. A file of huge pages (hugetlbfs) does not: each mapping has its own.
///
/// # Errors
/// Those of mbind(2): the process may not use the node's memory, the range is not mapped or its
/// address no multiple of a page, or the kernel has no NUMA.
pub fn prefer(address: u64, len: u64, node: NumaNode) -> io::Result<()> {
    let mut nodes = [0_u64; NumaNode::MOST / WORD];
    let number = usize::from(node.number());
    nodes[number / WORD] |= 1 << (number % WORD);
    // Static: the home of memory is a node of the host, whatever nodes the process may use later.
    let policy = libc::MPOL_PREFERRED | libc::MPOL_F_STATIC_NODES;
    // The kernel takes the number of bits to be one less.
    let bits = NumaNode::MOST + 1;
    // SAFETY: the kernel reads the mask during the call. Without flags the call changes no byte and
    // no page of the range, only where pages are made later; no address is invalid for it.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, address, len, policy, nodes.as_ptr(), bits, 0_u32)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
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
}
