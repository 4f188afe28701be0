//! The mounts of a mount namespace, as proc_pid_mountinfo(5) has them.
//!
//! Nothing is mounted or unmounted here. No dependencies.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The file with the mounts of the calling thread's mount namespace.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";
/// The end of the root of a mount that was removed from its file system, as the kernel writes it.
const REMOVED: &[u8] = b"//deleted";

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number of the mount, which another one may have once this is unmounted.
    pub id: u64,
    /// The number of the mount that this one is mounted on.
    pub parent: u64,
    /// The number of the file system's device, as `MAJOR:MINOR`.
    pub device: String,
    /// The directory or file of the file system that is mounted.
    pub root: PathBuf,
    /// Set if `root` was removed from its file system since.
    pub is_removed: bool,
    /// The mount point, below the root of the process that reads the mounts.
    pub point: PathBuf,
    /// The options of this mount, separated by commas.
    pub flags: String,
    /// The type of the file system.
    pub kind: String,
    /// The source of the file system, such as the path of a device.
    pub source: String,
    /// The options of the file system, separated by commas.
    pub options: String,
}

impl Mounted {
    /// Returns whether the file system has the option `name`, with its value if it takes one.
    pub fn has_option(&self, name: &str) -> bool {
        self.options.split(',').any(|option| option == name)
    }

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

/// Reads the mounts of the calling thread's namespace, in the order of their lines: of two with one
/// mount point, the later one covers the earlier.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn read() -> io::Result<Vec<Mounted>> {
    Ok(parse(&fs::read(MOUNTINFO)?).collect())
}

/// Parses lines of proc_pid_mountinfo(5). Lines of another shape are left out.
pub fn parse(mountinfo: &[u8]) -> impl Iterator<Item = Mounted> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(parse_line)
}

fn parse_line(line: &[u8]) -> Option<Mounted> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let [id, parent, device, root, point, flags, ..] = words[..] else { return None };
    // Optional fields, of any number, end with a single hyphen.
    let optional = words[6..].iter().position(|word| *word == b"-")?;
    let [kind, source, options] = words.get(6 + optional + 1..)?.get(..3)? else { return None };
    let (root, is_removed) = match root.strip_suffix(REMOVED) {
        Some(root) => (root, true),
        None => (root, false),
    };
    Some(Mounted {
        id: text(id).parse().ok()?,
        parent: text(parent).parse().ok()?,
        device: text(device),
        root: path(root),
        is_removed,
        point: path(point),
        flags: text(flags),
        kind: text(kind),
        source: text(source),
        options: text(options),
    })
}

/// Returns a field as text. Bytes that are no UTF-8 are replaced.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescaped(field)).into_owned()
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescaped(field)))
}

/// Returns the bytes of a field, in which the kernel writes blanks, line breaks and backslashes as
/// a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(field.len()), field);
    while let Some((&first, after)) = rest.split_first() {
        let escape = after.first_chunk::<3>().filter(|_| first == b'\\').and_then(octal);
        let (byte, next) = match escape {
            Some(byte) => (byte, &after[3..]),
            None => (first, after),
        };
        bytes.push(byte);
        rest = next;
    }
    bytes
}

/// Returns the value of three octal digits, or `None` if they are none or no byte.
fn octal(digits: &[u8; 3]) -> Option<u8> {
    digits.iter().try_fold(0_u8, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(digit - b'0'),
        _ => None,
    })
}

/// Returns the mount that is seen at `point`, or `None` if nothing is mounted there, or what was
/// mounted has been removed.
pub fn seen_at<'a>(point: &Path, mounts: &'a [Mounted]) -> Option<&'a Mounted> {
    mounts.iter().rev().find(|one| one.point == point).filter(|one| !one.is_removed)
}

