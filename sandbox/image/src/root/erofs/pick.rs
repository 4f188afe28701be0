//! Chosen files of an image, by path.
//!
//! Paths are resolved within the image, as in a chroot: the host's files have no part in it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::File;

use super::MAX_LINK;
use super::volume::{self, FileKind, Inode, Volume};
use crate::root::tree::FileRun;

/// `MAXSYMLINKS` of Linux.
const MAX_SYMLINKS: usize = 40;
/// The most bytes of names of one folder.
const MAX_FOLDER: u64 = 64 << 20;
/// The most folders that one folder may be in.
const MAX_DEPTH: usize = 512;

/// The bounds of what is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// The most files, folders and links.
    pub entries: usize,
    /// The most bytes of all files.
    pub bytes: u64,
    /// The most bytes of the names that are read to find files. A folder on several paths counts
    /// with each of them, and with at least a block.
    pub names: u64,
}

/// A chosen file, folder or link.
#[derive(Debug)]
pub(crate) struct Picked {
    /// Permission bits with set-id and sticky bits.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub content: Content,
}

#[derive(Debug)]
pub(crate) enum Content {
    Folder,
    Link(Vec<u8>),
    /// A regular file: its length, and the runs of its bytes in the image.
    File(u64, Vec<FileRun>),
}

/// The names from the root to a file. A folder is before what is in it.
pub(crate) type PathNames = Vec<Vec<u8>>;

/// Returns the files at `paths` in the file system in `file`, with the folders that lead to them
/// and all that is in folders among them. A link is chosen as it is; where a link is on a path or
/// at its end, the path is followed beyond it. Paths that are missing are skipped, and so is what
/// is no file, folder or link.
///
/// # Errors
/// Text that says what is wrong with the file system, or which bound is exceeded.
pub(crate) fn pick(
    file: &File,
    paths: &[Vec<u8>],
    bounds: Bounds,
) -> Result<BTreeMap<PathNames, Picked>, String> {
    let volume = Volume::open(file)?;
    let mut picker = Picker { volume, bounds, bytes: 0, names: 0, picked: BTreeMap::new() };
    for path in paths {
        picker.path(path)?;
    }
    Ok(picker.picked)
}

/// The way along a path, and what is left of the path.
struct Walk {
    rest: VecDeque<Vec<u8>>,
    /// The names from the root to the current file.
    way: PathNames,
    root: u64,
    /// The folders from the root to the current one.
    numbers: Vec<u64>,
}

impl Walk {
    /// Begins at the root, whose number is `root`.
    fn begin(path: &[u8], root: u64) -> Self {
        Self { rest: names(path).collect(), way: Vec::new(), root, numbers: vec![root] }
    }

    /// Returns the number of the current folder.
    fn folder(&self) -> u64 {
        self.numbers.last().copied().unwrap_or(self.root)
    }

    fn go_up(&mut self) {
        if self.way.pop().is_some() {
            self.numbers.pop();
        }
    }

    /// Goes on along `target` in place of the link at which the way ends.
    fn follow(&mut self, target: &[u8]) {
        self.way.pop();
        if target.starts_with(b"/") {
            self.way.clear();
            self.numbers.truncate(1);
        }
        for name in names(target).collect::<Vec<_>>().into_iter().rev() {
            self.rest.push_front(name);
        }
    }
}

struct Picker<'a> {
    volume: Volume<'a>,
    bounds: Bounds,
    /// The bytes of all files so far.
    bytes: u64,
    /// The bytes of names that were read so far.
    names: u64,
    picked: BTreeMap<PathNames, Picked>,
}

