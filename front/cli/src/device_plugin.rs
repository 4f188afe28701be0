//! `slipway device-plugin`: advertises functions of pools and the node's socket functions to
//! kubelet, or shows those that it would advertise (`--show`). The plugin itself is the crate
//! `slipway_device_plugin`.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use slipway_device_plugin::{Device, Devices, QUIET, Settings, Sockets, list, resource, serve};
use slipway_plane_api::functions::SOCKETS;
use slipway_runtime::Config;

use crate::args::DevicePluginArgs;
use crate::out::FAILURE;
use crate::spec::socket_engine;
use crate::table::table;

/// Runs `slipway device-plugin`. Returns the exit status: a pool that was named and would not be
/// advertised is a failure.
///
/// # Errors
/// If the settings of socket functions are wrong, or the daemon or the plugin's directory cannot be
/// used.
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
        crate::complain(&not_advertised(name));
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

/// Returns the pools in `named` that would not be advertised.
fn missing<'a>(named: &'a [String], devices: &Devices) -> Vec<&'a String> {
    named.iter().filter(|name| !devices.contains_key(*name)).collect()
}

/// Makes the error of a pool that was named and would not be advertised.
fn not_advertised(name: &str) -> anyhow::Error {
    if name == SOCKETS {
        return anyhow!("there are no socket functions: `pod_sockets` in the node's settings is 0");
    }
    anyhow!(
        "there is no pool \"{name}\" whose functions pods can have; `slipway vf ls` lists pools"
    )
}

/// Returns the node's socket functions for pods, or `None` if its settings have none.
fn sockets(config: &Config) -> Result<Option<Sockets>> {
    config.check_functions()?;
    if config.pod_sockets == 0 {
        return Ok(None);
    }
    let engine = socket_engine(&config.run_dir)?.into();
    Ok(Some(Sockets { count: config.pod_sockets, engine, serves: slipway_sgiov::is_served }))
}

/// Returns the number of a pool's functions with which `is` is true.
fn count(devices: &Devices, pool: &str, is: impl Fn(&Device) -> bool) -> usize {
    devices.get(pool).into_iter().flat_map(|all| all.values()).filter(|one| is(one)).count()
}

/// Returns a pool's row of the table.
fn row(devices: &Devices, pool: &str) -> [String; 4] {
    [
        resource(pool),
        count(devices, pool, |_| true).to_string(),
        count(devices, pool, |one| one.is_healthy).to_string(),
        count(devices, pool, |one| one.is_ready).to_string(),
    ]
}

/// Returns a list with an object for each pool, as `--json` prints it.
fn as_json(devices: &Devices) -> serde_json::Value {
    let function = |(number, device): (&u32, &Device)| {
        serde_json::json!({
            "number": number, "healthy": device.is_healthy, "ready": device.is_ready,
        })
    };
    let of_pool = |(pool, functions): (&String, &BTreeMap<u32, Device>)| {
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

    #[test]
    fn an_error_says_why_functions_are_not_advertised() {
        assert!(not_advertised("nosuch").to_string().starts_with("there is no pool \"nosuch\" "));
        assert!(not_advertised("sockets").to_string().contains("`pod_sockets`"));
    }
}
