//! Tests of roots: where their content is, and under which key it is found again.

use super::*;

fn mount(kind: &str, source: &str, options: &[String]) -> Mount {
    let options = options.to_vec();
    Mount { r#type: kind.into(), source: source.into(), target: String::new(), options }
}

fn content_of(mounts: &[Mount]) -> Result<Content, String> {
    content(mounts, Some("/srv/root".into()))
}

struct Layers(tempfile::TempDir);

impl Layers {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["1", "2", "upper", "work"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn overlay(&self, lower: &[&str], with_upper: bool) -> Mount {
        let list: Vec<_> = lower.iter().map(|name| self.path(name).display().to_string()).collect();
        let mut options = vec!["index=off".to_owned(), format!("lowerdir={}", list.join(":"))];
        if with_upper {
            options.push(format!("upperdir={}", self.path("upper").display()));
            options.push(format!("workdir={}", self.path("work").display()));
        }
        mount("overlay", "overlay", &options)
    }
}

#[test]
fn a_chain_has_one_key_whether_or_not_it_is_writable() {
    let layers = Layers::new();
    let writable = content_of(&[layers.overlay(&["2", "1"], true)]).unwrap();
    let view = content_of(&[layers.overlay(&["2", "1"], false)]).unwrap();
    assert!(writable.key.is_some());
    assert_eq!(writable, view);
    let other = content_of(&[layers.overlay(&["1", "2"], false)]).unwrap();
    assert_ne!(other.key, view.key);
    let paths = vec![layers.path("2"), layers.path("1")];
    assert_eq!(view.source, Source::Layers(paths, vec!["index=off".to_owned()]));
}

#[test]
fn a_single_layer_is_a_folder() {
    let layers = Layers::new();
    let content = content_of(&[layers.overlay(&["1"], true)]).unwrap();
    assert_eq!(content.source, Source::Folder(layers.path("1")));
    let bind =
        mount("bind", &layers.path("1").display().to_string(), &["rbind".into(), "ro".into()]);
    assert_eq!(content_of(&[bind]).unwrap(), content);
}

#[test]
fn content_of_a_containers_own_is_imported_for_it_alone() {
    let layers = Layers::new();
    std::fs::write(layers.path("upper").join("file"), "").unwrap();
    let content = content_of(&[layers.overlay(&["1"], true)]).unwrap();
    assert_eq!(content.key, None);
    let paths = vec![layers.path("upper"), layers.path("1")];
    assert_eq!(content.source, Source::Layers(paths, vec!["index=off".to_owned()]));
    let bind =
        mount("bind", &layers.path("1").display().to_string(), &["rbind".into(), "rw".into()]);
    assert_eq!(content_of(&[bind]).unwrap().key, None);
    assert_eq!(content_of(&[]).unwrap().source, Source::Folder("/srv/root".into()));
}

#[test]
fn another_folder_at_a_path_has_another_key() {
    let layers = Layers::new();
    let path = layers.path("1");
    let before = key_of(std::slice::from_ref(&path)).unwrap();
    assert_eq!(key_of(std::slice::from_ref(&path)).unwrap(), before);
    std::fs::rename(&path, layers.path("old")).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_ne!(key_of(std::slice::from_ref(&path)).unwrap(), before);
}

/// Directories of the snapshotter slipway: remote layers, the ordinary ones `own` and `upper`.
struct Remote(tempfile::TempDir);

impl Remote {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["1", "2", "own", "upper"] {
            std::fs::create_dir_all(dir.path().join(name).join("fs")).unwrap();
        }
        let remote = Self(dir);
        remote.write("1", false);
        remote.write("2", true);
        remote
    }

    fn write(&self, name: &str, whole: bool) {
        let json = serde_json::to_string(&serde_json::json!({
            "reference": Self::image(whole).reference, "digest": Self::image(whole).digest,
            "layers": ["sha256:00"], "whole": whole,
        }));
        std::fs::write(self.0.path().join(name).join("image.json"), json.unwrap()).unwrap();
    }

    fn image(whole: bool) -> lazy::Image {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let reference = format!("registry.test/app@{digest}");
        lazy::Image { reference, digest, whole }
    }

    fn files(&self, name: &str) -> String {
        self.0.path().join(name).join("fs").display().to_string()
    }

    fn overlay(&self, lower: &[&str]) -> Mount {
        let lower: Vec<_> = lower.iter().map(|name| self.files(name)).collect();
        let lower = format!("lowerdir={}", lower.join(":"));
        let upper = format!("upperdir={}", self.files("upper"));
        mount("overlay", "overlay", &["workdir=/w".into(), upper, lower, "index=off".into()])
    }
}

#[test]
fn layers_that_are_not_on_the_host_are_their_image() {
    let remote = Remote::new();
    let whole = Content { source: Source::Lazy(Remote::image(true)), key: None };
    assert_eq!(content_of(&[remote.overlay(&["2", "1"])]), Ok(whole));
    // Another image has shared its lower layers with this one, or has them unpacked.
    let top = content_of(&[remote.overlay(&["2", "own"])]).unwrap();
    assert_eq!(top.source, Source::Lazy(Remote::image(true)));
    let part = content_of(&[remote.overlay(&["1"])]).unwrap();
    assert_eq!(part.source, Source::Lazy(Remote::image(false)));
    let view = mount("bind", &remote.files("2"), &["ro".into(), "rbind".into()]);
    assert_eq!(content_of(&[view]).unwrap().source, Source::Lazy(Remote::image(true)));
    let own = content_of(&[remote.overlay(&["own"])]).unwrap();
    assert_eq!(own.source, Source::Folder(remote.files("own").into()));
}

#[test]
fn files_on_layers_that_are_not_on_the_host_are_refused() {
    let remote = Remote::new();
    let refused = content_of(&[remote.overlay(&["own", "2", "1"])]).unwrap_err();
    assert!(refused.contains("--snapshotter overlayfs"), "{refused}");
    std::fs::write(format!("{}/file", remote.files("upper")), "").unwrap();
    let refused = content_of(&[remote.overlay(&["2", "1"])]).unwrap_err();
    assert!(refused.contains("changes of its own"), "{refused}");
}

#[test]
fn roots_of_other_kinds() {
    let block = mount("ext4", "/dev/vg/one", &[]);
    assert_eq!(
        content_of(std::slice::from_ref(&block)).unwrap().source,
        Source::Device(block.clone())
    );
    let refused = content_of(&[block.clone(), block]).unwrap_err();
    assert!(refused.contains("2 mounts"), "{refused}");
    for bad in [vec![], vec!["lowerdir=a:b".to_owned()], vec!["lowerdir=/".into(), "x=y".into()]] {
        assert!(content_of(&[mount("overlay", "overlay", &bad)]).is_err(), "{bad:?}");
    }
}
