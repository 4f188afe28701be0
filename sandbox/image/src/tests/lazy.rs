//! Lazy pulls from a registry on loopback that sends parts of layers, or does not.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use flate2::read::MultiGzDecoder;
use tar::EntryType;

use super::estargz::Stargz;
use super::support::*;
use crate::lazy::map::Map;
use crate::source::registry::Registry;
use crate::{
    Access, Cache, Digest, Error, Image, Limits, NameConflict, Prune, Reference, Result, Selection,
    Silent, Source,
};

/// The registry's behaviour when a part of a blob is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranges {
    Sent,
    /// The whole blob is sent.
    Ignored,
    Refused,
    /// The part after the one that is asked for is sent.
    Shifted,
    /// The part without its last byte is sent.
    Short,
    /// More than the part is sent.
    Long,
}

/// A registry with one image. It answers by the last part of a path.
struct Server {
    host: String,
    documents: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    /// The ranges that were asked for, by the last part of the path.
    asked: Arc<Mutex<Vec<(String, String)>>>,
}

impl Server {
    fn start(ranges: Ranges) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let server = Self { host, documents: Arc::default(), asked: Arc::default() };
        let (documents, asked) = (server.documents.clone(), server.asked.clone());
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (documents, asked) = (documents.clone(), asked.clone());
                // A client that hangs up is no failure.
                std::thread::spawn(move || answer(stream, ranges, &documents, &asked));
            }
        });
        server
    }

    /// Adds an image of `layers`, with the digests of their indexes, under the tag `1`. Returns the
    /// digest of its manifest.
    fn put(&self, layers: &[(Blob, Option<Digest>)]) -> Digest {
        let blobs: Vec<_> = layers.iter().map(|(blob, _)| blob.clone()).collect();
        let config = config_json("amd64", &blobs);
        let layer = |(blob, toc): &(Blob, Option<Digest>)| {
            let key = "containerd.io/snapshot/stargz/toc.digest";
            let toc = toc.map(|toc| format!(r#","annotations":{{"{key}":"{toc}"}}"#));
            descriptor(blob.kind, &blob.bytes, &toc.unwrap_or_default())
        };
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
            descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes(), ""),
            layers.iter().map(layer).collect::<Vec<_>>().join(",")
        );
        let mut documents = self.documents.lock().unwrap();
        for bytes in blobs.into_iter().map(|blob| blob.bytes).chain([config.into_bytes()]) {
            documents.insert(Digest::of(&bytes).to_string(), bytes);
        }
        documents.insert("1".into(), manifest.clone().into_bytes());
        Digest::of(manifest.as_bytes())
    }

    fn blob(&self, digest: &Digest) -> Vec<u8> {
        self.documents.lock().unwrap()[&digest.to_string()].clone()
    }

    fn reference(&self) -> Reference {
        format!("{}/app:1", self.host).parse().unwrap()
    }

    async fn pull_lazy(&self, cache: &Cache) -> Result<Option<Image>> {
        cache.pull_lazy(&self.reference(), &Access::default(), Arc::new(Silent)).await
    }

    async fn range(&self, digest: &Digest, from: u64, bytes: u64) -> Result<Vec<u8>> {
        let registry = Registry::new(&self.reference(), &Access::default(), &Limits::default());
        registry.unwrap().blob_range(digest, from, bytes).await
    }
}

fn answer(
    mut stream: TcpStream,
    ranges: Ranges,
    documents: &Mutex<BTreeMap<String, Vec<u8>>>,
    asked: &Mutex<Vec<(String, String)>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let name = first.split(' ').nth(1).and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("range: bytes=") {
            range = value.split_once('-').map(|(a, b)| (a.to_owned(), b.to_owned()));
        }
        if line.is_empty() {
            break;
        }
    }
    let Some(blob) = documents.lock().unwrap().get(name).cloned() else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    };
    let send = |stream: &mut TcpStream, status: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
        stream.write_all(body)
    };
    let Some((from, last)) = range else { return send(&mut stream, "200 OK", &blob) };
    asked.lock().unwrap().push((name.to_owned(), format!("{from}-{last}")));
    let (mut from, mut end): (usize, usize) =
        (from.parse().unwrap(), last.parse::<usize>().unwrap() + 1);
    match ranges {
        Ranges::Ignored => return send(&mut stream, "200 OK", &blob),
        Ranges::Refused => return send(&mut stream, "416 No", b""),
        Ranges::Sent => {}
        Ranges::Shifted => from += 1,
        Ranges::Short => end -= 1,
        Ranges::Long => end = blob.len(),
    }
    let status = format!("206 Part\r\nContent-Range: bytes {from}-{}/{}", end - 1, blob.len());
    send(&mut stream, &status, &blob[from..end])
}

