//! The runtime options that containerd gives to `start`, on standard input (up to version 2.2 they
//! are all that it writes, and later a part of its parameters), and to Create.
//!
//! One option is honoured, of those that containerd's clients have for runc's shim: `ShimCgroup`,
//! the control group in which the shim's own process runs. `CriuImagePath`, the checkpoint with
//! which runc begins, is refused where containerd hands over no checkpoint. The others are about
//! the program `runc`, and change nothing for a microVM. Options that are not known are refused.
//!
//! A new option is a field of its message in `proto/containerd.proto`, and of `Options` with an arm
//! in `read`; for containerd's settings also a name in `NAMES` and an arm in `section`. [`check`]
//! has its effect on Create, or a function as [`shim_cgroup`] that on `start`. It has a case in the
//! tests below, and a row in `docs/containerd.md`, "Runtime options".

use std::fmt::Display;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::args::Args;
use crate::containerd as cd;

/// The name of the message with the options of runc's shim.
const RUNC: &str = "containerd.runc.v1.Options";
/// The name of the message with the same options, as clients of containerd 1.6 and 1.7 send them to
/// other runtimes.
const RUNC_CREATE: &str = "containerd.linux.runc.CreateOptions";
/// The name of the message with the settings of runc for containerd's first shim.
const RUNC_RUNTIME: &str = "containerd.linux.runc.RuncOptions";
/// The name of the message with the options of any runtime.
const GENERIC: &str = "runtimeoptions.v1.Options";
/// The earlier name of [`GENERIC`].
const GENERIC_OF_CRI: &str = "cri.runtimeoptions.v1.Options";
/// The messages that are known.
const KNOWN: [&str; 5] = [RUNC, RUNC_CREATE, RUNC_RUNTIME, GENERIC, GENERIC_OF_CRI];

/// The option with the shim's control group.
const SHIM_CGROUP: &str = "ShimCgroup";
/// The names of options in containerd's settings: of any runtime, and of runc.
const NAMES: [&str; 15] = [
    "TypeUrl",
    "ConfigPath",
    SHIM_CGROUP,
    "BinaryName",
    "CriuImagePath",
    "CriuPath",
    "CriuWorkPath",
    "IoGid",
    "IoUid",
    "NoNewKeyring",
    "NoPivotRoot",
    "Root",
    "SystemdCgroup",
    "TaskApiAddress",
    "TaskApiVersion",
];
/// The longest part of what containerd wrote that an error repeats, characters.
const QUOTED: usize = 100;
/// The directory at which the host's control groups are mounted.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// The options that count. Empty strings stand for none.
#[derive(Debug, Default, PartialEq)]
struct Options {
    /// The control group of the shim's process.
    shim_cgroup: String,
    /// The directory of a checkpoint with which the container is to begin.
    criu_image_path: String,
}

/// Returns the shim's control group as an absolute path, if containerd's input names one. Input
/// that is no message names none.
///
/// # Errors
/// One line: options that are not known, or are not what they are said to be.
pub fn shim_cgroup(input: &[u8], args: &Args) -> Result<Option<String>, String> {
    let mut groups = Vec::new();
    for any in given(input, args) {
        groups.push(read(&any)?.shim_cgroup);
    }
    Ok(groups.into_iter().find(|path| !path.is_empty()))
}

/// Checks the options of a new task.
///
/// # Errors
/// One line: options that are not known, or cannot be honoured.
pub fn check(request: &cd::CreateTaskRequest) -> Result<(), String> {
    let options = request.options.as_ref().map(read).transpose()?.unwrap_or_default();
    if options.criu_image_path.is_empty() || !request.checkpoint.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the runtime option CriuImagePath names the checkpoint {}, which containerd hands to runc \
         only: name the checkpoint's image instead (`ctr run --checkpoint`)",
        quoted(&options.criu_image_path)
    ))
}

/// Returns the options in containerd's input. Options can be read as parameters, whose container
/// and namespace tell them apart.
fn given(input: &[u8], args: &Args) -> Vec<cd::Any> {
    match parameters(input, args) {
        Some(parameters) => {
            let all = parameters.extensions.into_iter().filter_map(|one| one.value);
            // Other extensions need not be options. Create has those that are.
            all.filter(|any| is_known(&any.type_url)).collect()
        }
        None => {
            // Parameters for another container have more fields than options.
            let is_all = |any: &cd::Any| any.encoded_len() == input.len();
            let options = cd::Any::decode(input).ok();
            options.filter(|any| is_known(&any.type_url) || is_all(any)).into_iter().collect()
        }
    }
}

/// Returns the name of a message, without the address that may precede it.
fn name(type_url: &str) -> &str {
    type_url.rsplit_once('/').map_or(type_url, |(_, name)| name)
}

