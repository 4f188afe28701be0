//! Tests of `emptyDir` volumes: directories as kubelet lays them out.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// A directory in place of kubelet's, with pods in it.
struct Kubelet(tempfile::TempDir);

impl Kubelet {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Mounts have paths without links.
        fs::create_dir(dir.path().join("data")).unwrap();
        std::os::unix::fs::symlink("data", dir.path().join("kubelet")).unwrap();
        Self(dir)
    }

    /// Returns the directory as kubelet's settings name it.
    fn root(&self) -> PathBuf {
        self.0.path().canonicalize().unwrap().join("kubelet")
    }

    /// Makes a volume as kubelet does, and returns its directory.
    fn volume(&self, pod: &str, kind: &str, name: &str) -> PathBuf {
        let path = self.root().join(format!("pods/{pod}/volumes/{kind}/{name}"));
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2777)).unwrap();
        path
    }

    /// Makes the directory on which kubelet mounts `root` for a `subPath`. Returns both.
    fn sub_path(&self, name: &str, root: &Path) -> (PathBuf, Mounted) {
        let path = self.root().join(format!("pods/1/volume-subpaths/{name}/web/0"));
        fs::create_dir_all(&path).unwrap();
        let (root, point) = (root.canonicalize().unwrap(), path.canonicalize().unwrap());
        (path, Mounted { root, point, ..on_root() })
    }
}

fn on_root() -> Mounted {
    let (root, point) = (PathBuf::from("/"), PathBuf::from("/"));
    Mounted {
        device: "8:1".into(),
        root,
        point,
        kind: "ext4".into(),
        options: "rw".into(),
        ..Mounted::default()
    }
}

fn share(source: &Path, path: &str) -> v1::Share {
    let (source, path) = (source.to_str().unwrap().to_owned(), path.to_owned());
    v1::Share { source, path, below: true, ..v1::Share::default() }
}

/// Parts one share. Returns the directory of the guest, if it becomes one.
fn one(volumes: &Volumes, share: v1::Share, mounts: &[Mounted]) -> Option<v1::EmptyDir> {
    let (mut dirs, rest) = part_with(vec![share], volumes, mounts).unwrap();
    assert_eq!(dirs.len() + rest.len(), 1);
    dirs.pop()
}

#[test]
fn kubelets_names_are_told_from_others() {
    let below = |source: &str| named(source).map(|named| (named.name, named.below));
    let of = |name: &str, path: &str| Some((name.to_owned(), Below::Path(path.to_owned())));
    let volume = "/data/kubelet/pods/1-2/volumes/kubernetes.io~empty-dir/cache";
    assert_eq!(below(volume), of("cache", ""));
    assert_eq!(below(&format!("{volume}/a/b")), of("cache", "a/b"));
    let sub_path = named("/data/kubelet/pods/1-2/volume-subpaths/cache/web/3").unwrap();
    assert_eq!((sub_path.directory, sub_path.below), (volume.into(), Below::Bind));
    for other in [
        "/srv/cache",
        "/var/lib/kubelet/pods/1/volumes/kubernetes.io~host-path/cache",
        "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir",
        "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/cache/../x",
        "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/a_b",
        "/var/lib/kubelet/pods/1/volume-subpaths/cache/web",
        "/var/lib/kubelet/pods/1/volume-subpaths/cache/web/0/x",
        "pods",
        "",
    ] {
        assert_eq!(below(other), None, "{other}");
    }
    let annotated = |value: &str| in_guest(&BTreeMap::from([(ANNOTATION.into(), value.into())]));
    assert_eq!(in_guest(&BTreeMap::new()), Ok(true));
    assert_eq!((annotated("guest"), annotated("shared")), (Ok(true), Ok(false)));
    assert!(annotated("host").unwrap_err().contains("dev.slipway.empty-dir=\"host\""));
}

#[test]
fn an_empty_directory_is_the_guests_with_its_mode_and_owner() {
    let (kubelet, volumes) = (Kubelet::new(), Volumes::default());
    let path = kubelet.volume("1", KIND, "cache");
    let status = fs::metadata(&path).unwrap();
    let read_only = v1::Share { read_only: true, ..share(&path, "/cache") };
    let dir = one(&volumes, read_only, &[on_root()]).unwrap();
    let expected = v1::EmptyDir {
        name: "cache".into(),
        path: "/cache".into(),
        read_only: true,
        mode: 0o2777,
        uid: status.uid(),
        gid: status.gid(),
        source: path.to_str().unwrap().into(),
        ..v1::EmptyDir::default()
    };
    assert_eq!(dir, expected);
    // It stays the guest's, whatever is written to the host's directory later.
    fs::write(path.join("file"), "").unwrap();
    let below = one(&volumes, share(&path.join("a/b"), "/b"), &[on_root()]).unwrap();
    assert_eq!(
        (below.name.as_str(), below.sub_path.as_str(), below.mode),
        ("cache", "a/b", 0o2777)
    );
    // A directory of the host is none, and neither is another pod's of the same name.
    let other = kubelet.volume("2", KIND, "cache");
    let claim = kubelet.volume("1", "kubernetes.io~csi", "claim");
    for shared in [other, claim, kubelet.root()] {
        assert_eq!(one(&volumes, share(&shared, "/x"), &[on_root()]), None);
    }
}

