//! `slipway snapshot`: sandboxes that were saved while they ran, with which others begin.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use slipway_runtime::{Config, v1};

use crate::args::{
    MachineArgs, NetworkArgs, NodeArgs, ProcessArgs, Pull, RunArgs, SecurityArgs, SnapshotCommand,
};
use crate::client::{answer, connect_snapshots, refused};
use crate::manage::named;
use crate::progress;
use crate::spec::{NONE, absolute};
use crate::table::{self, ago, printable};

/// Runs a command about snapshots. Returns the exit status.
pub async fn command(node: &NodeArgs, config: &Config, command: &SnapshotCommand) -> Result<i32> {
    match command {
        SnapshotCommand::Create { sandbox, name } => {
            create(node, config, sandbox, name.as_deref()).await?;
        }
        SnapshotCommand::Ls { json } => show(&list(node, config).await?, *json)?,
        SnapshotCommand::Rm { names } => {
            let mut client = connect_snapshots(node, config).await?;
            for name in names {
                client.remove(named(name)).await.map_err(refused)?;
                crate::say!("{name}");
            }
        }
        SnapshotCommand::Export { name, dir } => export(node, config, name, dir).await?,
        SnapshotCommand::Import { dir, name } => {
            import(node, config, dir, name.as_deref()).await?;
        }
        SnapshotCommand::Inspect { names, json: _ } => {
            let all = list(node, config).await?;
            let found = names.iter().map(|name| find(&all, name).map(as_json));
            let found = found.collect::<Result<Vec<_>>>()?;
            crate::out::json(&found)?;
        }
    }
    Ok(0)
}

async fn create(node: &NodeArgs, config: &Config, sandbox: &str, name: Option<&str>) -> Result<()> {
    let mut client = connect_snapshots(node, config).await?;
    let (sandbox, name) = (sandbox.to_owned(), name.unwrap_or_default().to_owned());
    let spinner = progress::waiting("saving the sandbox");
    let made = client.create(v1::CreateSnapshotRequest { sandbox, name }).await;
    spinner.finish_and_clear();
    let snapshot = answer(made)?;
    tell_pause(&snapshot);
    crate::say!("{}", snapshot.name);
    Ok(())
}

/// Copies a snapshot into a directory, which is made if it is missing.
async fn export(node: &NodeArgs, config: &Config, name: &str, dir: &Path) -> Result<()> {
    let request = v1::ExportSnapshotRequest { name: name.to_owned(), path: absolute(dir)? };
    let mut client = connect_snapshots(node, config).await?;
    let made = make(dir)?;
    let spinner = progress::waiting("copying the snapshot");
    let exported = client.export(request).await;
    spinner.finish_and_clear();
    if made && exported.is_err() {
        // Fails if something is in it, and then it is somebody's.
        let _ = std::fs::remove_dir(dir);
    }
    exported.map_err(refused)?;
    Ok(())
}

/// Makes a directory for its owner's eyes only: it gets the memory of a guest. Returns `false` if
/// there is something at its path.
fn make(dir: &Path) -> Result<bool> {
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        made => {
            made.with_context(|| format!("cannot create {}", dir.display()))?;
            Ok(true)
        }
    }
}

/// Copies a snapshot in from a directory, and prints its name.
async fn import(node: &NodeArgs, config: &Config, dir: &Path, name: Option<&str>) -> Result<()> {
    let (path, name) = (absolute(dir)?, name.unwrap_or_default().to_owned());
    let mut client = connect_snapshots(node, config).await?;
    let spinner = progress::waiting("copying the snapshot");
    let request = v1::ImportSnapshotRequest { path, name, image_digest: String::new() };
    let imported = client.import(request).await;
    spinner.finish_and_clear();
    let snapshot = answer(imported)?;
    // Fails if the reader has left, and then nobody wants to know.
    let _ = writeln!(std::io::stderr(), "slipway: {}", image_line(&snapshot));
    crate::say!("{}", snapshot.name);
    Ok(())
}

