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
