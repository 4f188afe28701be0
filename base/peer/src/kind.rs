//! Checks of the kind of file behind a descriptor.

use std::os::fd::{AsFd, AsRawFd};

/// Returns whether `file` is an eventfd. Never waits: it reads a link in `/proc`.
pub fn is_eventfd(file: impl AsFd) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::readlink(link, Vec::new())
        .is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}

/// Returns whether `file` is memory: a memfd, or a file of tmpfs or hugetlbfs. Reads of such a file
/// and faults on its pages depend on no other process. Never waits.
pub fn is_memory_file(file: impl AsFd) -> bool {
    // Only file systems in memory support F_GET_SEALS.
    rustix::fs::fcntl_get_seals(file).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn each_kind_is_known() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let memory = memfd_create("kind", MemfdFlags::CLOEXEC).unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(is_eventfd(&event) && !is_memory_file(&event));
        assert!(is_memory_file(&memory) && !is_eventfd(&memory));
        assert!(!is_eventfd(&pipe) && !is_memory_file(&pipe));
        assert!(!is_eventfd(&file) && !is_memory_file(&file));
    }
}