fn open(dir: &Path) -> Cache {
    Cache::open(dir, Limits::default()).unwrap()
}

/// Returns the names of images' files and maps below a folder.
fn files(dir: &Path) -> Vec<String> {
    let names = tree_of(dir).into_keys();
    names.filter(|name| name.ends_with(".erofs") || name.ends_with(".map")).collect()
}

/// Returns two layers of all kinds of files; the upper one hides and changes some of the lower.
fn layers() -> [(Blob, Option<Digest>); 2] {
    let big = "0123456789abcdef".repeat(1000);
    let (lower, lower_toc) = Stargz::new()
        .packed(&[("first", "packed in the first member"), ("second", "with this")])
        .dir("etc/")
        .file("etc/gone", "gone", 100)
        .file("etc/old", &big, 4096)
        .file("keep", "kept", 100)
        .entry(EntryType::Link, "kept-too", "keep")
        .file("two", "of two names", 100)
        .entry(EntryType::Link, "two-too", "two")
        .dir("opq/")
        .file("opq/below", "below", 100)
        .entry(EntryType::Symlink, "lib", "usr/lib")
        .file(".no.prefetch.landmark", "\u{f}", 1)
        .end();
    let (upper, upper_toc) = Stargz::new()
        .entry(EntryType::Regular, "etc/.wh.gone", "")
        .file("keep", "changed", 100)
        .entry(EntryType::Regular, "opq/.wh..wh..opq", "")
        .file("opq/above", &"above".repeat(3000), 5000)
        .file(".prefetch.landmark", "\u{f}", 1)
        .packed(&[("small-1", "1"), ("small-2", "22"), ("small-3", "333")])
        .file("lib/libx", &big[..9999], 4096)
        .entry(EntryType::Fifo, "pipe", "")
        .entry(EntryType::Regular, "empty", "")
        .end();
    [(lower, Some(lower_toc)), (upper, Some(upper_toc))]
}

/// Writes the missing bytes into the file of an image, as a fetcher does. Returns their number.
fn fill(server: &Server, cache: &Cache, image: &Image) -> u64 {
    let map = Map::read(&cache.map_path(&image.digest), &Limits::default()).unwrap();
    assert_eq!(map.reference, server.reference());
    assert_eq!((map.bytes, map.plain_http), (image.size_bytes, false));
    let file = std::fs::File::options().write(true).open(&image.erofs_path).unwrap();
    for span in &map.spans {
        let blob = server.blob(&map.layers[span.layer as usize].digest);
        let stream = span.stream as usize..(span.stream + span.stream_bytes) as usize;
        let mut bytes = vec![0; (span.inner + span.bytes) as usize];
        MultiGzDecoder::new(&blob[stream]).read_exact(&mut bytes).unwrap();
        let chunk = &bytes[span.inner as usize..];
        assert_eq!(Digest::of(chunk), span.digest);
        file.write_all_at(chunk, span.image).unwrap();
    }
    map.spans.iter().map(|span| span.bytes).sum()
}