/// Says which image of this node the forks of a snapshot have. Its name is that of the directory's
/// author, who may have given another image that name.
fn image_line(snapshot: &v1::Snapshot) -> String {
    let v1::Snapshot { name, image, image_digest, .. } = snapshot;
    let (name, image) = (printable(name), printable(image));
    format!("forks of {name} read the image {image_digest} of this node, saved as {image}")
}

/// Says on standard error for how long a sandbox stood still while it was saved.
pub fn tell_pause(snapshot: &v1::Snapshot) {
    let milliseconds = snapshot.paused_ns as f64 / 1e6;
    let line = format!("{} stood still for {milliseconds:.0} ms", printable(&snapshot.sandbox));
    // Fails if the reader has left, and then nobody wants to know.
    let _ = writeln!(std::io::stderr(), "slipway: {line}");
}

/// Returns the node's snapshots.
pub async fn list(node: &NodeArgs, config: &Config) -> Result<Vec<v1::Snapshot>> {
    let mut client = connect_snapshots(node, config).await?;
    match client.list(v1::Empty {}).await {
        // A daemon of an earlier version, which has none.
        Err(status) if status.code() == tonic::Code::Unimplemented => Ok(Vec::new()),
        listed => Ok(answer(listed)?.snapshots),
    }
}

fn find<'a>(all: &'a [v1::Snapshot], name: &str) -> Result<&'a v1::Snapshot> {
    let found = all.iter().find(|one| one.name == name);
    found.with_context(|| {
        format!("there is no snapshot \"{name}\"; `slipway snapshot ls` lists them")
    })
}

fn show(all: &[v1::Snapshot], json: bool) -> Result<()> {
    let header = ["SNAPSHOT", "SANDBOX", "IMAGE", "MEMORY", "ON DISK", "CPUS", "CREATED"];
    table::list(all, json, as_json, header, row)
}

fn row(snapshot: &v1::Snapshot) -> [String; 7] {
    let on_disk = snapshot.touched_bytes.saturating_add(snapshot.disk_bytes);
    [
        snapshot.name.clone(),
        snapshot.sandbox.clone(),
        snapshot.image.clone(),
        format!("{} MiB", snapshot.memory_bytes >> 20),
        format!("{} MiB", on_disk >> 20),
        snapshot.cpus.to_string(),
        ago(snapshot.created_ns),
    ]
}

fn as_json(snapshot: &v1::Snapshot) -> serde_json::Value {
    serde_json::json!({
        "name": snapshot.name,
        "sandbox": snapshot.sandbox,
        "image": snapshot.image,
        "image_digest": snapshot.image_digest,
        "created_ns": snapshot.created_ns,
        "memory_bytes": snapshot.memory_bytes,
        "touched_bytes": snapshot.touched_bytes,
        "disk_bytes": snapshot.disk_bytes,
        "cpus": snapshot.cpus,
        "paused_ns": snapshot.paused_ns,
        "nic": snapshot.nic,
        "volumes": snapshot.volumes,
    })
}

/// Returns the snapshot that a run goes on with. Returns `None` if the run has an image.
///
/// # Errors
/// The run asks for something that the snapshot has already.
pub async fn of_run(
    node: &NodeArgs,
    config: &Config,
    args: &RunArgs,
) -> Result<Option<v1::Snapshot>> {
    let Some(name) = args.from.as_ref().filter(|name| *name != NONE) else { return Ok(None) };
    let found = list(node, config).await?.into_iter().find(|one| one.name == *name);
    if found.is_some() {
        check(args, name)?;
    }
    Ok(found)
}

/// Asks for no network in a sandbox that goes on with a snapshot without an interface, unless the
/// user named a network.
pub fn keep_interface(snapshot: &v1::Snapshot, spec: &mut v1::RunSpec) {
    if snapshot.nic.is_empty() && spec.network.is_empty() && spec.network_namespace.is_empty() {
        spec.network = "none".to_owned();
    }
}

