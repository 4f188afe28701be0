//! The whole process, started as the daemon starts it, and driven over its vfio-user socket by a
//! small real driver. Needs root: namespaces, and files of other users.
#![allow(clippy::unwrap_used)] // a failed unwrap is the failure report

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_hypervisor::{Access, Helper, HelperFiles, HelperSpec, Tree};
use slipway_vfio_user_client::{Client, Registers, TestGuest};
use slipway_virtio_fs::driver::{Arena, Driver};

const PATIENCE: Duration = Duration::from_secs(100);
const MEMORY: u64 = 32 << 20;
const REQUESTS: u16 = 1;
const ROOT: u64 = 1;

/// Operations of `linux/fuse.h`.
const LOOKUP: u32 = 1;
const SYMLINK: u32 = 6;
const MKNOD: u32 = 8;
const MKDIR: u32 = 9;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;
const CREATE: u32 = 35;

struct Share<'a> {
    source: &'a Path,
    read_only: bool,
}

/// A process that serves shares.
struct Served {
    helper: Option<Helper>,
    files: HelperFiles,
    socket: PathBuf,
    guest: TestGuest,
    /// The client's descriptor of the memory.
    passed: OwnedFd,
    log: PathBuf,
}

/// The descriptor that the client has of its memory.
#[derive(Clone, Copy, PartialEq)]
enum Passes {
    /// A descriptor that can be mapped.
    File,
    /// A descriptor that names the file and cannot be mapped, as of memory of a pool.
    Token,
}

/// Starts the process, and mounts the shares under their numbers.
async fn serve(directory: &Path, shares: &[Share<'_>]) -> Served {
    serve_client(directory, shares, Passes::File).await
}

async fn serve_client(directory: &Path, shares: &[Share<'_>], passes: Passes) -> Served {
    let guest = TestGuest::new(0, MEMORY).unwrap();
    let stat = rustix::fs::fstat(&guest.file).unwrap();
    let file = format!("{MEMORY}:{}:{}", stat.st_dev, stat.st_ino);
    let socket = directory.join("shares.sock");
    let listener = OwnedFd::from(UnixListener::bind(&socket).unwrap());
    let number = listener.as_raw_fd().to_string();
    let own = guest.file.try_clone().unwrap();
    let own_number = own.as_raw_fd().to_string();
    let mut words = vec!["--user", "0", "--memory", &file, "--tag", "shares", "--socket", &number];
    let mut inherited = vec![listener];
    if passes == Passes::Token {
        words.extend(["--file", &own_number]);
        inherited.push(own);
    }
    let log = directory.join("log");
    let spec = HelperSpec {
        program: env!("CARGO_BIN_EXE_slipway-fs").into(),
        arguments: words.into_iter().map(Into::into).collect(),
        passed: inherited,
        cgroup_procs: Vec::new(),
        log: log.clone(),
    };
    let helper = Helper::start(spec).await.unwrap();
    let files = HelperFiles::new(helper.pidfd().unwrap(), "/shares");
    for (number, Share { source, read_only }) in shares.iter().enumerate() {
        let access = Access { read_only: *read_only, ..Access::default() };
        files.attach(number as u32, &Tree::open(source, access).unwrap()).unwrap();
    }
    let passed = match passes {
        Passes::File => guest.file.try_clone().unwrap(),
        Passes::Token => token(&guest.file),
    };
    Served { helper: Some(helper), files, socket, guest, passed, log }
}

/// Opens a file for no access (access mode 3 of open(2)).
fn token(file: &OwnedFd) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let neither = rustix::fs::OFlags::from_bits_retain(3) | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path, neither, rustix::fs::Mode::empty()).unwrap()
}

impl Served {
    fn pid(&self) -> i32 {
        self.helper.as_ref().unwrap().pid()
    }

    /// Mounts the file system, and looks up a share.
    fn mount(&self, share: u32) -> Mount {
        let mut client = Client::connect(&self.socket, PATIENCE).unwrap();
        client.map(0, MEMORY, self.passed.as_fd(), 0, true).unwrap();
        let arena = Arena::new(self.guest.memory.clone(), 0, MEMORY);
        let driver = Driver::new(Registers::new(client, PATIENCE), arena, 64).unwrap();
        let mut mount = Mount { driver, user: 0, root: 0 };
        // Version 7.38, read-ahead, FUSE_SUBMOUNTS.
        let init = [7_u32, 38, 0, 1 << 27].map(u32::to_le_bytes).concat();
        mount.call(INIT, 0, &init).unwrap();
        mount.root = mount.lookup(ROOT, &share.to_string()).unwrap();
        mount
    }
}

