//! The attacks from a VMM's process on its host.

use std::ffi::CString;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;

/// The targets of the attacks, which the program reads from the kernel's command line.
pub struct Targets {
    pub file: PathBuf,
    pub socket: PathBuf,
    pub abstract_name: String,
    pub port: u16,
    pub process: i32,
    pub shared_memory: i32,
    pub queue: String,
}

impl Targets {
    pub fn words(&self) -> Vec<String> {
        vec![
            format!("t.file={}", self.file.display()),
            format!("t.socket={}", self.socket.display()),
            format!("t.abstract={}", self.abstract_name),
            format!("t.port={}", self.port),
            format!("t.process={}", self.process),
            format!("t.memory={}", self.shared_memory),
            format!("t.queue={}", self.queue),
        ]
    }

    pub fn of(arguments: &str) -> Self {
        let word = |key: &str| {
            let words = arguments.split_whitespace();
            let key = format!("t.{key}=");
            words.filter_map(|word| word.strip_prefix(&key)).next().unwrap().to_owned()
        };
        Self {
            file: word("file").into(),
            socket: word("socket").into(),
            abstract_name: word("abstract"),
            port: word("port").parse().unwrap(),
            process: word("process").parse().unwrap(),
            shared_memory: word("memory").parse().unwrap(),
            queue: word("queue"),
        }
    }
}

/// The attacks that succeed on any host without a cage. Others also depend on the host's settings.
pub const OPEN_WITHOUT_A_CAGE: [&str; 21] = [
    "a socket by path",
    "a socket by abstract name",
    "a socket by TCP",
    "an internet socket",
    "a netlink socket",
    "a file for reading",
    "a file for writing",
    "a directory of the host",
    "anything below /",
    "a device",
    "a file of /proc",
    "a file of another process",
    "a file of /sys",
    "making a file",
    "a signal",
    "a process descriptor",
    "limits of another process",
    "System V shared memory",
    "a POSIX message queue",
    "a hole in a file",
    "a hole in memory",
];

/// Tries every attack and prints the result.
pub fn all(targets: &Targets) {
    sockets(targets);
    files(targets);
    processes(targets);
    shared(targets);
    kernel();
    descriptors();
}

fn tried<T>(way: &str, outcome: io::Result<T>) {
    // libtest may have begun a line.
    match outcome {
        Ok(_) => println!("\nREACHED {way}"),
        Err(error) => println!("\nrefused {way}: {error}"),
    }
}

fn checked(result: impl Into<i64>) -> io::Result<i64> {
    let result = result.into();
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Opens a socket of the family, and closes it at once.
fn socket(family: i32, kind: i32) -> io::Result<()> {
    // SAFETY: no memory effects.
    let socket = checked(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: it was just made, and nothing else has it.
    unsafe { libc::close(socket as i32) };
    Ok(())
}

fn sockets(targets: &Targets) {
    tried("a socket by path", UnixStream::connect(&targets.socket));
    let address = SocketAddr::from_abstract_name(&targets.abstract_name).unwrap();
    tried("a socket by abstract name", UnixStream::connect_addr(&address));
    tried("a socket by TCP", TcpStream::connect(("127.0.0.1", targets.port)));
    tried("an internet socket", socket(libc::AF_INET, libc::SOCK_DGRAM));
    tried("a netlink socket", socket(libc::AF_NETLINK, libc::SOCK_RAW));
    tried("a socket between machines", socket(libc::AF_VSOCK, libc::SOCK_STREAM));
    tried("a socket of the kernel's ciphers", socket(libc::AF_ALG, libc::SOCK_SEQPACKET));
    tried("a packet socket", socket(libc::AF_PACKET, libc::SOCK_RAW));
    let mut pair = [0; 2];
    // SAFETY: the kernel writes two numbers, of descriptors that nothing else has. The process ends
    // soon.
    let paired =
        unsafe { libc::socketpair(libc::AF_TIPC, libc::SOCK_SEQPACKET, 0, pair.as_mut_ptr()) };
    tried("a pair of sockets between nodes", checked(paired));
}

fn files(targets: &Targets) {
    let pid = targets.process;
    let write = |path: &str| fs::OpenOptions::new().write(true).open(path);
    tried("a file for reading", fs::File::open(&targets.file));
    tried("a file for writing", write(&targets.file.to_string_lossy()));
    tried("a directory of the host", fs::read_dir(targets.file.parent().unwrap()));
    let entries = fs::read_dir("/").map(Iterator::count);
    let none = io::Error::other("it is empty");
    tried("anything below /", entries.and_then(|n| if n > 0 { Ok(()) } else { Err(none) }));
    let above = fs::read_dir("../../..").map(Iterator::count);
    let none = io::Error::other("it is empty");
    tried("anything above", above.and_then(|n| if n > 0 { Ok(()) } else { Err(none) }));
    for (way, path) in [
        ("a device", "/dev/null".to_owned()),
        ("the KVM device", "/dev/kvm".to_owned()),
        ("a file of /proc", "/proc/self/status".to_owned()),
        ("a descriptor of its own by path", "/proc/self/fd/0".to_owned()),
        ("a file of another process", format!("/proc/{pid}/environ")),
        ("a file of process 1", "/proc/1/status".to_owned()),
        ("a file of /sys", "/sys/kernel/notes".to_owned()),
        ("users", "/etc/passwd".to_owned()),
    ] {
        tried(way, fs::File::open(path));
    }
    for directory in ["/", "/tmp", "/dev/shm", "/run", "."] {
        let path = format!("{directory}/slipway-cage-{}", std::process::id());
        let made = fs::File::create(&path);
        let _ = fs::remove_file(&path);
        let way = if directory == "/tmp" { "making a file" } else { "making a file elsewhere" };
        tried(way, made);
    }
    let empty = c"";
    // SAFETY: constant strings; a mount would be this process's alone.
    let mounted = unsafe {
        libc::mount(c"none".as_ptr(), c"/".as_ptr(), c"tmpfs".as_ptr(), 0, empty.as_ptr().cast())
    };
    tried("mounting", checked(mounted));
}

fn processes(targets: &Targets) {
    let pid = targets.process;
    // SAFETY: signal 0 sends nothing.
    tried("a signal", checked(unsafe { libc::kill(pid, 0) }));
    // SAFETY: no memory effects.
    tried("a process descriptor", checked(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }));
    // SAFETY: an all-zero rlimit is a valid one.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to `limit` only.
    let asked = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &mut limit) };
    tried("limits of another process", checked(asked));
    let mut byte = [0u8; 1];
    let local = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // Nothing is mapped at address 0 in any process: a process with the right to read gets that
    // error.
    let remote = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
    // SAFETY: the kernel writes to `byte` at most.
    let read = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    let read = match checked(read as i64) {
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(0),
        read => read,
    };
    tried("the memory of another process", read);
    // SAFETY: no memory effects here.
    let traced = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    tried("tracing another process", checked(traced));
    // SAFETY: no memory effects here.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, 0, 0) };
    // All processes that this one may signal except itself: there is none.
    // SAFETY: signal 0 sends nothing.
    tried("everybody", checked(unsafe { libc::kill(-1, 0) }));
}

