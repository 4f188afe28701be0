//! Settings as the daemon checks them when it starts: a wrong one is reported then, in place of
//! when a sandbox needs it. `slipway daemon --check` does no more than this.

use std::time::Duration;

use anyhow::{Result, bail};
use slipway_network::reach::Policy;
use slipway_runtime::{Config, check_layers};

use crate::args::DaemonArgs;

/// The longest time that a thread which serves devices may poll before it sleeps.
const LONGEST_POLLING: Duration = Duration::from_secs(1);

/// Checks settings that are used when a sandbox starts, so that a wrong one is reported when the
/// daemon starts.
pub(super) fn check_settings(config: &Config) -> Result<()> {
    config.uses_pool()?;
    config.pool_page()?;
    config.shares_roots()?;
    config.forks_many()?;
    config.cpu_template()?;
    config.accelerator()?;
    config.vmm()?;
    config.check_cgroups()?;
    config.check_functions()?;
    config.check_cpus()?;
    config.check_templates()?;
    config.check_empty_dirs()?;
    config.check_logs()?;
    check_layers(config)?;
    reach(config)?;
    Ok(())
}

/// Returns the addresses beyond the host that sandboxes may reach.
pub(super) fn reach(config: &Config) -> Result<Policy> {
    let Config { network_reach, network_allow, network_deny, .. } = config;
    Ok(Policy::parse(network_reach, network_allow, network_deny)?)
}

/// Returns the poll budget of the command line, or else of the settings. Fails if it is too long.
pub(super) fn poll_budget_of(config: &Config, args: &DaemonArgs) -> Result<Duration> {
    let set = Duration::from_micros(config.poll_budget_us.into());
    let budget = args.poll_budget.unwrap_or(set);
    if budget > LONGEST_POLLING {
        bail!("a poll budget of {budget:?} is more than {LONGEST_POLLING:?}");
    }
    Ok(budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_setting_is_named() {
        check_settings(&Config::default()).unwrap();
        let word = || "other".to_owned();
        let usual = Config::default;
        for (name, config) in [
            ("accelerator", Config { accelerator: word(), ..usual() }),
            ("vmm", Config { vmm: word(), ..usual() }),
            ("cpu_template", Config { cpu_template: word(), ..usual() }),
            ("memory", Config { memory: word(), ..usual() }),
            ("network_reach", Config { network_reach: word(), ..usual() }),
            ("network_allow", Config { network_allow: vec![word()], ..usual() }),
            ("network_deny", Config { network_deny: vec![word()], ..usual() }),
        ] {
            let error = check_settings(&config).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("other"), "{error}");
        }
    }

    #[test]
    fn the_command_line_is_stronger_than_the_settings() {
        let config = Config { poll_budget_us: 70, ..Config::default() };
        let budget = |config: &Config, poll_budget| {
            poll_budget_of(config, &DaemonArgs { ends_when_idle: false, check: false, poll_budget })
        };
        assert_eq!(budget(&config, None).unwrap(), Duration::from_micros(70));
        assert_eq!(budget(&config, Some(Duration::ZERO)).unwrap(), Duration::ZERO);
        assert!(budget(&config, Some(Duration::from_secs(2))).is_err());
        let config = Config { poll_budget_us: 1_000_001, ..config };
        assert!(budget(&config, None).is_err());
    }
}