/// Returns the relative path of what is mounted at `point` below `directory`. Returns `None` if it
/// is not a bind mount of something below that.
pub fn below(point: &Path, directory: &Path, mounts: &[Mounted]) -> Option<String> {
    let bind = seen_at(point, mounts)?;
    // Of mounts with one mount point the last one counts, which `max_by_key` returns.
    let above = mounts.iter().filter(|one| directory.starts_with(&one.point));
    let home = above.max_by_key(|one| one.point.components().count())?;
    if bind.device != home.device || home.is_removed {
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

    fn mounts() -> Vec<Mounted> {
        parse(LINES.as_bytes()).collect()
    }

    #[test]
    fn lines_are_parsed() {
        let mounts = mounts();
        let ids: Vec<_> = mounts.iter().map(|one| one.id).collect();
        assert_eq!(ids, [22, 30, 40, 41, 42, 43, 44, 45]);
        let (root, point) = (PathBuf::from("/k"), PathBuf::from("/var/lib/kubelet"));
        let [device, flags, kind, source, options] =
            ["254:3", "rw", "xfs", "/dev/vdb", "rw"].map(str::to_owned);
        let (id, parent, is_removed) = (30, 22, false);
        let kubelets =
            Mounted { id, parent, device, root, is_removed, point, flags, kind, source, options };
        assert_eq!(mounts[1], kubelets);
        assert_eq!((mounts[1].size(), mounts[2].size()), (None, Some(8 << 20)));
        assert!(mounts[0].has_option("discard") && !mounts[0].has_option("relatime"));
        assert_eq!(mounts[3].root, Path::new("/k/pods/1/v/data/a b"));
        assert_eq!(mounts[4].root, Path::new("/k/pods/1/v/data/gone"));
        assert!(mounts[4].is_removed && !mounts[3].is_removed);
    }

    #[test]
    fn lines_of_another_shape_are_left_out() {
        for line in [
            "",
            "22 1 254:0 / / rw",
            "22 1 254:0 / / rw shared:1 ext4 /dev/vda rw",
            "22 1 254:0 / / rw - ext4 /dev/vda",
            "x 1 254:0 / / rw - ext4 /dev/vda rw",
            "-1 1 254:0 / / rw - ext4 /dev/vda rw",
        ] {
            assert_eq!(parse(line.as_bytes()).count(), 0, "{line}");
        }
        // A file system without a source.
        assert_eq!(parse(b"22 1 0:9 / /a rw - tmpfs  rw").count(), 1);
    }

    #[test]
    fn escapes_are_three_octal_digits_of_a_byte() {
        let paths = [
            ("/a\\040b\\134c\\012d\\011#\\043", "/a b\\c\nd\t##"),
            ("/\\04", "/\\04"),
            ("/\\+12", "/\\+12"),
            ("/\\08a\\400", "/\\08a\\400"),
            ("\\", "\\"),
        ];
        for (field, is) in paths {
            assert_eq!(path(field.as_bytes()), Path::new(is), "{field}");
        }
        assert_eq!(path(b"/\\377").into_os_string().into_vec(), [b'/', 0xff]);
        assert_eq!(text(b"\\377a"), "\u{fffd}a");
    }

    #[test]
    fn the_mounts_of_this_process_are_read() {
        assert!(seen_at(Path::new("/proc"), &read().unwrap()).is_some_and(|one| one.id > 0));
    }

    #[test]
    fn the_last_mount_at_a_point_is_seen() {
        let mounts = parse(b"1 0 0:1 / /a rw - tmpfs a rw\n2 1 0:2 / /a rw - tmpfs b rw\n");
        let mut mounts: Vec<_> = mounts.collect();
        assert_eq!(seen_at(Path::new("/a"), &mounts).map(|one| one.id), Some(2));
        mounts[1].is_removed = true;
        assert_eq!(seen_at(Path::new("/a"), &mounts), None);
        assert_eq!(seen_at(Path::new("/b"), &mounts), None);
    }

    #[test]
    fn a_bind_mount_is_below_the_directory_whose_part_it_is() {
        let mounts = mounts();
        let directory = Path::new("/var/lib/kubelet/pods/1/v/data");
        let at = |point: &str| below(Path::new(point), directory, &mounts);
        assert_eq!(at("/s/0").as_deref(), Some("a b"));
        assert_eq!(at("/s/4").as_deref(), Some(""));
        for other in ["/s/1", "/s/2", "/s/3", "/s/9", "/var/lib/kubelet"] {
            assert_eq!(at(other), None, "{other}");
        }
    }
}
