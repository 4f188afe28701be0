//! The lists of mounts that versions of containerd give with the EROFS snapshotter.

use super::*;

/// Snapshots of three layers, the third of which is the uppermost, and of a container.
struct Snapshots(tempfile::TempDir);

fn mount(kind: &str, source: &str, options: &[&str]) -> Mount {
    let options = options.iter().map(|option| (*option).to_owned()).collect();
    Mount { r#type: kind.into(), source: source.into(), target: String::new(), options }
}

fn content_of(mounts: &[Mount]) -> Result<Content, String> {
    crate::content::content(mounts, None)
}

impl Snapshots {
    fn new() -> Self {
        let snapshots = Self(tempfile::tempdir().unwrap());
        for layer in ["1", "2", "3"] {
            std::fs::create_dir_all(snapshots.0.path().join(layer).join("fs")).unwrap();
            std::fs::write(snapshots.path(&format!("{layer}/layer.erofs")), layer).unwrap();
        }
        std::fs::create_dir_all(snapshots.0.path().join("4/fs")).unwrap();
        snapshots
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// The mount of a layer, as of 2.2.
    fn layer(&self, layer: &str) -> Mount {
        mount("erofs", &self.path(&format!("{layer}/layer.erofs")), &["ro", "loop"])
    }

    /// The overlay of a container, as of 2.2.
    fn overlay(&self, lower: &str) -> Mount {
        let (work, upper) = (self.path("4/work"), self.path("4/fs"));
        let options = [format!("workdir={work}"), format!("upperdir={upper}"), lower.to_owned()];
        mount("format/mkdir/overlay", "overlay", &options.each_ref().map(String::as_str))
    }

    /// The mounts of a container with a writable layer of a size, as of 2.2.
    fn with_size(&self) -> Vec<Mount> {
        let options = ["X-containerd.mkfs.fs=ext4", "X-containerd.mkfs.size=1048576", "rw", "loop"];
        let block = mount("mkfs/ext4", &self.path("4/rwlayer.img"), &options);
        let options = [
            "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
            "X-containerd.mkdir.path={{ mount 0 }}/work:0755",
            "workdir={{ mount 0 }}/work",
            "upperdir={{ mount 0 }}/upper",
            "lowerdir={{ overlay 1 3 }}",
        ];
        let overlay = mount("format/mkdir/overlay", "overlay", &options);
        let layers = ["3", "2", "1"].map(|layer| self.layer(layer));
        [block].into_iter().chain(layers).chain([overlay]).collect()
    }

    fn files(&self, layers: &[&str]) -> Source {
        let file = |layer: &&str| PathBuf::from(self.path(&format!("{layer}/layer.erofs")));
        Source::Erofs(layers.iter().map(file).collect())
    }

    /// The content of all three layers.
    fn all(&self) -> Content {
        let mounts = [self.layer("3"), self.layer("2"), self.layer("1")];
        let overlay = self.overlay("lowerdir={{ overlay 0 2 }}");
        content_of(&[&mounts[..], &[overlay]].concat()).unwrap()
    }
}

#[test]
fn containerd_2_2_gives_a_mount_for_each_layer() {
    let snapshots = Snapshots::new();
    let all = snapshots.all();
    assert_eq!(all.source, snapshots.files(&["3", "2", "1"]));
    assert!(all.key.is_some());
    assert_eq!(content_of(&snapshots.with_size()).unwrap(), all);
    let one = [snapshots.layer("1"), snapshots.overlay("lowerdir={{ mount 0 }}")];
    let one = content_of(&one).unwrap();
    assert_eq!(one.source, snapshots.files(&["1"]));
    assert_ne!(one.key, all.key);
    // A view of one layer, which is that of 2.1, too.
    assert_eq!(content_of(&[snapshots.layer("1")]).unwrap(), one);
    let two = mount("format/mkdir/overlay", "overlay", &["lowerdir={{ overlay 0 1 }}"]);
    let two = content_of(&[snapshots.layer("2"), snapshots.layer("1"), two]).unwrap();
    assert_eq!(two.source, snapshots.files(&["2", "1"]));
}

#[test]
fn containerd_2_1_gives_an_overlay_over_what_it_has_mounted() {
    let snapshots = Snapshots::new();
    let lower = ["3/fs", "2/fs", "1/fs"].map(|name| snapshots.path(name)).join(":");
    let mut overlay = snapshots.overlay(&format!("lowerdir={lower}"));
    overlay.r#type = "overlay".into();
    assert_eq!(content_of(std::slice::from_ref(&overlay)).unwrap(), snapshots.all());
    // A directory without a file beside it is one of another snapshotter's.
    std::fs::remove_file(snapshots.path("2/layer.erofs")).unwrap();
    let folders = content_of(&[overlay]).unwrap();
    assert!(matches!(folders.source, Source::Layers(..)), "{folders:?}");
}

#[test]
fn merged_metadata_of_containerd_2_3_stands_for_its_layers() {
    let snapshots = Snapshots::new();
    let device =
        |layer: &str| format!("device={}", snapshots.path(&format!("{layer}/layer.erofs")));
    let merged = |layers: &[&str]| {
        let mut merged = mount("erofs", &snapshots.path("2/fsmeta.erofs"), &["ro", "loop"]);
        merged.options.extend(layers.iter().map(|layer| device(layer)));
        merged
    };
    let two = [snapshots.layer("3"), merged(&["1", "2"])];
    let overlay = snapshots.overlay("lowerdir={{ overlay 0 1 }}");
    assert_eq!(content_of(&[&two[..], &[overlay]].concat()).unwrap(), snapshots.all());
    let all = [merged(&["1", "2", "3"]), snapshots.overlay("lowerdir={{ mount 0 }}")];
    assert_eq!(content_of(&all).unwrap(), snapshots.all());
    let view = mount("format/bind", "{{ mount 0 }}", &["ro", "rbind"]);
    assert_eq!(content_of(&[all[0].clone(), view]).unwrap(), snapshots.all());
    let mut verified = snapshots.layer("1");
    verified.options.push("X-containerd.dmverity=/x/layer.erofs.dmverity".into());
    assert_eq!(content_of(&[verified]).unwrap().source, snapshots.files(&["1"]));
    let mut other = all[0].clone();
    other.source = "/x/blobs.erofs".into();
    assert!(content_of(&[other]).unwrap_err().contains("further devices"));
}

#[test]
fn what_a_snapshot_has_of_its_own_is_a_layer_of_its_container() {
    let snapshots = Snapshots::new();
    std::fs::write(snapshots.path("4/fs/file"), "").unwrap();
    let own = snapshots.all();
    assert_eq!(own.key, None);
    let Source::Erofs(layers) = own.source else { panic!("no layers") };
    assert_eq!((layers.len(), layers[0].to_str().unwrap()), (4, &*snapshots.path("4/fs")));
}

#[test]
fn a_writable_layer_of_a_size_is_left_out_while_it_is_empty() {
    let snapshots = Snapshots::new();
    let mut block = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| {
        block[1024 + at..][..bytes.len()].copy_from_slice(bytes);
        std::fs::write(snapshots.path("4/rwlayer.img"), &block).unwrap();
        content_of(&snapshots.with_size())
    };
    assert!(put(0, &16384_u32.to_le_bytes()).unwrap_err().contains("changes of its own"));
    put(16, &(16384_u32 - 14).to_le_bytes()).unwrap_err();
    assert!(put(56, &EXT4.to_le_bytes()).unwrap().key.is_some());
    put(96, &NEEDS_RECOVERY.to_le_bytes()).unwrap_err();
    put(96, &[0; 4]).unwrap();
    let changed = put(16, &(16384_u32 - 15).to_le_bytes()).unwrap_err();
    assert!(changed.contains("4/rwlayer.img"), "{changed}");
    put(92, &ORPHAN_FILE.to_le_bytes()).unwrap();
    put(16, &(16384_u32 - 16).to_le_bytes()).unwrap_err();
}

#[test]
fn other_forms_are_refused_in_one_line() {
    let snapshots = Snapshots::new();
    let layer = || snapshots.layer("1");
    let refused = |mounts: &[Mount], why: &str| {
        let refused = content_of(mounts).unwrap_err();
        assert!(refused.contains(why) && !refused.contains('\n'), "{refused}");
    };
    for lower in ["{{ mount 1 }}", "{{ overlay 0 9 }}", "{{ source 0 }}", "{{ mount 0 }}:/x", "/x"]
    {
        let overlay = snapshots.overlay(&format!("lowerdir={lower}"));
        refused(&[layer(), overlay], "which is not supported");
    }
    refused(&[layer(), snapshots.overlay("uidmap=0:1000:1")], "option uidmap");
    refused(&[layer(), mount("ext4", "/dev/x", &[])], "\"ext4\"");
    refused(&[layer(), layer()], "\"erofs\"");
    let with_size = snapshots.with_size();
    let empty = &with_size[..1];
    let bind = mount("format/mkdir/bind", "{{ mount 0 }}/upper", &["rw", "rbind"]);
    refused(&[empty, &[bind]].concat(), "{{ mount 0 }}/upper");
    let lower = [empty, &[snapshots.overlay("lowerdir={{ mount 0 }}")]].concat();
    refused(&lower, "\"mkfs/ext4\"");
    let mut gone = layer();
    gone.source = snapshots.path("9/layer.erofs");
    refused(&[gone], "9/layer.erofs");
}
