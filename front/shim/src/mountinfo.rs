//! The host's mounts, as proc_pid_mountinfo(5) has them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The words that the kernel adds to the root of a mount that was removed.
const REMOVED: &str = "//deleted";

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounted {
    /// The number of the file system's device, as `MAJOR:MINOR`.
    pub device: String,
    /// The directory or file of the file system that is mounted.
    pub root: PathBuf,
    /// The mount point.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: String,
    /// The options of the file system.
    pub options: String,
}

impl Mounted {
    /// Returns the option `size` of a tmpfs in bytes, or `None` if it has none.
    pub fn size(&self) -> Option<u64> {
        let size = self.options.split(',').find_map(|option| option.strip_prefix("size="))?;
        // Linux, mm/shmem.c, `shmem_show_options`: in KiB.
        let (number, unit) = match size.strip_suffix('k') {
            Some(number) => (number, 1024),
            None => (size, 1),
        };
        number.parse::<u64>().ok()?.checked_mul(unit)
    }
}

/// Reads the mounts of this process's namespace, in the order of their lines: of two with one mount
/// point, the later one covers the earlier.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn read() -> io::Result<Vec<Mounted>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// Parses a line. Returns `None` for one that is none, and for a mount that was removed.
fn parse(line: &[u8]) -> Option<Mounted> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    // Optional fields end with a single hyphen.
    let end = 6 + words.get(6..)?.iter().position(|word| *word == b"-")?;
    let [kind, _, options] = words.get(end + 1..end + 4)? else { return None };
    let root = path(words[3]);
    if root.to_string_lossy().ends_with(REMOVED) {
        return None;
    }
    let (device, point) = (text(words[2])?, path(words[4]));
    Some(Mounted { device, root, point, kind: text(kind)?, options: text(options)? })
}

fn text(word: &[u8]) -> Option<String> {
    String::from_utf8(word.to_vec()).ok()
}

/// Returns a path in which blanks and the like are written as a backslash and three octal digits.
fn path(word: &[u8]) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::with_capacity(word.len()), word);
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let octal = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let (byte, next) = match octal {
            Some(byte) if first == b'\\' => (byte, &after[3..]),
            _ => (first, after),
        };
        bytes.push(byte);
        rest = next;
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Returns the relative path of what is mounted at `point` below `directory`. Returns `None` if it
/// is not a bind mount of something below that.
pub fn below(point: &Path, directory: &Path, mounts: &[Mounted]) -> Option<String> {
    let bind = mounts.iter().rev().find(|one| one.point == point)?;
    // Of mounts with one mount point the last one counts, which `max_by_key` returns.
    let above = mounts.iter().filter(|one| directory.starts_with(&one.point));
    let home = above.max_by_key(|one| one.point.components().count())?;
    if bind.device != home.device {
        return None;
    }
    let inside = home.root.join(directory.strip_prefix(&home.point).ok()?);
    bind.root.strip_prefix(inside).ok()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 254:3 /k /var/lib/kubelet rw shared:2 master:1 - xfs /dev/vdb rw
40 30 0:50 / /var/lib/kubelet/pods/1/v/memory rw - tmpfs tmpfs rw,size=8192k
41 30 254:3 /k/pods/1/v/data/a\\040b /s/0 rw - xfs /dev/vdb rw
42 30 254:3 /k/pods/1/v/data/gone//deleted /s/1 rw - xfs /dev/vdb rw
43 30 254:3 /k/pods/1/v/data2/x /s/2 rw - xfs /dev/vdb rw
44 30 254:0 /k/pods/1/v/data/x /s/3 rw - ext4 /dev/vda rw
45 30 254:3 /k/pods/1/v/data /s/4 rw - xfs /dev/vdb rw
no mount
";

    #[test]
    fn lines_are_parsed() {
        let mounts: Vec<_> = LINES.as_bytes().split(|byte| *byte == b'\n').map(parse).collect();
        let found: Vec<_> = mounts.iter().map(Option::is_some).collect();
        assert_eq!(found, [true, true, true, true, false, true, true, true, false, false]);
        let memory = mounts[2].as_ref().unwrap();
        assert_eq!((memory.kind.as_str(), memory.size()), ("tmpfs", Some(8 << 20)));
        assert_eq!(memory.root, Path::new("/"));
        assert_eq!(mounts[3].as_ref().unwrap().root, Path::new("/k/pods/1/v/data/a b"));
        assert_eq!(mounts[1].as_ref().unwrap().size(), None);
        assert!(read().unwrap().iter().any(|one| one.point == Path::new("/proc")));
    }

    #[test]
    fn a_bind_mount_is_below_the_directory_whose_part_it_is() {
        let lines = LINES.as_bytes().split(|byte| *byte == b'\n');
        let mounts: Vec<_> = lines.filter_map(parse).collect();
        let directory = Path::new("/var/lib/kubelet/pods/1/v/data");
        let at = |point: &str| below(Path::new(point), directory, &mounts);
        assert_eq!(at("/s/0").as_deref(), Some("a b"));
        assert_eq!(at("/s/4").as_deref(), Some(""));
        for other in ["/s/1", "/s/2", "/s/3", "/s/9", "/var/lib/kubelet"] {
            assert_eq!(at(other), None, "{other}");
        }
    }
}
