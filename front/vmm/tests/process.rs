//! The program as its users meet it: exit statuses, messages, the control socket.
#![allow(unsafe_code)] // guests are assembled into this program, and their bytes found by labels
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[macro_use]
#[allow(dead_code)] // shared with the library's tests
#[path = "../../../host/vmm/tests/guests/common.rs"]
mod common;
#[path = "process/client.rs"]
mod client;
#[path = "process/memory.rs"]
mod memory;
#[path = "process/plug.rs"]
mod plug;
#[path = "../../../host/vfio-user/examples/ramdisk.rs"]
mod ramdisk;
#[path = "process/saved.rs"]
mod saved;
#[path = "process/spare.rs"]
mod spare;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use client::{Client, Running};
use common::has_kvm;
use serde_json::{Value, json};

guest!(prints_and_powers_off:
    "mov dx, 0x3f8"
    "mov al, 'x'"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

guest!(resets:
    "mov dx, 0x602"
    "mov al, 1"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

guest!(panics:
    "mov dx, 0x505"
    "mov al, 1"
    "out dx, al"
    "mov dx, 0x602"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

guest!(counts_for_ever:
    "mov dx, 0x80"
    "2: out dx, al"
    "jmp 2b"
);

struct TestDir(tempfile::TempDir);

impl TestDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a guest's kernel file.
    fn kernel(&self, code: &[u8]) -> PathBuf {
        let path = self.path("kernel");
        std::fs::write(&path, common::elf(code)).unwrap();
        path
    }
}

fn vmm(kernel: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
    command.arg("--kernel").arg(kernel).args(["--memory", "64"]).stdin(Stdio::null());
    command
}

fn error_of(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    text
}

#[test]
fn the_status_says_how_the_machine_ended() {
    if !has_kvm("the_status_says_how_the_machine_ended") {
        return;
    }
    let place = TestDir::new();
    for (code, status, printed) in
        [(prints_and_powers_off(), 0, "x"), (resets(), 3, ""), (panics(), 4, "")]
    {
        let output = vmm(&place.kernel(code)).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), printed);
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn statistics_are_printed_when_they_are_asked_for() {
    if !has_kvm("statistics_are_printed_when_they_are_asked_for") {
        return;
    }
    let place = TestDir::new();
    let kernel = place.kernel(prints_and_powers_off());
    let output = vmm(&kernel).arg("--statistics").output().unwrap();
    let statistics: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(statistics["exits"]["port_write"], 2);
    assert_eq!(statistics["memory"]["bytes"], 64 << 20);
    let touched = statistics["memory"]["touched"].as_u64().unwrap();
    assert!((4096..16 << 20).contains(&touched), "{touched} bytes were touched");
    assert!(statistics["faults"]["minor"].as_u64().unwrap() > 0, "{statistics}");
    assert_eq!(statistics["cpu_us"].as_array().unwrap().len(), 1);
}

#[test]
fn bad_input_is_one_clear_line() {
    if !has_kvm("bad_input_is_one_clear_line") {
        return;
    }
    let place = TestDir::new();
    let kernel = place.kernel(prints_and_powers_off());
    let no_kernel = place.path("no-kernel");
    std::fs::write(&no_kernel, "#!/bin/sh\n".repeat(100)).unwrap();
    let listener = place.path("silent");
    let _silent = UnixListener::bind(&listener).unwrap();
    let fails = |command: &mut Command, status: i32, words: &str| {
        let output = command.output().unwrap();
        let error = error_of(&output);
        assert_eq!(output.status.code(), Some(status), "{error}");
        assert!(error.starts_with("slipway-vmm: ") && error.contains(words), "{error}");
    };
    fails(&mut vmm(&no_kernel), 1, "it is not an ELF file");
    fails(vmm(&kernel).args(["--cpus", "33"]), 1, "1 to 32");
    fails(vmm(&kernel).args(["--cpus", "0"]), 1, "1 to 32");
    fails(vmm(&kernel).args(["--max-cpus", "33"]), 1, "1 to 32");
    fails(vmm(&kernel).args(["--cpus", "3", "--max-cpus", "2"]), 1, "at most 2");
    fails(vmm(&kernel).args(["--memory", "32"]), 1, "64 MiB to 256 GiB");
    fails(vmm(&kernel).args(["--hotplug-memory", "100"]), 1, "multiple of 128 MiB");
    fails(vmm(&kernel).args(["--hotplug-memory", "128,16"]), 1, "0 to 15");
    fails(vmm(&kernel).args(["--hotplug-memory", "1G"]), 2, "is not SIZE[,NODE]");
    fails(vmm(&kernel).args(["--slots", "28", "--hotplug-memory", "128"]), 1, "room for 27");
    fails(vmm(&kernel).args(["--cmdline", &"x".repeat(3000)]), 1, "command line");
    fails(vmm(&kernel).args(["--kvm", "/dev/null"]), 1, "not that of /dev/kvm");
    fails(vmm(&kernel).args(["--kvm", "/nonexistent"]), 2, "load kvm_intel or kvm_amd");
    fails(vmm(&kernel).arg("--pmem").arg(&no_kernel), 1, "sealed against shrinking and writing");
    fails(vmm(&kernel).args(["--pmem", "/nonexistent"]), 2, "/nonexistent");
    let twice = ["--pmem", "/dev/null", "--pmem", "/dev/null"];
    fails(vmm(&kernel).args(twice), 2, "more than once");
    fails(vmm(&kernel).args(["--function", "/nonexistent"]), 2, "/nonexistent");
    fails(vmm(&kernel).arg("--initramfs").arg(place.path("none")), 2, "none");
    fails(vmm(&kernel).arg("--control").arg(&listener), 2, "cannot be made");
    fails(vmm(&kernel).args(["--disk", "x"]), 2, "no option --disk");
    // A socket whose server is no vfio-user server.
    let hung_up = place.path("hung-up");
    let server = UnixListener::bind(&hung_up).unwrap();
    let accepting = std::thread::spawn(move || drop(server.accept()));
    fails(vmm(&kernel).arg("--function").arg(&hung_up), 1, "function 0: ");
    accepting.join().unwrap();
    // Nothing is left but what was there.
    let left = std::fs::read_dir(place.0.path()).unwrap().count();
    assert_eq!(left, 4);
}

fn start(place: &TestDir, code: &[u8]) -> (Running, Client) {
    let control = place.path("control");
    let mut command = vmm(&place.kernel(code));
    command.arg("--control").arg(&control).arg("--paused");
    let running = Running(command.stdout(Stdio::null()).spawn().unwrap());
    let client = Client::connect(&control);
    (running, client)
}

#[test]
fn a_client_runs_stops_and_ends_the_machine() {
    if !has_kvm("a_client_runs_stops_and_ends_the_machine") {
        return;
    }
    let place = TestDir::new();
    let (mut running, mut client) = start(&place, counts_for_ever());
    assert_eq!(client.execute("query-status"), json!({ "running": false, "status": "paused" }));
    assert_eq!(client.execute("query-kvm")["enabled"], true);
    assert_eq!(client.exits(), 0);
    client.execute("cont");
    assert_eq!(client.event(), "RESUME");
    while client.exits() == 0 {}
    while client.execute("slipway-statistics")["cpu_us"][0] == 0 {}
    // The next client takes the place of this one.
    let mut client = Client::connect(&place.path("control"));
    client.execute("stop");
    assert_eq!(client.event(), "STOP");
    let stopped = client.exits();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(client.exits(), stopped, "it runs");
    client.execute("stop");
    assert_eq!(client.event(), "STOP", "of a machine that has stopped");
    client.execute("quit");
    assert_eq!(client.event(), "SHUTDOWN");
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
    assert!(!place.path("control").exists(), "the socket is left");
}

#[test]
fn the_end_of_a_guest_is_an_event() {
    if !has_kvm("the_end_of_a_guest_is_an_event") {
        return;
    }
    let place = TestDir::new();
    let (mut running, mut client) = start(&place, panics());
    client.execute("cont");
    for event in ["RESUME", "GUEST_PANICKED", "SHUTDOWN"] {
        assert_eq!(client.event(), event);
    }
    assert_eq!(running.0.wait().unwrap().code(), Some(4));
}

#[test]
fn what_is_no_command_is_refused_and_the_machine_goes_on() {
    if !has_kvm("what_is_no_command_is_refused_and_the_machine_goes_on") {
        return;
    }
    let place = TestDir::new();
    let (_running, mut client) = start(&place, counts_for_ever());
    let reconnect = r#"{"execute": "slipway-reconnect", "arguments": {"function": 0}}"#;
    for line in ["stop", "{}", "[1]", r#"{"execute": "eject"}"#, reconnect] {
        let answer = client.ask(line);
        assert!(answer["error"]["desc"].is_string(), "{answer}");
    }
    // A line without an end is hung up on.
    let endless = vec![b'x'; 1 << 20];
    let _ = client.lines.get_mut().write_all(&endless);
    assert_eq!(client.lines.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    let mut client = Client::connect(&place.path("control"));
    assert_eq!(client.execute("query-status")["running"], false);
}
