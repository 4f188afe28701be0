//! Snapshots as directories of the host, which can be copied to another node.
//!
//! Such a directory has the files of a snapshot as they are beside the templates. It is not
//! trusted: only regular files are read, each as long as the description says, and a snapshot gets
//! its name once each file has the digest that the description gives. A path that the description
//! names beside its own files would be one of this host: the image's is replaced, and a snapshot
//! with another one is refused. Sizes are bounded by those of this node ([`checks`]), and a copy
//! leaves free space to others ([`Allowance`](slipway_space::Allowance)).

mod checks;
mod copy;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use self::checks::{check, check_image, clamp_to_node};
use self::copy::{copy, space_of};
use super::folder::Folder;
use crate::error::MOST_MESSAGE;
use crate::node::Node;
use crate::templates::{
    MANIFEST, MOST_MANIFEST, Manifest, Unfinished, apart, check_chosen, read_manifest,
};
use crate::v1::{ImportSnapshotRequest, RunSpec};
use crate::{Error, Result, layers, name};

/// Copies the files of the snapshot `name` into the directory `path`, which is empty.
///
/// # Errors
/// The directory is empty after an error.
/// - [`Error::Invalid`]: the path is not absolute, or the directory is not empty.
/// - [`Error::Invalid`]: the snapshot cannot be moved, was changed, or has more data than there is
///   space for.
/// - [`Error::NoTemplate`]: there is no such snapshot.
/// - [`Error::File`]: a file cannot be read or written, or the space has become too little.
pub(crate) async fn export(node: &Node, name: &str, path: &str) -> Result<()> {
    name::check_template(name)?;
    let (from, name, to) = (node.templates.place(name), name.to_owned(), absolute(path)?);
    apart(move || write_out(&from, &name, &to)).await
}

/// Copies a snapshot in from a directory, under the name that is asked for, or if that is empty
/// under the name that it had.
///
/// # Errors
/// Nothing is left after an error.
/// - [`Error::Invalid`]: the path is not absolute, or no snapshot that can be moved is there.
/// - [`Error::Invalid`]: the snapshot has another image than is asked for, or is too large for this
///   node, or was changed.
/// - [`Error::NoImage`]: the node does not have the snapshot's image.
/// - [`Error::TemplateTaken`]: a template or snapshot has the name.
/// - [`Error::File`]: a file cannot be read or written, or the space has become too little.
pub(crate) async fn import(node: &Node, asked: &ImportSnapshotRequest) -> Result<Manifest> {
    let ImportSnapshotRequest { path, name, image_digest } = asked;
    let path = absolute(path)?;
    let (from, mut manifest) = apart(move || read(&path)).await?;
    if !name.is_empty() {
        name.clone_into(&mut manifest.name);
    }
    check_chosen(&manifest.name)?;
    check_image(&manifest, image_digest)?;
    let layer_limit = layers::by_default(&node.config)?;
    let destination = node.templates.place(&manifest.name);
    let bounded = apart(move || {
        clamp_to_node(&mut manifest, layer_limit, &destination)?;
        Ok(manifest)
    });
    let mut manifest = bounded.await?;
    let image = manifest.snapshot.as_ref().map(|snapshot| snapshot.settings.image_digest.as_str());
    let unfinished = node.templates.begin_snapshot(&manifest.name, image.unwrap_or("")).await?;
    // From here on nobody removes the image.
    find_image(node, &mut manifest).await?;
    apart(move || read_in(&from, unfinished, manifest)).await
}

fn absolute(path: &str) -> Result<PathBuf> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Error::Invalid(format!("{path:?} is no absolute path of a directory")))
}

fn write_out(from: &Path, name: &str, to: &Path) -> Result<()> {
    let manifest = read_manifest(from, name)?;
    let unmovable = |why: String| Error::Invalid(format!("{name} cannot be moved: {why}"));
    check(&manifest).map_err(unmovable)?;
    let (from, mut to) = (Folder::open(from)?, Folder::open(to)?);
    to.check_empty()?;
    let space = space_of(&to)?;
    let copied = copy(&manifest, &from, &mut to, space).and_then(|_| describe(&manifest, &mut to));
    if copied.is_err() {
        to.undo();
    }
    copied
}