#[tokio::test]
async fn a_filled_image_is_the_image() {
    if !readers("a_filled_image_is_the_image") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&dir.path().join("lazy"));
    let server = Server::start(Ranges::Sent);
    let digest = server.put(&layers());
    let image = server.pull_lazy(&cache).await.unwrap().unwrap();
    assert_eq!((image.digest, image.lazy), (digest, true));
    assert_eq!(image.references, [server.reference()]);
    assert_eq!(image.config.cmd, ["sh"]);
    assert_eq!(image.size_bytes, std::fs::metadata(&image.erofs_path).unwrap().len());
    let filled = fill(&server, &cache, &image);
    let (lazy, whole) = (extract(&image.erofs_path), {
        let cache = open(&dir.path().join("whole"));
        let pulled = cache.pull(&server.reference(), &Access::default(), Arc::new(Silent)).await;
        let pulled = pulled.unwrap();
        assert!(!pulled.lazy);
        extract(&pulled.erofs_path)
    });
    let lazy = tree_of(&lazy.path().join("root"));
    let mut whole = tree_of(&whole.path().join("root"));
    // Only the layers have the indexes and the landmarks.
    for name in ["stargz.index.json", ".prefetch.landmark", ".no.prefetch.landmark"] {
        assert!(whole.remove(name).is_some());
    }
    assert_eq!(lazy, whole);
    // Each byte of a file is in one span. The names of a hard link share theirs.
    let plain = |name: &str, text: &str| name != "two-too" && !["dir", "special"].contains(&text);
    let bytes = lazy.iter().filter(|(name, text)| plain(name, text) && !text.starts_with("-> "));
    let bytes: usize = bytes.map(|(_, text)| text.len()).sum();
    assert_eq!(filled, bytes as u64);
}

/// Two requests for a layer are all, however large it is.
#[tokio::test]
async fn only_the_indexes_are_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let server = Server::start(Ranges::Sent);
    let layers = layers();
    server.put(&layers);
    let image = server.pull_lazy(&cache).await.unwrap().unwrap();
    let asked = server.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 4, "{asked:?}");
    let map = Map::read(&cache.map_path(&image.digest), &Limits::default()).unwrap();
    for ((blob, _), layer) in layers.iter().zip(&map.layers) {
        let (digest, size) = (Digest::of(&blob.bytes), blob.bytes.len());
        assert_eq!((layer.digest, layer.bytes), (digest, size as u64));
        let of_layer = asked.iter().filter(|(name, _)| *name == digest.to_string());
        let ranges: Vec<_> = of_layer.map(|(_, range)| range.as_str()).collect();
        assert_eq!(ranges[0], format!("{}-{}", size - 51, size - 1));
        assert!(ranges[1].ends_with(&format!("-{}", size - 52)), "{ranges:?}");
    }
    assert_eq!(map.layers[0].prefetch, 0);
    let soon: Vec<_> = map.spans.iter().filter(|span| span.layer == 1).collect();
    // Three chunks of `opq/above` and one of `keep` are before the landmark.
    let before = soon.iter().filter(|span| span.stream < map.layers[1].prefetch).count();
    assert_eq!((before, soon.len()), (4, 10));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&image.erofs_path), 0o600);
    assert_eq!(mode(&cache.map_path(&image.digest)), 0o600);
    assert!(tree_of(&dir.path().join("work")).is_empty());
}

#[tokio::test]
async fn an_image_is_pulled_once_in_either_way() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Ranges::Sent);
    server.put(&layers());
    let cache = open(&dir.path().join("1"));
    let lazy = server.pull_lazy(&cache).await.unwrap().unwrap();
    let access = Access::default();
    let again = cache.pull(&server.reference(), &access, Arc::new(Silent)).await.unwrap();
    assert_eq!((again.digest, again.lazy), (lazy.digest, true));
    let again = server.pull_lazy(&cache).await.unwrap().unwrap();
    assert_eq!((again.digest, again.lazy), (lazy.digest, true));
    let cache = open(&dir.path().join("2"));
    cache.pull(&server.reference(), &access, Arc::new(Silent)).await.unwrap();
    let again = server.pull_lazy(&cache).await.unwrap().unwrap();
    assert_eq!((again.digest, again.lazy), (lazy.digest, false));
    assert!(!cache.map_path(&lazy.digest).exists());
}

#[tokio::test]
async fn layers_without_an_index_are_not_pulled_lazily() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let [lower, upper] = layers();
    let plain = gzip(&Tar::new().file("x", "1").end());
    let tiny = Blob { bytes: b"tiny".to_vec(), ..plain.clone() };
    let digest = Some(Digest::of(b"x"));
    for layers in [
        vec![lower.clone(), (upper.0.clone(), None)],
        vec![lower.clone(), (plain.clone(), None)],
        vec![lower.clone(), (plain, digest)],
        vec![lower.clone(), (tiny, digest)],
    ] {
        let server = Server::start(Ranges::Sent);
        server.put(&layers);
        assert!(server.pull_lazy(&cache).await.unwrap().is_none());
    }
    for ranges in [Ranges::Refused, Ranges::Shifted, Ranges::Short] {
        let server = Server::start(ranges);
        server.put(&[lower.clone(), upper.clone()]);
        assert!(server.pull_lazy(&cache).await.unwrap().is_none(), "{ranges:?}");
    }
    // Too much of a small layer serves as well.
    for ranges in [Ranges::Ignored, Ranges::Long] {
        let cache = open(&dir.path().join(format!("{ranges:?}")));
        let server = Server::start(ranges);
        server.put(&[lower.clone(), upper.clone()]);
        assert!(server.pull_lazy(&cache).await.unwrap().is_some(), "{ranges:?}");
    }
    assert!(cache.list().unwrap().is_empty());
    assert!(files(dir.path()).iter().all(|name| name.contains('/')));
}

