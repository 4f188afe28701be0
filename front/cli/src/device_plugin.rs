//! `slipway device-plugin`: functions of pools for Kubernetes. `slipway_device_plugin` is
//! all that serves.

use anyhow::{Result, anyhow};
use slipway_device_plugin::{Device, Devices, QUIET, Settings, Sockets, list, resource, serve};
use slipway_runtime::Config;

use crate::args::DevicePluginArgs;
use crate::out::FAILURE;
use crate::spec::socket_engine;
use crate::table::table;

/// Runs `slipway device-plugin`.
pub async fn device_plugin(config: &Config, args: &DevicePluginArgs) -> Result<i32> {
    let settings = Settings {
        kubelet: args.kubelet.clone(),
        daemon: config.socket(),
        run_dir: config.run_dir.clone(),
        pools: args.pools.clone(),
        sockets: sockets(config)?,
        quiet: QUIET,
    };
    if !args.show {
        match serve(settings).await? {}
    }
    let devices = list(&settings).await?;
    let missing = missing(&args.pools, &devices);
    for name in &missing {
        crate::complain(&anyhow!("there is no pool \"{name}\"; `slipway vf ls` lists pools"));
    }
    let status = if missing.is_empty() { 0 } else { FAILURE };
    if devices.is_empty() && status != 0 {
        return Ok(status);
    }
    if args.json {
        crate::out::json(&as_json(&devices))?;
    } else {
        let rows: Vec<_> = devices.keys().map(|pool| row(&devices, pool)).collect();
        let header = ["RESOURCE", "FUNCTIONS", "HEALTHY", "READY"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    }
    Ok(status)
}

/// Returns the pools that were named and have no devices.
fn missing<'a>(named: &'a [String], devices: &Devices) -> Vec<&'a String> {
    named.iter().filter(|name| !devices.contains_key(*name)).collect()
}

/// Returns the node's socket functions for pods, if its settings have some.
fn sockets(config: &Config) -> Result<Option<Sockets>> {
    config.check_functions()?;
    if config.pod_sockets == 0 {
        return Ok(None);
    }
    let engine = socket_engine(&config.run_dir)?.into();
    Ok(Some(Sockets { count: config.pod_sockets, engine, serves: slipway_sgiov::is_served }))
}

fn count(devices: &Devices, pool: &str, is: impl Fn(&Device) -> bool) -> usize {
    devices.get(pool).into_iter().flat_map(|all| all.values()).filter(|one| is(one)).count()
}

fn row(devices: &Devices, pool: &str) -> [String; 4] {
    [
        resource(pool),
        count(devices, pool, |_| true).to_string(),
        count(devices, pool, |one| one.is_healthy).to_string(),
        count(devices, pool, |one| one.is_ready).to_string(),
    ]
}

fn as_json(devices: &Devices) -> serde_json::Value {
    let function = |(number, device): (&u32, &Device)| {
        serde_json::json!({
            "number": number, "healthy": device.is_healthy, "ready": device.is_ready,
        })
    };
    let of_pool = |(pool, functions): (&String, &std::collections::BTreeMap<u32, Device>)| {
        serde_json::json!({
            "resource": resource(pool),
            "functions": functions.iter().map(function).collect::<Vec<_>>(),
        })
    };
    devices.iter().map(of_pool).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_resource_with_functions() {
        let of = |is_healthy, is_ready| Device { is_healthy, is_ready };
        let functions = [(0_u32, of(true, true)), (1, of(true, false)), (2, of(false, false))];
        let devices = Devices::from([("fast".to_owned(), functions.into())]);
        assert_eq!(row(&devices, "fast"), ["slipway.dev/fast", "3", "2", "1"]);
        let json = as_json(&devices);
        assert_eq!(json[0]["resource"], "slipway.dev/fast");
        assert_eq!(json[0]["functions"][1]["healthy"], true);
        assert_eq!(json[0]["functions"][2]["ready"], false);
        let named = ["fast", "nosuch"].map(str::to_owned);
        assert_eq!(missing(&named, &devices), ["nosuch"]);
    }
}