/// Writes the description, without which nothing else in the directory is a snapshot.
fn describe(manifest: &Manifest, to: &mut Folder) -> Result<()> {
    let json = manifest.to_json().map_err(io::Error::from);
    let json = json.map_err(Error::file("cannot write", to.path(MANIFEST)))?;
    let written = to.create(MANIFEST)?.write_all(&json);
    written.map_err(Error::file("cannot write", to.path(MANIFEST)))
}

/// Reads and checks the description in a directory.
fn read(path: &Path) -> Result<(Folder, Manifest)> {
    let from = Folder::open(path)?;
    let (file, len) = from.file(MANIFEST)?;
    if len > MOST_MANIFEST {
        return Err(from.wrong(MANIFEST, "is too large for a snapshot's description"));
    }
    let mut json = Vec::new();
    let read = file.take(MOST_MANIFEST).read_to_end(&mut json);
    read.map_err(Error::file("cannot read", from.path(MANIFEST)))?;
    Ok((from, parse(&json, path)?))
}

/// Parses and checks the description in the directory `path`.
fn parse(json: &[u8], path: &Path) -> Result<Manifest> {
    checked(Manifest::parse_any(json), path)
}

/// Checks what was parsed of the description in the directory `path`.
fn checked(parsed: std::result::Result<Manifest, String>, path: &Path) -> Result<Manifest> {
    let checked = parsed.and_then(|parsed| check(&parsed).map(|()| parsed));
    checked.map_err(|why| {
        let what = format!("{} has no snapshot that can be moved: {why}", path.display());
        Error::Invalid(slipway_printable::line(&what, MOST_MESSAGE))
    })
}

/// Gives the container of a snapshot the file of its image in the node's cache.
async fn find_image(node: &Node, manifest: &mut Manifest) -> Result<()> {
    let Some(snapshot) = &mut manifest.snapshot else { return Ok(()) };
    let settings = &mut snapshot.settings;
    let asked = RunSpec { image_digest: settings.image_digest.clone(), ..RunSpec::default() };
    let image = match node.image(&asked).await {
        Err(Error::NoImage(_)) => return Err(Error::NoImage(settings.image.clone())),
        found => found?,
    };
    (settings.image_path, settings.lazy) = (image.erofs_path, image.lazy);
    Ok(())
}

