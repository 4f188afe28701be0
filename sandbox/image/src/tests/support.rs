//! Archives, layouts and lookups that several tests use.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tar::{EntryType, Header};

use crate::root::Form;
use crate::root::merge::{MergeError, Merger};
use crate::root::tree::{NodeKind, ROOT, Tree};
use crate::{Digest, Event, Limits, Progress};

/// A tar archive under construction. Its headers are made by the `tar` crate, so that this crate's
/// own writer is not checked against itself.
#[derive(Default)]
pub struct Tar(Vec<u8>);

impl Tar {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn raw(self, kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(if kind == EntryType::Directory { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(data.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        self.header(&header).data(data)
    }

    pub fn header(mut self, header: &Header) -> Self {
        self.0.extend_from_slice(header.as_bytes());
        self
    }

    pub fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, name: &str, data: &str) -> Self {
        self.raw(EntryType::Regular, name.as_bytes(), b"", data.as_bytes())
    }

    pub fn dir(self, name: &str) -> Self {
        self.raw(EntryType::Directory, name.as_bytes(), b"", b"")
    }

    /// Adds a folder as archives from before POSIX have it: a file of type 0 whose name ends with a
    /// slash.
    pub fn old_dir(self, name: &str) -> Self {
        let mut header = Header::new_old();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(0);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkflag = [0];
        header.set_cksum();
        self.header(&header)
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.raw(EntryType::Symlink, name.as_bytes(), target.as_bytes(), b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.raw(EntryType::Link, name.as_bytes(), target.as_bytes(), b"")
    }

    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut body = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut len = rest + 1;
            while len != rest + len.to_string().len() {
                len += 1;
            }
            body.extend_from_slice(format!("{len} {key}=").as_bytes());
            body.extend_from_slice(value);
            body.push(b'\n');
        }
        self.raw(EntryType::XHeader, b"pax", b"", &body)
    }

    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub fn in_file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

pub fn merge_with(limits: &Limits, layers: &[Vec<u8>]) -> Result<(Tree, Vec<File>), MergeError> {
    let mut merger = Merger::new(limits);
    let files: Vec<_> = layers.iter().map(|bytes| in_file(bytes)).collect();
    for file in &files {
        merger.apply(file, Form::Changes)?;
    }
    Ok((merger.finish(), files))
}

pub fn merge(layers: &[Vec<u8>]) -> Result<Vec<String>, MergeError> {
    merge_with(&Limits::default(), layers).map(|(tree, files)| show(&tree, &files))
}

/// Returns one line per name: `d a/`, `f a/x content`, `l a/s -> t`, `p fifo`, `c dev 1,3`. Names
/// that share an inode show its number of names.
pub fn show(tree: &Tree, layers: &[File]) -> Vec<String> {
    fn content(tree: &Tree, id: crate::root::tree::Id, layers: &[File]) -> String {
        use std::os::unix::fs::FileExt;
        let NodeKind::File(data) = &tree.inode(id).kind else { return String::new() };
        let mut bytes = vec![b'.'; data.len as usize];
        for piece in &data.pieces {
            let range = &mut bytes[piece.at as usize..(piece.at + piece.len) as usize];
            layers[data.layer as usize].read_exact_at(range, piece.from).unwrap();
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
    fn below(
        tree: &Tree,
        id: crate::root::tree::Id,
        path: &str,
        layers: &[File],
        out: &mut Vec<(crate::root::tree::Id, String)>,
    ) {
        for (name, child) in tree.children(id) {
            let path = format!("{path}{}", String::from_utf8_lossy(name));
            let line = match &tree.inode(child.id).kind {
                NodeKind::Directory(_) => format!("d {path}/"),
                NodeKind::File(_) => format!("f {path} {}", content(tree, child.id, layers)),
                NodeKind::Symlink(to) => format!("l {path} -> {}", String::from_utf8_lossy(to)),
                NodeKind::Char((a, b)) => format!("c {path} {a},{b}"),
                NodeKind::Block((a, b)) => format!("b {path} {a},{b}"),
                NodeKind::Fifo => format!("p {path}"),
            };
            out.push((child.id, line));
            below(tree, child.id, &format!("{path}/"), layers, out);
        }
    }
    let mut lines = Vec::new();
    below(tree, ROOT, "", layers, &mut lines);
    let count = |id| lines.iter().filter(|(other, _)| *other == id).count();
    let shown = lines.iter().map(|(id, line)| match count(*id) {
        1 => line.clone(),
        n => format!("{line} ({n} names)"),
    });
    shown.collect()
}

/// A blob and its uncompressed content.
#[derive(Clone)]
pub struct Blob {
    pub bytes: Vec<u8>,
    pub diff_id: Digest,
    pub kind: &'static str,
}

pub fn gzip(tar: &[u8]) -> Blob {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(tar).unwrap();
    let bytes = encoder.finish().unwrap();
    Blob { bytes, diff_id: Digest::of(tar), kind: "application/vnd.oci.image.layer.v1.tar+gzip" }
}

pub fn zstd(tar: &[u8]) -> Blob {
    let bytes = ::zstd::encode_all(tar, 1).unwrap();
    Blob { bytes, diff_id: Digest::of(tar), kind: "application/vnd.oci.image.layer.v1.tar+zstd" }
}

pub fn plain(tar: &[u8]) -> Blob {
    let kind = "application/vnd.oci.image.layer.v1.tar";
    Blob { bytes: tar.to_vec(), diff_id: Digest::of(tar), kind }
}

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub fn config_json(arch: &str, layers: &[Blob]) -> String {
    let ids: Vec<_> = layers.iter().map(|l| format!("\"{}\"", l.diff_id)).collect();
    format!(
        r#"{{"architecture":"{arch}","os":"linux","created":"2024-05-06T07:08:09Z",
        "config":{{"Env":["PATH=/bin"],"Cmd":["sh"],"WorkingDir":"/w"}},
        "rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        ids.join(",")
    )
}

pub fn descriptor(kind: &str, bytes: &[u8], more: &str) -> String {
    let (digest, size) = (Digest::of(bytes), bytes.len());
    format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":{size}{more}}}"#)
}

pub fn manifest_json(config: &str, layers: &[Blob]) -> String {
    let layers: Vec<_> = layers.iter().map(|l| descriptor(l.kind, &l.bytes, "")).collect();
    format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
        descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes(), ""),
        layers.join(",")
    )
}

pub fn index_json(entries: &[String]) -> String {
    format!(r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{}]}}"#, entries.join(","))
}

