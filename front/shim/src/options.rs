//! The runtime options that containerd gives to `start`, on standard input: up to version 2.2 they
//! are all that it writes, and later a part of its parameters.
//!
//! One option is honoured, of those that containerd's clients have for runc's shim: `ShimCgroup`,
//! the control group in which the shim's own process runs. The others are about the program `runc`.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::args::Args;
use crate::containerd as cd;

/// The name of the message with the options of runc's shim.
const RUNC: &str = "containerd.runc.v1.Options";
/// The directory at which the host's control groups are mounted.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Returns the shim's control group as an absolute path, if containerd's input names one. Input
/// that is not understood names none.
///
/// # Errors
/// One line: the options are said to be those of runc's shim, and are not.
pub fn shim_cgroup(input: &[u8], args: &Args) -> Result<Option<String>, String> {
    let is_runc = |any: &cd::Any| any.type_url.rsplit('/').next() == Some(RUNC);
    let Some(found) = given(input, args).into_iter().find(is_runc) else { return Ok(None) };
    let options = cd::RuncOptions::decode(found.value.as_slice());
    let options = options.map_err(|error| format!("containerd's options for the shim: {error}"))?;
    Ok(Some(options.shim_cgroup).filter(|path| !path.is_empty()))
}

/// Returns the messages in containerd's input. Options can be read as parameters, whose container
/// and namespace tell them apart.
fn given(input: &[u8], args: &Args) -> Vec<cd::Any> {
    let parameters = cd::BootstrapParams::decode(input).ok();
    let ours =
        |one: &cd::BootstrapParams| one.instance_id == args.id && one.namespace == args.namespace;
    match parameters.filter(ours) {
        Some(parameters) => parameters.extensions.into_iter().filter_map(|one| one.value).collect(),
        None => cd::Any::decode(input).into_iter().collect(),
    }
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
        let value = cd::RuncOptions { shim_cgroup: group.to_owned() }.encode_to_vec();
        cd::Any { type_url: type_url.to_owned(), value }
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
            options("runtimeoptions.v1.Options", "/a/b").encode_to_vec(),
            parameters("another", options(RUNC, "/a/b")),
        ] {
            assert_eq!(of(&none), None, "{none:?}");
        }
        let broken = cd::Any { type_url: RUNC.to_owned(), value: vec![0x1a, 9] };
        assert!(shim_cgroup(&broken.encode_to_vec(), &args()).is_err());
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