#[tokio::test]
async fn parts_of_blobs() {
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let blob = Blob { bytes: bytes.clone(), ..plain(b"") };
    let digest = Digest::of(&bytes);
    for ranges in [Ranges::Sent, Ranges::Ignored, Ranges::Long] {
        let server = Server::start(ranges);
        server.put(&[(blob.clone(), None)]);
        for (from, len) in [(0, 0), (0, 1), (0, 100_000), (99_999, 1), (70_001, 20_002)] {
            let part = server.range(&digest, from, len).await.unwrap();
            assert_eq!(part, bytes[from as usize..(from + len) as usize], "{ranges:?} {from}");
        }
    }
    for ranges in [Ranges::Refused, Ranges::Shifted, Ranges::Short] {
        let server = Server::start(ranges);
        server.put(&[(blob.clone(), None)]);
        let error = server.range(&digest, 10, 1000).await.unwrap_err();
        assert!(matches!(error, Error::Registry { .. }), "{ranges:?}: {error}");
    }
    // A registry that sends whole layers would send this one for every chunk of it.
    let server = Server::start(Ranges::Ignored);
    let error = {
        let huge = Blob { bytes: vec![0; (16 << 20) + 2], ..blob };
        server.put(&[(huge.clone(), None)]);
        server.range(&Digest::of(&huge.bytes), (16 << 20) + 1, 1).await.unwrap_err()
    };
    assert!(error.to_string().contains("a whole layer instead"), "{error}");
}

#[tokio::test]
async fn hostile_layers_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let climbs = Stargz::new().file("../x", "x", 1).end();
    let other = Stargz::new().file("x", "x", 1).end();
    // The index is said to be behind the footer.
    let mut misplaced = other.0.clone();
    let at = misplaced.bytes.len() - 35;
    misplaced.bytes[at..at + 16].copy_from_slice(b"00000000ffffffff");
    for (blob, toc, reason) in [
        (climbs.0, climbs.1, "climbs out"),
        (other.0, Digest::of(b"x"), "corrupt"),
        (misplaced, other.1, "not before its footer"),
    ] {
        let server = Server::start(Ranges::Sent);
        server.put(&[(blob, Some(toc))]);
        let error = server.pull_lazy(&cache).await.unwrap_err().to_string();
        assert!(error.contains(reason) && !error.contains('\n'), "{error}");
    }
    let small = Limits { metadata_bytes: 100, ..Limits::default() };
    let cache = Cache::open(dir.path(), small).unwrap();
    let server = Server::start(Ranges::Sent);
    server.put(&layers());
    let error = server.pull_lazy(&cache).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(cache.list().unwrap().is_empty() && files(dir.path()).is_empty());
    assert!(tree_of(&dir.path().join("work")).is_empty());
}

/// Each index is small enough, and so are all chunks, but not with the map that is made of them.
#[tokio::test]
async fn the_memory_of_all_layers_chunks_is_limited() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Ranges::Sent);
    let data = "x".repeat(500 * 4096);
    let layer = |name: &str| Stargz::new().file(name, &data, 4096).end();
    server.put(&["a", "b", "c"].map(|name| {
        let (blob, toc) = layer(name);
        (blob, Some(toc))
    }));
    let limits = |metadata_bytes| Limits { metadata_bytes, ..Limits::default() };
    let cache = Cache::open(dir.path(), limits(400_000)).unwrap();
    let error = server.pull_lazy(&cache).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("400000 bytes of memory"), "{error}");
    let cache = Cache::open(dir.path(), limits(800_000)).unwrap();
    assert!(server.pull_lazy(&cache).await.unwrap().is_some());
}

