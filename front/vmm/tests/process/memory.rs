//! Hot-plug memory by the control socket, with a guest that has a driver of the device.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use slipway_pool::{Pool, Server, Settings, Template, TemplateName};
use slipway_pool_wire::{Lease, Page, Request};

use crate::common::has_kvm;
use crate::{Client, Running, TestDir, vmm};

/// Bytes of a block.
const BLOCK: u64 = 2 << 20;
/// Bytes of a machine's memory with both regions of [`start`].
const BYTES: u64 = (64 + 256 + 128) << 20;

// The driver of the memory device that is PCI device 31, whose region is at 68 GiB: plugs the first
// block that is not plugged, or unplugs the last one, until as much is plugged as was asked for.
// Writes another register while it waits for the answer. Ends if a request fails.
guest!(follows_requests:
    "mov ebx, 0xe00f8000"
    "mov word ptr [ebx + 4], 6"
    "mov ebp, [ebx + 0x10]"
    "and ebp, 0xfffffff0"
    "mov byte ptr [ebp + 20], 0"             // status
    "mov byte ptr [ebp + 20], 3"
    "mov dword ptr [ebp + 8], 0"             // features
    "mov dword ptr [ebp + 12], 2"
    "mov dword ptr [ebp + 8], 1"
    "mov dword ptr [ebp + 12], 1"
    "mov byte ptr [ebp + 20], 0xb"
    "mov word ptr [ebp + 22], 0"             // the queue
    "mov word ptr [ebp + 24], 8"
    "mov dword ptr [ebp + 32], 0x30000"
    "mov dword ptr [ebp + 36], 0"
    "mov dword ptr [ebp + 40], 0x31000"
    "mov dword ptr [ebp + 44], 0"
    "mov dword ptr [ebp + 48], 0x32000"
    "mov dword ptr [ebp + 52], 0"
    "mov word ptr [ebp + 28], 1"
    "mov byte ptr [ebp + 20], 0xf"
    "mov dword ptr [0x30000], 0x33000"       // request
    "mov dword ptr [0x30008], 24"
    "mov dword ptr [0x3000c], 0x10001"
    "mov dword ptr [0x30010], 0x33100"       // response
    "mov dword ptr [0x30018], 10"
    "mov dword ptr [0x3001c], 2"
    "mov dword ptr [0x3300c], 0x11"
    "mov dword ptr [0x33010], 1"
    "2: mov eax, [ebp + 0x2028]"             // plugged
    "mov ecx, [ebp + 0x2030]"                // requested
    "cmp eax, ecx"
    "je 2b"
    "ja 3f"
    "mov dword ptr [0x33000], 0"
    "jmp 4f"
    "3: mov dword ptr [0x33000], 1"
    "sub eax, 0x200000"
    "4: mov [0x33008], eax"
    "mov eax, [0x31000]"                     // flags, index
    "add eax, 0x10000"
    "mov [0x31000], eax"
    "mov word ptr [ebp + 0x3000], 0"
    "5: mov dword ptr [ebp], 0"              // a register: no CPU does the device's work
    "mov ecx, [0x32000]"
    "xor ecx, eax"
    "shr ecx, 16"
    "jnz 5b"
    "cmp word ptr [0x33100], 0"              // the response: done
    "je 2b"
    "ud2"
);

/// Starts `command` with two regions of hot-plug memory.
fn start(place: &TestDir, mut command: Command) -> (Running, Client) {
    let control = place.path("control");
    let _ = std::fs::remove_file(&control);
    command.args(["--hotplug-memory", "256", "--hotplug-memory", "128,5"]);
    command.arg("--control").arg(&control).stdout(Stdio::null());
    let running = Running(command.spawn().unwrap());
    (running, Client::connect(&control))
}

/// Asks for memory, and waits until the guest has it.
fn request(client: &mut Client, bytes: u64) {
    let arguments = json!({ "device": 0, "bytes": bytes });
    let command = json!({ "execute": "slipway-memory", "arguments": arguments });
    assert_eq!(client.ask(&command.to_string())["return"], json!({}));
    wait(client, bytes);
}

