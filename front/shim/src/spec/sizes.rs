//! Memory and CPUs: what annotations and limits of control groups stand for.

use std::collections::BTreeMap;

use slipway_sandbox_api::v1;

use super::huge_pages;
use super::oci::{Oci, Resources};

/// The annotation with a sandbox's memory: bytes, or with a suffix K, M or G of powers of 1024.
pub const MEMORY: &str = "dev.slipway.memory";
/// The annotation with the most memory that an update can give, as a size.
pub const MAX_MEMORY: &str = "dev.slipway.max-memory";
/// The annotation with the most memory of the host that what containers write to their roots takes,
/// as a size.
pub const LAYERS: &str = "dev.slipway.layers";
/// The annotation with a sandbox's number of CPUs.
pub const CPUS: &str = "dev.slipway.cpus";
/// The annotation with the most CPUs that an update can give.
pub const MAX_CPUS: &str = "dev.slipway.max-cpus";
/// The least memory of a sandbox whose container has a limit, bytes: its kernel needs some too.
pub const LEAST_MEMORY: u64 = 128 << 20;
/// The period of a quota that names none, microseconds.
pub const PERIOD: u64 = 100_000;
/// The least quota that the kernel takes, microseconds.
pub const LEAST_QUOTA: u64 = 1000;

/// Returns the memory of the sandbox of a single container, bytes; 0 stands for the node's default.
///
/// # Errors
/// One line: the annotation is no size.
pub fn memory(oci: &Oci) -> Result<u64, String> {
    if let Some(bytes) = annotated_memory(&oci.annotations, MEMORY)? {
        return Ok(bytes);
    }
    Ok(memory_of_limit(&oci.linux.resources))
}

/// Returns the memory of a sandbox whose container has such a limit, and huge pages beside that, in
/// bytes; 0 if it has no limit.
pub fn memory_of_limit(resources: &Resources) -> u64 {
    let huge = huge_pages::bytes(resources);
    memory_limit(resources).map_or(0, |limit| limit.max(LEAST_MEMORY).saturating_add(huge))
}

/// Returns the memory that the annotation `key` gives to a sandbox, bytes.
///
/// # Errors
/// One line: the annotation is no size.
pub fn annotated_memory(
    annotations: &BTreeMap<String, String>,
    key: &str,
) -> Result<Option<u64>, String> {
    let Some(text) = annotations.get(key) else { return Ok(None) };
    size(text)
        .map(Some)
        .ok_or_else(|| format!("the annotation {key}={text:?} is no size: bytes, or as 512M or 2G"))
}

/// Returns the limit of memory, bytes, if there is one.
pub fn memory_limit(resources: &Resources) -> Option<u64> {
    let limit = resources.memory.as_ref().and_then(|memory| memory.limit);
    limit.and_then(|limit| u64::try_from(limit).ok()).filter(|limit| *limit > 0)
}

fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" | "ki" => 10,
        "m" | "mib" | "mi" => 20,
        "g" | "gib" | "gi" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

/// Returns the number of CPUs that an annotation gives.
///
/// # Errors
/// One line: the annotation is no number, or 0.
pub fn number(annotations: &BTreeMap<String, String>, key: &str) -> Result<Option<u32>, String> {
    let Some(text) = annotations.get(key) else { return Ok(None) };
    match text.parse::<u32>() {
        Ok(number @ 1..) => Ok(Some(number)),
        _ => Err(format!("the annotation {key}={text:?} is no number of CPUs")),
    }
}

/// Returns the CPUs that a quota or a set stands for, or 0 if there is neither.
pub fn cpus(resources: &Resources) -> u32 {
    let set = resources.cpu.as_ref().map_or(0, |cpu| set_size(&cpu.cpus));
    match cpus_of_limit(resources) {
        0 => u32::try_from(set).unwrap_or(u32::MAX),
        asked => asked,
    }
}

/// Returns the CPUs that the quota stands for, or 0 if there is none.
pub fn cpus_of_limit(resources: &Resources) -> u32 {
    let Some(cpu) = &resources.cpu else { return 0 };
    cpus_of_quota(cpu.quota.unwrap_or(0), cpu.period.unwrap_or(0))
}

