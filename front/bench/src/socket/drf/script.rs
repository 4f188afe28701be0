//! The expected rate of each tenant, from two independent computations.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use slipway_warp::share::formula::{Demand, fill};

use super::Mix;

/// A script that implements progressive filling from its definition; the scheduler's tests use it,
/// too.
const SCRIPT: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../pipes/tests/progressive_filling.py"));

/// Returns the bytes per second of each tenant by the scheduler's own formula.
pub fn formula(mix: &Mix) -> Vec<f64> {
    let demand = |tenant: &super::DrfTenant| {
        let seconds = mix.executors.iter().enumerate().map(|(at, executor)| {
            if tenant.executors.contains(&at) { executor.capacity.recip() } else { 0.0 }
        });
        Demand { seconds: seconds.collect(), weight: tenant.weight, most: None }
    };
    let demands: Vec<Demand> = mix.tenants.iter().map(demand).collect();
    fill(mix.executors.len(), &demands).iter().map(|grant| grant.rate).collect()
}

/// Returns the bytes per second of each tenant of all `mixes` by the script, or `None` without
/// Python.
pub fn script(mixes: &[&Mix]) -> Result<Option<Vec<Vec<f64>>>> {
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("python3"),
    };
    let input = json!({ "mixes": mixes.iter().map(|mix| in_json(mix)).collect::<Vec<Value>>() });
    let mut stdin = child.stdin.take().context("python3's standard input")?;
    stdin.write_all(input.to_string().as_bytes())?;
    drop(stdin);
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "the script of progressive filling failed");
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

fn in_json(mix: &Mix) -> Value {
    let executors = mix.executors.iter().enumerate();
    let executors: Vec<Value> = executors
        .map(|(resource, one)| json!({ "capacity": one.capacity, "resource": resource }))
        .collect();
    let tenant = |one: &super::DrfTenant| {
        let cap: Option<u64> = None;
        json!({ "executors": one.executors, "weight": one.weight, "cap": cap })
    };
    let tenants: Vec<Value> = mix.tenants.iter().map(tenant).collect();
    json!({ "executors": executors, "tenants": tenants })
}
