//! QMP, as far as `slipway-vmm` speaks it on its control socket: QEMU's framing and names, so that
//! the programs which drive QEMU can drive that VMM (QEMU, *docs/interop/qmp-spec.rst* and
//! *qapi/*). The names that begin with `slipway` are Slipway's own.
//!
//! One JSON object per line:
//! - [`parse`] reads a [`Command`]: `qmp_capabilities`, `query-status`, `query-kvm`, `cont`,
//!   `stop`, `system_powerdown`, `device_add`, `device_del`, `query-hotpluggable-cpus`, `quit`;
//!   `slipway-functions`, `slipway-memory`, `slipway-statistics`, `slipway-reconnect`,
//!   `slipway-copy-ahead`, `slipway-save`;
//! - [`greeting`], [`answer`] and [`event`] are the lines of the VMM.
//!
//! Not here: the results of commands and the data of events, and when a command is carried out.
//!
//! Dependencies: `serde` and `serde_json` for the text.
#![no_std]

extern crate alloc;

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Deserialize;
use serde_json::{Value, json};

/// A command of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Leave the negotiation that every connection begins with.
    Capabilities,
    /// Tell whether the guest runs.
    Status,
    /// Tell whether KVM is in use, which it always is.
    Kvm,
    /// Let the guest run.
    Continue,
    /// Stop the guest's CPUs.
    Stop,
    /// Press the power button.
    PowerDown,
    /// End the process.
    Quit,
    /// Tell what the machine has used.
    Statistics,
    /// Add the function behind the connection that came with the command (`device_add`).
    Plug {
        /// The name by which it can be removed.
        name: String,
    },
    /// Add a CPU (`device_add`).
    PlugCpu {
        /// The name by which it can be removed.
        name: String,
        /// The CPU's number.
        cpu: u8,
    },
    /// Ask the guest to give up a function or a CPU.
    Unplug {
        /// Its name.
        name: String,
    },
    /// Write the memory of the machine to the pipe that came with the command, while the guest
    /// runs.
    CopyAhead,
    /// Save the machine, which is stopped, into the file that came with the command, and write its
    /// memory to the pipe if one came after the file.
    Save {
        /// Write only what was written to since it was copied ahead.
        rest: bool,
    },
    /// List the functions behind sockets.
    Functions,
    /// List the devices of hot-plug memory.
    Memory,
    /// Ask the guest to have a number of bytes of a device of hot-plug memory plugged.
    RequestMemory {
        /// The device's number, from 0.
        device: usize,
        /// The bytes.
        bytes: u64,
    },
    /// List the CPUs that the machine can have.
    Cpus,
    /// Use the connection that came with the command for this function, which has lost its own.
    Reconnect {
        /// The function's number, from 0.
        function: usize,
    },
}

/// A command with the identifier that its answer repeats.
#[derive(Clone, Debug)]
pub struct Request {
    /// Any JSON value; null if the client gave none.
    pub id: Value,
    /// The command, or what is wrong with it.
    pub command: Result<Command, String>,
}

#[derive(Deserialize)]
struct Line {
    execute: String,
    #[serde(default)]
    arguments: Value,
    #[serde(default)]
    id: Value,
}

/// Parses a line of a client. Arguments of commands that take none, and unknown ones of
/// `slipway-reconnect`, are passed over.
pub fn parse(line: &[u8]) -> Request {
    let Line { execute, arguments, id } = match serde_json::from_slice(line) {
        Ok(line) => line,
        Err(error) => {
            let command = Err(format!("the line is no QMP command: {error}"));
            return Request { id: Value::Null, command };
        }
    };
    let command = match execute.as_str() {
        "qmp_capabilities" => Ok(Command::Capabilities),
        "query-status" => Ok(Command::Status),
        "query-kvm" => Ok(Command::Kvm),
        "cont" => Ok(Command::Continue),
        "stop" => Ok(Command::Stop),
        "system_powerdown" => Ok(Command::PowerDown),
        "quit" => Ok(Command::Quit),
        "slipway-functions" => Ok(Command::Functions),
        "slipway-memory" => memory(&arguments),
        "slipway-copy-ahead" => Ok(Command::CopyAhead),
        "slipway-save" => save(&arguments),
        "slipway-statistics" => Ok(Command::Statistics),
        "device_add" => device_add(&arguments),
        "query-hotpluggable-cpus" => Ok(Command::Cpus),
        "device_del" => device(&arguments, &["id"]).map(|name| Command::Unplug { name }),
        "slipway-reconnect" => reconnect(&arguments),
        _ => Err(format!("there is no command {execute:?}")),
    };
    Request { id, command }
}

