//! From a layout to layers on disk: every digest, every size, every platform. No tool is needed.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::support::*;
use crate::manifest::{self, Plan};
use crate::root::Form;
use crate::source::{Fetcher, Spool, archive, layout};
use crate::{Digest, Error, Limits, Result};

fn tar() -> Vec<u8> {
    Tar::new().file("x", &"hello ".repeat(1000)).end()
}

async fn plan_of(layout: &Layout, tag: Option<&str>) -> Result<(Plan, Fetcher)> {
    let limits = Limits::default();
    let local = layout::Local::folder(layout.path().to_owned())?;
    let (bytes, _) = local.choose(tag, &limits)?;
    let fetcher = Fetcher::Local(Arc::new(local));
    let plan = crate::resolve::plan(&fetcher, bytes, "test", &limits).await?;
    Ok((plan, fetcher))
}

async fn fetch(layout: &Layout, limits: &Limits) -> Result<Vec<Vec<u8>>> {
    let (plan, fetcher) = plan_of(layout, None).await?;
    let dir = std::env::temp_dir();
    let spool = Arc::new(Spool { dir, limits: limits.clone(), total: AtomicU64::new(0) });
    let mut contents = Vec::new();
    for layer in plan.layers {
        let file = fetcher.layer(layer, spool.clone(), |_| {}).await?;
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        contents.push(bytes);
    }
    Ok(contents)
}

#[tokio::test]
async fn every_compression() {
    let other = Tar::new().file("y", "2").end();
    let mut two_members = gzip(&tar()[..512]).bytes;
    two_members.extend(gzip(&tar()[512..]).bytes);
    let two_members = Blob { bytes: two_members, ..gzip(&tar()) };
    let layout = Layout::of(&[gzip(&tar()), zstd(&tar()), plain(&other), two_members]);
    let contents = fetch(&layout, &Limits::default()).await.unwrap();
    assert_eq!(contents, [tar(), tar(), other, tar()]);
}

#[tokio::test]
async fn manifest_of_another_digest() {
    let mut layout = Layout::empty();
    let manifest = layout.image("amd64", &[gzip(&tar())]);
    layout.list(MANIFEST, &manifest, "");
    let changed = manifest.replace("schemaVersion\":2", "schemaVersion\": 2");
    let changed = &changed[..manifest.len()];
    std::fs::write(layout.blob_path(&Digest::of(manifest.as_bytes())), changed).unwrap();
    let error = plan_of(&layout, None).await.map(|_| ()).unwrap_err();
    assert!(
        matches!(&error, Error::DigestMismatch { what, .. } if what.contains("manifest")),
        "{error}"
    );
}

#[tokio::test]
async fn config_of_another_digest() {
    let layout = Layout::of(&[gzip(&tar())]);
    let config = config_json("amd64", &[gzip(&tar())]);
    let path = layout.blob_path(&Digest::of(config.as_bytes()));
    std::fs::write(path, config.replace("/bin", "/bad")).unwrap();
    let error = plan_of(&layout, None).await.map(|_| ()).unwrap_err();
    assert!(
        matches!(&error, Error::DigestMismatch { what, .. } if what.contains("config")),
        "{error}"
    );
}

/// Overwrites the blob of the only layer with `stored`, and returns the error of fetching it.
async fn with_layer(blob: &Blob, stored: &[u8]) -> Error {
    let layout = Layout::of(std::slice::from_ref(blob));
    std::fs::write(layout.blob_path(&Digest::of(&blob.bytes)), stored).unwrap();
    fetch(&layout, &Limits::default()).await.unwrap_err()
}

#[tokio::test]
async fn layer_of_another_digest() {
    for blob in [gzip(&tar()), zstd(&tar()), plain(&tar())] {
        for at in [0, 5, blob.bytes.len() / 2, blob.bytes.len() - 1] {
            let mut bytes = blob.bytes.clone();
            bytes[at] ^= 0x40;
            let error = with_layer(&blob, &bytes).await;
            let expected = Digest::of(&blob.bytes);
            assert!(
                matches!(&error, Error::DigestMismatch { expected: e, .. } if *e == expected),
                "{error}"
            );
        }
    }
}

