//! Trees of the host in a helper's mount namespace.

use std::process::{Child, Command, Stdio};

use rustix::mount::MountFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::*;

/// A process in a mount namespace of its own, with a read-only file system at `base`.
struct Namespace {
    process: Child,
    files: HelperFiles,
}

impl Namespace {
    fn new(base: &Path) -> Self {
        use std::io::{BufRead, BufReader};
        let script = "mount -t tmpfs none $0 && mount -o remount,bind,ro $0 && echo && exec cat";
        let mut process = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .arg(base)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "\n");
        let pid = Pid::from_child(&process);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        Self { process, files: HelperFiles::new(pidfd, base) }
    }

    /// Runs a command in the namespace. Returns its output.
    fn sh(&self, command: &str) -> String {
        let pid = self.process.id().to_string();
        let output = Command::new("nsenter")
            .args(["--mount", "--target", &pid, "sh", "-c", command])
            .output()
            .unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Mounts a file system at `path` while it lives.
struct Mounted(PathBuf);

impl Mounted {
    fn new(path: PathBuf) -> Self {
        std::fs::create_dir(&path).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&path).status();
        assert!(mounted.unwrap().success());
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn as_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: {test}: needs root");
    }
    root
}

#[test]
fn trees_come_to_a_helper_that_cannot_mount() {
    if !as_root("trees_come_to_a_helper_that_cannot_mount") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["base", "d"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    std::fs::write(at("d/f"), "one").unwrap();
    let below = Mounted::new(at("d/below"));
    std::fs::write(below.0.join("g"), "two").unwrap();
    let namespace = Namespace::new(&at("base"));
    let all = Access { below: true, ..Access::default() };
    let fixed = Access { read_only: true, ..all };
    let frozen = Access { below_read_only: true, ..fixed };
    for (number, access) in [(0, Access::default()), (1, all), (2, fixed), (3, frozen)] {
        let tree = Tree::open(&at("d"), access).unwrap();
        namespace.files.attach(number, &tree).unwrap();
    }
    namespace.files.attach(4, &Tree::open(&at("d/f"), frozen).unwrap()).unwrap();
    let sh = |command: &str| namespace.sh(&format!("cd {}; {command}", at("base").display()));
    assert_eq!(sh("cat */f */file"), "one".repeat(5));
    assert_eq!(sh("ls -A 0/below; cat 1/below/g"), "two");
    let writable = "for d in */ */below/; do touch $d/new 2>/dev/null && echo $d; done; true";
    assert_eq!(sh(writable), "0/\n1/\n0/below/\n1/below/\n2/below/\n");
    assert_eq!(sh("echo x 2>&1 >4/file").matches("Read-only").count(), 1);
    assert!(sh("mkdir new").contains("Read-only"));
    // Another takes its place, and all go.
    namespace.files.attach(4, &Tree::open(&at("d"), all).unwrap()).unwrap();
    assert_eq!(sh("cat 4/f 4/below/g"), "onetwo");
    for number in 0..6 {
        namespace.files.detach(number).unwrap();
    }
    assert_eq!(sh("ls -A; grep -c below /proc/self/mounts"), "1\n");
    assert_eq!(std::fs::read(at("d/f")).unwrap(), b"one");
}

#[test]
fn a_tree_of_other_mounts_is_another() {
    if !as_root("a_tree_of_other_mounts_is_another") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = Mounted::new(directory.path().join("a b"));
    std::fs::create_dir(source.0.join("d")).unwrap();
    let identity = |below| {
        let access = Access { below, ..Access::default() };
        Tree::open(&source.0.join("d"), access).unwrap().identity()
    };
    let (alone, all) = (identity(false), identity(true));
    assert_eq!((identity(false), identity(true)), (alone, all));
    let beside = Mounted::new(source.0.join("dd"));
    assert_eq!((identity(false), identity(true)), (alone, all), "not below it");
    drop(beside);
    let below = Mounted::new(source.0.join("d/below"));
    assert_eq!(identity(false), alone);
    assert_ne!(identity(true), all);
    drop(below);
    assert_eq!(identity(true), all);
    let flags = MountFlags::BIND | MountFlags::RDONLY;
    rustix::mount::mount_remount(&source.0, flags, c"").unwrap();
    assert_ne!(identity(false), alone);
}

/// Mounts a FUSE file system whose server ends when it is asked for a name. Returns `false` if
/// the kernel has none.
fn mount_deaf(at: &Path) -> bool {
    use std::io::{Read, Write};
    let mut options = std::fs::OpenOptions::new();
    let Ok(mut device) = options.read(true).write(true).open("/dev/fuse") else { return false };
    let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let data = std::ffi::CString::new(data).unwrap();
    rustix::mount::mount("none", at, "fuse", MountFlags::empty(), data.as_c_str()).unwrap();
    // Replies of `linux/fuse.h`, in words: to INIT, version 7.31; to GETATTR, a directory.
    let (mut begun, mut attributes) = ([0_u32; 16], [0_u32; 26]);
    (begun[0], begun[1], begun[5]) = (7, 31, 4096);
    (attributes[4], attributes[19], attributes[20]) = (1, 0o40755, 2);
    std::thread::spawn(move || {
        let mut request = vec![0; 1 << 17];
        // The read fails when the file system is unmounted.
        while device.read(&mut request).is_ok() {
            let (error, body) = match u32::from_le_bytes(*request[4..].first_chunk().unwrap()) {
                1 => return,
                3 => (0, &attributes[..]),
                26 => (0, &begun[..]),
                _ => (-libc::ENOSYS, &[][..]),
            };
            let len = (16 + body.len() * 4) as u32;
            let mut reply = [len.to_le_bytes(), error.to_le_bytes()].concat();
            reply.extend(&request[8..16]);
            reply.extend(body.iter().flat_map(|word| word.to_le_bytes()));
            let _ = device.write_all(&reply);
        }
    });
    true
}

#[test]
fn a_tree_goes_without_its_file_system() {
    let test = "a_tree_goes_without_its_file_system";
    if !as_root(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["base", "fuse"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    if !mount_deaf(&at("fuse")) {
        println!("SKIPPED: {test}: needs FUSE");
        return;
    }
    let namespace = Namespace::new(&at("base"));
    let tree = Tree::open(&at("fuse"), Access::default());
    unmount(at("fuse"), UnmountFlags::DETACH).unwrap();
    namespace.files.attach(0, &tree.unwrap()).unwrap();
    namespace.files.detach(0).unwrap();
    let mounted = format!("ls -A {0}; grep -c {0}/0 /proc/self/mounts", at("base").display());
    assert_eq!(namespace.sh(&mounted), "0\n");
}

#[test]
fn what_cannot_be_mounted_is_refused() {
    if !as_root("what_cannot_be_mounted_is_refused") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let refused = |path: &Path| Tree::open(path, Access::default()).unwrap_err().kind();
    assert_eq!(refused(&directory.path().join("no")), io::ErrorKind::NotFound);
    assert_eq!(refused(Path::new("/dev/null")), io::ErrorKind::Unsupported);
    let tree = Tree::open(directory.path(), Access::default()).unwrap();
    let mut namespace = Namespace::new(directory.path());
    namespace.process.kill().unwrap();
    namespace.process.wait().unwrap();
    let ended = namespace.files.attach(0, &tree).unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_path_that_has_become_a_link_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    std::fs::create_dir_all(root.join("secret/data")).unwrap();
    std::os::unix::fs::symlink("secret", root.join("shared")).unwrap();
    for path in ["shared", "shared/data"] {
        let refused = Tree::open(&root.join(path), Access::default()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::LOOP.raw_os_error()), "{path}");
    }
}