/// Waits for the event that says that `bytes` bytes are plugged.
fn wait(client: &mut Client, bytes: u64) {
    loop {
        let event = client.read();
        if event["event"] == "SLIPWAY_MEMORY_CHANGED" {
            assert_eq!(event["data"]["device"], 0, "{event}");
            assert_eq!(event["data"]["requested"], bytes, "{event}");
            if event["data"]["plugged"] == bytes {
                return;
            }
        }
    }
}

fn devices(client: &mut Client) -> Value {
    client.execute("slipway-memory")
}

#[test]
fn a_guest_follows_what_is_asked_of_it() {
    if !has_kvm("a_guest_follows_what_is_asked_of_it") {
        return;
    }
    let place = TestDir::new();
    let (_running, mut client) = start(&place, vmm(&place.kernel(follows_requests())));
    let listed = |requested: u64, plugged: u64| {
        json!([
            { "device": 0, "node": 1, "address": 68u64 << 30, "bytes": 256 << 20, "block": BLOCK,
              "requested": requested, "plugged": plugged },
            { "device": 1, "node": 5, "address": 70u64 << 30, "bytes": 128 << 20, "block": BLOCK,
              "requested": 0, "plugged": 0 },
        ])
    };
    assert_eq!(devices(&mut client), listed(0, 0));
    for blocks in [5, 2, 128, 0] {
        request(&mut client, blocks * BLOCK);
        assert_eq!(devices(&mut client), listed(blocks * BLOCK, blocks * BLOCK));
        let memory = &client.execute("slipway-statistics")["memory"];
        assert_eq!(
            (&memory["bytes"], &memory["plugged"]),
            (&json!(64 << 20), &json!(blocks * BLOCK))
        );
    }
    for (device, bytes, words) in [
        (2, 0, "the machine has 2"),
        (0, BLOCK / 2, "no multiple of the block's"),
        (0, 258 << 20, "the region has 268435456 bytes"),
    ] {
        let arguments = json!({ "device": device, "bytes": bytes });
        let command = json!({ "execute": "slipway-memory", "arguments": arguments });
        let answer = client.ask(&command.to_string());
        assert!(answer["error"]["desc"].as_str().unwrap().contains(words), "{answer}");
    }
    assert_eq!(devices(&mut client), listed(0, 0));
}

#[test]
fn plugged_memory_is_part_of_a_saved_machine() {
    if !has_kvm("plugged_memory_is_part_of_a_saved_machine") {
        return;
    }
    let place = TestDir::new();
    let memory = crate::common::memory(64 + 256 + 128);
    let with_memory = |mut command: Command| {
        command.args(["--memory", "fd:0"]).stdin(memory.try_clone().unwrap());
        command
    };
    let kernel = place.kernel(follows_requests());
    let (running, mut client) = start(&place, with_memory(vmm(&kernel)));
    request(&mut client, 3 * BLOCK);
    client.execute("stop");
    let state = place.path("state");
    let saved = client.save(&[File::create(&state).unwrap().as_fd()]);
    assert!(saved["return"]["bytes"].is_u64(), "{saved}");
    let refused =
        client.ask(r#"{"execute": "slipway-memory", "arguments": {"device": 0, "bytes": 0}}"#);
    assert!(refused["error"]["desc"].as_str().unwrap().contains("was saved"), "{refused}");
    drop(running);
    let restore = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
        command.arg("--restore").arg(&state);
        with_memory(command)
    };
    let output = restore().args(["--hotplug-memory", "384"]).output().unwrap();
    let error = crate::error_of(&output);
    assert!(error.contains("--hotplug-memory: it was saved with other regions"), "{error}");
    let (_running, mut client) = start(&place, restore());
    assert_eq!(devices(&mut client)[0]["plugged"], 3 * BLOCK);
    request(&mut client, 4 * BLOCK);
    request(&mut client, 0);
}

