//! Plugs functions, CPUs and memory into a running `slipway-vmm`, and removes them, by its control
//! socket:
//! - `device CONTROL function ID SOCKET` plugs what the vfio-user server at the socket serves;
//! - `device CONTROL cpu ID NUMBER` plugs a CPU;
//! - `device CONTROL remove ID` waits until the guest has given the device up;
//! - `device CONTROL memory NUMBER BYTES` waits until the guest has so much of a device of hot-plug
//!   memory plugged, and prints the machine's statistics then;
//! - `device CONTROL qemu-memory ID BYTES` does the same with a `virtio-mem-pci` of QEMU's, and
//!   prints QEMU's memory devices then;
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
        [path, "remove", id] => {
            let command = json!({ "execute": "device_del", "arguments": { "id": id } });
            (path, command, None)
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
                 memory NUMBER BYTES | qemu-memory ID BYTES | cont"
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
    if let [_, "qemu-memory", id, bytes] = words[..] {
        println!("{}", wait_for_qemu(&control, &mut lines, id, bytes.parse()?)?);
    }
    Ok(())
}