/// Fails if a run that goes on with snapshot `name` asks for something that the snapshot has.
fn check(args: &RunArgs, name: &str) -> Result<()> {
    if args.pod.is_some() {
        bail!("no container of a pod goes on with snapshot {name}: slipway run --from {name}");
    }
    if args.image.is_some() {
        bail!(
            "snapshot {name} goes on with its own container: leave the image and the command out; \
             `slipway exec` runs commands in it"
        );
    }
    match fixed(args) {
        Some(option) => bail!("snapshot {name} goes on as it was saved: leave {option} out"),
        None => Ok(()),
    }
}

/// Returns the first option of a run that a snapshot leaves no choice of.
fn fixed(args: &RunArgs) -> Option<&'static str> {
    let RunArgs { machine, process, network, .. } = args;
    let MachineArgs {
        memory,
        max_memory,
        layers: _,
        cpus,
        max_cpus,
        free_page_reporting,
        kernel,
        accel,
    } = machine;
    let ProcessArgs { env, env_file, workdir, user, interactive, tty, privileged, security } =
        process;
    let SecurityArgs { cap_add, cap_drop, group_add, security_opt } = security;
    let NetworkArgs { mac_at_port, queues, nic, nic_interval, sockets, .. } = network;
    let options = [
        ("--memory", memory.is_some()),
        ("--max-memory", max_memory.is_some()),
        ("--cpus", cpus.is_some()),
        ("--max-cpus", max_cpus.is_some()),
        ("--free-page-reporting", free_page_reporting.is_some()),
        ("--kernel", kernel.is_some()),
        ("--accel", accel.is_some()),
        ("--env", !env.is_empty()),
        ("--env-file", !env_file.is_empty()),
        ("--workdir", workdir.is_some()),
        ("--user", user.is_some()),
        ("--interactive", *interactive),
        ("--tty", *tty),
        ("--privileged", *privileged),
        ("--cap-add", !cap_add.is_empty()),
        ("--cap-drop", !cap_drop.is_empty()),
        ("--group-add", !group_add.is_empty()),
        ("--security-opt", !security_opt.is_empty()),
        ("--mac-at-port", *mac_at_port),
        ("--queues", queues.is_some()),
        ("--nic-interval", nic_interval.is_some()),
        ("--nic", nic.is_some()),
        ("--sockets", *sockets),
        ("--entrypoint", args.entrypoint.is_some()),
        ("--read-only", args.read_only),
        ("--volume", !args.volume.is_empty()),
        ("--copy", !args.copy.is_empty()),
        ("--tmpfs", !args.tmpfs.is_empty()),
        ("--ulimit", !args.ulimit.is_empty()),
        ("--sysctl", !args.sysctl.is_empty()),
        ("--pull", args.pull != Pull::Missing),
        ("--lazy", args.lazy.lazy.is_some()),
    ];
    options.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::spec;

    /// Returns the arguments of `slipway run --from s` with these further words.
    fn run_with(words: &[&str]) -> RunArgs {
        let all = [&["slipway", "run", "--from", "s"][..], words].concat();
        let Command::Run(args) = Cli::try_parse_from(all).unwrap().command else {
            panic!("{words:?}")
        };
        *args
    }

    #[test]
    fn a_run_from_a_snapshot_has_no_option_that_the_snapshot_fixes() {
        for words in [
            &["--memory", "1G"][..],
            &["--max-memory", "1G"],
            &["--cpus", "2"],
            &["--max-cpus", "2"],
            &["--kernel", "/k"],
            &["--accel", "kvm"],
            &["--env", "A=1"],
            &["--workdir", "/"],
            &["--user", "1"],
            &["--interactive"],
            &["--tty"],
            &["--privileged"],
            &["--cap-add", "ALL"],
            &["--cap-drop", "ALL"],
            &["--group-add", "1"],
            &["--security-opt", "no-new-privileges"],
            &["--queues", "2"],
            &["--nic", "virtio"],
            &["--sockets"],
            &["--entrypoint", ""],
            &["--read-only"],
            &["--volume", "data:1M"],
            &["--copy", "/etc/x:/x"],
            &["--ulimit", "nofile=1"],
            &["--sysctl", "net.core.somaxconn=1"],
            &["--pull", "always"],
            &["--lazy"],
            &["--free-page-reporting"],
        ] {
            let error = check(&run_with(words), "s").unwrap_err().to_string();
            assert!(error.ends_with(&format!("leave {} out", words[0])), "{words:?}: {error}");
        }
        let error = check(&run_with(&["debian:12", "true"]), "s").unwrap_err().to_string();
        assert!(error.contains("leave the image and the command out"), "{error}");
        let in_pod = RunArgs { pod: Some("p".to_owned()), ..run_with(&[]) };
        assert!(check(&in_pod, "s").unwrap_err().to_string().contains("container of a pod"));
    }

    #[test]
    fn a_run_from_a_snapshot_has_a_name_and_a_network_of_its_own() {
        let words = [
            ["--name", "a"],
            ["--hostname", "b"],
            ["--network", "n"],
            ["--ip", "10.0.0.9"],
            ["--mac", "02:00:00:00:00:01"],
            ["--publish", "80"],
            ["--label", "k=v"],
            ["--layers", "16M"],
            ["--timeline", "x.json"],
            ["--rm", "--detach"],
        ];
        let args = run_with(words.as_flattened());
        assert!(check(&args, "s").is_ok() && args.image.is_none());
        let spec = spec::of_run(&args, "", std::path::Path::new("/run/slipway")).unwrap();
        assert_eq!((spec.template.as_str(), spec.image.as_str()), ("s", ""));
        assert!(spec.detach && spec.remove && !spec.stdin && spec.security.is_none());
        assert_eq!(spec.layers_bytes, 16 << 20);
    }

    #[test]
    fn an_image_is_needed_without_a_template_or_snapshot() {
        let error = Cli::try_parse_from(["slipway", "run", "--rm"]).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument);
        assert!(error.to_string().contains("IMAGE"), "{error}");
    }

    #[test]
    fn a_fork_of_a_sandbox_without_an_interface_has_none() {
        let snapshot = |nic: &str| v1::Snapshot { nic: nic.to_owned(), ..Default::default() };
        let network = |nic: &str, asked: &str| {
            let mut spec = v1::RunSpec { network: asked.to_owned(), ..Default::default() };
            keep_interface(&snapshot(nic), &mut spec);
            spec.network
        };
        assert_eq!((network("", ""), network("", "n")), ("none".into(), "n".into()));
        assert_eq!((network("virtio", ""), network("virtio", "n")), ("".into(), "n".into()));
    }

    #[test]
    fn a_directory_for_a_snapshot_is_its_owners_alone() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        assert!(make(&path).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert!(!make(&path).unwrap());
        let error = make(&dir.path().join("no/out")).unwrap_err().to_string();
        assert!(error.starts_with("cannot create"), "{error}");
    }

    #[test]
    fn a_snapshot_is_found_by_its_name() {
        let all = ["a", "b"].map(|name| v1::Snapshot { name: name.into(), ..Default::default() });
        assert_eq!(find(&all, "b").unwrap().name, "b");
        let error = find(&all, "c").unwrap_err().to_string();
        assert!(error.contains("there is no snapshot \"c\""), "{error}");
    }

    #[test]
    fn a_snapshot_takes_the_room_of_its_memory_and_of_its_disks() {
        let snapshot = v1::Snapshot {
            name: "s".to_owned(),
            memory_bytes: 256 << 20,
            touched_bytes: 70 << 20,
            disk_bytes: 3 << 20,
            ..Default::default()
        };
        assert_eq!(row(&snapshot)[3..5], ["256 MiB".to_owned(), "73 MiB".to_owned()]);
        assert_eq!(as_json(&snapshot)["disk_bytes"], 3 << 20);
    }

    #[test]
    fn an_import_says_which_image_is_read() {
        let snapshot = v1::Snapshot {
            name: "s".to_owned(),
            image: "debian:12\n".to_owned(),
            image_digest: "sha256:ab".to_owned(),
            ..Default::default()
        };
        let line = image_line(&snapshot);
        assert!(
            line.contains("the image sha256:ab of this node") && !line.contains('\n'),
            "{line}"
        );
        assert_eq!(as_json(&snapshot)["image_digest"], "sha256:ab");
    }
}
