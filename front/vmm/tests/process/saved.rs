//! Machines that are saved by the control socket, and processes that go on from the file.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use serde_json::{Value, json};
use slipway_reactor::{Reactor, Settings};

use crate::common::{events, has_kvm, memory};
use crate::{Client, Running, TestDir, error_of, ramdisk, vmm};

// Prints each number's low byte.
guest!(counts:
    "xor ecx, ecx"
    "mov dx, 0x3f8"
    "2: inc ecx"
    "mov al, cl"
    "out dx, al"
    "jmp 2b"
);

// Writes the sizes of the admin queues to the NVMe controller that is device 4, and prints the low
// byte of the register for ever.
guest!(reads_a_controller:
    "mov dword ptr [0xe0020004], 6"
    "mov ebx, [0xe0020010]"
    "and ebx, 0xfffffff0"
    "mov dword ptr [ebx + 0x24], 0x00150015"
    "mov dx, 0x3f8"
    "2: mov eax, [ebx + 0x24]"
    "out dx, al"
    "jmp 2b"
);

// Writes a word to every 16th page from 2 MiB to 16 MiB, and zeros to the page behind the first of
// them. Then prints each number's low byte.
guest!(fills_and_counts:
    "mov edi, 0x200ffc"
    "3: mov dword ptr [edi], edi"
    "add edi, 0x10000"
    "cmp edi, 0x1000000"
    "jb 3b"
    "mov dword ptr [0x201000], 0"
    "xor ecx, ecx"
    "mov dx, 0x3f8"
    "2: inc ecx"
    "mov al, cl"
    "out dx, al"
    "jmp 2b"
);

// Prints each number's low byte, after a while each, and writes the number to one of 16 pages in
// turn before.
guest!(writes_and_counts:
    "xor ecx, ecx"
    "mov dx, 0x3f8"
    "2: inc ecx"
    "mov eax, ecx"
    "and eax, 15"
    "shl eax, 12"
    "mov [eax + 0x200000], ecx"
    "mov ebx, 0x100"
    "3: dec ebx"
    "jnz 3b"
    "mov al, cl"
    "out dx, al"
    "jmp 2b"
);

/// A machine that runs, what it prints, and a client of its control socket.
struct Vm {
    _running: Running,
    console: ChildStdout,
    client: Client,
    memory: OwnedFd,
    /// The bytes of `console` that were read.
    taken: u64,
}

impl Vm {
    /// Starts `command` with `memory`, and a control socket at the path `control`.
    fn start(mut command: Command, memory: OwnedFd, control: &PathBuf) -> Self {
        command.args(["--memory", "fd:0"]).stdin(memory.try_clone().unwrap());
        command.arg("--control").arg(control).stdout(Stdio::piped());
        let mut running = Running(command.spawn().unwrap());
        let console = running.0.stdout.take().unwrap();
        let client = Client::connect(control);
        Self { _running: running, console, client, memory, taken: 0 }
    }

    fn read(&mut self, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; count as usize];
        self.console.read_exact(&mut bytes).unwrap();
        self.taken += count;
        bytes
    }

    /// Reads until the guest has printed `count` bytes after this call. The console holds what was
    /// printed before, and a guest waits while it is full.
    fn read_on(&mut self, count: u64) -> Vec<u8> {
        let printed = self.client.exits();
        self.read(printed - self.taken + count)
    }

    /// Stops the guest, and returns what it has printed that was not read.
    fn stop(&mut self) -> Vec<u8> {
        self.client.execute("stop");
        let printed = self.client.exits();
        self.read(printed - self.taken)
    }

    fn save(&mut self, file: BorrowedFd<'_>) -> Value {
        self.client.save(&[file])
    }

    /// Returns a copy of the guest's memory.
    fn copy(&self) -> OwnedFd {
        let copy = memory(64);
        let mut at = 0;
        while let Ok(start) = rustix::fs::seek(&self.memory, SeekFrom::Data(at)) {
            at = rustix::fs::seek(&self.memory, SeekFrom::Hole(start)).unwrap();
            let mut bytes = vec![0; (at - start) as usize];
            assert_eq!(rustix::io::pread(&self.memory, &mut bytes, start).unwrap(), bytes.len());
            assert_eq!(rustix::io::pwrite(&copy, &bytes, start).unwrap(), bytes.len());
        }
        copy
    }
}

/// Returns the command that goes on from `state`.
fn restore(state: &PathBuf) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
    command.arg("--restore").arg(state).stdin(Stdio::null());
    command
}

/// Checks that each byte is the next number after the one before, first of all `last`.
fn follow(printed: &[u8], last: u8) -> u8 {
    printed.iter().fold(last, |last, &byte| {
        assert_eq!(byte, last.wrapping_add(1));
        byte
    })
}