/// Parses the arguments of `slipway-memory`, of which there are none or both.
fn memory(arguments: &Value) -> Result<Command, String> {
    let wrong = || "slipway-memory takes no arguments, or 'device' and 'bytes', two numbers".into();
    match arguments {
        Value::Null => return Ok(Command::Memory),
        Value::Object(given) if given.is_empty() => return Ok(Command::Memory),
        Value::Object(given) if given.len() == 2 => {}
        _ => return Err(wrong()),
    }
    let number = |name| arguments.get(name).and_then(Value::as_u64).ok_or_else(wrong);
    let device = usize::try_from(number("device")?).map_err(|_| wrong())?;
    Ok(Command::RequestMemory { device, bytes: number("bytes")? })
}

/// Parses the arguments of `slipway-save`.
fn save(arguments: &Value) -> Result<Command, String> {
    let rest = match arguments {
        Value::Null => Some(false),
        Value::Object(given) if given.is_empty() => Some(false),
        Value::Object(given) if given.len() == 1 => given.get("rest").and_then(Value::as_bool),
        _ => None,
    };
    let wrong = || "slipway-save takes no argument but 'rest', true or false".into();
    rest.map(|rest| Command::Save { rest }).ok_or_else(wrong)
}

/// Parses the arguments of `slipway-reconnect`.
fn reconnect(arguments: &Value) -> Result<Command, String> {
    let number = arguments.get("function").and_then(Value::as_u64);
    let function = number.and_then(|number| usize::try_from(number).ok());
    let wrong = || "slipway-reconnect needs the argument 'function', a number".into();
    function.map(|function| Command::Reconnect { function }).ok_or_else(wrong)
}

/// The driver of a function behind a vfio-user socket, as QEMU calls it.
const FUNCTION_DRIVER: &str = "vfio-user-pci";
/// The driver of a CPU, as QEMU calls one that has what the host's has.
pub const CPU_DRIVER: &str = "host-x86_64-cpu";
/// The longest name of a device in bytes.
const MAX_NAME: usize = 64;

/// Parses the arguments of `device_add`, which depend on the driver.
fn device_add(arguments: &Value) -> Result<Command, String> {
    match arguments.get("driver").and_then(Value::as_str) {
        Some(FUNCTION_DRIVER) => {
            device(arguments, &["driver", "id"]).map(|name| Command::Plug { name })
        }
        Some(CPU_DRIVER) => {
            let name = device(arguments, &["driver", "id", "core-id"])?;
            let cpu = arguments.get("core-id").and_then(Value::as_u64);
            let cpu = cpu.and_then(|number| u8::try_from(number).ok());
            let cpu = cpu.ok_or("the argument 'core-id', a CPU's number, is missing")?;
            Ok(Command::PlugCpu { name, cpu })
        }
        _ => Err(format!("'driver' is {FUNCTION_DRIVER:?} or {CPU_DRIVER:?}")),
    }
}

/// Returns the device's name, the argument `id`. Arguments other than those in `known` are refused.
fn device(arguments: &Value, known: &[&str]) -> Result<String, String> {
    let mut given = arguments.as_object().into_iter().flat_map(|object| object.keys());
    if let Some(other) = given.find(|name| !known.contains(&name.as_str())) {
        return Err(format!("there is no argument {other:?}"));
    }
    let name = arguments.get("id").and_then(Value::as_str);
    let name = name.ok_or("the argument 'id', a name, is missing")?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if !name.starts_with(|first: char| first.is_ascii_alphabetic())
        || name.len() > MAX_NAME
        || !name.bytes().all(plain)
    {
        return Err(format!(
            "'id' begins with a letter, and has at most {MAX_NAME} letters, digits, - _ ."
        ));
    }
    Ok(name.to_owned())
}

