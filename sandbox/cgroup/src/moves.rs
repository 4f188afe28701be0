//! How the host's kernel carries out a process's move into a group by another process.

use std::io;
use std::path::PathBuf;

use slipway_mounts::Mounted;

/// The mount option of version 2's hierarchy that favours moves (Linux 6.0 and later).
pub const FAVORDYNMODS: &str = "favordynmods";

/// The host's setting for moves. A move by another process takes the kernel's
/// `cgroup_threadgroup_rwsem`, and waits for a grace period of RCU unless the host favours moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// `true` if a hierarchy has the option. All hierarchies share the lock, so that holds for
    /// version 1 and version 2 alike. Since Linux 6.18 moves by `cgroup.procs` stay fast until the
    /// next boot after the option was taken away, which no mount shows.
    pub favoured: bool,
    /// The first mount point of version 2.
    pub v2: Option<PathBuf>,
}

impl Moves {
    /// Reads the mounts of this thread's namespace.
    ///
    /// # Errors
    /// The kernel's list cannot be read.
    pub fn of_host() -> io::Result<Self> {
        Ok(Self::of(slipway_mounts::read()?))
    }

    /// Parses lines of proc_pid_mountinfo(5). Lines of another shape and other file systems are
    /// left out.
    pub fn parse(mountinfo: &str) -> Self {
        Self::of(slipway_mounts::parse(mountinfo.as_bytes()))
    }

    fn of(mounts: impl IntoIterator<Item = Mounted>) -> Self {
        let mut moves = Self::default();
        for mounted in mounts {
            if matches!(&*mounted.kind, "cgroup" | "cgroup2") {
                moves.favoured |= mounted.has_option(FAVORDYNMODS);
            }
            if mounted.kind == "cgroup2" && moves.v2.is_none() {
                moves.v2 = Some(mounted.point);
            }
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "\
24 31 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:6 - sysfs sysfs rw
28 24 0:25 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 \
rw,nsdelegate,memory_recursiveprot
90 31 0:25 / /run/again rw,relatime - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    fn moves(favoured: bool, v2: Option<&str>) -> Moves {
        Moves { favoured, v2: v2.map(PathBuf::from) }
    }

    #[test]
    fn the_option_of_version_2_is_found() {
        assert_eq!(Moves::parse(V2), moves(false, Some("/sys/fs/cgroup")));
        let favoured = V2.replace("rw,nsdelegate", "rw,nsdelegate,favordynmods");
        assert_eq!(Moves::parse(&favoured), moves(true, Some("/sys/fs/cgroup")));
    }

    #[test]
    fn the_option_of_either_version_holds_for_a_hybrid_host() {
        let point = Some("/sys/fs/cgroup/unified");
        assert_eq!(Moves::parse(HYBRID), moves(false, point));
        let favoured = HYBRID.replace("cgroup2 rw", "cgroup2 rw,favordynmods");
        assert_eq!(Moves::parse(&favoured), moves(true, point));
        let favoured = HYBRID.replace("rw,memory", "rw,memory,favordynmods");
        assert_eq!(Moves::parse(&favoured), moves(true, point));
    }

    #[test]
    fn other_mounts_say_nothing_of_moves() {
        let lines = "\
22 1 254:0 / /favordynmods rw,relatime - ext4 /dev/vda rw,favordynmods
23 1 0:9 / /sys/fs/cgroup rw - cgroup2
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup favordynmods rw,cpu
no mount
";
        assert_eq!(Moves::parse(lines), moves(false, None));
        assert_eq!(Moves::parse(""), moves(false, None));
    }
}
