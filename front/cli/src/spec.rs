//! Specifications of sandboxes and containers, from the command line.

use std::path::Path;

use anyhow::{Context, Result, bail};
use slipway_runtime::v1;

use crate::args::{MachineArgs, NetworkArgs, ProcessArgs, RunArgs, Switched};
use crate::session::terminal_size;
use crate::size::CpuCount;
use crate::{copy, security, tmpfs, volume};

/// The word of `--from` for no template.
pub const NONE: &str = "none";

/// Returns the specification of a container that `slipway run` asks for. `digest` is that of its
/// image, and is empty for one that goes on with a snapshot.
///
/// # Errors
/// An argument is malformed, or a file cannot be read.
pub fn of_run(args: &RunArgs, digest: &str, run_dir: &Path) -> Result<v1::RunSpec> {
    let (rows, columns) = terminal_size();
    let of_pod = match args.pod {
        Some(_) => v1::RunSpec {
            resources: Some(resources(args.machine.memory, args.machine.cpus)),
            ..machine(
                &MachineArgs { memory: None, cpus: None, ..args.machine.clone() },
                &args.network,
                run_dir,
            )?
        },
        None => machine(&args.machine, &args.network, run_dir)?,
    };
    let (template, boots) = beginning(args.from.as_deref());
    if boots && args.image.is_none() {
        bail!("with --from {NONE} a sandbox boots: name an image");
    }
    Ok(v1::RunSpec {
        pod: args.pod.clone().unwrap_or_default(),
        shares_processes: args.share_processes,
        template,
        boots,
        name: args.name.clone().unwrap_or_default(),
        image: args.image.clone().unwrap_or_default(),
        image_digest: digest.to_owned(),
        command: args.command.clone(),
        entrypoint: args.entrypoint.clone(),
        env: environment(&args.process)?,
        cwd: args.process.workdir.clone().unwrap_or_default(),
        user: args.process.user.clone().unwrap_or_default(),
        hostname: args.hostname.clone().unwrap_or_default(),
        terminal: args.process.tty,
        rows,
        columns,
        stdin: args.process.interactive,
        detach: args.detach,
        remove: args.rm,
        privileged: args.process.privileged,
        read_only: args.read_only,
        volumes: volume::disks(&args.volume),
        shares: volume::shares(&args.volume),
        labels: labels(&args.label)?,
        limits: args.ulimit.iter().map(|text| limit(text)).collect::<Result<_>>()?,
        files: copy::read(&args.copy)?,
        file_dirs: tmpfs::dirs(&args.tmpfs),
        security: security::of_run(&args.process.security, args.process.privileged, &args.sysctl)?,
        ..of_pod
    })
}

/// Returns the template or snapshot of `--from`, which is empty if a sandbox begins with none, and
/// whether it boots even if the node would choose one ([`NONE`]).
pub fn beginning(from: Option<&str>) -> (String, bool) {
    match from {
        Some(NONE) => (String::new(), true),
        named => (named.unwrap_or_default().to_owned(), false),
    }
}

/// Returns the limits of a container of a pod: memory in bytes, and the CPUs whose time it may use.
pub fn resources(memory: Option<u64>, cpus: Option<CpuCount>) -> v1::Resources {
    v1::Resources {
        memory_bytes: memory.unwrap_or(0),
        cpu_quota_us: cpus.map_or(0, CpuCount::quota_us),
        ..Default::default()
    }
}

