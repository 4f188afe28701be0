//! Limits that the guest's kernel keeps for a container, as control groups of either version name
//! them.
//!
//! `linux.resources.unified` names files of a group of version 2. A file that [`set`] does not know
//! is refused, as runc refuses one that its host does not have. A guest has no swap, so limits of
//! swap are ignored.

use std::collections::BTreeMap;

use slipway_sandbox_api::v1;

use super::huge_pages;
use super::oci::Resources;
use super::sizes::{self, LEAST_QUOTA, PERIOD};

/// The files that can be set.
const FILES: &str = "cpu.max, cpu.weight, memory.high, memory.low, memory.min, memory.oom.group, \
                     memory.swap.max, pids.max";

/// The most characters of a file's name, or of a value, that an error has.
const SHOWN: usize = 40;

/// Returns the limits of a container in a pod. 0 stands for no limit, or in an update for no
/// change; the greatest number takes a limit away.
///
/// # Errors
/// One line that names a file of a control group that cannot be set, or what is no value of it.
pub fn of_member(asked: &Resources) -> Result<v1::Resources, String> {
    with_files(named(asked), &asked.unified)
}

/// Returns the limits of a container with a sandbox of its own, if it has some beside the memory
/// and CPUs of that sandbox's machine.
///
/// # Errors
/// The errors of [`of_member`].
pub fn of_own(asked: &Resources) -> Result<Option<v1::Resources>, String> {
    let named = v1::Resources { memory_bytes: 0, cpu_quota_us: 0, cpu_weight: 0, ..named(asked) };
    let limits = with_files(named, &asked.unified)?;
    Ok(Some(limits).filter(|limits| *limits != v1::Resources::default()))
}

/// Returns the limits that have fields of their own in a configuration.
fn named(asked: &Resources) -> v1::Resources {
    let bytes = |limit: Option<i64>| match limit {
        None => 0,
        Some(limit) => u64::try_from(limit).unwrap_or(u64::MAX),
    };
    let quota = asked.cpu.as_ref().and_then(|cpu| cpu.quota);
    let pids = asked.pids.as_ref().and_then(|pids| pids.limit).unwrap_or(0);
    let memory = asked.memory.as_ref();
    v1::Resources {
        memory_bytes: bytes(memory.and_then(|memory| memory.limit)),
        memory_low_bytes: bytes(memory.and_then(|memory| memory.reservation)),
        cpu_quota_us: match quota {
            Some(quota) if quota < 0 => u64::MAX,
            _ => sizes::quota_us(asked),
        },
        cpu_weight: sizes::weight(asked),
        pids: u32::try_from(pids).unwrap_or(u32::MAX),
        huge_page_bytes: huge_pages::limit(asked),
        ..v1::Resources::default()
    }
}

/// Returns `limits` with those of the files in their place, which runc writes last.
fn with_files(
    mut limits: v1::Resources,
    files: &BTreeMap<String, String>,
) -> Result<v1::Resources, String> {
    for (file, value) in files {
        set(&mut limits, file, value.trim())?;
    }
    Ok(limits)
}

fn set(limits: &mut v1::Resources, file: &str, value: &str) -> Result<(), String> {
    let short = |text: &str| text.chars().take(SHOWN).collect::<String>();
    let wrong = || format!("{:?} is no value of the control group's file {file}", short(value));
    match file {
        "cpu.max" => limits.cpu_quota_us = quota(value).ok_or_else(wrong)?,
        "cpu.weight" => limits.cpu_weight = weight(value).ok_or_else(wrong)?,
        "memory.high" => limits.memory_high_bytes = amount(value).ok_or_else(wrong)?,
        "memory.low" => limits.memory_low_bytes = protection(value).ok_or_else(wrong)?,
        "memory.min" => limits.memory_min_bytes = protection(value).ok_or_else(wrong)?,
        "memory.oom.group" => limits.oom_group = oom_group(value).ok_or_else(wrong)?,
        "memory.swap.max" => {
            amount(value).ok_or_else(wrong)?;
        }
        "pids.max" => {
            let most = amount(value).ok_or_else(wrong)?;
            limits.pids = u32::try_from(most).unwrap_or(u32::MAX);
        }
        _ => {
            return Err(format!(
                "the control group's file {:?} cannot be set in a microVM: leave it out of \
                 linux.resources.unified, which can have {FILES}",
                short(file)
            ));
        }
    }
    Ok(())
}

/// Parses an amount, or "max". 0 would stand for no change, so it becomes 1.
fn amount(value: &str) -> Option<u64> {
    match value {
        "max" => Some(u64::MAX),
        number => Some(number.parse::<u64>().ok()?.max(1)),
    }
}