/// An OCI layout in a folder.
pub struct Layout {
    pub dir: tempfile::TempDir,
    pub entries: Vec<String>,
}

impl Layout {
    pub fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        std::fs::write(dir.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let layout = Self { dir, entries: Vec::new() };
        layout.write_index();
        layout
    }

    /// Makes a layout with one image of these layers.
    pub fn of(layers: &[Blob]) -> Self {
        let mut layout = Self::empty();
        let manifest = layout.image("amd64", layers);
        layout.list(MANIFEST, &manifest, "");
        layout
    }

    pub fn blob(&self, bytes: &[u8]) -> PathBuf {
        let path = self.blob_path(&Digest::of(bytes));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.dir.path().join("blobs/sha256").join(digest.hex())
    }

    /// Adds the blobs of an image and returns its manifest.
    pub fn image(&self, arch: &str, layers: &[Blob]) -> String {
        layers.iter().for_each(|layer| drop(self.blob(&layer.bytes)));
        let config = config_json(arch, layers);
        self.blob(config.as_bytes());
        let manifest = manifest_json(&config, layers);
        self.blob(manifest.as_bytes());
        manifest
    }

    /// Adds an entry to index.json.
    pub fn list(&mut self, kind: &str, document: &str, more: &str) {
        self.blob(document.as_bytes());
        self.entries.push(descriptor(kind, document.as_bytes(), more));
        self.write_index();
    }