fn is_known(type_url: &str) -> bool {
    KNOWN.contains(&name(type_url))
}

fn read(any: &cd::Any) -> Result<Options, String> {
    let value = any.value.as_slice();
    let options = match name(&any.type_url) {
        RUNC => cd::RuncOptions::decode(value).map(|options| Options {
            shim_cgroup: options.shim_cgroup,
            criu_image_path: options.criu_image_path,
        }),
        RUNC_CREATE => cd::RuncCreateOptions::decode(value).map(|options| Options {
            shim_cgroup: options.shim_cgroup,
            criu_image_path: options.criu_image_path,
        }),
        GENERIC | GENERIC_OF_CRI => match cd::GenericOptions::decode(value) {
            Ok(options) => return generic(&options),
            Err(error) => Err(error),
        },
        RUNC_RUNTIME => Ok(Options::default()),
        _ if any.type_url.is_empty() => Ok(Options::default()),
        _ => return Err(unknown_type(&any.type_url)),
    };
    options.map_err(|error| format!("containerd's options for the shim: {error}"))
}

fn unknown_type(type_url: &str) -> String {
    format!(
        "the runtime options of the type {} are not known here: leave them out, or use those of \
         {RUNC} or {GENERIC}",
        quoted(type_url)
    )
}

fn generic(options: &cd::GenericOptions) -> Result<Options, String> {
    if !options.config_path.is_empty() {
        return Err(format!(
            "the runtime option ConfigPath names the file {}, and this runtime reads none: leave \
             it out; containers have settings by annotations, as dev.slipway.memory",
            quoted(&options.config_path)
        ));
    }
    if !options.type_url.is_empty() && !is_known(&options.type_url) {
        return Err(unknown_type(&options.type_url));
    }
    let body = std::str::from_utf8(&options.config_body);
    section(body.map_err(|error| format!("the runtime option ConfigBody is no text: {error}"))?)
}

/// Reads a section of containerd's settings, with a line for each option. containerd writes it anew
/// from what it has read, so there are no comments behind values.
fn section(text: &str) -> Result<Options, String> {
    let mut options = Options::default();
    let is_quote = |one: char| one == '"' || one == '\'';
    let lines = text.lines().map(str::trim);
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        let key = key.trim().trim_matches(is_quote);
        if !NAMES.iter().any(|name| name.eq_ignore_ascii_case(key)) {
            return Err(format!(
                "the runtime option {} is not known here: leave it out of containerd's settings \
                 of this runtime; known are {}",
                quoted(key),
                NAMES.join(", ")
            ));
        }
        if key.eq_ignore_ascii_case(SHIM_CGROUP) {
            value.trim().trim_matches(is_quote).clone_into(&mut options.shim_cgroup);
        }
    }
    Ok(options)
}

/// Returns a short form of a text of containerd's, in quotes and without line breaks.
fn quoted(text: &str) -> String {
    format!("{:?}", text.chars().take(QUOTED).collect::<String>())
}

/// Returns whether containerd understands parameters of version 3 as the answer: it gives
/// parameters itself.
pub fn takes_version_3(input: &[u8], args: &Args) -> bool {
    parameters(input, args).is_some()
}

/// Returns the parameters in containerd's input, if it has some.
fn parameters(input: &[u8], args: &Args) -> Option<cd::BootstrapParams> {
    let ours =
        |one: &cd::BootstrapParams| one.instance_id == args.id && one.namespace == args.namespace;
    cd::BootstrapParams::decode(input).ok().filter(ours)
}

/// Moves this process into the existing control group `path`, an absolute path in every hierarchy
/// that has such a group. Processes that are started later are in it too.
///
/// # Errors
/// One line: there is no such group, or the kernel refuses.
pub fn join(path: &str) -> Result<(), String> {
    join_below(Path::new(CONTROL_GROUPS), path)
}

fn join_below(root: &Path, path: &str) -> Result<(), String> {
    let failed = |why: &dyn Display| {
        format!("the shim cannot run in the control group {path:?} (its option ShimCgroup): {why}")
    };
    if !crate::spec::is_plain_path(Path::new(path)) {
        return Err(failed(&"it is no absolute path without \"..\""));
    }
    let below = Path::new(path.trim_start_matches('/'));
    let groups = hierarchies(root).into_iter().map(|hierarchy| hierarchy.join(below));
    let mut files = groups.map(|group| group.join("cgroup.procs")).filter(|file| file.exists());
    let join = |file: PathBuf| {
        // "0" stands for the writer.
        std::fs::write(&file, "0")
            .map_err(|error| failed(&format_args!("{}: {error}", file.display())))
    };
    let first = files.next().ok_or_else(|| failed(&"there is none: make it first"))?;
    join(first)?;
    files.try_for_each(join)
}

