//! CPUs of a running VM: `query-hotpluggable-cpus`, `device_add` and `device_del`, the same for
//! QEMU (*docs/system/cpu-hotplug.rst*) and for `slipway-vmm`.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Command, Qmp};
use crate::{CpuSlot, Error, Result, VmSpec};

/// One entry of `query-hotpluggable-cpus`.
#[derive(Debug, PartialEq)]
struct HotplugEntry {
    slot: CpuSlot,
    /// The driver that makes the CPU.
    driver: String,
    /// The CPU's place in the machine's topology, as arguments of `device_add`.
    place: Map<String, Value>,
}

impl Qmp {
    /// Returns the CPUs that the machine has or can be given, in ascending order.
    pub(crate) async fn cpus(&self, timeout: Duration) -> Result<Vec<CpuSlot>> {
        Ok(self.cpu_entries(timeout).await?.into_iter().map(|entry| entry.slot).collect())
    }

    /// Has the VMM add a CPU.
    pub(crate) async fn plug_cpu(&self, name: &str, cpu: u32, timeout: Duration) -> Result<()> {
        let entries = self.cpu_entries(timeout).await?;
        let entry = entries.into_iter().find(|entry| entry.slot.cpu == cpu);
        let Some(HotplugEntry { driver, mut place, .. }) = entry else {
            let message = format!("the machine has no place for CPU {cpu}");
            return Err(Error::Refused { command: "device_add".to_owned(), message });
        };
        place.insert("driver".to_owned(), driver.into());
        place.insert("id".to_owned(), name.into());
        let arguments = Some(Value::Object(place));
        let command = Command { name: "device_add", arguments, descriptors: Vec::new() };
        self.execute_within(&command, timeout).await.map(drop)
    }

    /// Has the VMM ask its guest to give up a CPU or a function.
    pub(crate) async fn unplug(&self, name: &str, timeout: Duration) -> Result<()> {
        let arguments = Some(json!({ "id": name }));
        let command = Command { name: "device_del", arguments, descriptors: Vec::new() };
        self.execute_within(&command, timeout).await.map(drop)
    }

    async fn cpu_entries(&self, timeout: Duration) -> Result<Vec<HotplugEntry>> {
        let answer = self.execute("query-hotpluggable-cpus", timeout).await?;
        let invalid = || Error::Control("query-hotpluggable-cpus answered with no CPUs".into());
        entries(&answer).ok_or_else(invalid)
    }
}

/// Parses the answer to `query-hotpluggable-cpus`. Returns `None` unless it has at least one CPU
/// and at most [`VmSpec::MAX_CPUS`], each with a number of its own below that.
fn entries(answer: &Value) -> Option<Vec<HotplugEntry>> {
    let mut entries = answer.as_array()?.iter().map(entry).collect::<Option<Vec<_>>>()?;
    entries.sort_by_key(|entry| entry.slot.cpu);
    let distinct = entries.windows(2).all(|pair| pair[0].slot.cpu < pair[1].slot.cpu);
    (distinct && !entries.is_empty()).then_some(entries)
}

/// Parses `HotpluggableCPU` of QEMU's *qapi/machine.json*. A CPU that is there has a `qom-path`.
fn entry(value: &Value) -> Option<HotplugEntry> {
    let place = value.get("props")?.as_object()?.clone();
    let cpu = u32::try_from(place.get("core-id")?.as_u64()?).ok()?;
    let slot = CpuSlot { cpu, present: value.get("qom-path").is_some() };
    let driver = value.get("type")?.as_str()?.to_owned();
    (cpu < VmSpec::MAX_CPUS).then_some(HotplugEntry { slot, driver, place })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(core: u64, path: Option<&str>) -> Value {
        let props = json!({ "core-id": core, "thread-id": 0, "socket-id": 0 });
        let mut cpu = json!({ "type": "max-x86_64-cpu", "vcpus-count": 1, "props": props });
        if let Some(path) = path {
            cpu["qom-path"] = path.into();
        }
        cpu
    }

    #[test]
    fn cpus_are_sorted_by_number() {
        let answer = json!([cpu(1, None), cpu(0, Some("/machine/unattached/device[0]"))]);
        let entries = entries(&answer).unwrap();
        let slots: Vec<_> = entries.iter().map(|entry| entry.slot).collect();
        let slot = |cpu, present| CpuSlot { cpu, present };
        assert_eq!(slots, [slot(0, true), slot(1, false)]);
        assert_eq!(entries[1].driver, "max-x86_64-cpu");
        assert_eq!(entries[1].place["thread-id"], 0);
    }

    #[test]
    fn a_list_that_cannot_be_is_refused() {
        let without = |key: &str| {
            let mut cpu = cpu(0, None);
            cpu.as_object_mut().unwrap().remove(key);
            json!([cpu])
        };
        let invalid = [
            json!({}),
            json!([]),
            json!([cpu(1, None), cpu(1, None)]),
            json!([cpu(255, None)]),
            json!([cpu(u64::MAX, None)]),
            without("props"),
            without("type"),
        ];
        for answer in invalid {
            assert_eq!(entries(&answer), None, "{answer}");
        }
    }
}