    fn write_index(&self) {
        std::fs::write(self.path().join("index.json"), index_json(&self.entries)).unwrap();
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// A progress receiver that keeps every event as text.
#[derive(Default)]
pub struct Log(pub Mutex<Vec<String>>);

impl Progress for Log {
    fn event(&self, event: Event<'_>) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

impl Log {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn has(&self, word: &str) -> bool {
        self.0.lock().unwrap().iter().any(|line| line.starts_with(word))
    }
}

/// Returns a command of erofs-utils: from the tool root `$SLIPWAY_TOOLS` (by default the one that
/// set-up makes), or from `PATH`. Returns `None` if there is none.
pub fn tool(name: &str) -> Option<Vec<OsString>> {
    let root = std::env::var_os("SLIPWAY_TOOLS").unwrap_or("/var/lib/slipway/tools".into());
    let installed = Path::new(&root).join("bin").join(name);
    if installed.exists() {
        return Some(vec![installed.into()]);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.exists());
    found.map(|program| vec![program.into()])
}

/// Prints that a test is skipped, past the test harness, which would capture the line.
pub fn skip(test: &str, needs: &str) {
    let line = format!("SKIPPED: {test}: needs {needs}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Returns a `mkfs.erofs` that reads archives (1.7 or newer). Returns `None` after printing that
/// the test is skipped.
pub fn mkfs(test: &str) -> Option<Vec<OsString>> {
    let found = tool("mkfs.erofs").filter(|command| {
        let mut help = std::process::Command::new(&command[0]);
        let help = help.args(&command[1..]).arg("--help").output();
        let help = help.map(|output| [output.stdout, output.stderr].concat());
        help.is_ok_and(|help| String::from_utf8_lossy(&help).contains("--tar="))
    });
    if found.is_none() {
        skip(test, "mkfs.erofs 1.7 or newer (SLIPWAY_TOOLS or PATH)");
    }
    found
}

/// Returns whether there are programs that read images: `fsck.erofs` and `dump.erofs`. If not,
/// prints that the test is skipped.
pub fn readers(test: &str) -> bool {
    let found = tool("fsck.erofs").is_some() && tool("dump.erofs").is_some();
    if !found {
        skip(test, "fsck.erofs and dump.erofs (SLIPWAY_TOOLS or PATH)");
    }
    found
}

/// Unpacks an image file with `fsck.erofs`, an independent implementation of the format.
pub fn extract(erofs: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let command = tool("fsck.erofs").expect("`readers` has found it");
    let output = std::process::Command::new(&command[0])
        .args(&command[1..])
        .arg(format!("--extract={}", dir.path().join("root").display()))
        .args(["--no-preserve-owner", "--xattrs"])
        .arg(erofs)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    dir
}

/// Returns the output of `dump.erofs` for a path in an image file.
pub fn dump(erofs: &Path, path: &str) -> String {
    let command = tool("dump.erofs").expect("`readers` has found it");
    let output = std::process::Command::new(&command[0])
        .args(&command[1..])
        .arg(format!("--path={path}"))
        .arg(erofs)
        .output()
        .unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Returns the content of a folder: each path with its content, link target or type.
pub fn tree_of(dir: &Path) -> BTreeMap<String, String> {
    fn walk(base: &Path, dir: &Path, out: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(base).unwrap().display().to_string();
            let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
            let text = if kind.is_dir() {
                walk(base, &path, out);
                "dir".into()
            } else if kind.is_symlink() {
                format!("-> {}", std::fs::read_link(&path).unwrap().display())
            } else if kind.is_file() {
                String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned()
            } else {
                "special".into()
            };
            out.insert(name, text);
        }
    }
    let mut out = BTreeMap::new();
    walk(dir, dir, &mut out);
    out
}