/// Returns a file in memory that nobody can change.
fn sealed(bytes: &[u8]) -> File {
    let file = rustix::fs::memfd_create("state", MemfdFlags::ALLOW_SEALING).unwrap();
    let mut file = File::from(file);
    file.write_all(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    file
}

fn refused(answer: &Value, words: &str) {
    let text = answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(text.contains(words), "{text}");
}

#[test]
fn several_processes_go_on_from_one_file() {
    if !has_kvm("several_processes_go_on_from_one_file") {
        return;
    }
    let place = TestDir::new();
    let command = vmm(&place.kernel(counts()));
    let mut vm = Vm::start(command, memory(64), &place.path("control"));
    let mut last = follow(&vm.read(10), 0);
    let state = place.path("state");
    let file = File::create(&state).unwrap();
    refused(&vm.save(file.as_fd()), "stop it");
    last = follow(&vm.stop(), last);
    refused(&vm.client.ask(r#"{"execute": "slipway-save"}"#), "descriptor");
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    refused(&vm.save(pipe.as_fd()), "needs a file");
    let answer = vm.save(file.as_fd());
    assert_eq!(answer["return"]["bytes"], file.metadata().unwrap().len(), "{answer}");
    refused(&vm.client.ask(r#"{"execute": "system_powerdown"}"#), "let it go on");
    let fork = |number: u32| {
        let control = place.path(&format!("control-{number}"));
        Vm::start(restore(&state), vm.copy(), &control)
    };
    let mut forks = [0, 1, 2].map(fork);
    for fork in &mut forks {
        let at = follow(&fork.read(10), last);
        follow(&fork.stop(), at);
    }
    // The saved machine goes on as well, and can be saved again.
    for _ in 0..2 {
        vm.client.execute("cont");
        last = follow(&vm.read(10), last);
        last = follow(&vm.stop(), last);
        let again = File::create(place.path("again")).unwrap();
        assert!(vm.save(again.as_fd())["return"]["bytes"].is_u64());
    }
    // A successor that stays paused.
    let mut command = restore(&place.path("again"));
    command.arg("--paused");
    let mut paused = Vm::start(command, vm.copy(), &place.path("control-3"));
    assert_eq!(paused.client.execute("query-status")["running"], false);
    paused.client.execute("cont");
    follow(&paused.read(10), last);
}

#[test]
fn memory_comes_through_a_pipe_and_a_reader_that_goes_away_ends_the_save_alone() {
    if !has_kvm("memory_comes_through_a_pipe_and_a_reader_that_goes_away_ends_the_save_alone") {
        return;
    }
    let place = TestDir::new();
    let mut command = vmm(&place.kernel(fills_and_counts()));
    command.args(["--hotplug-memory", "128"]);
    let mut vm = Vm::start(command, memory(64 + 128), &place.path("control"));
    let mut last = follow(&vm.read(10), 0);
    last = follow(&vm.stop(), last);
    let state = place.path("state");
    let file = File::create(&state).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    for files in [[&file; 2].as_slice(), &[&file; 3]] {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        refused(&vm.client.save(&files), "a pipe for the memory");
    }
    drop(reader);
    refused(&vm.client.save(&[file.as_fd(), writer.as_fd()]), "Broken pipe");
    vm.client.execute("cont");
    last = follow(&vm.read(10), last);
    last = follow(&vm.stop(), last);
    let file = File::create(&state).unwrap();
    let (answer, pages) = vm.client.save_with_memory(file.as_fd());
    assert_eq!(answer["return"]["bytes"], file.metadata().unwrap().len(), "{answer}");
    for offset in (0x20_0000u64..0x100_0000).step_by(0x1_0000) {
        let found = pages.binary_search_by_key(&offset, |(offset, _)| *offset).unwrap();
        assert_eq!(pages[found].1[0xffc..], (offset as u32 + 0xffc).to_le_bytes());
    }
    assert!(pages.iter().all(|(offset, _)| *offset != 0x20_1000), "touched, and zeros");
    // All other pages are zeros: another machine goes on with these.
    let copy = memory(64 + 128);
    for (offset, page) in &pages {
        assert_eq!(rustix::io::pwrite(&copy, page, *offset).unwrap(), page.len());
    }
    let whole = |file: &OwnedFd| {
        let mut bytes = vec![0; 64 << 20];
        assert_eq!(rustix::io::pread(file, &mut bytes, 0).unwrap(), bytes.len());
        bytes
    };
    assert!(whole(&copy) == whole(&vm.memory), "the bytes of the guest's memory");
    let mut fork = restore(&state);
    fork.args(["--hotplug-memory", "128"]);
    let mut fork = Vm::start(fork, copy, &place.path("control-1"));
    follow(&fork.read(10), last);
    vm.client.execute("cont");
    follow(&vm.read(10), last);
}

#[test]
fn what_is_written_after_memory_was_copied_ahead_comes_with_the_save() {
    if !has_kvm("what_is_written_after_memory_was_copied_ahead_comes_with_the_save") {
        return;
    }
    let place = TestDir::new();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let disk = place.path("disk");
    let server = ramdisk::serve(disk.to_str().unwrap(), &reactor).unwrap();
    let mut command = vmm(&place.kernel(writes_and_counts()));
    command.arg("--function").arg(&disk);
    let mut vm = Vm::start(command, memory(64), &place.path("control"));
    let mut last = follow(&vm.read(10), 0);
    let file = File::create(place.path("state")).unwrap();
    let nothing = json!({ "execute": "slipway-save", "arguments": { "rest": true } });
    refused(&vm.client.ask(&nothing.to_string()), "not copied ahead");
    refused(&vm.client.ask(r#"{"execute": "slipway-copy-ahead"}"#), "needs a pipe");
    let whole = |file: &OwnedFd| {
        let mut bytes = vec![0; 64 << 20];
        assert_eq!(rustix::io::pread(file, &mut bytes, 0).unwrap(), bytes.len());
        bytes
    };
    for _ in 0..2 {
        let copy = memory(64);
        assert!(vm.client.copy_ahead(copy.as_fd()) >= 2);
        // The guest goes on, and writes.
        last = follow(&vm.read_on(300), last);
        last = follow(&vm.stop(), last);
        let (answer, pages) = vm.client.save_rest(file.as_fd(), copy.as_fd());
        assert!(answer["return"]["bytes"].is_u64(), "{answer}");
        assert!((1..64).contains(&pages), "{pages} of 16384 pages");
        assert!(whole(&copy) == whole(&vm.memory), "the bytes of the guest's memory");
        vm.client.execute("cont");
        last = follow(&vm.read(10), last);
        refused(&vm.client.ask(&nothing.to_string()), "not copied ahead");
    }
    // A save that fails has taken the bits of pages that its reader never had.
    let copy = memory(64);
    vm.client.copy_ahead(copy.as_fd());
    last = follow(&vm.read_on(300), last);
    last = follow(&vm.stop(), last);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    drop(reader);
    vm.client.send_with(&nothing, &[file.as_fd(), writer.as_fd()]);
    refused(&vm.client.answer(), "writing the memory");
    let (answer, _) = vm.client.save_rest(file.as_fd(), copy.as_fd());
    assert!(answer["return"]["bytes"].is_u64(), "{answer}");
    assert!(whole(&copy) == whole(&vm.memory), "the bytes of the guest's memory");
    vm.client.execute("cont");
    follow(&vm.read(10), last);
    // No function comes while memory is copied, here to a reader that takes none of it.
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    vm.client.send_with(&json!({ "execute": "slipway-copy-ahead" }), &[writer.as_fd()]);
    drop(writer);
    refused(&vm.client.plug("late", &disk), "is being copied");
    drop(reader);
    refused(&vm.client.answer(), "writing the memory");
    server.close();
}

#[test]
fn a_state_that_does_not_fit_is_one_clear_line() {
    if !has_kvm("a_state_that_does_not_fit_is_one_clear_line") {
        return;
    }
    let place = TestDir::new();
    let command = vmm(&place.kernel(counts()));
    let mut vm = Vm::start(command, memory(64), &place.path("control"));
    vm.client.execute("stop");
    let state = place.path("state");
    vm.save(File::create(&state).unwrap().as_fd());
    let fails = |command: &mut Command, memory: OwnedFd, words: &str| {
        let output = command.args(["--memory", "fd:0"]).stdin(memory).output().unwrap();
        let error = error_of(&output);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("slipway-vmm: ") && error.contains(words), "{error}");
    };
    fails(&mut restore(&state), memory(65), "bytes of memory");
    fails(restore(&state).args(["--cpus", "2"]), vm.copy(), "--cpus");
    fails(restore(&state).args(["--slots", "2"]), vm.copy(), "--slots");
    let whole = std::fs::read(&state).unwrap();
    // Nobody can have changed a sealed file since it was checked: its checksum is not looked at.
    let mut unsummed = whole.clone();
    unsummed[24] ^= 1;
    let sealed = sealed(&unsummed);
    let sealed = format!("/proc/{}/fd/{}", std::process::id(), sealed.as_raw_fd());
    let mut fork = Vm::start(restore(&sealed.into()), vm.copy(), &place.path("fork"));
    assert_eq!(fork.read(3).len(), 3);
    std::fs::write(&state, &whole[..whole.len() / 2]).unwrap();
    fails(&mut restore(&state), vm.copy(), "cut off");
    let mut changed = whole;
    changed[100] ^= 1;
    std::fs::write(&state, &changed).unwrap();
    fails(&mut restore(&state), vm.copy(), "damaged");
    let socket = place.path("control");
    fails(&mut restore(&place.kernel(counts())), vm.copy(), "none of slipway-vmm's");
    assert!(socket.exists());
}

#[test]
fn a_function_behind_a_socket_goes_on() {
    if !has_kvm("a_function_behind_a_socket_goes_on") {
        return;
    }
    let place = TestDir::new();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let disks = ["a", "b", "c"].map(|name| place.path(name));
    let serve = |path: &PathBuf| ramdisk::serve(path.to_str().unwrap(), &reactor).unwrap();
    let servers = disks.each_ref().map(serve);
    let mut command = vmm(&place.kernel(reads_a_controller()));
    command.arg("--function").arg(&disks[0]);
    let mut vm = Vm::start(command, memory(64), &place.path("control"));
    assert_eq!(vm.read(3), [0x15; 3]);
    vm.client.execute("stop");
    let state = place.path("state");
    let answer = vm.save(File::create(&state).unwrap().as_fd());
    assert!(answer["return"]["bytes"].is_u64(), "{answer}");
    let mut fork = restore(&state);
    fork.arg("--function").arg(&disks[1]);
    let mut fork = Vm::start(fork, vm.copy(), &place.path("control-1"));
    assert_eq!(fork.read(3), [0x15; 3], "the register as it was");
    let listed = fork.client.execute("slipway-functions");
    assert_eq!(listed[0]["id"], "function-0");
    // The saved machine's function goes on as well.
    vm.client.execute("cont");
    let unread = vm.client.exits() - vm.taken;
    assert!(vm.read(unread + 3).iter().all(|&byte| byte == 0x15));
    // Another number of functions.
    let output = restore(&state).args(["--memory", "fd:0"]).stdin(vm.copy()).output().unwrap();
    assert!(error_of(&output).contains("1 functions; --function is given 0 times"));
    servers.iter().for_each(|server| server.close());
}

#[test]
fn what_was_plugged_goes_on_and_can_be_removed() {
    if !has_kvm("what_was_plugged_goes_on_and_can_be_removed") {
        return;
    }
    let place = TestDir::new();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let disks = ["a", "b"].map(|name| place.path(name));
    let serve = |path: &PathBuf| ramdisk::serve(path.to_str().unwrap(), &reactor).unwrap();
    let servers = disks.each_ref().map(serve);
    let room = ["--slots", "2", "--max-cpus", "2"];
    let mut command = vmm(&place.kernel(events()));
    command.args(room);
    let mut vm = Vm::start(command, memory(64), &place.path("control"));
    assert_eq!(vm.read(1), b"r");
    assert_eq!(vm.client.plug("disk", &disks[0])["return"]["function"], 0);
    assert_eq!(vm.read(4), b"4p\xf4.");
    let arguments = json!({ "driver": "host-x86_64-cpu", "id": "second", "core-id": 1 });
    let add = json!({ "execute": "device_add", "arguments": arguments });
    assert_eq!(vm.client.ask(&add.to_string())["return"], json!({}));
    assert_eq!(vm.read(3), b"8c.");
    vm.client.execute("stop");
    let state = place.path("state");
    let answer = vm.save(File::create(&state).unwrap().as_fd());
    assert!(answer["return"]["bytes"].is_u64(), "{answer}");
    refused(&vm.client.ask(&add.to_string()), "let it go on");
    refused(&vm.client.unplug("disk"), "let it go on");
    let mut fork = restore(&state);
    fork.args(room).arg("--function").arg(&disks[1]);
    let mut fork = Vm::start(fork, vm.copy(), &place.path("control-1"));
    assert_eq!(fork.read(2), b"2.", "a new generation");
    refused(&fork.client.ask(&add.to_string()), "already");
    assert_eq!(fork.client.unplug("disk")["return"], json!({}));
    assert_eq!(fork.read(4), b"4e\xff.");
    assert_eq!(fork.client.unplug("second")["return"], json!({}));
    assert_eq!(fork.read(3), b"8d.");
    for _ in 0..2 {
        assert_eq!(fork.client.event(), "DEVICE_DELETED");
    }
    servers.iter().for_each(|server| server.close());
}