fn line(value: &Value) -> Vec<u8> {
    let mut line = value.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// Returns the line that every connection begins with. `package` names the program.
pub fn greeting(package: &str) -> Vec<u8> {
    let version = json!({ "qemu": { "major": 0, "minor": 0, "micro": 0 }, "package": package });
    line(&json!({ "QMP": { "version": version, "capabilities": [] } }))
}

/// Returns the answer to a request.
pub fn answer(id: &Value, outcome: Result<Value, String>) -> Vec<u8> {
    let mut answer = match outcome {
        Ok(value) => json!({ "return": value }),
        Err(reason) => json!({ "error": { "class": "GenericError", "desc": reason } }),
    };
    if !id.is_null() {
        answer["id"] = id.clone();
    }
    line(&answer)
}

/// Returns the line of the event `name` at a time: seconds since 1970 (UTC), and the microseconds
/// beyond them.
pub fn event(name: &str, data: Value, (seconds, microseconds): (i64, i64)) -> Vec<u8> {
    let stamp = json!({ "seconds": seconds, "microseconds": microseconds });
    line(&json!({ "event": name, "data": data, "timestamp": stamp }))
}

/// Returns the path that QEMU would give a device of this name.
pub fn path(name: &str) -> String {
    format!("/machine/peripheral/{name}")
}

/// Returns the answer to `query-status`.
pub fn status(running: bool) -> Value {
    json!({ "running": running, "status": if running { "running" } else { "paused" } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_apart() {
        let save = |rest| Ok(Command::Save { rest });
        assert_eq!(parse(br#"{"execute": "slipway-save"}"#).command, save(false));
        let line = br#"{"execute": "slipway-save", "arguments": {"rest": true}}"#;
        assert_eq!(parse(line).command, save(true));
        let line = br#"{"execute": "slipway-save", "arguments": {"rest": 1}}"#;
        assert!(parse(line).command.unwrap_err().contains("'rest'"));
        let line = br#"{"execute": "slipway-copy-ahead"}"#;
        assert_eq!(parse(line).command, Ok(Command::CopyAhead));
        let request = parse(br#"{"execute": "cont", "id": 7}"#);
        assert_eq!((request.id, request.command), (json!(7), Ok(Command::Continue)));
        let line = br#"{"execute": "slipway-reconnect", "arguments": {"function": 2}}"#;
        assert_eq!(parse(line).command, Ok(Command::Reconnect { function: 2 }));
        let line =
            br#"{"execute": "device_add", "arguments": {"driver": "vfio-user-pci", "id": "a"}}"#;
        assert_eq!(parse(line).command, Ok(Command::Plug { name: "a".into() }));
        let line = br#"{"execute": "device_add",
            "arguments": {"driver": "host-x86_64-cpu", "id": "c", "core-id": 3}}"#;
        assert_eq!(parse(line).command, Ok(Command::PlugCpu { name: "c".into(), cpu: 3 }));
        let line = br#"{"execute": "device_del", "arguments": {"id": "a-1"}}"#;
        assert_eq!(parse(line).command, Ok(Command::Unplug { name: "a-1".into() }));
        let line = br#"{"execute": "slipway-memory", "arguments": {"device": 1, "bytes": 4096}}"#;
        let command = Command::RequestMemory { device: 1, bytes: 4096 };
        assert_eq!(parse(line).command, Ok(command));
        for line in [
            &br#"{"execute": "slipway-memory"}"#[..],
            br#"{"execute": "slipway-memory", "arguments": {}}"#,
        ] {
            assert_eq!(parse(line).command, Ok(Command::Memory));
        }
        for bad in [
            &b"{}"[..],
            br#"{"execute": "slipway-memory", "arguments": 1}"#,
            br#"{"execute": "slipway-memory", "arguments": {"device": 0}}"#,
            br#"{"execute": "slipway-memory", "arguments": {"device": -1, "bytes": 0}}"#,
            br#"{"execute": "slipway-memory", "arguments": {"device": 0, "bytes": 0.5}}"#,
            br#"{"execute": "slipway-memory", "arguments": {"device": 0, "bytes": 0, "a": 0}}"#,
            br#"{"execute": "device_add", "arguments": {"driver": "nvme", "id": "a"}}"#,
            br#"{"execute": "device_add", "arguments": {"driver": "vfio-user-pci"}}"#,
            br#"{"execute": "device_add", "arguments": {"driver": "host-x86_64-cpu", "id": "c"}}"#,
            br#"{"execute": "device_del", "arguments": {"id": "a", "bus": "pci.0"}}"#,
            br#"{"execute": "device_del", "arguments": {"id": "1"}}"#,
            br#"{"execute": "device_del", "arguments": {"id": "a\n"}}"#,
            br#"{"execute": "device_del", "arguments": "a"}"#,
            br#"{"execute": "device_del"}"#,
            b"cont",
            br#"{"execute": 1}"#,
            br#"{"execute": "eject"}"#,
            br#"{"execute": "slipway-reconnect", "arguments": {"function": -1}}"#,
            br#"{"execute": "slipway-reconnect"}"#,
            b"\xff",
        ] {
            assert!(parse(bad).command.is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn answers_repeat_the_identifier_and_end_the_line() {
        let text = String::from_utf8(answer(&json!("a"), Ok(json!({})))).unwrap();
        assert_eq!(text, "{\"id\":\"a\",\"return\":{}}\n");
        let text = String::from_utf8(answer(&Value::Null, Err("no\nway".into()))).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        assert!(!text.contains("\"id\""));
    }
}