#[tokio::test]
async fn layer_of_another_size() {
    let blob = gzip(&tar());
    let size = blob.bytes.len() as u64;
    let error = with_layer(&blob, &blob.bytes[..50]).await;
    assert!(matches!(error, Error::SizeMismatch { expected, actual: 50, .. } if expected == size));
    let mut longer = blob.bytes.clone();
    longer.extend([0; 500]);
    let error = with_layer(&blob, &longer).await;
    assert!(matches!(error, Error::SizeMismatch { actual, .. } if actual == size + 1), "{error}");
}

#[tokio::test]
async fn layer_of_another_diff_id() {
    let blob = Blob { diff_id: Digest::of(b"other"), ..gzip(&tar()) };
    let error = fetch(&Layout::of(&[blob]), &Limits::default()).await.unwrap_err();
    let is = matches!(&error, Error::DigestMismatch { expected, what, .. }
        if *expected == Digest::of(b"other") && what.contains("uncompressed"));
    assert!(is, "{error}");
}

#[tokio::test]
async fn layer_that_does_not_decompress() {
    // The digest is right, but the maker stored a broken stream.
    let mut broken = gzip(&tar());
    broken.bytes.truncate(60);
    let error = fetch(&Layout::of(&[broken]), &Limits::default()).await.unwrap_err();
    assert!(matches!(error, Error::BadLayer { .. }), "{error}");
}

#[tokio::test]
async fn missing_blobs() {
    let blob = gzip(&tar());
    let layout = Layout::of(std::slice::from_ref(&blob));
    std::fs::remove_file(layout.blob_path(&Digest::of(&blob.bytes))).unwrap();
    let error = fetch(&layout, &Limits::default()).await.unwrap_err();
    assert!(matches!(error, Error::Source { .. }), "{error}");
}

#[tokio::test]
async fn bombs() {
    let zeros = vec![0; 1 << 20];
    let limits = Limits { ratio_floor: 64 << 10, ratio: 20, ..Limits::default() };
    for blob in [gzip(&zeros), zstd(&zeros)] {
        let error = fetch(&Layout::of(&[blob]), &limits).await.unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    }
    let limits = Limits { layer_uncompressed: 100_000, ..Limits::default() };
    let error = fetch(&Layout::of(&[gzip(&zeros)]), &limits).await.unwrap_err();
    assert!(error.to_string().contains("100000"), "{error}");
    // Each layer is small enough, but all together are not.
    let limits = Limits { image_uncompressed: 3 << 19, ..Limits::default() };
    let error = fetch(&Layout::of(&[gzip(&zeros), zstd(&zeros)]), &limits).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert_eq!(fetch(&Layout::of(&[gzip(&zeros)]), &limits).await.unwrap().len(), 1);
}

/// An archive that is a bomb as a whole is refused by its ratio, long before it fills the disk.
#[test]
fn a_compressed_archive_is_no_bomb() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb.tar.gz");
    std::fs::write(&path, gzip(&vec![0; 4 << 20]).bytes).unwrap();
    let limits = Limits { ratio_floor: 64 << 10, ratio: 20, ..Limits::default() };
    let error = archive::open(&path, dir.path(), &limits).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    archive::open(&path, dir.path(), &Limits::default()).map(|_| ()).unwrap();
}

#[test]
fn sizes_in_the_manifest_are_limited_before_the_download() {
    let (digest, form) = (Digest::of(b""), Form::Changes);
    let layer = |size| manifest::Layer { digest, size, diff_id: digest, form, toc: None };
    let limits =
        Limits { layers: 2, layer_compressed: 10, image_compressed: 15, ..Limits::default() };
    assert!(manifest::check_layers(&[layer(7), layer(7)], &limits, "x").is_ok());
    for layers in [vec![layer(11)], vec![layer(8), layer(8)], vec![layer(1); 3]] {
        let error = manifest::check_layers(&layers, &limits, "x").unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    }
    let huge = [layer(u64::MAX), layer(u64::MAX)];
    let limits = Limits { layer_compressed: u64::MAX, ..Limits::default() };
    assert!(manifest::check_layers(&huge, &limits, "x").is_err());
}

