//! A container's mounts: what becomes of each.
//!
//! File systems of the kernel are the guest's own, and so is the memory that a pod shares. Files of
//! the host are copied where a copy does: those that tell a container its name and the names of
//! others, and Kubernetes' secrets and settings. All else of the host is shared with the guest, by
//! a process of the sandbox's own. Among it here are `emptyDir` volumes, which `empty_dirs` has be
//! directories of the guest, and parts of secrets and settings, which `copies` copies. Some mounts
//! stand for functions of pools: by them kubelet says which ones `slipway device-plugin` has given
//! to a container, since mounts reach this program through every containerd without a setting.
//! [`plan`] decides.

use std::path::{Component, Path, PathBuf};

use slipway_sandbox_api::copies::{Copies, CopyError};
use slipway_sandbox_api::functions::{MOUNTS as FUNCTIONS, SOCKETS};
use slipway_sandbox_api::v1;

use super::oci::Mount;
use crate::mount::is_bind;

/// The kinds of Kubernetes' volumes that hold a few small files, which a container cannot change.
const SMALL_VOLUMES: [&str; 4] = [
    "kubernetes.io~configmap",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
    "kubernetes.io~secret",
];
/// Files that container engines make for each container, and mount writable.
const NAMES: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
/// Where Kubernetes mounts the file for a container's termination message, unless a pod says
/// otherwise.
const TERMINATION_LOG: &str = "/dev/termination-log";
/// The memory that the containers of a pod share.
const SHARED_MEMORY: &str = "/dev/shm";
/// File systems that the agent mounts itself, where it mounts them.
const OWN_MOUNTS: [&str; 8] =
    ["/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys/fs/cgroup", "/run"];
/// The options of bind mounts that are honoured. `rro` is the OCI runtime specification's, for a
/// mount that is read-only with all that is mounted below.
pub const OPTIONS: [&str; 10] =
    ["bind", "private", "rbind", "ro", "rprivate", "rro", "rslave", "rw", "slave", "nodev"];
/// Options with which mounts of the container would appear on the host.
const BOTH_WAYS: [&str; 2] = ["shared", "rshared"];
/// The types of file systems of the kernel.
const KERNELS: [&str; 6] = ["proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// The container whose mounts they are.
#[derive(Clone, Copy, Debug)]
pub struct Container<'a> {
    /// Its id.
    pub id: &'a str,
    /// Set if it runs in a pod.
    pub in_pod: bool,
    /// Set if its root is read-only.
    pub read_only: bool,
    /// The directory of the host's files that stand for functions of pools.
    pub functions: &'a str,
}

/// Where the content of a mount comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The guest has it already.
    Guest,
    /// The host's files, of which the container gets copies.
    Copy,
    /// The host's files, which the container shares.
    Share,
    /// A function of a pool, for which it stands.
    Function,
}

/// The parts of the host that a container gets.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    /// Mounts whose files are copied.
    pub copies: Vec<&'a Mount>,
    /// Directories and files that are shared.
    pub shares: Vec<v1::Share>,
    /// Functions of pools.
    pub functions: Vec<v1::PoolFunction>,
}

impl Plan<'_> {
    /// Forgets an earlier mount whose place a later one takes.
    fn forget(&mut self, place: &str) {
        self.copies.retain(|mount| mount.destination != place);
        self.shares.retain(|share| share.path != place);
    }
}

/// Decides what becomes of a container's mounts. Reads nothing.
///
/// # Errors
/// One line that names the mount, and says why a microVM cannot have it.
pub fn plan<'a>(mounts: &'a [Mount], container: Container<'_>) -> Result<Plan<'a>, String> {
    let origins = mounts.iter().map(|mount| Ok((mount, origin(mount, container)?)));
    let origins = origins.collect::<Result<Vec<_>, String>>()?;
    let shared = origins.iter().filter(|(_, origin)| *origin == Origin::Share);
    let shared: Vec<_> = shared.map(|(mount, _)| Path::new(&mount.destination)).collect();
    let mut plan = Plan::default();
    for (mount, origin) in origins {
        let place = Path::new(&mount.destination);
        // A copy below a share would be hidden by it.
        let is_hidden = || shared.iter().any(|share| place.starts_with(share));
        match origin {
            Origin::Guest => {}
            Origin::Function => {
                plan.functions.extend(function(mount).filter(|one| one.pool != SOCKETS));
            }
            // A volume is a mount in the guest, too.
            Origin::Copy if is_small_volume(&mount.source) || !is_hidden() => {
                plan.forget(&mount.destination);
                plan.copies.push(mount);
            }
            Origin::Copy | Origin::Share => {
                plan.forget(&mount.destination);
                plan.shares.push(share(mount));
            }
        }
    }
    name_devices(&mut plan.functions);
    Ok(plan)
}

