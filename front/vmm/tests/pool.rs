//! A machine whose memory is that of an earlier one. Needs KVM and /dev/userfaultfd; without them
//! the tests end at once and say so.
#![allow(unsafe_code)] // guests are assembled into this program, and their bytes found by labels
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[macro_use]
#[allow(dead_code)] // shared with the library's tests
#[path = "../../../host/vmm/tests/guests/common.rs"]
mod common;
#[allow(dead_code)] // shared with the tests of the process
#[path = "process/client.rs"]
mod client;
#[path = "../../../host/pool/tests/common/huge_pages.rs"]
mod huge_pages;

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use client::{Client, Running};
use common::has_kvm;
use huge_pages::HugePages;
use slipway_keeper::Keeper;
use slipway_pool::{Pool, SLOTS, Server, Settings, Shelves};
use slipway_pool_wire::{Lease, Page, Request};

const BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

// Prints 'z' if the last word of each page from 2 MiB on is zero, else 's'. Writes to all of these.
guest!(reads_and_fills:
    "mov al, 'z'"
    "mov edi, 0x200ffc"
    "3: cmp dword ptr [edi], 0"
    "je 4f"
    "mov al, 's'"
    "4: mov dword ptr [edi], 0xaaaaaaaa"
    "add edi, 4096"
    "cmp edi, 0x4000000"
    "jb 3b"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

// Writes to the last word of every 16th page from 2 MiB to 16 MiB, and prints 'x'.
guest!(fills_a_little:
    "mov edi, 0x200ffc"
    "3: mov dword ptr [edi], 0x55555555"
    "add edi, 0x10000"
    "cmp edi, 0x1000000"
    "jb 3b"
    "mov dx, 0x3f8"
    "mov al, 'x'"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

/// A keeper, a pool that zeroes nothing before it must, and a guest's kernel.
struct Node {
    directory: tempfile::TempDir,
    pool: Pool,
    page: Page,
    _server: Server,
}

impl Node {
    fn new(page: Page) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper");
        let keepers = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&keepers));
        let keeper = (0..60_000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            Keeper::connect(&path).ok()
        });
        let keeper = keeper.unwrap();
        keeper.take(PATIENCE).unwrap();
        let shelves = Some(Shelves::new(Arc::new(keeper), 0..SLOTS * 4));
        let pool = Pool::new(Settings { limit: BYTES, shelves, ..Settings::default() }).unwrap();
        let server = pool.listen(&directory.path().join("pool")).unwrap();
        std::fs::write(directory.path().join("kernel"), common::elf(reads_and_fills())).unwrap();
        Self { directory, pool, page, _server: server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn lease(&self) -> Lease {
        Lease::ask(
            &self.path("pool"),
            Request { bytes: BYTES, page: self.page, near: None, template: None },
        )
        .unwrap()
    }

    /// Returns the command of a machine with this memory.
    fn command(&self, kernel: &str, lease: &Lease) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
        command.arg("--kernel").arg(self.path(kernel)).stdin(Stdio::null());
        for (option, file) in [("--memory", &lease.file), ("--lease", &lease.connection)] {
            command.args([option, &inherit(file)]);
        }
        command
    }

    /// Runs a machine until its guest powers off.
    fn run(&self) -> Output {
        self.command("kernel", &self.lease()).output().unwrap()
    }

    /// Waits until the pool has taken the memory back.
    fn all_back(&self) {
        let mut waited = Duration::ZERO;
        while self.pool.stats().lent > 0 || self.pool.stats().free_bytes == 0 {
            assert!(waited < PATIENCE, "{:?}", self.pool.stats());
            std::thread::sleep(Duration::from_millis(5));
            waited += Duration::from_millis(5);
        }
    }
}

/// Has children inherit the descriptor.
fn inherit(file: &OwnedFd) -> String {
    rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).unwrap();
    format!("fd:{}", file.as_raw_fd())
}

#[test]
fn a_guest_never_sees_what_an_earlier_one_wrote() {
    let name = "a_guest_never_sees_what_an_earlier_one_wrote";
    if !has_kvm(name) || !Path::new("/dev/userfaultfd").exists() {
        return;
    }
    no_guest_sees_another(Page::Base);
}

#[test]
#[ignore = "raises vm.nr_overcommit_hugepages of the host: make soak"]
fn a_guest_never_sees_what_an_earlier_one_wrote_in_huge_pages() {
    let name = "a_guest_never_sees_what_an_earlier_one_wrote_in_huge_pages";
    if !has_kvm(name) || !Path::new("/dev/userfaultfd").exists() {
        return;
    }
    let Some(_pages) = HugePages::allow() else { return };
    no_guest_sees_another(Page::Huge);
}

fn no_guest_sees_another(page: Page) {
    let node = Node::new(page);
    for round in 0..3 {
        let output = node.run();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "z", "round {round}");
        node.all_back();
    }
    assert!(node.pool.stats().faults > 0);
    // The file itself has the last guest's bytes.
    let mut byte = [0];
    rustix::io::pread(&node.lease().file, &mut byte, BYTES - 1).unwrap();
    assert_eq!(byte, [0xaa]);
}

#[test]
fn the_memory_of_a_saved_machine_has_no_byte_of_an_earlier_guest() {
    let name = "the_memory_of_a_saved_machine_has_no_byte_of_an_earlier_guest";
    if !has_kvm(name) || !Path::new("/dev/userfaultfd").exists() {
        return;
    }
    let node = Node::new(Page::Base);
    assert_eq!(node.run().status.code(), Some(0));
    node.all_back();
    let (kernel, control) = (node.path("fills"), node.path("control"));
    std::fs::write(&kernel, common::elf(fills_a_little())).unwrap();
    let lease = node.lease();
    let mut command = node.command("fills", &lease);
    command.arg("--control").arg(&control).stdout(Stdio::piped());
    let mut machine = Running(command.spawn().unwrap());
    machine.0.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let mut client = Client::connect(&control);
    client.execute("stop");
    let state = std::fs::File::create(node.path("state")).unwrap();
    let (answer, pages) = client.save_with_memory(state.as_fd());
    assert!(answer["return"]["bytes"].is_u64(), "{answer}");
    let filled = pages.iter().filter(|(offset, _)| *offset >= 2 << 20);
    let expected: Vec<u64> = (0x20_0000..0x100_0000).step_by(0x1_0000).collect();
    assert_eq!(filled.clone().map(|(offset, _)| *offset).collect::<Vec<_>>(), expected);
    for (_, page) in filled {
        assert_eq!((&page[..0xffc], &page[0xffc..]), (&[0; 0xffc][..], &[0x55; 4][..]));
    }
    client.execute("quit");
    assert_eq!(machine.0.wait().unwrap().code(), Some(0));
}
