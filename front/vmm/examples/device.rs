//! Plugs functions, CPUs and memory into a running `slipway-vmm`, and removes them, by its control
//! socket:
//! - `device CONTROL function ID SOCKET` plugs what the vfio-user server at the socket serves;
//! - `device CONTROL cpu ID NUMBER` plugs a CPU;
//! - `device CONTROL remove ID` waits until the guest has given the device up;
//! - `device CONTROL memory NUMBER BYTES` waits until the guest has so much of a device of hot-plug
//!   memory plugged, and prints the machine's statistics then;
//! - `device CONTROL qemu-memory ID BYTES` does the same with a `virtio-mem-pci` of QEMU's, and
//!   prints QEMU's memory devices then;
//! - `device CONTROL qemu-dimm ID BYTES` plugs a DIMM with memory of its own into QEMU;
//! - `device CONTROL qemu-dimm-remove ID` has the guest give a DIMM of QEMU's up, asks again as
//!   often as it refuses, frees the memory, and prints how often it refused;
//! - `device CONTROL qemu-balloon BYTES` waits until the guest has given up so much to the balloon
//!   of QEMU that it has BYTES at most;
//! - `device CONTROL cont` lets a machine run that was started with `--paused`.
//!
//! Prints the VMM's answers.

use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Sends a command, with a descriptor if there is one.
fn send(control: &UnixStream, command: &Value, file: Option<&UnixStream>) -> Outcome<()> {
    let line = format!("{command}\n");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    if !files.is_empty() {
        attached.push(SendAncillaryMessage::ScmRights(&files));
    }
    let bytes = [IoSlice::new(line.as_bytes())];
    let sent = rustix::net::sendmsg(control, &bytes, &mut attached, SendFlags::empty())?;
    if sent < line.len() { Err("the command was cut".into()) } else { Ok(()) }
}

/// Prints what the VMM says until a line has `key`, and returns the line.
fn wait(lines: &mut impl BufRead, key: &str) -> Outcome<Value> {
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            return Err("the VMM has closed the connection".into());
        }
        let value: Value = serde_json::from_str(&line)?;
        if let Some(error) = value.pointer("/error/desc") {
            return Err(error.to_string().into());
        }
        if value.get(key).is_some() {
            return Ok(value);
        }
    }
}

/// The time between two looks at QEMU's memory devices: QEMU tells of a change once in a second at
/// most. That of `slipway-vmm` is told as often.
const LOOK: Duration = Duration::from_millis(10);

/// Waits until `id` of QEMU's memory devices has `bytes` bytes plugged. Returns the devices.
fn wait_for_qemu(
    control: &UnixStream,
    lines: &mut impl BufRead,
    id: &str,
    bytes: u64,
) -> Outcome<Value> {
    let is_there = |device: &Value| {
        let field = |name: &str| device.pointer(&format!("/data/{name}"));
        field("id") == Some(&json!(id)) && field("size") == Some(&json!(bytes))
    };
    loop {
        send(control, &json!({ "execute": "query-memory-devices" }), None)?;
        let answer = wait(lines, "return")?;
        let devices = answer["return"].as_array().ok_or("QEMU has answered with no devices")?;
        if devices.iter().any(is_there) {
            return Ok(answer);
        }
        std::thread::sleep(LOOK);
    }
}

/// The time before a guest that has refused to give a DIMM up is asked again.
const AGAIN: Duration = Duration::from_millis(100);
/// The greatest of ACPI's statuses by which a guest refuses (ACPI 6.5, 6.3.5); the next one says
/// that the ejection is in progress, and 0 that it is done.
const LAST_REFUSAL: u64 = 0x83;

/// Returns the request to remove a device.
fn removal(id: &str) -> Value {
    json!({ "execute": "device_del", "arguments": { "id": id } })
}

/// Returns the name of the memory of a DIMM.
fn memory_of(id: &str) -> String {
    format!("memory-{id}")
}

/// Waits until QEMU has removed the DIMM `id`, and frees its memory. Returns how often the guest
/// refused.
fn wait_for_dimm(control: &UnixStream, lines: &mut impl BufRead, id: &str) -> Outcome<u32> {
    let mut refusals = 0;
    loop {
        let event = wait(lines, "event")?;
        let status = event.pointer("/data/info/status").and_then(Value::as_u64);
        let refuses = status.is_some_and(|one| (1..=LAST_REFUSAL).contains(&one));
        match event["event"].as_str() {
            Some("DEVICE_DELETED") if event.pointer("/data/device") == Some(&json!(id)) => break,
            Some("ACPI_DEVICE_OST") if refuses => {
                refusals += 1;
                std::thread::sleep(AGAIN);
                send(control, &removal(id), None)?;
            }
            _ => {}
        }
    }
    let arguments = json!({ "id": memory_of(id) });
    send(control, &json!({ "execute": "object-del", "arguments": arguments }), None)?;
    wait(lines, "return")?;
    Ok(refusals)
}