fn shared(targets: &Targets) {
    // SAFETY: no memory effects.
    let found = unsafe { libc::shmget(targets.shared_memory, 0, 0) };
    tried("System V shared memory", checked(found));
    let name = CString::new(targets.queue.as_str()).unwrap();
    // SAFETY: a valid string.
    tried(
        "a POSIX message queue",
        checked(unsafe { libc::mq_open(name.as_ptr(), libc::O_RDONLY) }),
    );
    let spec = libc::KEY_SPEC_USER_KEYRING;
    // SAFETY: no memory effects.
    let found = unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_GET_KEYRING_ID, spec, 1) };
    tried("a keyring", checked(found));
}

fn kernel() {
    // A process with threads cannot make a user namespace; a child can.
    // SAFETY: the child makes system calls only, and ends.
    let made = unsafe {
        match libc::fork() {
            0 => {
                let made = libc::unshare(libc::CLONE_NEWUSER);
                libc::_exit(if made == 0 { 0 } else { 1 })
            }
            child => {
                let mut status = 0;
                libc::waitpid(child, &mut status, 0);
                status
            }
        }
    };
    let made = if made == 0 { Ok(()) } else { Err(io::Error::other("the child could not")) };
    tried("a user namespace", made);
    let mut context: libc::c_ulong = 0;
    // SAFETY: the kernel writes to `context` only.
    let set_up = checked(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) });
    if set_up.is_ok() {
        // SAFETY: it was just made.
        unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    }
    tried("an io_setup context", set_up);
    let mut parameters = [0u8; 120];
    // SAFETY: the kernel writes to `parameters`, which is as long as struct io_uring_params.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    tried("an io_uring", checked(ring));
    holes();
}

/// Removes pages from memory that others may be copying from, in both possible ways.
fn holes() {
    // SAFETY: a valid name; the descriptor and the mapping end with the process, and nothing else
    // uses them.
    unsafe {
        let file = libc::memfd_create(c"holes".as_ptr(), 0);
        libc::ftruncate(file, 1 << 16);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        tried("a hole in a file", checked(libc::fallocate(file, mode, 0, 4096)));
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let memory = libc::mmap(std::ptr::null_mut(), 1 << 16, rights, libc::MAP_SHARED, file, 0);
        tried("a hole in memory", checked(libc::madvise(memory, 4096, libc::MADV_REMOVE)));
    }
}

/// Checks that no descriptor of the process is a directory, from which a path could start.
fn descriptors() {
    for fd in 0..1024 {
        // SAFETY: a valid string; what is opened is not used, and ends with the process.
        let opened = unsafe { libc::openat(fd, c"..".as_ptr(), libc::O_PATH) };
        if opened >= 0 {
            tried("a directory behind a descriptor", Ok(()));
        }
    }
}

/// Makes a segment that every process may use; returns its key. `number` tells apart those of one
/// process.
pub fn make_shared_memory(number: u32) -> i32 {
    let key = 0x5100_0000 | ((number as i32 & 0xf) << 16) | (std::process::id() as i32 & 0xffff);
    // SAFETY: no memory effects.
    checked(unsafe { libc::shmget(key, 4096, libc::IPC_CREAT | 0o666) }).unwrap();
    key
}

pub fn remove_shared_memory(key: i32) {
    // SAFETY: no memory effects; nobody has it mapped.
    unsafe { libc::shmctl(libc::shmget(key, 0, 0), libc::IPC_RMID, std::ptr::null_mut()) };
}

/// Makes a queue that every process may use.
pub fn make_queue(name: &str) {
    let name = CString::new(name).unwrap();
    // SAFETY: a valid string; default attributes.
    let queue = unsafe {
        let attributes = std::ptr::null_mut::<libc::mq_attr>();
        libc::mq_open(name.as_ptr(), libc::O_CREAT | libc::O_RDONLY, 0o644, attributes)
    };
    checked(queue).unwrap();
}

pub fn remove_queue(name: &str) {
    let name = CString::new(name).unwrap();
    // SAFETY: a valid string.
    unsafe { libc::mq_unlink(name.as_ptr()) };
}