impl Drop for Served {
    /// Ends the process, which stays if its client has never reached its function.
    fn drop(&mut self) {
        let pidfd = self.helper.as_ref().and_then(|helper| helper.pidfd().ok());
        if let Some(pidfd) = pidfd {
            let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        }
    }
}

/// A guest's side of a share.
struct Mount {
    driver: Driver<Registers>,
    user: u32,
    /// The inode of the share.
    root: u64,
}

impl Mount {
    /// Makes a request, and returns the reply's bytes behind its header, or the error's number.
    fn call(&mut self, opcode: u32, inode: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let message = message(opcode, inode, self.user, body);
        let reply = self.driver.call(REQUESTS, &message, &[16, 1 << 17]).unwrap();
        assert_eq!(u64_at(&reply, 8), 77, "the number of the request");
        assert_eq!(u32_at(&reply, 0) as usize, reply.len());
        match u32_at(&reply, 4) as i32 {
            0 => Ok(reply[16..].to_vec()),
            error => Err(-error),
        }
    }

    fn lookup(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        self.call(LOOKUP, parent, &text(name)).map(|reply| u64_at(&reply, 0))
    }

    fn open(&mut self, inode: u64, flags: i32) -> Result<u64, i32> {
        let body = [flags as u32, 0].map(u32::to_le_bytes).concat();
        self.call(OPEN, inode, &body).map(|reply| u64_at(&reply, 0))
    }

    fn read(&mut self, inode: u64, handle: u64, size: u32) -> Result<Vec<u8>, i32> {
        self.call(READ, inode, &transfer(handle, size))
    }

    fn write(&mut self, inode: u64, handle: u64, bytes: &[u8]) -> Result<u32, i32> {
        let body = [transfer(handle, bytes.len() as u32), bytes.to_vec()].concat();
        self.call(WRITE, inode, &body).map(|reply| u32_at(&reply, 0))
    }