/// A pool without a keeper, which has the template "web" of `memory`, at the socket "pool".
fn pool_with_template(place: &TestDir, memory: &OwnedFd) -> (Pool, Server) {
    let pool = Pool::new(Settings { limit: 0, ..Settings::default() }).unwrap();
    pool.add_template(template(), Template::copy_of(memory.as_fd()).unwrap()).unwrap();
    let server = pool.listen(&place.path("pool")).unwrap();
    (pool, server)
}

fn template() -> TemplateName {
    TemplateName::new("web").unwrap()
}

/// Has `command` use `bytes` bytes of the pool's memory, which begin as `template` if there is one.
/// The command's process inherits the descriptors.
fn lease(
    place: &TestDir,
    command: &mut Command,
    (bytes, template): (u64, Option<TemplateName>),
) -> Lease {
    let request = Request { bytes, page: Page::Base, near: None, template };
    let lease = Lease::ask(&place.path("pool"), request).unwrap();
    command.stdin(Stdio::null());
    for (option, file) in [("--memory", &lease.file), ("--lease", &lease.connection)] {
        rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).unwrap();
        command.args([option, &format!("fd:{}", file.as_raw_fd())]);
    }
    lease
}

#[test]
fn forks_have_what_their_template_had_plugged_and_give_it_back_alone() {
    let name = "forks_have_what_their_template_had_plugged_and_give_it_back_alone";
    if !has_kvm(name) || !Path::new("/dev/userfaultfd").exists() {
        return;
    }
    let place = TestDir::new();
    let memory = crate::common::memory(BYTES >> 20);
    let mut command = vmm(&place.kernel(follows_requests()));
    command.args(["--memory", "fd:0"]).stdin(memory.try_clone().unwrap());
    let (running, mut client) = start(&place, command);
    request(&mut client, 3 * BLOCK);
    client.execute("stop");
    let state = place.path("state");
    let saved = client.save(&[File::create(&state).unwrap().as_fd()]);
    assert!(saved["return"]["bytes"].is_u64(), "{saved}");
    drop(running);
    // In the second block, as the guest or a device could have written it.
    let at = (64 << 20) + BLOCK + 5;
    rustix::io::pwrite(&memory, b"plugged", at).unwrap();
    let (_pool, _server) = pool_with_template(&place, &memory);
    let fork = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
        command.arg("--restore").arg(&state);
        let lease = lease(&place, &mut command, (BYTES, Some(template())));
        let (running, client) = start(&place, command);
        (running, client, lease.file)
    };
    let (mut one, mut two) = (fork(), fork());
    let bytes = |file: &OwnedFd| {
        let mut bytes = [1; 7];
        assert_eq!(rustix::io::pread(file, &mut bytes, at).unwrap(), bytes.len());
        bytes
    };
    for (_running, client, file) in [&mut one, &mut two] {
        assert_eq!(devices(client)[0]["plugged"], 3 * BLOCK);
        assert_eq!(bytes(file), *b"plugged");
    }
    request(&mut one.1, 0);
    assert_eq!(bytes(&one.2), [0; 7], "it is the host's");
    request(&mut one.1, 64 * BLOCK);
    request(&mut one.1, BLOCK);
    assert_eq!(devices(&mut two.1)[0]["plugged"], 3 * BLOCK);
    assert_eq!(bytes(&two.2), *b"plugged", "the other fork's");
    request(&mut two.1, 4 * BLOCK);
    assert_eq!(bytes(&two.2), *b"plugged");
}

#[test]
fn recycled_memory_has_no_regions() {
    let name = "recycled_memory_has_no_regions";
    if !has_kvm(name) || !Path::new("/dev/userfaultfd").exists() {
        return;
    }
    let place = TestDir::new();
    let (_pool, _server) = pool_with_template(&place, &crate::common::memory(64));
    let mut command = vmm(&place.kernel(follows_requests()));
    command.args(["--hotplug-memory", "256", "--hotplug-memory", "128"]);
    let _lease = lease(&place, &mut command, (1 << 20, None));
    let error = crate::error_of(&command.output().unwrap());
    assert!(error.contains("recycled memory of a pool has no hot-plug memory"), "{error}");
}
