//! The host's limits of huge pages, for tests.

/// Huge pages of the host, as long as this exists.
pub struct HugePages {
    file: &'static str,
    before: String,
}

impl HugePages {
    /// Has the kernel make huge pages when they are asked for. Returns `None` where this process
    /// may not allow that, or the host has none.
    pub fn allow() -> Option<Self> {
        Self::set("/proc/sys/vm/nr_overcommit_hugepages", 256)
    }

    /// Has the kernel set `count` huge pages aside, an equal part of them on each NUMA node.
    /// Returns `None` where this process may not do that, or the host has none.
    #[allow(dead_code)] // by tests with several nodes only
    pub fn set_aside(count: u32) -> Option<Self> {
        Self::set("/proc/sys/vm/nr_hugepages", count)
    }

    fn set(file: &'static str, count: u32) -> Option<Self> {
        let before = std::fs::read_to_string(file).ok()?;
        let allowed = std::fs::write(file, count.to_string());
        if allowed.is_err() {
            eprintln!("needs the right to allow huge pages");
        }
        allowed.ok().map(|()| Self { file, before })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(self.file, &self.before);
    }
}