/// Returns the function that a mount stands for, without a name in the container.
fn function(mount: &Mount) -> Option<v1::PoolFunction> {
    let (pool, number) = mount.destination.strip_prefix(FUNCTIONS)?.rsplit_once('.')?;
    // Functions have one name each.
    let number = number.parse().ok().filter(|parsed: &u32| parsed.to_string() == number)?;
    Some(v1::PoolFunction { pool: pool.to_owned(), number, name: String::new() })
}

/// Returns whether a container of a pod asks for the pod's socket function, by a mount that
/// [`plan`] has checked.
pub fn asks_for_sockets(mounts: &[Mount]) -> bool {
    let bound = mounts.iter().filter(|mount| is_bind(&mount.kind, &mount.options));
    bound.filter_map(function).any(|one| one.pool == SOCKETS)
}

/// Names the devices of functions for the container, which does not choose their numbers: POOL-0,
/// POOL-1 and so on.
fn name_devices(functions: &mut [v1::PoolFunction]) {
    functions.sort_by(|a, b| (&a.pool, a.number).cmp(&(&b.pool, b.number)));
    for of_pool in functions.chunk_by_mut(|a, b| a.pool == b.pool) {
        for (position, function) in of_pool.iter_mut().enumerate() {
            function.name = format!("{}-{position}", function.pool);
        }
    }
}

/// Checks a mount that stands for a function of a pool: its source is the file that stands for the
/// same function, which users cannot mount who cannot mount all of the host.
fn check_function(mount: &Mount, container: Container<'_>) -> Result<(), String> {
    let name = mount.destination.strip_prefix(FUNCTIONS).unwrap_or_default();
    if function(mount).is_none() || mount.source != format!("{}/{name}", container.functions) {
        let why = "only kubelet gives functions of pools, as `slipway device-plugin` says: ask for \
                   one by `resources: {limits: {\"slipway.dev/POOL\": 1}}`";
        return Err(refused(mount, why));
    }
    if !container.in_pod {
        return Err(refused(mount, "functions of pools are for the containers of a pod"));
    }
    Ok(())
}

/// Translates a mount of the host's files.
pub fn share(Mount { source, destination, options, .. }: &Mount) -> v1::Share {
    let has = |name: &str| options.iter().any(|option| option == name);
    v1::Share {
        source: source.clone(),
        path: destination.clone(),
        read_only: has("ro") || has("rro"),
        below: has("rbind"),
        below_read_only: has("rro"),
        later: has("slave") || has("rslave"),
    }
}

/// Finds out where the content of a mount comes from.
///
/// # Errors
/// One line that names the mount, and says why a microVM cannot have it.
fn origin(mount: &Mount, container: Container<'_>) -> Result<Origin, String> {
    let Mount { destination, kind, options, .. } = mount;
    if !is_bind(kind, options) {
        return file_system(mount);
    }
    if destination.starts_with(FUNCTIONS) {
        return check_function(mount, container).map(|()| Origin::Function);
    }
    let destination = destination.as_str();
    if container.in_pod && (destination == SHARED_MEMORY || is_for_message(mount)) {
        return Ok(Origin::Guest);
    }
    // The root has the image's files there, and is as volatile as such a volume.
    if is_volume_of_image(mount, container.id) && !container.read_only {
        return Ok(Origin::Guest);
    }
    if NAMES.contains(&destination) || is_small_volume(&mount.source) {
        return Ok(Origin::Copy);
    }
    if options.iter().any(|option| BOTH_WAYS.contains(&option.as_str())) {
        let why = "what is mounted in a microVM cannot appear on its host; use `rslave`";
        return Err(refused(mount, why));
    }
    Ok(Origin::Share)
}

fn file_system(mount: &Mount) -> Result<Origin, String> {
    let Mount { destination, kind, .. } = mount;
    let known = KERNELS.contains(&kind.as_str()) || kind == "tmpfs";
    if known && OWN_MOUNTS.contains(&destination.as_str()) {
        return Ok(Origin::Guest);
    }
    Err(format!(
        "a file system of type {kind} cannot be mounted at {destination}: leave it out; a \
         container's root is writable and volatile unless it is read-only"
    ))
}