fn platform(arch: &str, more: &str) -> String {
    format!(r#","platform":{{"os":"linux","architecture":"{arch}"{more}}}"#)
}

/// Makes an index of images for these platforms, with different layers.
fn multi_arch(platforms: &[(&str, &str)]) -> Layout {
    let mut layout = Layout::empty();
    let mut entries = Vec::new();
    for (arch, more) in platforms {
        let layer = gzip(&Tar::new().file("arch", &format!("{arch}{more}")).end());
        let image = layout.image(if *arch == "unknown" { "amd64" } else { arch }, &[layer]);
        entries.push(descriptor(MANIFEST, image.as_bytes(), &platform(arch, more)));
    }
    let index = index_json(&entries);
    layout.list(INDEX, &index, "");
    layout
}

#[tokio::test]
async fn the_right_platform_is_picked() {
    let layout = multi_arch(&[("arm64", ""), ("amd64", ""), ("s390x", "")]);
    let contents = fetch(&layout, &Limits::default()).await.unwrap();
    assert_eq!(contents, [Tar::new().file("arch", "amd64").end()]);
    let v3 = r#","variant":"v3""#;
    let layout = multi_arch(&[("amd64", v3), ("unknown", ""), ("amd64", "")]);
    let contents = fetch(&layout, &Limits::default()).await.unwrap();
    assert_eq!(contents, [Tar::new().file("arch", "amd64").end()]);
}

#[tokio::test]
async fn media_types_of_docker() {
    let mut layout = Layout::empty();
    let docker = |text: &str| {
        text.replace(MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
            .replace(INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
            .replace("vnd.oci.image.config.v1", "vnd.docker.container.image.v1")
            .replace("vnd.oci.image.layer.v1.tar+gzip", "vnd.docker.image.rootfs.diff.tar.gzip")
    };
    let image = docker(&layout.image("amd64", &[gzip(&tar())]));
    layout.blob(image.as_bytes());
    let entry = descriptor(MANIFEST, image.as_bytes(), &platform("amd64", ""));
    let index = docker(&index_json(&[entry]));
    layout.list(&docker(INDEX), &index, "");
    assert_eq!(fetch(&layout, &Limits::default()).await.unwrap(), [tar()]);
}

#[tokio::test]
async fn other_platforms_are_named() {
    let layout = multi_arch(&[("arm64", ""), ("arm", r#","variant":"v7""#), ("unknown", "")]);
    let error = plan_of(&layout, None).await.map(|_| ()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::WrongPlatform { .. }));
    assert!(text.contains("linux/amd64") && text.contains("linux/arm64, linux/arm/v7"), "{text}");
    let mut layout = Layout::empty();
    let image = layout.image("riscv64", &[gzip(&tar())]);
    layout.list(MANIFEST, &image, "");
    let text = plan_of(&layout, None).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("offers linux/riscv64"), "{text}");
}

async fn plan_text(document: &str) -> Result<Plan> {
    let layout = Layout::empty();
    let local = layout::Local::folder(layout.path().to_owned())?;
    let fetcher = Fetcher::Local(Arc::new(local));
    crate::resolve::plan(&fetcher, document.as_bytes().to_vec(), "test", &Limits::default()).await
}

#[tokio::test]
async fn documents_that_make_no_sense() {
    let config = config_json("amd64", &[gzip(&tar())]);
    let good = manifest_json(&config, &[gzip(&tar())]);
    let both = good.replacen('{', r#"{"manifests":[],"#, 1);
    let artifact = good.replace("image.config.v1", "other.config.v1");
    let sha512 = good.replace("sha256:", "sha512:");
    for (document, reason) in [
        ("", "EOF"),
        ("[]", "no JSON object"),
        ("{}", "missing field"),
        (r#"{"schemaVersion":1,"fsLayers":[]}"#, "schema 1"),
        (r#"{"schemaVersion":2,"mediaType":"text/plain"}"#, "unknown type text/plain"),
        (both.as_str(), "both as a manifest and as an index"),
        (artifact.as_str(), "no container image"),
        (sha512.as_str(), ""),
        (r#"{"schemaVersion":2,"manifests":[]}"#, "offers nothing"),
    ] {
        let text = plan_text(document).await.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(reason), "{document}: {text}");
        assert!(!text.contains('\n'), "{text}");
    }
}

#[tokio::test]
async fn layers_and_config_must_agree() {
    for change in ["count", "type"] {
        let mut layout = Layout::empty();
        let layer = gzip(&tar());
        let config = config_json("amd64", std::slice::from_ref(&layer));
        layout.blob(config.as_bytes());
        let manifest = match change {
            "count" => manifest_json(&config, &[layer.clone(), layer]),
            _ => manifest_json(&config, &[layer]).replace("tar+gzip", "tar+gzip+encrypted"),
        };
        layout.list(MANIFEST, &manifest, "");
        let error = plan_of(&layout, None).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::BadDocument { .. }), "{error}");
    }
}

#[tokio::test]
async fn an_index_of_itself_ends() {
    // A cycle would need a broken hash, but a long chain does not.
    let mut layout = Layout::empty();
    let mut document = layout.image("amd64", &[gzip(&tar())]);
    let mut kind = MANIFEST;
    for _ in 0..6 {
        layout.blob(document.as_bytes());
        document = index_json(&[descriptor(kind, document.as_bytes(), &platform("amd64", ""))]);
        kind = INDEX;
    }
    layout.list(INDEX, &document, "");
    let text = plan_of(&layout, None).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("nested too deep"), "{text}");
}

#[tokio::test]
async fn tags_of_a_layout() {
    let mut layout = Layout::empty();
    for tag in ["11", "12"] {
        let image = layout.image("amd64", &[gzip(&Tar::new().file(tag, "").end())]);
        let more = format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{tag}"}}"#);
        layout.list(MANIFEST, &image, &more);
    }
    let digest = |plan: (Plan, Fetcher)| plan.0.digest;
    let eleven = digest(plan_of(&layout, Some("11")).await.unwrap());
    let twelve = digest(plan_of(&layout, Some("12")).await.unwrap());
    assert_ne!(eleven, twelve);
    let text = plan_of(&layout, None).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("2 images") && text.contains("11, 12"), "{text}");
    let text = plan_of(&layout, Some("13")).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("no image '13'"), "{text}");
    let text = plan_of(&Layout::empty(), None).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("no image"), "{text}");
}

/// Makes an archive as `docker save` wrote it up to version 24, with a layer that is a link.
fn docker_archive(config: &str, config_name: &str) -> tempfile::NamedTempFile {
    let layers = r#"["a/layer.tar","b/layer.tar"]"#;
    let manifest =
        format!(r#"[{{"Config":"{config_name}","RepoTags":["team/app:1"],"Layers":{layers}}}]"#);
    let layer = tar();
    let archive = Tar::new()
        .dir("a/")
        .raw(tar::EntryType::Regular, b"a/layer.tar", b"", &layer)
        .symlink("b/layer.tar", "../a/layer.tar")
        .file(config_name, config)
        .file("manifest.json", &manifest)
        .end();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), archive).unwrap();
    file
}

