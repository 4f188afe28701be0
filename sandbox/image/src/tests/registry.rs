//! Pulls from a real registry, Debian's docker-registry, on loopback.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;

use super::support::*;
use crate::{Access, Cache, Credentials, Digest, Error, Limits, PullPolicy, Reference, Silent};

/// A registry with a storage folder of its own. Dropping this ends it.
struct Server {
    child: Child,
    dir: tempfile::TempDir,
    host: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a registry and a cache for a test. Returns `None` after printing why the test is
/// skipped.
fn setup(test: &str, auth: &str) -> Option<(Server, Cache)> {
    let server = Server::start(auth);
    if server.is_none() {
        skip(test, "docker-registry");
    }
    let server = server?;
    let cache = open(&server);
    Some((server, cache))
}

fn open(server: &Server) -> Cache {
    Cache::open(server.dir.path().join("cache"), Limits::default()).unwrap()
}

impl Server {
    /// Starts a registry; `auth` goes into its configuration.
    fn start(auth: &str) -> Option<Self> {
        // Another process may take the port in between; then the loop tries another one.
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            let config = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: \
                 {}}}\n\
                 http: {{addr: '{host}'}}\n{auth}",
                dir.path().join("storage").display()
            );
            let path = dir.path().join("config.yml");
            std::fs::write(&path, config).unwrap();
            let mut command = Command::new("docker-registry");
            command.arg("serve").arg(path).stdin(Stdio::null());
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
            let mut server = Self { child, dir, host };
            if server.answers() {
                return Some(server);
            }
        }
        panic!("docker-registry is there but does not start");
    }

    fn answers(&mut self) -> bool {
        for _ in 0..500 {
            if TcpStream::connect(&self.host).is_ok() {
                return self.child.try_wait().unwrap().is_none();
            }
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    fn reference(&self, rest: &str) -> Reference {
        format!("{}/{rest}", self.host).parse().unwrap()
    }

    fn blob_path(&self, digest: &Digest) -> PathBuf {
        let hex = digest.hex();
        let blobs = self.dir.path().join("storage/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(hex).join("data")
    }

    /// Pushes everything in `layout`, and `documents` (manifests before indexes), of which the last
    /// gets `tag`.
    async fn push(&self, name: &str, tag: &str, layout: &Layout, documents: &[(&str, &str)]) {
        self.push_as(&RegistryAuth::Anonymous, name, tag, layout, documents).await;
    }

    async fn push_as(
        &self,
        auth: &RegistryAuth,
        name: &str,
        tag: &str,
        layout: &Layout,
        documents: &[(&str, &str)],
    ) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = oci_client::Client::new(ClientConfig {
            protocol: ClientProtocol::Http,
            accept_invalid_certificates: true,
            ..ClientConfig::default()
        });
        let target = |tag: &str| {
            format!("{}/{name}:{tag}", self.host).parse::<oci_client::Reference>().unwrap()
        };
        client.auth(&target(tag), auth, oci_client::RegistryOperation::Push).await.unwrap();
        for entry in std::fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            let digest = Digest::of(&bytes).to_string();
            client.push_blob(&target(tag), bytes, &digest).await.unwrap();
        }
        for (i, (kind, text)) in documents.iter().enumerate() {
            let tag = if i + 1 == documents.len() { tag } else { "part" };
            let kind = kind.parse().unwrap();
            let body = text.as_bytes().to_vec();
            client.push_manifest_raw(&target(tag), body, kind).await.unwrap();
        }
    }

    /// Pushes an image of one layer with the file `x`. Returns the layer and the manifest.
    async fn push_simple(&self, name: &str, tag: &str, content: &str) -> (Blob, String) {
        let layer = gzip(&Tar::new().file("x", content).end());
        let layout = Layout::empty();
        let manifest = layout.image("amd64", std::slice::from_ref(&layer));
        self.push(name, tag, &layout, &[(MANIFEST, &manifest)]).await;
        (layer, manifest)
    }
}