    fn create(&mut self, parent: u64, name: &str, mode: u32) -> Result<(u64, u64), i32> {
        let flags = (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32;
        let body = [words(&[flags, mode, 0, 0]), text(name)].concat();
        let reply = self.call(CREATE, parent, &body)?;
        Ok((u64_at(&reply, 0), u64_at(&reply, 128)))
    }

    fn mkdir(&mut self, parent: u64, name: &str) -> Result<Vec<u8>, i32> {
        self.call(MKDIR, parent, &[words(&[0o755, 0]), text(name)].concat())
    }

    fn mknod(&mut self, name: &str, mode: u32) -> Result<Vec<u8>, i32> {
        self.call(MKNOD, self.root, &[words(&[mode, 0x103, 0, 0]), text(name)].concat())
    }
}

fn message(opcode: u32, inode: u64, user: u32, body: &[u8]) -> Vec<u8> {
    let len = 40 + body.len() as u32;
    let head = [words(&[len, opcode]), 77_u64.to_le_bytes().to_vec()].concat();
    [head, inode.to_le_bytes().to_vec(), words(&[user, user, 1, 0]), body.to_vec()].concat()
}

fn transfer(handle: u64, size: u32) -> Vec<u8> {
    let at = [handle.to_le_bytes(), 0_u64.to_le_bytes()].concat();
    [at, words(&[size, 0, 0, 0, 0, 0])].concat()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn text(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Returns whether the test can run; says what it needs if not.
fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: {test}: needs root");
    }
    root
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_read_and_written_as_the_user_of_the_request() {
    if !is_root("files_are_read_and_written_as_the_user_of_the_request") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(dir.path().join("hello"), "of the host").unwrap();
    let shares = [Share { source: dir.path(), read_only: false }];
    let served = serve(run.path(), &shares).await;
    let mut mount = served.mount(0);
    let hello = mount.lookup(mount.root, "hello").unwrap();
    let handle = mount.open(hello, libc::O_RDONLY).unwrap();
    assert_eq!(mount.read(hello, handle, 4096).unwrap(), b"of the host");
    mount.user = 1234;
    let (new, handle) = mount.create(mount.root, "new", 0o640).unwrap();
    let bytes = vec![7; 100_000];
    assert_eq!(mount.write(new, handle, &bytes).unwrap(), 100_000);
    assert_eq!(mount.read(new, handle, 1 << 17).unwrap(), bytes);
    let found = fs::metadata(dir.path().join("new")).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1234, 1234, 0o640));
    assert!(fs::read(dir.path().join("new")).unwrap() == bytes);
    let log = fs::read_to_string(&served.log).unwrap();
    assert_eq!(log, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_only_names_its_memory_is_served() {
    if !is_root("a_client_that_only_names_its_memory_is_served") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(dir.path().join("hello"), "of the host").unwrap();
    let shares = [Share { source: dir.path(), read_only: false }];
    let served = serve_client(run.path(), &shares, Passes::Token).await;
    let mut mount = served.mount(0);
    let hello = mount.lookup(mount.root, "hello").unwrap();
    let handle = mount.open(hello, libc::O_RDONLY).unwrap();
    assert_eq!(mount.read(hello, handle, 4096).unwrap(), b"of the host");
    // A process that was given no file refuses a descriptor that only names one.
    let run = tempfile::tempdir().unwrap();
    let served = serve(run.path(), &shares).await;
    let mut client = Client::connect(&served.socket, PATIENCE).unwrap();
    let named = token(&served.guest.file);
    assert!(client.map(0, MEMORY, named.as_fd(), 0, true).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_beside_a_share_is_reached() {
    if !is_root("nothing_beside_a_share_is_reached") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(dir.path().join("beside"), "secret").unwrap();
    symlink("../beside", root.join("link")).unwrap();
    symlink("/etc", root.join("etc")).unwrap();
    let served = serve(run.path(), &[Share { source: &root, read_only: false }]).await;
    let mut mount = served.mount(0);
    let sub = mount.lookup(mount.root, "sub").unwrap();
    for name in ["../beside", "sub/..", "/etc/passwd", "", "link/passwd"] {
        assert!(mount.lookup(mount.root, name).is_err(), "{name}");
        assert!(mount.create(sub, name, 0o600).is_err(), "{name}");
        assert!(mount.mkdir(sub, name).is_err(), "{name}");
    }
    for name in [".", ".."] {
        assert_eq!(mount.lookup(mount.root, name), Err(libc::EINVAL), "{name}");
    }
    // A link is an inode of its own, which is not opened and has no entries.
    for name in ["link", "etc"] {
        let link = mount.lookup(mount.root, name).unwrap();
        for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_RDONLY | libc::O_DIRECTORY] {
            assert!(mount.open(link, flags).is_err(), "{name}");
        }
        assert!(mount.lookup(link, "passwd").is_err(), "{name}");
    }
    // A link that the guest makes is one of the guest's.
    mount.call(SYMLINK, mount.root, &[text("made"), text("/etc/passwd")].concat()).unwrap();
    let made = mount.lookup(mount.root, "made").unwrap();
    assert!(mount.open(made, libc::O_RDONLY).is_err());
    // Inodes and handles that were never given.
    for inode in [0, 2000, u64::MAX] {
        assert!(mount.open(inode, libc::O_RDONLY).is_err());
        assert!(mount.read(inode, 5, 16).is_err());
    }
    assert_eq!(mount.mknod("null", libc::S_IFCHR | 0o666).unwrap_err(), libc::EPERM);
    mount.mknod("pipe", libc::S_IFIFO | 0o666).unwrap();
    assert!(fs::metadata(root.join("pipe")).unwrap().file_type().is_fifo());
    assert!(!root.join("null").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_share_and_a_file_are_all_that_there_is() {
    if !is_root("a_read_only_share_and_a_file_are_all_that_there_is") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (fixed, file) = (dir.path().join("fixed"), dir.path().join("app.conf"));
    fs::create_dir(&fixed).unwrap();
    fs::write(fixed.join("f"), "fixed").unwrap();
    fs::write(&file, "setting").unwrap();
    let shares =
        [Share { source: &fixed, read_only: true }, Share { source: &file, read_only: false }];
    let served = serve(run.path(), &shares).await;
    let mut mount = served.mount(0);
    let f = mount.lookup(mount.root, "f").unwrap();
    assert!(mount.open(f, libc::O_RDWR).is_err());
    assert!(mount.open(f, libc::O_RDONLY | libc::O_TRUNC).is_err());
    assert!(mount.create(mount.root, "g", 0o600).is_err());
    assert!(mount.mkdir(mount.root, "d").is_err());
    let handle = mount.open(f, libc::O_RDONLY).unwrap();
    assert_eq!(mount.read(f, handle, 16).unwrap(), b"fixed");
    assert!(mount.write(f, handle, b"x").is_err());
    let single = mount.lookup(ROOT, "1").unwrap();
    let inode = mount.lookup(single, "file").unwrap();
    let handle = mount.open(inode, libc::O_RDWR).unwrap();
    assert_eq!(mount.write(inode, handle, b"SETTING").unwrap(), 7);
    assert_eq!(fs::read(&file).unwrap(), b"SETTING");
    // Nothing beside the shares is made, nor seen.
    for place in [ROOT, single] {
        assert_eq!(mount.create(place, "beside", 0o600), Err(libc::EROFS));
        assert_eq!(mount.mkdir(place, "beside"), Err(libc::EROFS));
    }
    for name in ["2", "proc", "shares"] {
        assert_eq!(mount.lookup(ROOT, name), Err(libc::ENOENT), "{name}");
    }
    assert_eq!(fs::read_dir(&fixed).unwrap().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_process_has_its_shares_and_few_rights_and_ends_with_its_client() {
    if !is_root("the_process_has_its_shares_and_few_rights_and_ends_with_its_client") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let shares = [Share { source: dir.path(), read_only: false }];
    let mut served = serve(run.path(), &shares).await;
    let proc = PathBuf::from(format!("/proc/{}", served.pid()));
    let mut names: Vec<_> = fs::read_dir(proc.join("root"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["proc", "shares"]);
    let names = |path: &str| fs::read_dir(proc.join(path)).unwrap().flatten();
    assert_eq!(names("root/proc").map(|entry| entry.file_name()).collect::<Vec<_>>(), ["self"]);
    assert_eq!(names("root/proc/self").map(|entry| entry.file_name()).collect::<Vec<_>>(), ["fd"]);
    let mut own = names("root/proc/self/fd");
    assert!(own.all(|entry| entry.file_name().to_str().unwrap().parse::<u32>().is_ok()));
    for thread in fs::read_dir(proc.join("task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        for line in ["CapPrm:\t00000000000000db", "CapBnd:\t00000000000000db", "Seccomp:\t2"] {
            assert!(status.contains(line), "{line}: {status}");
        }
    }
    assert_eq!(fs::read_to_string(proc.join("oom_score_adj")).unwrap().trim(), "500");
    for namespace in ["mnt", "net", "pid", "ipc", "uts", "cgroup"] {
        let of = |process: &Path| fs::read_link(process.join("ns").join(namespace)).unwrap();
        assert_ne!(of(&proc), of(Path::new("/proc/self")), "{namespace}");
    }
    let mount = served.mount(0);
    assert!(proc.join("exe").exists());
    drop(mount);
    tokio::time::timeout(PATIENCE, served.helper.take().unwrap().ended()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_come_and_go_while_the_guest_has_them_mounted() {
    if !is_root("shares_come_and_go_while_the_guest_has_them_mounted") {
        return;
    }
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(dir.path().join("f"), "here").unwrap();
    let shares = [Share { source: dir.path(), read_only: false }];
    let served = serve(run.path(), &shares).await;
    let mut mount = served.mount(0);
    assert_eq!(mount.lookup(ROOT, "7"), Err(libc::ENOENT));
    let tree = Tree::open(dir.path(), Access { read_only: true, ..Access::default() }).unwrap();
    served.files.attach(7, &tree).unwrap();
    let seven = mount.lookup(ROOT, "7").unwrap();
    assert_ne!(seven, mount.root, "the same directory, mounted twice");
    assert_eq!(mount.mkdir(seven, "d"), Err(libc::EROFS));
    mount.mkdir(mount.root, "d").unwrap();
    let f = mount.lookup(seven, "f").unwrap();
    let handle = mount.open(f, libc::O_RDONLY).unwrap();
    served.files.detach(7).unwrap();
    assert_eq!(mount.lookup(ROOT, "7"), Err(libc::ENOENT));
    // A file that is open stays so, as on any mount that is detached.
    assert_eq!(mount.read(f, handle, 16).unwrap(), b"here");
    assert!(mount.lookup(mount.root, "f").is_ok());
}

/// Any bytes behind a header: the process answers, or says nothing, and serves on.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_messages_end_no_session() {
    if !is_root("hostile_messages_end_no_session") {
        return;
    }
    const OPCODES: [u32; 48] = [
        1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25, 26, 27,
        28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51,
    ];
    let (run, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(dir.path().join("a")).unwrap();
    fs::write(dir.path().join("b"), "b").unwrap();
    let shares = [Share { source: dir.path(), read_only: false }];
    let served = serve(run.path(), &shares).await;
    let mut mount = served.mount(0);
    for (round, noise) in slipway_ram::fuzz::inputs(3, 256).take(40).enumerate() {
        for opcode in OPCODES {
            let inode = 1 + round as u64 % 4;
            let body = &noise[..(round * 7) % noise.len()];
            let message = message(opcode, inode, 0, body);
            let _ = mount.driver.call(REQUESTS, &message, &[16, 512]).unwrap();
        }
        mount.driver.start().unwrap();
    }
    let mut again = Mount { ..mount };
    assert_eq!(again.call(INIT, 0, &words(&[7, 38, 0, 0])), Err(libc::EINVAL));
    again.call(INIT, 0, &words(&[7, 38, 0, 1 << 27])).unwrap();
    assert_eq!(fs::read_to_string(&served.log).unwrap(), "");
    again.root = again.lookup(ROOT, "0").unwrap();
    assert!(again.mkdir(again.root, "works").is_ok());
    assert!(dir.path().join("works").is_dir());
}
