//! The VMMs of the node, as its settings choose.

use anyhow::Result;
use slipway_hypervisor::Vmms;
use slipway_runtime::Config;

/// Returns the node's VMMs. Fails if the settings name none that there is.
pub fn vmms(config: &Config) -> Result<Vmms> {
    let choice = config.vmm()?;
    let program = config.find_vmm().map_err(|error| error.to_string());
    let hollow = config.find_program("slipway-hollow").map_err(|error| error.to_string());
    Ok(Vmms::new(choice, program, &config.cache_dir()).with_hollow(hollow))
}