#[test]
fn memory_has_the_size_of_the_hosts() {
    let (kubelet, volumes) = (Kubelet::new(), Volumes::default());
    let mounted = |name: &str, kind: &str, options: &str| {
        let path = kubelet.volume("1", KIND, name);
        let (kind, options) = (kind.to_owned(), options.to_owned());
        let (device, point) = ("0:9".to_owned(), path.canonicalize().unwrap());
        (share(&path, "/m"), Mounted { device, point, kind, options, ..on_root() })
    };
    for (name, options, size) in [("a", "rw,size=8192k,mode=777", 8 << 20), ("b", "rw", 0)] {
        let (share, mount) = mounted(name, "tmpfs", options);
        let dir = one(&volumes, share, &[on_root(), mount]).unwrap();
        assert_eq!((dir.in_memory, dir.size_bytes), (true, size), "{name}");
    }
    let (share, mount) = mounted("huge", "hugetlbfs", "rw,pagesize=2M,size=4M");
    let dir = one(&volumes, share, &[on_root(), mount]).unwrap();
    assert_eq!((dir.in_memory, dir.huge_pages, dir.size_bytes), (true, true, 0));
    let (share, mount) = mounted("giant", "hugetlbfs", "rw,pagesize=1024M");
    let refused = part_with(vec![share], &volumes, &[on_root(), mount]).unwrap_err();
    assert!(refused.contains("/m: its huge pages are not of 2 MiB"), "{refused}");
}

#[test]
fn a_directory_with_files_stays_the_hosts_for_all() {
    let (kubelet, volumes) = (Kubelet::new(), Volumes::default());
    let path = kubelet.volume("1", KIND, "cache");
    // Kubelet makes the directories of a subPath before.
    fs::create_dir_all(path.join("sub/dir")).unwrap();
    assert!(holds_directories_only(&path).unwrap());
    fs::write(path.join("sub/dir/file"), "").unwrap();
    assert_eq!(one(&volumes, share(&path, "/cache"), &[on_root()]), None);
    fs::remove_file(path.join("sub/dir/file")).unwrap();
    assert_eq!(one(&volumes, share(&path, "/cache"), &[on_root()]), None);
    let many = kubelet.volume("1", KIND, "many");
    for one in 0..=MOST_DIRECTORIES {
        fs::create_dir(many.join(one.to_string())).unwrap();
    }
    assert!(!holds_directories_only(&many).unwrap());
}

#[test]
fn a_sub_path_is_found_by_its_mount_or_its_volume_is_the_hosts() {
    let (kubelet, volumes) = (Kubelet::new(), Volumes::default());
    let path = kubelet.volume("1", KIND, "cache");
    fs::create_dir(path.join("sub")).unwrap();
    let (source, mount) = kubelet.sub_path("cache", &path.join("sub"));
    let dir = one(&volumes, share(&source, "/sub"), &[on_root(), mount]).unwrap();
    assert_eq!((dir.name.as_str(), dir.sub_path.as_str()), ("cache", "sub"));
    // A volume of another kind has no such directory.
    let (claim, mount) = kubelet.sub_path("claim", Path::new("/usr"));
    assert_eq!(one(&volumes, share(&claim, "/sub"), &[on_root(), mount]), None);
    // The volume is the guest's by now.
    let unknown = share(&source, "/sub");
    let refused = part_with(vec![unknown.clone()], &volumes, &[on_root()]).unwrap_err();
    assert!(refused.contains("dev.slipway.empty-dir=shared"), "{refused}");
    let later = v1::Share { later: true, ..share(&path, "/cache") };
    assert!(part_with(vec![later.clone()], &volumes, &[on_root()]).is_err());
    // Of a volume that nobody has had yet, they make the host's.
    for first in [unknown, later] {
        let volumes = Volumes::default();
        assert_eq!(one(&volumes, first, &[on_root()]), None);
        assert_eq!(one(&volumes, share(&path, "/cache"), &[on_root()]), None);
    }
}