/// Waits until the guest has `bytes` bytes at most beside what QEMU's balloon has. Returns what
/// QEMU says.
fn wait_for_balloon(control: &UnixStream, lines: &mut impl BufRead, bytes: u64) -> Outcome<Value> {
    loop {
        send(control, &json!({ "execute": "query-balloon" }), None)?;
        let answer = wait(lines, "return")?;
        let actual = answer.pointer("/return/actual").and_then(Value::as_u64);
        if actual.ok_or("QEMU has no balloon")? <= bytes {
            return Ok(answer);
        }
        std::thread::sleep(LOOK);
    }
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let add = |arguments| json!({ "execute": "device_add", "arguments": arguments });
    let (path, command, socket) = match words[..] {
        [path, "function", id, function] => {
            let command = add(json!({ "driver": "vfio-user-pci", "id": id }));
            (path, command, Some(UnixStream::connect(function)?))
        }
        [path, "cpu", id, number] => {
            let number: u8 = number.parse()?;
            (path, add(json!({ "driver": "host-x86_64-cpu", "id": id, "core-id": number })), None)
        }
        [path, "remove" | "qemu-dimm-remove", id] => (path, removal(id), None),
        [path, "qemu-dimm", id, bytes] => {
            let (id, bytes): (_, u64) = (memory_of(id), bytes.parse()?);
            let kind = "memory-backend-memfd";
            let arguments = json!({ "qom-type": kind, "id": id, "size": bytes, "share": true });
            (path, json!({ "execute": "object-add", "arguments": arguments }), None)
        }
        [path, "qemu-balloon", bytes] => {
            let bytes: u64 = bytes.parse()?;
            (path, json!({ "execute": "balloon", "arguments": { "value": bytes } }), None)
        }
        [path, "memory", device, bytes] => {
            let (device, bytes): (u8, u64) = (device.parse()?, bytes.parse()?);
            let arguments = json!({ "device": device, "bytes": bytes });
            (path, json!({ "execute": "slipway-memory", "arguments": arguments }), None)
        }
        [path, "qemu-memory", id, bytes] => {
            let bytes: u64 = bytes.parse()?;
            let path_of = format!("/machine/peripheral/{id}");
            let property = "requested-size";
            let arguments = json!({ "path": path_of, "property": property, "value": bytes });
            (path, json!({ "execute": "qom-set", "arguments": arguments }), None)
        }
        [path, "cont"] => (path, json!({ "execute": "cont" }), None),
        _ => {
            return Err("device CONTROL function ID SOCKET | cpu ID NUMBER | remove ID | \
                 memory NUMBER BYTES | qemu-memory ID BYTES | qemu-dimm ID BYTES | \
                 qemu-dimm-remove ID | qemu-balloon BYTES | cont"
                .into());
        }
    };
    let control = UnixStream::connect(path)?;
    let mut lines = BufReader::new(control.try_clone()?);
    wait(&mut lines, "QMP")?;
    send(&control, &json!({ "execute": "qmp_capabilities" }), None)?;
    wait(&mut lines, "return")?;
    send(&control, &command, socket.as_ref())?;
    println!("{}", wait(&mut lines, "return")?);
    if words[1] == "remove" {
        println!("{}", wait(&mut lines, "event")?);
    }
    if words[1] == "memory" {
        let wanted = command.pointer("/arguments/bytes");
        while wait(&mut lines, "event")?.pointer("/data/plugged") != wanted {}
        send(&control, &json!({ "execute": "slipway-statistics" }), None)?;
        println!("{}", wait(&mut lines, "return")?);
    }
    match words[..] {
        [_, "qemu-memory", id, bytes] => {
            println!("{}", wait_for_qemu(&control, &mut lines, id, bytes.parse()?)?);
        }
        [_, "qemu-dimm", id, _] => {
            let dimm = json!({ "driver": "pc-dimm", "id": id, "memdev": memory_of(id) });
            send(&control, &add(dimm), None)?;
            println!("{}", wait(&mut lines, "return")?);
        }
        [_, "qemu-dimm-remove", id] => {
            println!("refused {} times", wait_for_dimm(&control, &mut lines, id)?);
        }
        [_, "qemu-balloon", bytes] => {
            println!("{}", wait_for_balloon(&control, &mut lines, bytes.parse()?)?);
        }
        _ => {}
    }
    Ok(())
}