impl Picker<'_> {
    /// Follows one path, and chooses what it meets.
    fn path(&mut self, path: &[u8]) -> Result<(), String> {
        let mut walk = Walk::begin(path, self.volume.root);
        let mut links = 0;
        while let Some(name) = walk.rest.pop_front() {
            if name == b".." {
                walk.go_up();
                continue;
            }
            let Some(number) = self.find(walk.folder(), &name)? else { return Ok(()) };
            let inode = self.volume.inode(number)?;
            walk.way.push(name);
            match inode.kind {
                FileKind::Directory if walk.rest.is_empty() => {
                    return self.all(walk.way, number, inode);
                }
                FileKind::Directory => {
                    self.take(&walk.way, &inode)?;
                    walk.numbers.push(number);
                }
                FileKind::Symlink => {
                    self.take(&walk.way, &inode)?;
                    links += 1;
                    if links > MAX_SYMLINKS {
                        return Ok(());
                    }
                    walk.follow(&self.volume.content(&inode, MAX_LINK)?);
                }
                // A file in the place of a folder: the path is missing.
                _ if !walk.rest.is_empty() => return Ok(()),
                _ => return self.take(&walk.way, &inode),
            }
        }
        // The path ends at a folder by `..`, or at the root.
        let number = walk.folder();
        let inode = self.volume.inode(number)?;
        self.all(walk.way, number, inode)
    }

    /// Chooses a folder and all that is in it. Links are not followed.
    fn all(&mut self, way: PathNames, number: u64, inode: Inode) -> Result<(), String> {
        // A folder with two names would have no end.
        let mut folders = HashSet::from([number]);
        self.take(&way, &inode)?;
        let mut open = vec![(way, inode)];
        while let Some((way, inode)) = open.pop() {
            if way.len() > MAX_DEPTH {
                return Err("folders that are nested too deep".into());
            }
            for (name, number) in self.names(&inode)? {
                let inode = self.volume.inode(number)?;
                let mut child = way.clone();
                child.push(name);
                self.take(&child, &inode)?;
                if inode.kind == FileKind::Directory {
                    if !folders.insert(number) {
                        return Err("a folder with two names".into());
                    }
                    open.push((child, inode));
                }
            }
        }
        Ok(())
    }

    /// Chooses one file, folder or link.
    fn take(&mut self, way: &PathNames, inode: &Inode) -> Result<(), String> {
        if way.is_empty() || self.picked.contains_key(way) {
            return Ok(());
        }
        let content = match inode.kind {
            FileKind::Directory => Content::Folder,
            FileKind::Symlink => Content::Link(self.volume.content(inode, MAX_LINK)?),
            FileKind::File => {
                self.bytes = self.bytes.saturating_add(inode.size);
                if self.bytes > self.bounds.bytes {
                    return Err(format!("files of more than {} bytes", self.bounds.bytes));
                }
                Content::File(inode.size, self.volume.pieces(inode)?)
            }
            _ => return Ok(()),
        };
        if self.picked.len() >= self.bounds.entries {
            return Err(format!("more than {} files", self.bounds.entries));
        }
        let Inode { mode, uid, gid, .. } = *inode;
        self.picked.insert(way.clone(), Picked { mode, uid, gid, content });
        Ok(())
    }

    fn find(&mut self, folder: u64, name: &[u8]) -> Result<Option<u64>, String> {
        let inode = self.volume.inode(folder)?;
        let found = self.names(&inode)?.into_iter().find(|(other, _)| other == name);
        Ok(found.map(|(_, number)| number))
    }

    /// Returns the names in a folder, with the numbers of their inodes.
    fn names(&mut self, inode: &Inode) -> Result<Vec<(Vec<u8>, u64)>, String> {
        if inode.size > MAX_FOLDER {
            return Err("a folder that is too long".into());
        }
        let (pieces, block) = (self.volume.pieces(inode)?, self.volume.block());
        self.names += inode.size.max(1).next_multiple_of(block);
        if self.names > self.bounds.names {
            return Err(format!("paths through folders of more than {} bytes", self.bounds.names));
        }
        let mut names = Vec::new();
        for at in (0..inode.size).step_by(block as usize) {
            let bytes = self.volume.range(&pieces, at, block.min(inode.size - at))?;
            let found = volume::names(&bytes)?.into_iter();
            names.extend(found.filter(|(name, _)| name != b"." && name != b".."));
        }
        Ok(names)
    }
}

/// Returns the names on a path.
fn names(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let names = path.split(|byte| *byte == b'/');
    names.filter(|name| !name.is_empty() && *name != b".").map(<[u8]>::to_vec)
}