#[test]
fn docker_archives() {
    let layer = plain(&tar());
    let config = config_json("amd64", &[layer.clone(), layer.clone()]);
    let name = format!("{}.json", Digest::of(config.as_bytes()).hex());
    let (dir, limits) = (std::env::temp_dir(), Limits::default());
    let open = |file: &tempfile::NamedTempFile, name: Option<&str>| {
        let mut local = archive::open(file.path(), &dir, &limits)?;
        archive::plan_docker(&mut local, name, &limits).map(|(plan, names)| (plan, names, local))
    };
    let file = docker_archive(&config, &name);
    let (plan, names, local) = open(&file, None).unwrap();
    assert_eq!(plan.layers.len(), 2);
    assert_eq!(names, ["team/app:1".parse().unwrap()]);
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut local.open_layer(&plan.layers[1]).unwrap(), &mut bytes)
        .unwrap();
    assert_eq!(bytes, tar());
    assert!(open(&file, Some("team/app:1")).is_ok());
    assert!(open(&file, Some("team/app:2")).is_err());
    // The archive is compressed as a whole.
    std::fs::write(file.path(), gzip(&std::fs::read(file.path()).unwrap()).bytes).unwrap();
    assert_eq!(open(&file, None).unwrap().0.digest, plan.digest);
    // The config does not have the digest in its name.
    let file = docker_archive(&config.replace("/bin", "/bad"), &name);
    assert!(matches!(open(&file, None).map(|_| ()), Err(Error::DigestMismatch { .. })));
    let file = docker_archive(&config_json("arm64", &[layer.clone(), layer]), "config.json");
    assert!(matches!(open(&file, None).map(|_| ()), Err(Error::WrongPlatform { .. })));
}
