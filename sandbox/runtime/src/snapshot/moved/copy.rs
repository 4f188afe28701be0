//! The copying of a snapshot's files from one directory to another.

use std::io::{self, Read, Write};

use slipway_hypervisor::MAX_STATE_BYTES;
use slipway_space::Allowance;

use crate::snapshot::folder::Folder;
use crate::templates::pages::copy_pages_if;
use crate::templates::{DiskFile, MACHINE, MEMORY, Manifest, digest};
use crate::{Error, Result};

/// The operation that fails if a file system does not tell its free space.
const NO_SPACE: &str = "cannot find the free space of";

/// Returns the space that a copy to a directory may take.
///
/// # Errors
/// [`Error::File`].
pub(super) fn space_of(dir: &Folder) -> Result<Allowance> {
    Allowance::of(dir).map_err(Error::file(NO_SPACE, dir.own_path()))
}

/// A file of pages as the description has it.
struct PagesFile<'a> {
    name: &'a str,
    bytes: u64,
    /// The bytes of its pages that are not all zeros.
    data_bytes: u64,
    sha256: &'a str,
}

impl<'a> PagesFile<'a> {
    /// Returns the memory's file.
    fn memory(manifest: &'a Manifest) -> Self {
        Self {
            name: MEMORY,
            bytes: manifest.shape.memory_file_bytes(),
            data_bytes: manifest.touched_bytes,
            sha256: &manifest.memory_sha256,
        }
    }

    /// Returns the file of a disk.
    fn disk(file: &'a DiskFile) -> Self {
        let DiskFile { name, bytes, data_bytes, sha256 } = file;
        Self { name, bytes: *bytes, data_bytes: *data_bytes, sha256 }
    }
}

/// The bytes that were copied of each file: pages that are all zeros are left out.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) memory: u64,
    /// In the order of the description.
    pub(super) disks: Vec<u64>,
}

/// Copies the files that a description names, and checks them. Returns the number of bytes copied:
/// pages that are all zeros are left out.
///
/// # Errors
/// [`Error::Invalid`] if a file is not as its description says, or there is no space for the data;
/// [`Error::File`], also if the space has become too little meanwhile.
pub(super) fn copy(
    manifest: &Manifest,
    from: &Folder,
    to: &mut Folder,
    mut space: Allowance,
) -> Result<Copied> {
    let memory = PagesFile::memory(manifest);
    let disks = manifest.snapshot.iter().flat_map(|snapshot| &snapshot.files);
    let disks: Vec<_> = disks.map(PagesFile::disk).collect();
    check_space(&memory, &disks, to, &space)?;
    copy_machine(&manifest.machine_sha256, from, to)?;
    let mut copy_one = |part: &PagesFile<'_>| copy_part(part, from, to, &mut space);
    let memory = copy_one(&memory)?;
    let disks = disks.iter().map(copy_one).collect::<Result<Vec<_>>>()?;
    Ok(Copied { memory, disks })
}

/// Checks that the directory has space for the data of all files together. The description says how
/// much that is, and no file is copied with more. The files' own extents would not do: zeros are
/// data in a directory that was unpacked from an archive, and are not copied.
///
/// # Errors
/// [`Error::Invalid`], [`Error::File`].
fn check_space(
    memory: &PagesFile<'_>,
    disks: &[PagesFile<'_>],
    to: &Folder,
    space: &Allowance,
) -> Result<()> {
    let disks = disks.iter().map(|disk| disk.data_bytes);
    let data = disks.fold(memory.data_bytes, u64::saturating_add);
    let left = space.left(to).map_err(Error::file(NO_SPACE, to.own_path()))?;
    if data <= left {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the snapshot has {} MiB of data, and {} has space for {} MiB beside the {} MiB that stay \
         free: free some of it",
        data >> 20,
        to.own_path().display(),
        left >> 20,
        space.reserve >> 20
    )))
}

fn copy_machine(sha256: &str, from: &Folder, to: &mut Folder) -> Result<()> {
    let (file, _) = from.file(MACHINE)?;
    let mut state = Vec::new();
    let read = file.take(MAX_STATE_BYTES as u64).read_to_end(&mut state);
    read.map_err(Error::file("cannot read", from.path(MACHINE)))?;
    if digest(&state) != sha256 {
        return Err(from.wrong(MACHINE, CHANGED));
    }
    let written = to.create(MACHINE)?.write_all(&state);
    written.map_err(Error::file("cannot write", to.path(MACHINE)))
}

/// The reason for which a file with another digest is refused.
const CHANGED: &str = "is not as its snapshot's description says: it was changed";

/// Copies a file with its holes. Returns the number of bytes copied: pages that are all zeros are
/// left out.
fn copy_part(
    part: &PagesFile<'_>,
    from: &Folder,
    to: &mut Folder,
    space: &mut Allowance,
) -> Result<u64> {
    let (file, len) = from.file(part.name)?;
    if len != part.bytes {
        return Err(from.wrong(part.name, "has another length than its description says"));
    }
    let copy = to.create(part.name)?;
    let (mut described, mut exceeds) = (part.data_bytes, false);
    let allow = |bytes: u64| {
        let Some(left) = described.checked_sub(bytes) else {
            exceeds = true;
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        };
        described = left;
        space.take(&copy, bytes)
    };
    let copied = copy.set_len(len).and_then(|()| copy_pages_if(&file, len, &copy, allow));
    if exceeds {
        return Err(
            from.wrong(part.name, "has more data than its description says: it was changed")
        );
    }
    let (bytes, sha256) = copied.map_err(Error::file("cannot copy", from.path(part.name)))?;
    match sha256 == part.sha256 {
        true => Ok(bytes),
        false => Err(from.wrong(part.name, CHANGED)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::moved::checks::PAGE;
    use crate::snapshot::moved::tests::make;

    #[test]
    fn a_snapshot_takes_no_more_space_than_the_node_can_give() {
        let dir = tempfile::tempdir().unwrap();
        let [own, out] = ["web", "out"].map(|name| dir.path().join(name));
        let mut manifest = make(&own);
        std::fs::create_dir(&out).unwrap();
        let (from, mut to) = (Folder::open(&own).unwrap(), Folder::open(&out).unwrap());
        // The data of all files together is more than there is, that of each is not.
        let left = Allowance::keeping(0).left(&to).unwrap();
        manifest.touched_bytes = left / 4 * 3;
        manifest.snapshot.as_mut().unwrap().files[0].data_bytes = left / 4 * 3;
        let refused =
            copy(&manifest, &from, &mut to, Allowance::keeping(0)).unwrap_err().to_string();
        assert!(refused.contains("has space for") && !refused.contains('\n'), "{refused}");
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);
        // The space has become too little since it was checked.
        let manifest = make(&dir.path().join("again"));
        let part = PagesFile::memory(&manifest);
        let mut space = Allowance::keeping(u64::MAX);
        let full = copy_part(&part, &from, &mut to, &mut space).unwrap_err().to_string();
        assert!(full.contains("cannot copy") && full.contains("stay free"), "{full}");
        let less = PagesFile {
            data_bytes: PAGE - 1,
            ..PagesFile::disk(&manifest.snapshot.as_ref().unwrap().files[0])
        };
        let mut space = Allowance::keeping(0);
        let more = copy_part(&less, &from, &mut to, &mut space).unwrap_err().to_string();
        assert!(more.contains("has more data than"), "{more}");
    }
}