async fn pull(cache: &Cache, reference: &Reference) -> crate::Result<crate::Image> {
    cache.pull(reference, &Access::default(), Arc::new(Silent)).await
}

#[tokio::test]
async fn registry_multi_arch_by_tag_and_by_digest() {
    const NAME: &str = "registry_multi_arch_by_tag_and_by_digest";
    if !readers(NAME) {
        return;
    }
    let Some((server, cache)) = setup(NAME, "") else { return };
    let layout = Layout::empty();
    let big = "0123456789abcdef".repeat(200_000);
    let arm = layout.image("arm64", &[gzip(&Tar::new().file("x", "arm").end())]);
    let layers = [
        gzip(&Tar::new().file("x", "1").file("y", &big).end()),
        zstd(&Tar::new().file(".wh.x", "").file("z", "2").end()),
    ];
    let amd = layout.image("amd64", &layers);
    let entry = |text: &str, arch: &str| {
        let platform = format!(r#","platform":{{"os":"linux","architecture":"{arch}"}}"#);
        descriptor(MANIFEST, text.as_bytes(), &platform)
    };
    let index = index_json(&[entry(&arm, "arm64"), entry(&amd, "amd64")]);
    let only_arm = index_json(&[entry(&arm, "arm64")]);
    server.push("a/b", "1", &layout, &[(MANIFEST, &arm), (MANIFEST, &amd), (INDEX, &index)]).await;
    server.push("a/b", "arm", &layout, &[(INDEX, &only_arm)]).await;

    let log = Log::new();
    let reference = server.reference("a/b:1");
    let image = cache.pull(&reference, &Access::default(), log.clone()).await.unwrap();
    assert_eq!(image.digest, Digest::of(amd.as_bytes()));
    assert_eq!(image.references, std::slice::from_ref(&reference));
    let tree = tree_of(&extract(&image.erofs_path).path().join("root"));
    assert_eq!(tree.keys().collect::<Vec<_>>(), ["y", "z"]);
    assert!(tree["y"] == big);
    for event in [
        "Resolving",
        "Layers",
        "LayerStarted",
        "LayerBytes",
        "LayerFinished",
        "Merging",
        "Building",
        "Finished",
    ] {
        assert!(log.has(event), "{event}");
    }
    // A second pull fetches only the manifest.
    let log = Log::new();
    let again = cache.pull(&reference, &Access::default(), log.clone()).await.unwrap();
    assert_eq!(again.digest, image.digest);
    assert!(!log.has("Layers"));
    // Pulls by the digest of the index, and by that of the manifest.
    for text in [&index, &amd] {
        let pinned = server.reference(&format!("a/b@{}", Digest::of(text.as_bytes())));
        assert_eq!(pull(&cache, &pinned).await.unwrap().digest, image.digest);
        assert_eq!(cache.get(&pinned.to_string()).unwrap().unwrap().digest, image.digest);
    }
    let error = pull(&cache, &server.reference("a/b:arm")).await.unwrap_err();
    assert!(
        matches!(&error, Error::WrongPlatform { offers, .. } if offers == "linux/arm64"),
        "{error}"
    );
}

#[tokio::test]
async fn registry_ensure_and_moving_tags() {
    let Some((server, cache)) = setup("registry_ensure_and_moving_tags", "") else { return };
    let (_, first) = server.push_simple("app", "latest", "old").await;
    let name = server.reference("app").to_string();
    let ensure = |policy| cache.ensure(&name, ANONYMOUS, policy, Arc::new(Silent));
    assert!(matches!(ensure(PullPolicy::Never).await, Err(Error::Unknown(_))));
    let image = ensure(PullPolicy::Missing).await.unwrap();
    assert_eq!(image.digest, Digest::of(first.as_bytes()));
    let (_, second) = server.push_simple("app", "latest", "new").await;
    assert_eq!(ensure(PullPolicy::Missing).await.unwrap().digest, image.digest);
    let moved = ensure(PullPolicy::Always).await.unwrap();
    assert_eq!(moved.digest, Digest::of(second.as_bytes()));
    assert!(cache.get(&image.digest.to_string()).unwrap().unwrap().references.is_empty());
}

const ANONYMOUS: &Access = &Access { credentials: Credentials::Anonymous, plain_http: false };

#[tokio::test]
async fn registry_without_the_image() {
    let Some((server, cache)) = setup("registry_without_the_image", "") else { return };
    server.push_simple("app", "1", "x").await;
    for missing in ["app:2", "other", &format!("app@{}", Digest::of(b"no"))] {
        let error = pull(&cache, &server.reference(missing)).await.unwrap_err();
        assert!(matches!(error, Error::NotFound(_)), "{missing}: {error}");
    }
}

#[tokio::test]
async fn registry_whose_blobs_are_corrupt() {
    let Some((server, cache)) = setup("registry_whose_blobs_are_corrupt", "") else { return };
    for what in ["layer", "config", "manifest"] {
        for change in ["flip", "cut"] {
            let name = format!("{what}-{change}");
            let (layer, manifest) = server.push_simple(&name, "1", &name).await;
            let bytes = match what {
                "layer" => layer.bytes,
                "config" => config_json("amd64", std::slice::from_ref(&layer)).into_bytes(),
                _ => manifest.into_bytes(),
            };
            let path = server.blob_path(&Digest::of(&bytes));
            let mut bytes = std::fs::read(&path).unwrap();
            let (middle, end) = (bytes.len() / 2, bytes.len() - 20);
            match change {
                "flip" => bytes[middle] ^= 1,
                _ => bytes.truncate(end),
            }
            std::fs::write(&path, bytes).unwrap();
            let error = pull(&cache, &server.reference(&format!("{name}:1"))).await.unwrap_err();
            let corrupt =
                matches!(error, Error::DigestMismatch { .. } | Error::SizeMismatch { .. });
            // The registry itself may detect a bad manifest.
            let noticed = what == "manifest" && matches!(error, Error::Registry { .. });
            assert!(corrupt || noticed, "{name}: {error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
    assert!(cache.list().unwrap().is_empty());
    assert!(tree_of(&server.dir.path().join("cache/work")).is_empty());
}

#[tokio::test]
async fn registry_that_wants_a_login() {
    const NAME: &str = "registry_that_wants_a_login";
    // The file has bcrypt of "secret" for the user "me".
    let htpasswd = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(htpasswd.path(), format!("me:{BCRYPT_SECRET}\n")).unwrap();
    let auth =
        format!("auth: {{htpasswd: {{realm: test, path: '{}'}}}}\n", htpasswd.path().display());
    let Some((server, cache)) = setup(NAME, &auth) else { return };
    let layout = Layout::empty();
    let manifest = layout.image("amd64", &[gzip(&Tar::new().file("x", "1").end())]);
    let login = RegistryAuth::Basic("me".into(), "secret".into());
    server.push_as(&login, "app", "1", &layout, &[(MANIFEST, &manifest)]).await;
    let reference = server.reference("app:1");
    let with = |password: &str| {
        let credentials = Credentials::Basic { user: "me".into(), password: password.to_owned() };
        Access { credentials, plain_http: false }
    };
    for access in [Access::default(), with("wrong")] {
        let error = cache.pull(&reference, &access, Arc::new(Silent)).await.unwrap_err();
        assert!(matches!(error, Error::Unauthorized { .. }), "{error}");
        assert!(!error.to_string().contains("wrong"));
    }
    cache.pull(&reference, &with("secret"), Arc::new(Silent)).await.unwrap();
}

const BCRYPT_SECRET: &str = "$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";

#[tokio::test]
async fn registry_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), Limits::default()).unwrap();
    // A port is bound and closed at once, so that no process listens on it.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let reference = format!("127.0.0.1:{port}/app").parse().unwrap();
    let text = pull(&cache, &reference).await.unwrap_err().to_string();
    assert!(text.contains(&format!("127.0.0.1:{port}")) && text.contains("refused"), "{text}");
    assert!(!text.contains('\n'), "{text}");
}