#[tokio::test]
async fn a_lazy_image_becomes_whole_and_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let server = Server::start(Ranges::Sent);
    server.put(&layers());
    let image = server.pull_lazy(&cache).await.unwrap().unwrap();
    let (hex, name) = (image.digest.hex(), server.reference().to_string());
    let (erofs, map) = (format!("{hex}.erofs"), format!("{hex}.map"));
    assert_eq!(files(dir.path()), [erofs.as_str(), &map]);
    // Another process that opens the cache leaves it as it is.
    let list = open(dir.path()).list().unwrap();
    assert_eq!(list, std::slice::from_ref(&image));
    // Another file is not the image, even under its digest.
    let other = tempfile::tempfile().unwrap();
    assert!(matches!(cache.become_whole(&image.digest, &other), Err(Error::Unknown(_))));
    assert!(cache.get(&name).unwrap().unwrap().lazy);
    let file = std::fs::File::open(&image.erofs_path).unwrap();
    cache.become_whole(&image.digest, &file).unwrap();
    assert!(!cache.get(&name).unwrap().unwrap().lazy);
    assert_eq!(files(dir.path()), [erofs.as_str()]);
    cache.become_whole(&image.digest, &file).unwrap();
    cache.remove(&name, &Default::default(), false).unwrap();
    assert!(matches!(cache.become_whole(&image.digest, &file), Err(Error::Unknown(_))));
    for prune in [false, true] {
        server.pull_lazy(&cache).await.unwrap().unwrap();
        match prune {
            true => {
                drop(cache.prune(&Prune { which: Selection::All, ..Prune::default() }).unwrap())
            }
            false => drop(cache.remove(&name, &Default::default(), false).unwrap()),
        }
        assert!(files(dir.path()).is_empty());
    }
}

#[tokio::test]
async fn a_crash_leaves_no_map_without_its_image_nor_an_image_without_its_map() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let server = Server::start(Ranges::Sent);
    server.put(&layers());
    let image = server.pull_lazy(&cache).await.unwrap().unwrap();
    let map = cache.map_path(&image.digest);
    let stray = dir.path().join(format!("{}.map", Digest::of(b"stray").hex()));
    let half = dir.path().join("work").join(format!("{}-aB3.map", Digest::of(b"half").hex()));
    std::fs::write(&stray, "").unwrap();
    std::fs::write(&half, "").unwrap();
    let cache = open(dir.path());
    assert!(!stray.exists() && !half.exists() && map.exists());
    // The image cannot be filled without its map, so it is pulled anew, also by a process that has
    // the cache open.
    std::fs::remove_file(&map).unwrap();
    let again = server.pull_lazy(&cache).await.unwrap().unwrap();
    assert!(again.lazy && map.exists());
    std::fs::remove_file(&map).unwrap();
    let cache = open(dir.path());
    assert!(cache.list().unwrap().is_empty() && files(dir.path()).is_empty());
    // A crash between the index and the removal of the map leaves the map of a whole image.
    let image = server.pull_lazy(&cache).await.unwrap().unwrap();
    let kept = std::fs::read(&map).unwrap();
    let file = std::fs::File::open(&image.erofs_path).unwrap();
    cache.become_whole(&image.digest, &file).unwrap();
    std::fs::write(&map, kept).unwrap();
    assert!(!open(dir.path()).list().unwrap()[0].lazy);
    assert!(!map.exists() && image.erofs_path.exists());
}

/// An index that was written before there were lazy images has none.
#[tokio::test]
async fn older_records_are_of_whole_images() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let layout = Layout::of(&[gzip(&Tar::new().file("x", "1").end())]);
    let source = Source::OciLayout(layout.path().to_owned(), None);
    cache.import(&source, None, NameConflict::Refuse, Arc::new(Silent)).await.unwrap();
    let path = dir.path().join("index.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&text).unwrap();
    for record in index["images"].as_object_mut().unwrap().values_mut() {
        assert_eq!(record.as_object_mut().unwrap().remove("lazy"), Some(false.into()));
    }
    std::fs::write(&path, index.to_string()).unwrap();
    let list = open(dir.path()).list().unwrap();
    assert_eq!(list.iter().map(|image| image.lazy).collect::<Vec<_>>(), [false]);
}
