//! Hot-plug memory of a running `slipway-vmm`: `slipway-memory`.

use std::time::Duration;

use serde_json::{Value, json};
use slipway_machine::MAX_HOT_REGIONS;

use super::{Command, Qmp};
use crate::{Error, MemoryDevice, Result};

const COMMAND: &str = "slipway-memory";
/// The smallest block in bytes.
const MIN_BLOCK: u64 = 2 << 20;

impl Qmp {
    /// Returns the devices of hot-plug memory, in the order of their numbers.
    pub(crate) async fn memory_devices(&self, timeout: Duration) -> Result<Vec<MemoryDevice>> {
        let answer = self.execute(COMMAND, timeout).await?;
        let invalid = || Error::Control("slipway-memory answered with no devices".into());
        devices(&answer).ok_or_else(invalid)
    }

    /// Has the VMM ask its guest for a size of a device.
    pub(crate) async fn set_memory(
        &self,
        device: usize,
        bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        let arguments = Some(json!({ "device": device, "bytes": bytes }));
        let command = Command { name: COMMAND, arguments, descriptors: Vec::new() };
        self.execute_within(&command, timeout).await.map(drop)
    }
}

/// Parses the answer to `slipway-memory`. Returns `None` unless it has at most
/// [`MAX_HOT_REGIONS`] devices with ascending numbers from 0 on.
fn devices(answer: &Value) -> Option<Vec<MemoryDevice>> {
    let entries = answer.as_array().filter(|all| all.len() <= MAX_HOT_REGIONS)?;
    entries.iter().enumerate().map(|(number, entry)| device(number, entry)).collect()
}

fn device(number: usize, entry: &Value) -> Option<MemoryDevice> {
    let field = |name: &str| entry.get(name).and_then(Value::as_u64);
    let found = usize::try_from(field("device")?).ok()?;
    let device = MemoryDevice {
        bytes: field("bytes")?,
        node: u8::try_from(field("node")?).ok()?,
        block: field("block")?,
        requested: field("requested")?,
        plugged: field("plugged")?,
    };
    let MemoryDevice { bytes, block, requested, plugged, .. } = device;
    let is_block = block.is_power_of_two() && (MIN_BLOCK..=bytes).contains(&block);
    let sound = found == number && is_block && requested.max(plugged) <= bytes;
    sound.then_some(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64, plugged: u64) -> Value {
        json!({ "device": number, "node": 1, "address": 68u64 << 30, "bytes": 1 << 30,
                "block": 2 << 20, "requested": 4 << 20, "plugged": plugged })
    }

    #[test]
    fn devices_are_listed() {
        let found = devices(&json!([entry(0, 2 << 20), entry(1, 0)])).unwrap();
        let (requested, plugged, block) = (4 << 20, 2 << 20, 2 << 20);
        let first = MemoryDevice { bytes: 1 << 30, node: 1, block, requested, plugged };
        assert_eq!(found, [first, MemoryDevice { plugged: 0, ..first }]);
        assert_eq!(devices(&json!([])), Some(vec![]));
    }

    #[test]
    fn a_list_that_cannot_be_is_refused() {
        let many: Vec<_> = (0..9).map(|number| entry(number, 0)).collect();
        let no_node = json!([{ "device": 0, "bytes": 2 << 20, "block": 2 << 20, "requested": 0,
                               "plugged": 0 }]);
        let blocks = |block: u64| {
            let mut one = entry(0, 0);
            one["block"] = block.into();
            json!([one])
        };
        for answer in [
            json!({}),
            json!(many),
            json!([entry(1, 0)]),
            json!([entry(0, 2 << 30)]),
            blocks(0),
            blocks(3 << 20),
            blocks(2 << 30),
            json!([entry(0, 0), entry(0, 0)]),
            no_node,
        ] {
            assert_eq!(devices(&answer), None, "{answer}");
        }
    }
}
