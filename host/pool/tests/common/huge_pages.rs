//! The host's limit of huge pages, for tests.

/// Huge pages that the kernel makes when they are asked for, as long as this exists.
pub struct HugePages(String);

impl HugePages {
    const FILE: &str = "/proc/sys/vm/nr_overcommit_hugepages";

    /// Returns `None` where this process may not allow them, or the host has none.
    pub fn allow() -> Option<Self> {
        let before = std::fs::read_to_string(Self::FILE).ok()?;
        let allowed = std::fs::write(Self::FILE, "256");
        if allowed.is_err() {
            eprintln!("needs the right to allow huge pages");
        }
        allowed.ok().map(|()| Self(before))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::FILE, &self.0);
    }
}