/// Copies a snapshot in, and gives it its name.
fn read_in(from: &Folder, unfinished: Unfinished, mut manifest: Manifest) -> Result<Manifest> {
    let mut to = Folder::open(unfinished.dir())?;
    let space = space_of(&to)?;
    let copied = copy(&manifest, from, &mut to, space)?;
    manifest.touched_bytes = copied.memory;
    if let Some(snapshot) = &mut manifest.snapshot {
        for (file, bytes) in snapshot.files.iter_mut().zip(copied.disks) {
            file.data_bytes = bytes;
        }
    }
    unfinished.finish(&manifest)?;
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use slipway_image::Digest;
    use slipway_plane_api::PlaneClient;
    use tonic::transport::Endpoint;

    use super::checks::PAGE;
    use super::*;
    use crate::memory::of_host;
    use crate::record::LAYER;
    use crate::resize::ROOM_UNIT;
    use crate::snapshot::begin::tests::snapshot;
    use crate::snapshot::disks::names;
    use crate::templates::manifest::tests::manifest;
    use crate::templates::pages::measure_pages;
    use crate::templates::{DiskFile, MACHINE, MEMORY, Snapshot, Templates, create_file, digest};

    const DISK: u64 = 8 << 20;

    /// Makes the snapshot "web" in the directory `dir`.
    pub(super) fn make(dir: &Path) -> Manifest {
        std::fs::create_dir(dir).unwrap();
        let (mut manifest, mut snapshot) = (manifest("web"), snapshot());
        snapshot.volumes.truncate(1);
        snapshot.settings.image_digest = Digest::of(b"i").to_string();
        let write = |name: &str, bytes: u64| {
            let file = create_file(&dir.join(name)).unwrap();
            file.set_len(bytes).unwrap();
            file.write_all_at(name.as_bytes(), bytes / 2).unwrap();
            measure_pages(&file, bytes).unwrap()
        };
        (manifest.touched_bytes, manifest.memory_sha256) =
            write(MEMORY, manifest.shape.memory_file_bytes());
        let described = names(&snapshot.volumes).map(|name| {
            let (data_bytes, sha256) = write(&name, DISK);
            DiskFile { name, bytes: DISK, data_bytes, sha256 }
        });
        snapshot.files = described.collect();
        std::fs::write(dir.join(MACHINE), "state").unwrap();
        manifest.machine_sha256 = digest(b"state");
        manifest.snapshot = Some(snapshot);
        std::fs::write(dir.join(MANIFEST), manifest.to_json().unwrap()).unwrap();
        manifest
    }

    /// Returns the templates of a node whose plane is not there.
    fn templates(dir: &Path) -> Templates {
        let plane = PlaneClient::new(Endpoint::from_static("http://[::1]:1").connect_lazy());
        Templates::new(dir.to_owned(), plane, 0)
    }

    fn count(dir: &Path) -> usize {
        std::fs::read_dir(dir).unwrap().count()
    }

    #[tokio::test]
    async fn a_snapshot_is_copied_out_and_in_under_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let [own, out, node] = ["web", "out", "node"].map(|name| dir.path().join(name));
        make(&own);
        std::fs::create_dir(&out).unwrap();
        write_out(&own, "web", &out).unwrap();
        let (from, mut manifest) = read(&out).unwrap();
        "new".clone_into(&mut manifest.name);
        let all = templates(&node);
        let unfinished = all.begin("new").await.unwrap();
        let manifest = read_in(&from, unfinished, manifest).unwrap();
        assert_eq!(all.list().await, std::slice::from_ref(&manifest));
        let disks = manifest.snapshot.unwrap().files;
        let data = [manifest.touched_bytes, disks[0].data_bytes, disks[1].data_bytes];
        assert_eq!(data, [PAGE; 3]);
        for name in [MACHINE, MEMORY, LAYER, "volume-own"] {
            let written = std::fs::read(own.join(name)).unwrap();
            for copy in [out.join(name), node.join("new").join(name)] {
                // The copy is no link, and has the holes.
                let status = std::fs::metadata(&copy).unwrap();
                assert_eq!((status.nlink(), status.blocks() * 512 < 1 << 20), (1, true));
                assert!(std::fs::read(&copy).unwrap() == written, "{}", copy.display());
            }
        }
        let again = write_out(&own, "web", &out).unwrap_err().to_string();
        assert!(again.contains("is not empty"), "{again}");
        assert_eq!(count(&out), 5);
    }

    /// Copies a snapshot after a change of its directory, out and in, which both fail. Returns the
    /// error.
    async fn refused(change: fn(&Path)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let [own, out, node] = ["web", "out", "node"].map(|name| dir.path().join(name));
        make(&own);
        change(&own);
        let (from, manifest) = read(&own).unwrap();
        let unfinished = templates(&node).begin("web").await.unwrap();
        let error = read_in(&from, unfinished, manifest).unwrap_err().to_string();
        std::fs::create_dir(&out).unwrap();
        assert!(write_out(&own, "web", &out).is_err());
        assert_eq!((count(&node), count(&out)), (0, 0), "{error}");
        assert!(!error.contains('\n'), "{error}");
        error
    }

    fn change(file: &Path, at: u64) {
        let file = std::fs::File::options().write(true).open(file).unwrap();
        file.write_all_at(b"X", at).unwrap();
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_snapshot_that_was_changed() {
        let changed = refused(|dir| change(&dir.join(MACHINE), 0)).await;
        assert!(changed.contains("machine is not as"), "{changed}");
        for changed in [
            refused(|dir| change(&dir.join(MEMORY), 4096)).await,
            refused(|dir| change(&dir.join("volume-own"), DISK - 1)).await,
        ] {
            assert!(changed.contains("was changed"), "{changed}");
        }
        let longer = refused(|dir| change(&dir.join(LAYER), DISK)).await;
        assert!(longer.contains("another length"), "{longer}");
        let gone = refused(|dir| std::fs::remove_file(dir.join(LAYER)).unwrap()).await;
        assert!(gone.contains("cannot read"), "{gone}");
        let link = refused(|dir| {
            std::fs::rename(dir.join(LAYER), dir.join("other")).unwrap();
            std::os::unix::fs::symlink("other", dir.join(LAYER)).unwrap();
        });
        let link = link.await;
        assert!(link.contains("cannot read"), "{link}");
        let fifo = refused(|dir| {
            std::fs::remove_file(dir.join(MEMORY)).unwrap();
            let mode = Mode::RUSR | Mode::WUSR;
            mknodat(CWD, dir.join(MEMORY), FileType::Fifo, mode, 0).unwrap();
        });
        let fifo = fifo.await;
        assert!(fifo.contains("no regular file"), "{fifo}");
    }

    #[test]
    fn a_directory_without_a_sound_description_is_refused_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let refused = || read(dir.path()).err().unwrap().to_string();
        assert!(refused().contains("cannot read"));
        for (text, why) in [("{", "damaged"), ("{\"version\": 9}", "layout 9")] {
            std::fs::write(dir.path().join(MANIFEST), text).unwrap();
            let error = refused();
            assert!(error.contains(why) && !error.contains('\n'), "{error}");
        }
        let large = std::fs::File::create(dir.path().join(MANIFEST)).unwrap();
        large.set_len(MOST_MANIFEST + 1).unwrap();
        assert!(refused().contains("too large"));
        assert!(absolute("relative").is_err() && absolute("").is_err());
    }

    #[test]
    fn a_description_names_files_of_its_own_only() {
        let dir = tempfile::tempdir().unwrap();
        let whole = make(&dir.path().join("web"));
        assert_eq!(check(&whole), Ok(()));
        let refused = |change: fn(&mut Snapshot)| {
            let mut manifest = whole.clone();
            change(manifest.snapshot.as_mut().unwrap());
            check(&manifest).unwrap_err()
        };
        assert!(refused(|one| one.kernel = Some("/k".into())).contains("--kernel"));
        assert!(refused(|one| one.cpus = 3).contains("CPUs"));
        assert!(refused(|one| one.origin.disks = "../..".into()).contains("disks"));
        assert!(refused(|one| one.origin.slots = 2).contains("slots"));
        assert!(refused(|one| one.plugged_bytes = 1).contains("plugged memory"));
        let room = |bytes| {
            let mut manifest = whole.clone();
            manifest.shape.room_bytes = bytes;
            check(&manifest)
        };
        assert_eq!(room(256 << 20), Ok(()));
        for bytes in [1, 64 << 20, 257 << 30, u64::MAX] {
            assert!(room(bytes).unwrap_err().contains("the size of its memory"), "{bytes}");
        }
        let mut binds = whole.clone();
        binds.shape.region_bytes = 128 << 20;
        assert!(check(&binds).unwrap_err().contains("memory of containers"));
        assert!(refused(|one| one.settings.image_digest = "debian:12".into()).contains("image"));
        assert!(refused(|one| one.settings.image = "a\nb".into()).contains("image"));
        assert!(refused(|one| one.volumes[0].overlay = false).contains("of a host"));
        let other = "none of a snapshot's";
        assert!(refused(|one| one.volumes[0].path = "/etc/shadow".into()).contains(other));
        assert!(refused(|one| one.volumes[0].path = "layer".into()).contains(other));
        assert!(refused(|one| one.volumes[0].scratch_bytes = Some(1)).contains(other));
        assert!(refused(|one| one.volumes[0].name = "../x".into()).contains("is no name"));
        let files = "not those of its disks";
        assert!(refused(|one| one.files[0].name = "../layer".into()).contains(files));
        assert!(refused(|one| one.files.truncate(1)).contains(files));
        let twice = refused(|one| {
            one.volumes.push(one.volumes[0].clone());
            one.files.push(one.files[1].clone());
        });
        assert!(twice.contains(files), "{twice}");
        let many = refused(|one| {
            one.volumes = vec![one.volumes[0].clone(); 33];
        });
        assert!(many.contains("33 volumes are too many: at most 32"), "{many}");
        let mut template = whole.clone();
        template.snapshot = None;
        assert!(check(&template).unwrap_err().contains("a template"));
    }

    #[test]
    fn a_snapshot_has_no_bounds_of_another_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let whole = make(&dir.path().join("web"));
        let bounded = |change: fn(&mut Manifest)| {
            let mut manifest = whole.clone();
            change(&mut manifest);
            clamp_to_node(&mut manifest, 64 << 20, &dir.path().join("new")).map(|()| manifest)
        };
        assert_eq!(bounded(|_| {}).unwrap(), whole);
        let more = bounded(|one| one.snapshot.as_mut().unwrap().layers_bytes = u64::MAX);
        assert_eq!(more.unwrap().snapshot.unwrap().layers_bytes, 64 << 20);
        let adjusted = |adjustment: Option<i32>| {
            let mut manifest = whole.clone();
            manifest.snapshot.as_mut().unwrap().settings.process.oom_score_adj = adjustment;
            clamp_to_node(&mut manifest, 64 << 20, dir.path()).unwrap();
            manifest.snapshot.unwrap().settings.process.oom_score_adj
        };
        let adjusted = [None, Some(-1000), Some(i32::MIN), Some(900), Some(i32::MAX)].map(adjusted);
        assert_eq!(adjusted, [None, Some(0), Some(0), Some(900), Some(1000)]);
        let memory = bounded(|one| one.shape.memory_bytes = 1 << 62).unwrap_err().to_string();
        assert!(memory.contains("more than this host has"), "{memory}");
        let with_room = |room: u64| {
            let mut manifest = whole.clone();
            manifest.shape.room_bytes = room;
            clamp_to_node(&mut manifest, 64 << 20, dir.path())
        };
        // As much as a sandbox can be made with here, rounded up.
        let most = (of_host() - whole.shape.memory_bytes).next_multiple_of(ROOM_UNIT);
        with_room(most).unwrap();
        let room = with_room(most + ROOM_UNIT).unwrap_err().to_string();
        assert!(room.contains("more than this host has"), "{room}");
        let file = |at: usize, bytes: u64| {
            let mut manifest = whole.clone();
            manifest.snapshot.as_mut().unwrap().files[at].bytes = bytes;
            clamp_to_node(&mut manifest, 64 << 20, dir.path())
        };
        file(0, 1 << 40).unwrap();
        let layer = file(0, (1 << 40) + 1).unwrap_err().to_string();
        assert!(layer.contains("its root layer"), "{layer}");
        let volume = file(1, 1 << 62).unwrap_err().to_string();
        assert!(volume.contains("volume own of") && volume.contains("free"), "{volume}");
    }

    #[test]
    fn a_snapshot_with_another_image_than_is_asked_for_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = make(&dir.path().join("web"));
        check_image(&manifest, "").unwrap();
        check_image(&manifest, &Digest::of(b"i").to_string()).unwrap();
        let other = Digest::of(b"other").to_string();
        let error = check_image(&manifest, &other).unwrap_err().to_string();
        assert!(error.contains(&other) && !error.contains('\n'), "{error}");
    }
}
