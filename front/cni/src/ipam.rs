//! The IPAM plugin of a configuration: another program that chooses addresses (CNI specification,
//! *Section 4: Plugin Delegation*).

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;
use slipway_plane_api::network_v1 as v1;

use crate::failure::{Code, Failure};

/// The largest answer in bytes.
const LARGEST: u64 = 1 << 20;

/// The answer to ADD, with the fields that are used.
#[derive(Debug, Default, Deserialize)]
struct Answer {
    #[serde(default)]
    ips: Vec<Ip>,
    #[serde(default)]
    routes: Vec<Route>,
    #[serde(default)]
    dns: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Ip {
    address: String,
    #[serde(default)]
    gateway: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Route {
    dst: String,
    #[serde(default)]
    gw: Option<String>,
}

/// The error of a plugin.
#[derive(Debug, Deserialize)]
struct Refusal {
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

/// The choice of an IPAM plugin.
#[derive(Debug, PartialEq)]
pub struct Chosen {
    /// Addresses without the lengths of their prefixes.
    pub addresses: Vec<String>,
    /// Routes to add.
    pub routes: v1::AttachmentRoutes,
    /// Name servers and such, if the plugin says any.
    pub dns: Option<Value>,
}

/// Runs the plugin `kind` of the directories in `path` for the same operation, with the same
/// environment and input. Returns its output.
///
/// # Errors
/// The plugin's own error; [`Code::Ipam`] if it is not there or says nothing that is understood.
pub fn run(kind: &str, path: &OsStr, input: &[u8]) -> Result<Vec<u8>, Failure> {
    run_with(kind, path, input, &[])
}

/// Has the plugin release what ADD got.
///
/// # Errors
/// The errors of [`run`].
pub fn release(kind: &str, path: &OsStr, input: &[u8]) -> Result<(), Failure> {
    run_with(kind, path, input, &[("CNI_COMMAND", "DEL")]).map(drop)
}

fn run_with(
    kind: &str,
    path: &OsStr,
    input: &[u8],
    changed: &[(&str, &str)],
) -> Result<Vec<u8>, Failure> {
    let program = find(kind, path)?;
    let failed = |error: std::io::Error| {
        Failure::new(Code::Ipam, format!("cannot run {}: {error}", program.display()))
    };
    let mut child = Command::new(&program)
        .envs(changed.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut pipe) = child.stdin.take() {
        // A plugin that ended early says why.
        let _ = pipe.write_all(input);
    }
    let mut output = Vec::new();
    let pipe = child.stdout.take();
    let read = pipe.map_or(Ok(0), |pipe| pipe.take(LARGEST).read_to_end(&mut output));
    let status = child.wait().map_err(failed)?;
    read.map_err(failed)?;
    if status.success() {
        return Ok(output);
    }
    Err(match serde_json::from_slice::<Refusal>(&output) {
        Ok(Refusal { code, msg, details }) if !msg.is_empty() => {
            Failure::with_code(code, &format!("the IPAM plugin {kind}: {msg}; {details}"))
        }
        _ => Failure::new(Code::Ipam, format!("the IPAM plugin {kind} failed: {status}")),
    })
}

fn find(kind: &str, path: &OsStr) -> Result<PathBuf, Failure> {
    let all = std::env::split_paths(path).map(|dir| dir.join(kind));
    all.into_iter().find(|program| program.is_file()).ok_or_else(|| {
        let path = path.to_string_lossy();
        Failure::new(
            Code::Ipam,
            format!("the IPAM plugin {kind} is not in CNI_PATH ({path}); install it there"),
        )
    })
}

/// Parses a plugin's answer to ADD.
///
/// # Errors
/// [`Code::Ipam`].
pub fn parse(kind: &str, output: &[u8]) -> Result<Chosen, Failure> {
    let bad = |why: String| {
        Failure::new(Code::Ipam, format!("the answer of the IPAM plugin {kind} is no use: {why}"))
    };
    let answer: Answer = serde_json::from_slice(output).map_err(|error| bad(error.to_string()))?;
    if !answer.ips.iter().any(|ip| !ip.address.contains(':')) {
        return Err(bad("it has no IPv4 address, and an interface of Slipway's has one".into()));
    }
    let gateway = |six: bool| {
        let mut own = answer.ips.iter().filter(|ip| ip.address.contains(':') == six);
        own.find_map(|ip| ip.gateway.clone()).unwrap_or_default()
    };
    let route = |one: &Route| {
        let (destination, prefix) = one.dst.split_once('/')?;
        let next = one.gw.clone().filter(|gw| !gw.is_empty());
        Some(v1::InterfaceRoute {
            destination: destination.to_owned(),
            prefix: prefix.parse().ok()?,
            gateway: next.unwrap_or_else(|| gateway(one.dst.contains(':'))),
            ..Default::default()
        })
    };
    let routes = answer.routes.iter().map(|one| {
        route(one).ok_or_else(|| bad(format!("{:?} is no destination of a route", one.dst)))
    });
    let routes = v1::AttachmentRoutes { routes: routes.collect::<Result<_, _>>()? };
    let address = |ip: &Ip| ip.address.split('/').next().unwrap_or_default().to_owned();
    let addresses = answer.ips.iter().map(address).collect();
    let dns = answer.dns.filter(|dns| dns.as_object().is_some_and(|dns| !dns.is_empty()));
    Ok(Chosen { addresses, routes, dns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_understood() {
        let chosen = parse(
            "host-local",
            br#"{"cniVersion": "1.0.0", "dns": {}, "ips": [
                {"address": "10.1.0.7/24", "gateway": "10.1.0.1"}, {"address": "fd00::7/64"}],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.9"}]}"#,
        )
        .unwrap();
        assert_eq!(chosen.addresses, ["10.1.0.7", "fd00::7"]);
        let next: Vec<_> = chosen.routes.routes.iter().map(|one| one.gateway.as_str()).collect();
        assert_eq!((next, chosen.dns), (vec!["10.1.0.1", "10.1.0.9"], None));
        for bad in [
            &b""[..],
            b"{}",
            br#"{"ips": [{"address": "fd00::7/64"}]}"#,
            br#"{"ips": [{"address": "10.1.0.7/24"}], "routes": [{"dst": "x"}]}"#,
        ] {
            assert_eq!(parse("x", bad).unwrap_err().code(), 103);
        }
    }

    #[test]
    fn a_plugin_is_run_and_its_error_is_its_own() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let plugin = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        plugin("good", "cat");
        plugin("full", r#"cat >/dev/null; echo '{"code": 12, "msg": "full"}'; exit 1"#);
        plugin("dead", "exit 3");
        let path = std::env::join_paths(["/nonexistent".as_ref(), dir.path()]).unwrap();
        assert_eq!(run("good", &path, b"{}").unwrap(), b"{}");
        let full = run("full", &path, b"{}").unwrap_err();
        assert_eq!((full.code(), full.message()), (12, "the IPAM plugin full: full"));
        assert_eq!(run("dead", &path, b"{}").unwrap_err().code(), 103);
        let missing = run("missing", &path, b"{}").unwrap_err();
        assert!(missing.message().contains("not in CNI_PATH"), "{}", missing.message());
    }
}