/// Returns whether it is a volume that the image asks for (`VOLUME`), which containerd makes in a
/// directory of the container's, and removes with the container.
fn is_volume_of_image(mount: &Mount, id: &str) -> bool {
    matches!(last_parts(&mount.source)[..], ["containers", of, "volumes", _] if of == id)
}

/// Returns the mount of kubelet's file for a container's termination message. The guest has a file
/// of its own there, whose content is written to the host's when the container has ended. A file
/// that is mounted read-only is never written.
pub fn message(mounts: &[Mount]) -> Option<&Mount> {
    mounts.iter().find(|mount| {
        let is_read_only = mount.options.iter().any(|option| option == "ro" || option == "rro");
        is_bind(&mount.kind, &mount.options) && is_kubelets_message(mount) && !is_read_only
    })
}

/// Returns whether the mount is at the usual place of the file for a container's termination
/// message, or is kubelet's file for one.
fn is_for_message(mount: &Mount) -> bool {
    mount.destination == TERMINATION_LOG || is_kubelets_message(mount)
}

/// Returns whether the source is a file that kubelet makes for a container's termination message:
/// `…/pods/UID/containers/NAME/FILE`.
fn is_kubelets_message(mount: &Mount) -> bool {
    matches!(plain_parts(&mount.source)[..], [.., "pods", _, "containers", _, _])
}

/// Returns whether `source` is a volume of Kubernetes' that holds a few small files:
/// `…/pods/UID/volumes/KIND/NAME`.
pub fn is_small_volume(source: &str) -> bool {
    let parts = plain_parts(source);
    matches!(parts[..], [.., "pods", _, "volumes", kind, _] if SMALL_VOLUMES.contains(&kind))
}

/// Returns the directories of which one is that of the small volume whose part `source` is, if it
/// is one: kubelet mounts a part (`subPath`) of a volume of any kind at
/// `…/pods/UID/volume-subpaths/NAME/CONTAINER/INDEX`. Reads nothing.
pub fn volumes_of_part(source: &str) -> Vec<PathBuf> {
    let parts = plain_parts(source);
    let [above @ .., "pods", pod, "volume-subpaths", name, _, _] = &parts[..] else {
        return Vec::new();
    };
    let volume = |kind: &&str| {
        let parts = [above, &["pods", *pod, "volumes", *kind, *name][..]].concat();
        PathBuf::from(format!("/{}", parts.join("/")))
    };
    SMALL_VOLUMES.iter().map(volume).collect()
}

/// Returns the last four parts of a path, or fewer if it has no more.
fn last_parts(path: &str) -> Vec<&str> {
    let parts = plain_parts(path);
    parts[parts.len().saturating_sub(4)..].to_vec()
}

/// Returns the parts of an absolute path, or none if it leads upwards.
pub fn plain_parts(path: &str) -> Vec<&str> {
    let parts = Path::new(path).components().skip(1);
    let plain = parts.map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    plain.collect::<Option<_>>().unwrap_or_default()
}

/// Reads the files of a mount that is to be copied. They are below `from`, which is the mount's
/// source as it was opened.
///
/// # Errors
/// A file cannot be read, or they are too large.
pub fn read(mount: &Mount, from: &Path) -> Result<Vec<v1::File>, CopyError> {
    let mut copies = Copies::of_volume();
    match is_small_volume(&mount.source) {
        true => copies.add_volume(from, &mount.destination)?,
        false => copies.add(from, &mount.destination)?,
    }
    Ok(copies.into_files())
}

