//! Resource limits by the names that `ulimit` and docker use.

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, setrlimit};
use slipway_agent_protocol::v1::ResourceLimit;

/// Applies `limits` to this process.
pub fn apply(limits: &[ResourceLimit]) -> Result<()> {
    for limit in limits {
        let resource = resource(&limit.name)?;
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

fn resource(name: &str) -> Result<Resource> {
    let bare = name.to_ascii_lowercase();
    Ok(match bare.strip_prefix("rlimit_").unwrap_or(&bare) {
        "as" => Resource::As,
        "core" => Resource::Core,
        "cpu" => Resource::Cpu,
        "data" => Resource::Data,
        "fsize" => Resource::Fsize,
        "locks" => Resource::Locks,
        "memlock" => Resource::Memlock,
        "msgqueue" => Resource::Msgqueue,
        "nice" => Resource::Nice,
        "nofile" => Resource::Nofile,
        "nproc" => Resource::Nproc,
        "rss" => Resource::Rss,
        "rtprio" => Resource::Rtprio,
        "rttime" => Resource::Rttime,
        "sigpending" => Resource::Sigpending,
        "stack" => Resource::Stack,
        _ => bail!("unknown limit {name:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_spellings() {
        assert!(matches!(resource("nofile").unwrap(), Resource::Nofile));
        assert!(matches!(resource("RLIMIT_NPROC").unwrap(), Resource::Nproc));
        assert!(resource("files").is_err());
    }

    #[test]
    fn a_soft_limit_above_the_hard_one_is_refused() {
        let limit = ResourceLimit { name: "core".into(), soft: 2, hard: 1 };
        assert!(apply(&[limit]).unwrap_err().to_string().contains("above hard"));
    }
}