/// Returns the directories of the hierarchies that are mounted at `root`: of cgroup v2 itself, or
/// those in it.
fn hierarchies(root: &Path) -> Vec<PathBuf> {
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args { namespace: "k8s.io".into(), id: "one".into(), ..Args::default() }
    }

    fn options(type_url: &str, group: &str) -> cd::Any {
        let shim_cgroup = group.to_owned();
        any(type_url, &cd::RuncOptions { shim_cgroup, ..Default::default() })
    }

    fn any(type_url: &str, message: &impl Message) -> cd::Any {
        cd::Any { type_url: type_url.to_owned(), value: message.encode_to_vec() }
    }

    fn settings(body: &str) -> cd::Any {
        let config_body = body.as_bytes().to_vec();
        any(GENERIC, &cd::GenericOptions { config_body, ..Default::default() })
    }

    /// Returns the error of Create for these options.
    fn refusal(options: cd::Any, checkpoint: &str) -> Option<String> {
        let checkpoint = checkpoint.to_owned();
        let request =
            cd::CreateTaskRequest { options: Some(options), checkpoint, ..Default::default() };
        check(&request).err()
    }

    fn parameters(id: &str, options: cd::Any) -> Vec<u8> {
        let extensions = vec![cd::Extension { value: Some(options) }];
        let (instance_id, namespace) = (id.to_owned(), "k8s.io".to_owned());
        cd::BootstrapParams { instance_id, namespace, extensions }.encode_to_vec()
    }

    #[test]
    fn the_group_is_found_in_options_and_in_parameters() {
        let of = |input: &[u8]| shim_cgroup(input, &args()).unwrap();
        let group = Some("/a/b".to_owned());
        assert_eq!(of(&options(RUNC, "/a/b").encode_to_vec()), group);
        let prefixed = format!("type.googleapis.com/{RUNC}");
        assert_eq!(of(&parameters("one", options(&prefixed, "/a/b"))), group);
        for none in [
            Vec::new(),
            b"no message".to_vec(),
            options(RUNC, "").encode_to_vec(),
            any(GENERIC, &cd::GenericOptions::default()).encode_to_vec(),
            parameters("another", options(RUNC, "/a/b")),
            // An extension of containerd's, which need not be options.
            parameters("one", options("containerd.io/sandbox.v1.SandboxConfig", "/a/b")),
        ] {
            assert_eq!(of(&none), None, "{none:?}");
        }
        let create = cd::RuncCreateOptions { shim_cgroup: "/a/b".into(), ..Default::default() };
        assert_eq!(of(&any(RUNC_CREATE, &create).encode_to_vec()), group);
        for body in ["ShimCgroup = \"/a/b\"", "\n  SystemdCgroup = true\n  ShimCgroup = '/a/b'\n"] {
            assert_eq!(of(&settings(body).encode_to_vec()), group);
            assert_eq!(of(&parameters("one", settings(body))), group);
        }
        let foreign = options("io.containerd.runsc.v1.options", "/a/b").encode_to_vec();
        let error = shim_cgroup(&foreign, &args()).unwrap_err();
        assert!(error.contains("\"io.containerd.runsc.v1.options\""), "{error}");
        let plain = options(RUNC, "/a/b");
        assert!(!takes_version_3(&plain.encode_to_vec(), &args()));
        assert!(!takes_version_3(b"", &args()));
        assert!(takes_version_3(&parameters("one", plain), &args()));
        let broken = cd::Any { type_url: RUNC.to_owned(), value: vec![0x1a, 9] };
        assert!(shim_cgroup(&broken.encode_to_vec(), &args()).is_err());
    }

    #[test]
    fn options_of_containerds_settings_and_clients_are_taken() {
        assert_eq!(check(&cd::CreateTaskRequest::default()), Ok(()));
        let section = "BinaryName = \"\"\nCriuImagePath = \"\"\nCriuPath = \"\"\n\
                       CriuWorkPath = \"\"\nIoGid = 0\nIoUid = 0\nNoNewKeyring = false\n\
                       NoPivotRoot = false\nRoot = \"\"\nShimCgroup = \"\"\n\
                       SystemdCgroup = true\n";
        // NoPivotRoot, NoNewKeyring, IoUid, IoGid, BinaryName, Root, SystemdCgroup, TaskApiVersion.
        let all_of_runc = b"\x08\x01\x10\x01\x20\x05\x28\x06\x32\x03foo\x3a\x02/x\x48\x01\x68\x02";
        let type_url = RUNC.to_owned();
        for taken in [
            cd::Any::default(),
            cd::Any { type_url, value: all_of_runc.to_vec() },
            options(RUNC, ""),
            options("types.googleapis.com/containerd.runc.v1.Options", "/a"),
            any(RUNC_CREATE, &cd::RuncCreateOptions::default()),
            any(RUNC_RUNTIME, &cd::RuncCreateOptions::default()),
            any(GENERIC_OF_CRI, &cd::GenericOptions::default()),
            any(GENERIC, &cd::GenericOptions { type_url: RUNC.into(), ..Default::default() }),
            settings(""),
            settings("\n# nothing\n\n"),
            settings("TypeUrl = \"\"\nConfigPath = ''\n"),
            settings(section),
        ] {
            assert_eq!(refusal(taken.clone(), ""), None, "{taken:?}");
        }
    }

    #[test]
    fn options_that_are_not_known_are_named_in_one_line() {
        let path = cd::GenericOptions { config_path: "/etc/x\n.toml".into(), ..Default::default() };
        let of_runsc = cd::GenericOptions { type_url: "a/runsc.v1".into(), ..Default::default() };
        let binary = cd::GenericOptions { config_body: vec![0xff], ..Default::default() };
        let broken = cd::Any { type_url: GENERIC.to_owned(), value: vec![0x0a, 9] };
        for (options, named) in [
            (options("io.containerd.runhcs.v1.Options", ""), "\"io.containerd.runhcs.v1.Options\""),
            (options("containerd.runc.v1.Options/", ""), "\"containerd.runc.v1.Options/\""),
            (options(&"x\n".repeat(1 << 20), ""), "x\\nx"),
            (any(GENERIC, &path), "ConfigPath names the file \"/etc/x\\n.toml\""),
            (any(GENERIC, &of_runsc), "\"a/runsc.v1\""),
            (any(GENERIC, &binary), "ConfigBody is no text"),
            (broken, "containerd's options for the shim: "),
            (settings("SystemdCgroup = true\nKernel = \"/vmlinux\""), "option \"Kernel\" is not"),
            (settings("[hypervisor]\npath = \"/x\""), "option \"[hypervisor]\" is not"),
            (settings("\"no option\""), "option \"no option\" is not"),
        ] {
            let error = refusal(options, "").unwrap();
            assert!(error.contains(named) && !error.contains('\n'), "{error}");
            assert!(error.len() < 1024, "{error}");
        }
    }

    #[test]
    fn a_checkpoint_that_containerd_does_not_hand_over_is_refused() {
        let path = || "/srv/saved".to_owned();
        let runc = cd::RuncOptions { criu_image_path: path(), ..Default::default() };
        let create = cd::RuncCreateOptions { criu_image_path: path(), ..Default::default() };
        for options in [any(RUNC, &runc), any(RUNC_CREATE, &create)] {
            assert_eq!(refusal(options.clone(), "/srv/saved"), None);
            let error = refusal(options, "").unwrap();
            assert!(error.contains("the checkpoint \"/srv/saved\""), "{error}");
        }
    }

    #[test]
    fn a_group_is_joined_in_each_hierarchy_that_has_it() {
        let root = tempfile::tempdir().unwrap();
        for hierarchy in ["pids", "devices", "cpu"] {
            std::fs::create_dir_all(root.path().join(hierarchy).join("a/b")).unwrap();
        }
        let procs = |group: &str| root.path().join(group).join("cgroup.procs");
        let made = ["pids/a/b", "devices/a/b"].map(procs);
        made.iter().for_each(|file| std::fs::write(file, "").unwrap());
        join_below(root.path(), "/a/b").unwrap();
        for file in made {
            assert_eq!(std::fs::read_to_string(file).unwrap(), "0");
        }
        assert!(!procs("cpu/a/b").exists());
    }

    #[test]
    fn cgroup_v2_is_one_hierarchy() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "cpu").unwrap();
        std::fs::create_dir_all(root.path().join("a/b")).unwrap();
        std::fs::write(root.path().join("a/b/cgroup.procs"), "").unwrap();
        assert!(join_below(root.path(), "/b").unwrap_err().contains("there is none"));
        join_below(root.path(), "/a/b").unwrap();
        assert_eq!(std::fs::read_to_string(root.path().join("a/b/cgroup.procs")).unwrap(), "0");
    }

    #[test]
    fn a_group_that_cannot_be_joined_is_named() {
        let root = tempfile::tempdir().unwrap();
        for path in ["/a", "a", "/../a", "/a\n"] {
            let error = join_below(root.path(), path).unwrap_err();
            assert!(error.contains("ShimCgroup") && !error.contains('\n'), "{error}");
        }
        std::fs::create_dir_all(root.path().join("pids/a/cgroup.procs")).unwrap();
        let error = join_below(root.path(), "/a").unwrap_err();
        assert!(error.contains("pids/a/cgroup.procs: "), "{error}");
    }
}