/// Returns one line that says why a mount cannot be.
pub fn refused(mount: &Mount, reason: &str) -> String {
    let Mount { source, destination, .. } = mount;
    format!("the host's {source} cannot be mounted at {destination}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Container<'static> = Container {
        id: "one",
        in_pod: false,
        read_only: false,
        functions: "/run/slipway/functions",
    };
    const MEMBER: Container<'static> = Container { in_pod: true, ..ALONE };

    fn mount(source: impl AsRef<Path>, destination: &str, options: &[&str]) -> Mount {
        let (source, destination) = (source.as_ref().display().to_string(), destination.to_owned());
        let options = options.iter().map(|&one| one.to_owned()).collect();
        Mount { source, destination, options, kind: "bind".to_owned() }
    }

    fn shares(mounts: &[Mount]) -> Vec<v1::Share> {
        plan(mounts, MEMBER).unwrap().shares
    }

    #[test]
    fn files_of_names_and_small_volumes_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/0-1/volumes/kubernetes.io~configmap/app");
        std::fs::create_dir_all(&volume).unwrap();
        for (path, content) in [(volume.join("a"), "a"), (dir.path().join("b"), "b")] {
            std::fs::write(path, content).unwrap();
        }
        let mounts = [
            mount(dir.path().join("b"), "/etc/hosts", &["rbind", "rw"]),
            mount(&volume, "/etc/app", &["rbind", "rro"]),
        ];
        let copied = plan(&mounts, ALONE).unwrap().copies;
        let files = copied.iter().flat_map(|mount| read(mount, Path::new(&mount.source)).unwrap());
        let files: Vec<_> = files.collect();
        let files: Vec<_> = files.iter().map(|f| (f.path.as_str(), &f.content[..])).collect();
        let expected: [(&str, &[u8]); 2] = [("/etc/hosts", b"b"), ("/etc/app/a", b"a")];
        assert_eq!(files, expected);
        assert_eq!(shares(&mounts), []);
        let gone = mount("/no/such", "/etc/hosts", &["ro"]);
        let missing = read(&gone, Path::new("/no/such")).unwrap_err().to_string();
        assert!(missing.contains("cannot read /no/such"), "{missing}");
    }

    #[test]
    fn all_else_of_the_host_is_shared() {
        let one = |options: &[&str]| shares(&[mount("/srv", "/data", options)]).remove(0);
        let plain = v1::Share {
            source: "/srv".to_owned(),
            path: "/data".to_owned(),
            ..v1::Share::default()
        };
        assert_eq!(one(&["bind", "rprivate", "rw"]), plain);
        let below = v1::Share { below: true, ..plain.clone() };
        assert_eq!(one(&["rbind"]), below);
        assert_eq!(one(&["rbind", "ro"]), v1::Share { read_only: true, ..below.clone() });
        let all = v1::Share { read_only: true, below_read_only: true, ..below.clone() };
        assert_eq!(one(&["rbind", "rro"]), all);
        assert_eq!(one(&["rbind", "rslave"]), v1::Share { later: true, ..below });
        let later = [mount("/a", "/data", &["bind"]), mount("/srv", "/data", &["bind"])];
        assert_eq!(shares(&later), [plain]);
        let refused = plan(&[mount("/srv", "/data", &["rbind", "rshared"])], ALONE).unwrap_err();
        assert!(refused.starts_with("the host's /srv cannot be mounted at /data: "), "{refused}");
    }

    #[test]
    fn mounts_stand_for_functions_of_pools() {
        let at = |source: &str, name: &str| {
            let source = format!("/run/slipway/functions/{source}");
            mount(source, &format!("{FUNCTIONS}{name}"), &["rbind", "rprivate", "ro"])
        };
        let of = |name: &str| at(name, name);
        let mounts = [of("fast.12"), of("slow.0"), of("fast.3"), of("a.b.1")];
        let functions = plan(&mounts, MEMBER).unwrap().functions;
        let all: Vec<_> = functions
            .iter()
            .map(|one| (one.pool.as_str(), one.number, one.name.as_str()))
            .collect();
        let expected = [
            ("a.b", 1, "a.b-0"),
            ("fast", 3, "fast-0"),
            ("fast", 12, "fast-1"),
            ("slow", 0, "slow-0"),
        ];
        assert_eq!(all, expected);
        assert_eq!(shares(&mounts), []);
        for wrong in
            [at("fast.1", "fast.2"), of("fast"), of("fast.01"), of("fast.-1"), of("fast.+1")]
        {
            let refused = plan(std::slice::from_ref(&wrong), MEMBER).unwrap_err();
            assert!(refused.contains("slipway.dev/POOL"), "{wrong:?}: {refused}");
        }
        let sockets = [of("fast.1"), of("sockets.7")];
        assert_eq!(plan(&sockets, MEMBER).unwrap().functions.len(), 1);
        assert!(asks_for_sockets(&sockets) && !asks_for_sockets(&mounts));
        assert!(plan(&[at("fast.1", "sockets.7")], MEMBER).is_err());
        let elsewhere = mount("/var/lib/x/fast.1", &format!("{FUNCTIONS}fast.1"), &["rbind"]);
        assert!(plan(&[elsewhere], MEMBER).is_err());
        let alone = plan(&[of("fast.1")], ALONE).unwrap_err();
        assert!(alone.contains("containers of a pod"), "{alone}");
    }

    #[test]
    fn a_file_that_a_share_would_hide_is_shared_too() {
        let secret = "/var/lib/kubelet/pods/0-1/volumes/kubernetes.io~projected/token";
        let hosts = mount("/var/lib/kubelet/pods/0-1/etc-hosts", "/etc/hosts", &["rbind"]);
        let volume = mount(secret, "/etc/secrets", &["rbind", "ro"]);
        let paths = |mounts: &[Mount]| {
            let plan = plan(mounts, MEMBER).unwrap();
            let copies = plan.copies.iter().map(|mount| mount.destination.clone());
            let shares = plan.shares.iter().map(|share| share.path.clone());
            (copies.collect::<Vec<_>>().join(" "), shares.collect::<Vec<_>>().join(" "))
        };
        let mounts = [mount("/srv", "/etc", &["rbind"]), hosts.clone(), volume.clone()];
        // The volume is a mount of its own.
        assert_eq!(paths(&mounts), ("/etc/secrets".to_owned(), "/etc /etc/hosts".to_owned()));
        let beside = [mount("/srv", "/et", &["rbind"]), hosts, volume.clone()];
        assert_eq!(paths(&beside), ("/etc/hosts /etc/secrets".to_owned(), "/et".to_owned()));
        // Of two mounts at one place the later one counts.
        let other = mount("/srv", "/etc/secrets", &["rbind"]);
        let (one, two) = ([volume.clone(), other.clone()], [other, volume]);
        assert_eq!(paths(&one), (String::new(), "/etc/secrets".to_owned()));
        assert_eq!(paths(&two), ("/etc/secrets".to_owned(), String::new()));
    }

    #[test]
    fn a_part_of_a_volume_names_its_volume() {
        let kubelet = "/var/lib/kubelet/pods/0-1";
        let volumes = volumes_of_part(&format!("{kubelet}/volume-subpaths/app/web/0"));
        assert_eq!(volumes.len(), SMALL_VOLUMES.len());
        let map = format!("{kubelet}/volumes/kubernetes.io~configmap/app");
        assert!(volumes.contains(&PathBuf::from(map)));
        for other in ["volume-subpaths/app/web", "volumes/kubernetes.io~secret/app/web/0"] {
            assert!(volumes_of_part(&format!("{kubelet}/{other}")).is_empty(), "{other}");
        }
    }

    #[test]
    fn a_pods_shared_memory_and_a_file_for_a_termination_message_are_the_guests() {
        let shared = mount("/run/containerd/x/sandboxes/pod/shm", "/dev/shm", &["rbind", "rw"]);
        assert_eq!(origin(&shared, MEMBER), Ok(Origin::Guest));
        assert_eq!(origin(&shared, ALONE), Ok(Origin::Share));
        let file = "/var/lib/kubelet/pods/0-1/containers/web/8f2a";
        let words = |destination| mount(file, destination, &["rbind", "rprivate", "rw"]);
        for place in [TERMINATION_LOG, "/tmp/message"] {
            let mounts = [shared.clone(), words(place)];
            assert_eq!(origin(&mounts[1], MEMBER), Ok(Origin::Guest));
            assert_eq!(message(&mounts), Some(&mounts[1]));
        }
        assert_eq!(message(&[shared]), None);
        // A file of somebody else's is not written, nor one that is read-only.
        let other = mount("/srv/file", TERMINATION_LOG, &["rbind", "rw"]);
        let fixed = mount(file, TERMINATION_LOG, &["rbind", "ro"]);
        assert_eq!(message(&[other.clone(), fixed]), None);
        assert_eq!(origin(&other, MEMBER), Ok(Origin::Guest));
        for other in ["/var/lib/kubelet/pods/0-1/containers/../x", "/containers/web/8f2a"] {
            let mount = mount(other, "/tmp/message", &["rw"]);
            assert_eq!(origin(&mount, MEMBER), Ok(Origin::Share), "{other}");
        }
    }

    #[test]
    fn a_volume_of_the_image_is_in_the_root_if_that_is_writable() {
        let volume = |id: &str| {
            let dir = "/var/lib/containerd/io.containerd.grpc.v1.cri/containers";
            mount(format!("{dir}/{id}/volumes/0a1b"), "/data", &["rbind", "rw"])
        };
        assert_eq!(origin(&volume("one"), MEMBER), Ok(Origin::Guest));
        assert_eq!(origin(&volume("other"), MEMBER), Ok(Origin::Share));
        let fixed = Container { read_only: true, ..MEMBER };
        assert_eq!(origin(&volume("one"), fixed), Ok(Origin::Share));
    }
}
