//! The messages of QMP that come from a VMM.

use serde_json::Value;
use slipway_machine::MAX_HOT_REGIONS;

use crate::{ShutdownReason, VmEvent, VmSpec};

/// The longest reason that is taken over from a VMM, in characters. Reasons are in log lines.
const REASON: usize = 300;

/// The result of a command: its value, or the reason of a refusal.
pub(super) type Answer = Result<Value, String>;

/// The content of one line.
#[derive(Debug, PartialEq)]
pub(super) enum Message {
    Greeting,
    Answer {
        id: u64,
        answer: Answer,
    },
    Event(VmEvent),
    /// The connection of the function with this index has ended. The index is below
    /// [`VmSpec::MAX_FUNCTIONS`].
    FunctionLost(usize),
    /// A function is broken for this reason, and cannot be connected again.
    FunctionBroken {
        /// The function's number, as in [`Message::FunctionLost`].
        function: usize,
        /// One printable line of at most [`REASON`] characters.
        reason: String,
    },
    /// Valid, but of no interest here.
    Ignored,
}

pub(super) fn parse(line: &[u8]) -> Result<Message, String> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| format!("a line that is no JSON: {error}"))?;
    let Value::Object(mut object) = value else {
        return Err("a line that is no JSON object".into());
    };
    if object.contains_key("QMP") {
        return Ok(Message::Greeting);
    }
    if let Some(name) = object.get("event") {
        let name = name.as_str().ok_or("an event without a name")?;
        let data = object.get("data").unwrap_or(&Value::Null);
        if name == "SLIPWAY_FUNCTION_LOST" {
            return lost_function(data);
        }
        return Ok(event(name, data).map_or(Message::Ignored, Message::Event));
    }
    let answer = match (object.remove("return"), object.get("error")) {
        (Some(value), _) => Ok(value),
        (None, Some(error)) => Err(one_line(error.get("desc"))),
        (None, None) => return Err("a line that is neither answer nor event".into()),
    };
    match object.get("id").and_then(Value::as_u64) {
        Some(id) => Ok(Message::Answer { id, answer }),
        // QEMU omits the id if it could not parse the command, and our commands are valid.
        None => Err("an answer without an id".into()),
    }
}

/// Returns a reason that the VMM gives, as one printable line of at most [`REASON`] characters.
fn one_line(reason: Option<&Value>) -> String {
    slipway_printable::line(reason.and_then(Value::as_str).unwrap_or("no reason given"), REASON)
}

fn event(name: &str, data: &Value) -> Option<VmEvent> {
    Some(match name {
        "SHUTDOWN" => VmEvent::Shutdown(shutdown_reason(data)),
        "GUEST_PANICKED" => VmEvent::GuestPanicked,
        "STOP" => VmEvent::Stopped,
        "RESUME" => VmEvent::Resumed,
        // A device without a name was not added by a command.
        "DEVICE_DELETED" => VmEvent::Unplugged(data.get("device")?.as_str()?.to_owned()),
        "SLIPWAY_MEMORY_CHANGED" => {
            let device = usize::try_from(data.get("device")?.as_u64()?).ok()?;
            let known = device < MAX_HOT_REGIONS;
            let plugged = data.get("plugged")?.as_u64().filter(|_| known)?;
            VmEvent::MemoryChanged { device, plugged }
        }
        _ => return None,
    })
}

/// Parses the data of SLIPWAY_FUNCTION_LOST.
fn lost_function(data: &Value) -> Result<Message, String> {
    let function = function(data).ok_or("no such function is lost")?;
    Ok(match data.get("final").and_then(Value::as_bool) {
        Some(true) => Message::FunctionBroken { function, reason: one_line(data.get("reason")) },
        _ => Message::FunctionLost(function),
    })
}

/// Returns the number of a function in an event or an answer.
pub(super) fn function(data: &Value) -> Option<usize> {
    let index = usize::try_from(data.get("function")?.as_u64()?).ok()?;
    (index < VmSpec::MAX_FUNCTIONS).then_some(index)
}

/// Parses `ShutdownCause` of QEMU's *qapi/run-state.json*.
fn shutdown_reason(data: &Value) -> ShutdownReason {
    match data.get("reason").and_then(Value::as_str) {
        Some("guest-shutdown") => ShutdownReason::GuestPowerOff,
        Some("guest-reset") => ShutdownReason::GuestReset,
        Some("guest-panic") => ShutdownReason::GuestPanic,
        Some(reason) if reason.starts_with("host-") => ShutdownReason::Host,
        _ => ShutdownReason::Other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changes_of_memory_name_a_device() {
        let changed = |data| event("SLIPWAY_MEMORY_CHANGED", &data);
        let expected = VmEvent::MemoryChanged { device: 7, plugged: 4096 };
        assert_eq!(
            changed(json!({ "device": 7, "plugged": 4096, "requested": 0 })),
            Some(expected)
        );
        for bad in [json!({ "device": 8, "plugged": 0 }), json!({ "device": 0 }), Value::Null] {
            assert_eq!(changed(bad), None);
        }
    }

    #[test]
    fn shutdown_reasons_are_told_apart() {
        for (reason, expected) in [
            ("guest-shutdown", ShutdownReason::GuestPowerOff),
            ("guest-reset", ShutdownReason::GuestReset),
            ("guest-panic", ShutdownReason::GuestPanic),
            ("host-qmp-quit", ShutdownReason::Host),
            ("new-in-12.0", ShutdownReason::Other),
        ] {
            assert_eq!(shutdown_reason(&json!({ "reason": reason })), expected);
        }
        assert_eq!(shutdown_reason(&Value::Null), ShutdownReason::Other);
    }
}