/// Returns the specification of a sandbox that has this machine and network, and no container yet.
///
/// # Errors
/// The CPUs are not whole, or a path is malformed.
pub fn machine(
    machine: &MachineArgs,
    network: &NetworkArgs,
    run_dir: &Path,
) -> Result<v1::RunSpec> {
    let MachineArgs {
        memory,
        max_memory,
        layers,
        cpus,
        max_cpus,
        free_page_reporting,
        kernel,
        accel,
    } = machine;
    let kernel = kernel.as_deref().map(absolute).transpose()?;
    let namespace = network.network_namespace.as_deref().map(absolute).transpose()?;
    Ok(v1::RunSpec {
        network_namespace: namespace.unwrap_or_default(),
        // 0 stands for "not given", so an explicit 0 becomes 1.
        memory_bytes: memory.map_or(0, |bytes| bytes.max(1)),
        max_memory_bytes: max_memory.map_or(0, |bytes| bytes.max(1)),
        layers_bytes: layers.map_or(0, |bytes| bytes.max(1)),
        cpus: cpus.map(CpuCount::whole).transpose()?.unwrap_or(0),
        max_cpus: max_cpus.unwrap_or(0),
        free_page_reporting: free_page_reporting.map(Switched::is_on),
        kernel: kernel.unwrap_or_default(),
        accelerator: accel.clone().unwrap_or_default(),
        network: network.network.clone().unwrap_or_default(),
        mac: network.mac.clone().unwrap_or_default(),
        mac_at_port: network.mac_at_port,
        addresses: network.ip.clone(),
        publish: network.publish.clone(),
        wait_network: network.wait_network,
        queues: network.queues.unwrap_or(0),
        nic: network.nic.clone().unwrap_or_default(),
        interrupt_interval_ns: network.nic_interval.map_or(0, |time| time.as_nanos() as u64),
        vf_pool: network.vf.clone().unwrap_or_default(),
        vf_addresses: network.vf_addresses.clone(),
        socket_engine: if network.sockets { socket_engine(run_dir)? } else { String::new() },
        ..v1::RunSpec::default()
    })
}

/// Parses labels.
pub fn labels(texts: &[String]) -> Result<std::collections::HashMap<String, String>> {
    texts.iter().map(|text| label(text)).collect()
}

/// Returns the path of the socket engine that programs started here would use.
pub fn socket_engine(run_dir: &Path) -> Result<String> {
    let named = std::env::var_os("SLIPWAY_SOCKET").filter(|path| !path.is_empty());
    absolute(&named.map_or_else(|| run_dir.join("socket.sock"), Into::into))
}

/// Makes a path absolute, since the daemon has another working directory.
pub fn absolute(path: &Path) -> Result<String> {
    let full = std::path::absolute(path).with_context(|| path.display().to_string())?;
    Ok(full.to_string_lossy().into_owned())
}

pub fn environment(args: &ProcessArgs) -> Result<Vec<String>> {
    let mut entries = Vec::new();
    for file in &args.env_file {
        entries.extend(entries_of_file(file)?);
    }
    entries.extend_from_slice(&args.env);
    Ok(variables(&entries))
}

/// Reads entries of an environment as docker does: what follows the first `=` of a line is the
/// value, quotes and blanks included.
fn entries_of_file(file: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read --env-file {}", file.display()))?;
    let lines = (1..).zip(text.lines()).map(|(number, line)| (number, line.trim_start()));
    let entries = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let entry = |(number, line): (u32, &str)| {
        let name = line.split_once('=').map_or(line, |(name, _)| name);
        if name.is_empty() || name.contains(char::is_whitespace) {
            bail!("{} line {number}: \"{name}\" is no name of a variable", file.display());
        }
        Ok(line.to_owned())
    };
    entries.map(entry).collect()
}

/// Returns an environment of entries NAME=VALUE. A NAME alone has the value that it has here.
pub fn variables(entries: &[String]) -> Vec<String> {
    let entry = |text: &String| match text.contains('=') {
        true => Some(text.clone()),
        // A variable that is unset here is left out, as docker does.
        false => Some(format!("{text}={}", std::env::var(text).ok()?)),
    };
    entries.iter().filter_map(entry).collect()
}

fn label(text: &str) -> Result<(String, String)> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    if key.is_empty() {
        bail!("\"{text}\" is no label: KEY=VALUE");
    }
    Ok((key.to_owned(), value.to_owned()))
}

