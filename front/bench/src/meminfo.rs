//! Figures of the host's memory.

/// Returns a figure of `/proc/meminfo` (proc(5)), or 0 if the kernel has none of that name.
pub(crate) fn meminfo(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}