/// Returns the CPUs and the memory nodes of the host that are named, if there are any.
pub fn placement(resources: &Resources) -> Option<v1::Placement> {
    let cpu = resources.cpu.as_ref()?;
    let (cpus, memory_nodes) = (cpu.cpus.clone(), cpu.mems.clone());
    Some(v1::Placement { cpus, memory_nodes }).filter(|one| *one != v1::Placement::default())
}

/// Returns the CPUs that a quota stands for, rounded up, or 0 if there is no quota. Both are in
/// microseconds; a period of 0 stands for 100 ms.
pub fn cpus_of_quota(quota: i64, period: u64) -> u32 {
    let period = if period == 0 { PERIOD } else { period };
    u32::try_from(u64::try_from(quota).unwrap_or(0).div_ceil(period)).unwrap_or(u32::MAX)
}

/// Returns the CPU time that a quota gives in 100 ms, microseconds, or 0 if there is no quota.
pub fn quota_us(resources: &Resources) -> u64 {
    let Some(cpu) = &resources.cpu else { return 0 };
    let period = cpu.period.filter(|period| *period > 0).unwrap_or(PERIOD);
    let quota = cpu.quota.and_then(|quota| u64::try_from(quota).ok()).unwrap_or(0);
    if quota == 0 {
        return 0;
    }
    let scaled = u128::from(quota) * u128::from(PERIOD) / u128::from(period);
    u64::try_from(scaled).unwrap_or(u64::MAX).max(LEAST_QUOTA)
}

/// Returns the weight, 1 to 10000, that CPU shares of control groups version 1 stand for, or 0 if
/// there are none. Shares from 2 to 262144 are spread evenly over the weights, as runc does it.
pub fn weight(resources: &Resources) -> u32 {
    let shares = resources.cpu.as_ref().and_then(|cpu| cpu.shares).unwrap_or(0);
    if shares == 0 {
        return 0;
    }
    let weight = 1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142;
    u32::try_from(weight).unwrap_or(1)
}

/// Returns the size of a set such as "0-3,5". A part that is no range counts as 0.
fn set_size(text: &str) -> u64 {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        Some(u64::from(last).checked_sub(u64::from(first))? + 1)
    };
    text.split(',').filter_map(range).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cpu(value: Value) -> Resources {
        serde_json::from_value(json!({ "cpu": value })).unwrap()
    }

    #[test]
    fn a_quota_is_scaled_to_100_ms() {
        assert_eq!(quota_us(&cpu(json!({"quota": 50_000, "period": 100_000}))), 50_000);
        assert_eq!(quota_us(&cpu(json!({"quota": 5_000, "period": 10_000}))), 50_000);
        assert_eq!(quota_us(&cpu(json!({"quota": 1_000, "period": 1_000_000}))), 1000);
        assert_eq!(quota_us(&cpu(json!({"quota": i64::MAX, "period": 1}))), u64::MAX);
        for none in [json!({"quota": -1, "period": 100_000}), json!({"quota": 0}), json!({})] {
            assert_eq!(quota_us(&cpu(none)), 0);
        }
    }

    #[test]
    fn a_set_is_a_placement_and_a_number_without_a_quota() {
        let both = cpu(json!({"cpus": "0-2,5", "mems": "1", "quota": 150_000}));
        assert_eq!((cpus(&both), cpus_of_limit(&both)), (2, 2));
        let (list, memory_nodes) = ("0-2,5".to_owned(), "1".to_owned());
        assert_eq!(placement(&both), Some(v1::Placement { cpus: list, memory_nodes }));
        let set = cpu(json!({"cpus": "0-2,5"}));
        assert_eq!((cpus(&set), cpus_of_limit(&set)), (4, 0));
        for none in [cpu(json!({"cpus": "", "quota": 5})), Resources::default()] {
            assert_eq!(placement(&none), None);
        }
    }

    #[test]
    fn shares_are_weights() {
        let weights = [(0, 0), (2, 1), (1, 1), (1024, 39), (262_144, 10_000), (u64::MAX, 10_000)];
        for (shares, expected) in weights {
            assert_eq!(weight(&cpu(json!({ "shares": shares }))), expected, "{shares}");
        }
    }
}