fn limit(text: &str) -> Result<v1::Limit> {
    let wrong = || format!("\"{text}\" is no limit: NAME=SOFT[:HARD], as nofile=1024:4096");
    let number = |text: &str| match text {
        "unlimited" | "-1" => Ok(u64::MAX),
        _ => text.parse::<u64>(),
    };
    let (name, values) = text.split_once('=').with_context(wrong)?;
    let (soft, hard) = values.split_once(':').unwrap_or((values, values));
    let (soft, hard) = (number(soft).with_context(wrong)?, number(hard).with_context(wrong)?);
    if soft > hard {
        bail!("{}; the soft limit is above the hard one", wrong());
    }
    Ok(v1::Limit { name: name.to_owned(), soft, hard })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_says_itself_whether_its_guest_reports_free_pages() {
        #[derive(clap::Parser)]
        struct Machine {
            #[command(flatten)]
            args: MachineArgs,
        }
        let asked = |words: &[&str]| {
            let words = [&["machine"][..], words].concat();
            let parsed = <Machine as clap::Parser>::try_parse_from(words).ok()?;
            Some(parsed.args.free_page_reporting.map(Switched::is_on))
        };
        assert_eq!(asked(&[]), Some(None));
        assert_eq!(asked(&["--free-page-reporting"]), Some(Some(true)));
        assert_eq!(asked(&["--free-page-reporting=off"]), Some(Some(false)));
        assert_eq!(asked(&["--free-page-reporting=no"]), None);
    }

    #[test]
    fn a_sandbox_boots_whatever_the_settings_say_if_it_is_told_so() {
        assert_eq!(beginning(None), (String::new(), false));
        assert_eq!(beginning(Some("none")), (String::new(), true));
        assert_eq!(beginning(Some("auto")), ("auto".to_owned(), false));
    }

    #[test]
    fn entries_of_a_file_come_before_those_of_the_command_line() {
        #[derive(clap::Parser)]
        struct Process {
            #[command(flatten)]
            args: ProcessArgs,
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let words = ["process", "-e", "A=3", "--env-file", path];
        let args = <Process as clap::Parser>::parse_from(words).args;
        let of = |text: &str| {
            std::fs::write(path, text).unwrap();
            environment(&args)
        };
        let text = "# notes\n\n  A=1\nB= 'two' # kept\r\nSLIPWAY_UNSET_VARIABLE\nC=\n";
        assert_eq!(of(text).unwrap(), ["A=1", "B= 'two' # kept", "C=", "A=3"]);
        for (text, wrong) in [("A=1\n=2\n", "line 2: \"\""), ("export A=1", "\"export A\"")] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        std::fs::remove_file(path).unwrap();
        assert!(environment(&args).unwrap_err().to_string().contains("cannot read --env-file"));
    }

    #[test]
    fn limits_as_docker_writes_them() {
        let both = limit("nofile=1024:4096").unwrap();
        assert_eq!((both.name.as_str(), both.soft, both.hard), ("nofile", 1024, 4096));
        assert_eq!(limit("core=-1").unwrap().hard, u64::MAX);
        for bad in ["nofile", "nofile=", "nofile=2:1", "nofile=x"] {
            assert!(limit(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_of_a_pods_container_are_the_guests() {
        let cpus = |text: &str| crate::size::parse_cpus(text).ok();
        let both = resources(Some(64 << 20), cpus("2"));
        assert_eq!((both.memory_bytes, both.cpu_quota_us), (64 << 20, 200_000));
        assert_eq!(resources(None, cpus("0.5")).cpu_quota_us, 50_000);
        assert_eq!(resources(None, None), v1::Resources::default());
    }

    #[test]
    fn labels() {
        assert_eq!(label("a=b=c").unwrap(), ("a".into(), "b=c".into()));
        assert!(label("=x").is_err());
    }
}
