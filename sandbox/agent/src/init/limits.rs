//! Resource limits of processes.

use anyhow::{Context, Result, bail};
use rustix::process::{Rlimit, setrlimit};
use slipway_agent_protocol::limits::resource;
use slipway_agent_protocol::v1::ResourceLimit;

/// Applies `limits` to this process.
pub fn apply(limits: &[ResourceLimit]) -> Result<()> {
    for limit in limits {
        let resource =
            resource(&limit.name).with_context(|| format!("unknown limit {:?}", limit.name))?;
        if limit.soft > limit.hard {
            bail!("limit {}: soft {} is above hard {}", limit.name, limit.soft, limit.hard);
        }
        // 2^64-1 is the kernel's "unlimited", for which rustix uses `None`.
        let value = |value: u64| (value != u64::MAX).then_some(value);
        let new = Rlimit { current: value(limit.soft), maximum: value(limit.hard) };
        setrlimit(resource, new)
            .with_context(|| format!("limit {}={}:{}", limit.name, limit.soft, limit.hard))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soft_limit_above_the_hard_one_is_refused() {
        let limit = ResourceLimit { name: "core".into(), soft: 2, hard: 1 };
        assert!(apply(&[limit]).unwrap_err().to_string().contains("above hard"));
    }
}