/// Parses an amount of protected memory. The greatest number stands for none, and one less for all.
fn protection(value: &str) -> Option<u64> {
    match value {
        "max" => Some(u64::MAX - 1),
        number => match number.parse::<u64>().ok()? {
            0 => Some(u64::MAX),
            bytes => Some(bytes.min(u64::MAX - 1)),
        },
    }
}

fn oom_group(value: &str) -> Option<u32> {
    match value {
        "0" => Some(1),
        "1" => Some(2),
        _ => None,
    }
}

fn weight(value: &str) -> Option<u32> {
    value.parse().ok().filter(|weight| (1..=10_000).contains(weight))
}

/// Parses a quota and its period in microseconds, the latter 100 ms if it is left out. Returns the
/// CPU time in 100 ms.
fn quota(value: &str) -> Option<u64> {
    let (quota, period) = value.split_once(' ').unwrap_or((value, "100000"));
    let period = period.parse::<u64>().ok().filter(|us| (1000..=1_000_000).contains(us))?;
    match quota {
        "max" => Some(u64::MAX),
        quota => Some((quota.parse::<u64>().ok()?.checked_mul(PERIOD)? / period).max(LEAST_QUOTA)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn resources(value: Value) -> Resources {
        serde_json::from_value(value).unwrap()
    }

    fn files(value: Value) -> Result<v1::Resources, String> {
        of_member(&resources(json!({ "unified": value })))
    }

    #[test]
    fn files_of_a_control_group_are_limits() {
        let limits = files(json!({
            "cpu.max": "50000 200000", "cpu.weight": "10000", "memory.high": "4096",
            "memory.low": "2048", "memory.min": "1024\n", "memory.oom.group": "1",
            "memory.swap.max": "0", "pids.max": "7"
        }));
        let expected = v1::Resources {
            cpu_quota_us: 25_000,
            cpu_weight: 10_000,
            memory_high_bytes: 4096,
            memory_low_bytes: 2048,
            memory_min_bytes: 1024,
            oom_group: 2,
            pids: 7,
            ..v1::Resources::default()
        };
        assert_eq!(limits, Ok(expected));
    }

    #[test]
    fn limits_are_taken_away() {
        let limits = files(json!({
            "cpu.max": "max 100000", "memory.high": "max", "memory.low": "0", "memory.min": "max",
            "memory.oom.group": "0", "pids.max": "max"
        }));
        let expected = v1::Resources {
            cpu_quota_us: u64::MAX,
            memory_high_bytes: u64::MAX,
            memory_low_bytes: u64::MAX,
            memory_min_bytes: u64::MAX - 1,
            oom_group: 1,
            pids: u32::MAX,
            ..v1::Resources::default()
        };
        assert_eq!(limits, Ok(expected));
    }

    #[test]
    fn a_file_counts_before_a_field() {
        let both = json!({
            "pids": {"limit": 5}, "memory": {"limit": 9, "reservation": 3, "swap": 9},
            "unified": {"pids.max": "7"}
        });
        let limits = of_member(&resources(both)).unwrap();
        assert_eq!((limits.pids, limits.memory_bytes, limits.memory_low_bytes), (7, 9, 3));
    }

    #[test]
    fn what_cannot_be_set_is_named() {
        for (file, value) in [
            ("io.weight", "100"),
            ("memory.max", "1"),
            ("../memory.high", "1"),
            ("hugetlb.2MB.max\n", "0"),
        ] {
            let refused = files(json!({ file: value })).unwrap_err();
            let named = format!("the control group's file {file:?} cannot be set");
            assert!(refused.starts_with(&named) && !refused.contains('\n'), "{refused}");
        }
        for (file, value) in [
            ("cpu.max", "1 2 3"),
            ("cpu.max", "max 1"),
            ("cpu.weight", "0"),
            ("memory.high", "1G"),
            ("memory.min", "-1"),
            ("memory.oom.group", "2"),
            ("memory.swap.max", ""),
            ("pids.max", "many"),
        ] {
            let refused = files(json!({ file: value })).unwrap_err();
            let named = format!("{value:?} is no value of the control group's file {file}");
            assert_eq!(refused, named);
        }
    }

    #[test]
    fn a_sandbox_of_its_own_has_memory_and_cpus() {
        let own = |value: Value| of_own(&resources(value)).unwrap();
        let machine = json!({"memory": {"limit": 1 << 30}, "cpu": {"quota": 50_000, "shares": 2}});
        assert_eq!(own(machine), None);
        let pids = own(json!({"memory": {"limit": 1 << 30}, "pids": {"limit": 5}})).unwrap();
        assert_eq!((pids.pids, pids.memory_bytes), (5, 0));
        assert_eq!(own(json!({"unified": {"memory.oom.group": "1"}})).unwrap().oom_group, 2);
    }
}
