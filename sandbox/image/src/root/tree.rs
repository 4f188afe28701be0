//! The merged root as a tree of inodes in memory.
//!
//! Paths are resolved as in a chroot: symbolic links in the middle of a path are followed within
//! this tree, never on the host.

use std::cell::Cell;
use std::collections::BTreeMap;

/// The index of an inode in its [`Tree`]. Two names with the same index are hard links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id(u32);

impl Id {
    /// Returns the index, which is below [`Tree::inodes`].
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The index of the root folder.
pub(crate) const ROOT: Id = Id(0);

/// `MAXSYMLINKS` of Linux.
const MAX_SYMLINKS: usize = 40;
/// `NAME_MAX` of Linux and `EROFS_NAME_LEN`.
pub(super) const MAX_NAME: usize = 255;
/// The most extended attributes of a file. Files of ordinary images have one or two.
const MAX_ATTRIBUTES: usize = 64;

/// The metadata of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Permission bits with set-id and sticky bits, 0 to 0o7777.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// The modification time, in seconds since the epoch.
    pub mtime: u64,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The content of a file, by type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeKind {
    Directory(BTreeMap<Vec<u8>, Child>),
    File(Data),
    Symlink(Vec<u8>),
    /// Major and minor number.
    Char((u32, u32)),
    /// Major and minor number.
    Block((u32, u32)),
    Fifo,
}

impl NodeKind {
    pub(crate) fn new_directory() -> Self {
        Self::Directory(BTreeMap::new())
    }
}

/// A name in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Child {
    pub id: Id,
    /// The last layer that added the name, since a whiteout hides names of lower layers only.
    pub layer: u32,
}

/// The position of a file's bytes in the uncompressed layer with number `layer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Data {
    pub layer: u32,
    /// The length of the file.
    pub len: u64,
    /// The runs of bytes in ascending order; the gaps are zeros.
    pub pieces: Vec<FileRun>,
}

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileRun {
    /// The offset in the file.
    pub at: u64,
    /// The offset in the layer.
    pub from: u64,
    pub len: u64,
}

/// A file without its names.
#[derive(Debug, Clone)]
pub(crate) struct Inode {
    pub meta: Meta,
    pub kind: NodeKind,
}

/// All inodes; those of folders have the names. An inode that lost its last name stays in the
/// vector, which the limit on entries bounds.
#[derive(Debug)]
pub(crate) struct Tree {
    inodes: Vec<Inode>,
    max_path: usize,
    /// The number of names looked up so far. A small hostile layer could make it large.
    work: Cell<u64>,
}

/// A folder and the path from the root to it, with symbolic links resolved.
#[derive(Debug, Clone)]
pub(crate) struct ResolvedFolder {
    /// Every folder from the root on, with the length of its name.
    chain: Vec<(Id, usize)>,
}

impl ResolvedFolder {
    fn root() -> Self {
        Self { chain: vec![(ROOT, 0)] }
    }

    /// Returns the folder's index.
    pub(crate) fn id(&self) -> Id {
        self.chain.last().map_or(ROOT, |&(id, _)| id)
    }

    /// Returns the length of the path to `name` in this folder.
    fn path_len(&self, name: &[u8]) -> usize {
        self.chain.iter().map(|(_, len)| len + 1).sum::<usize>() + name.len()
    }
}

impl Tree {
    /// Makes an empty root. Paths (with symbolic links resolved) may have up to `max_path` bytes.
    pub(crate) fn new(max_path: usize) -> Self {
        Self {
            inodes: vec![implicit_directory()],
            max_path: max_path.min(4095),
            work: Cell::new(0),
        }
    }

    /// Returns the number of inodes, those without a name included.
    pub(crate) fn inodes(&self) -> usize {
        self.inodes.len()
    }

    pub(crate) fn inode(&self, id: Id) -> &Inode {
        &self.inodes[id.0 as usize]
    }

    pub(crate) fn inode_mut(&mut self, id: Id) -> &mut Inode {
        &mut self.inodes[id.0 as usize]
    }

    /// Counts `names` more names as looked up, and returns the new count.
    pub(crate) fn work(&self, names: u64) -> u64 {
        self.work.set(self.work.get().saturating_add(names));
        self.work.get()
    }

    /// Returns the names in folder `id`, or no names if it is not a folder.
    pub(crate) fn children(&self, id: Id) -> impl Iterator<Item = (&[u8], Child)> {
        let children = match &self.inode(id).kind {
            NodeKind::Directory(children) => Some(children),
            _ => None,
        };
        children.into_iter().flatten().map(|(name, child)| (name.as_slice(), *child))
    }

    /// Visits every name, a folder before its content and names in byte order, with the path, the
    /// index of the folder, the name and the index of the file. The paths of folders end with a
    /// slash.
    ///
    /// Trees are walked without recursion everywhere: paths may have two thousand parts, and a
    /// layer must not choose the depth of the stack.
    #[cfg(test)]
    pub(crate) fn walk<'a, E>(
        &'a self,
        mut visit: impl FnMut(&[u8], Id, &'a [u8], Id) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut path = Vec::new();
        let mut open = vec![(ROOT, self.children(ROOT), 0)];
        while let Some((folder, names, len)) = open.last_mut() {
            path.truncate(*len);
            let Some((name, child)) = names.next() else {
                open.pop();
                continue;
            };
            path.extend_from_slice(name);
            let is_directory = self.is_directory(child.id);
            if is_directory {
                path.push(b'/');
            }
            visit(&path, *folder, name, child.id)?;
            if is_directory {
                open.push((child.id, self.children(child.id), path.len()));
            }
        }
        Ok(())
    }

    pub(crate) fn child(&self, folder: Id, name: &[u8]) -> Option<Child> {
        match &self.inode(folder).kind {
            NodeKind::Directory(children) => children.get(name).copied(),
            _ => None,
        }
    }

    pub(crate) fn is_directory(&self, id: Id) -> bool {
        matches!(self.inode(id).kind, NodeKind::Directory(_))
    }

    /// Adds an inode without a name.
    pub(crate) fn add(&mut self, inode: Inode) -> Result<Id, String> {
        let id = u32::try_from(self.inodes.len()).map_err(|_| "too many files")?;
        self.inodes.push(inode);
        Ok(Id(id))
    }

    /// Adds `child` under the name `name` in `place`, and replaces a previous one.
    pub(crate) fn link(
        &mut self,
        place: &ResolvedFolder,
        name: &[u8],
        child: Child,
    ) -> Result<(), String> {
        if place.path_len(name) > self.max_path {
            return Err(format!("a path longer than {} bytes", self.max_path));
        }
        match &mut self.inode_mut(place.id()).kind {
            NodeKind::Directory(children) => {
                children.insert(name.to_vec(), child);
                Ok(())
            }
            _ => Err("a file where a folder is needed".into()),
        }
    }

    /// Removes the names in `folder` for which `stays` returns `false`.
    pub(crate) fn retain(&mut self, folder: Id, stays: impl Fn(&Self, Child) -> bool) {
        let NodeKind::Directory(children) = &mut self.inode_mut(folder).kind else { return };
        let mut children = std::mem::take(children);
        children.retain(|_, child| stays(self, *child));
        self.inode_mut(folder).kind = NodeKind::Directory(children);
    }

    /// Removes the name `name` from `folder`.
    pub(crate) fn unlink(&mut self, folder: Id, name: &[u8]) {
        if let NodeKind::Directory(children) = &mut self.inode_mut(folder).kind {
            children.remove(name);
        }
    }

    /// Returns the folder at `path`. Returns `None` if it is missing or not a folder.
    pub(crate) fn find(&self, path: &[&[u8]]) -> Result<Option<ResolvedFolder>, String> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.left.pop() {
            match self.step(&mut walk, &name)? {
                LookupStep::Done => {}
                LookupStep::Missing | LookupStep::NotAFolder => return Ok(None),
            }
        }
        Ok(Some(walk.place))
    }

    /// Returns the folder at `path` and the number of folders that were missing. Those are made by
    /// `layer` (owned by root, 0755).
    pub(crate) fn find_or_make(
        &mut self,
        path: &[&[u8]],
        layer: u32,
    ) -> Result<(ResolvedFolder, usize), String> {
        let mut walk = Walk::new(path);
        let mut made = 0;
        while let Some(name) = walk.left.pop() {
            match self.step(&mut walk, &name)? {
                LookupStep::Done => {}
                LookupStep::NotAFolder => {
                    return Err(format!("'{}' is used as a folder, but is none", show(&name)));
                }
                LookupStep::Missing => {
                    let id = self.add(implicit_directory())?;
                    self.link(&walk.place, &name, Child { id, layer })?;
                    walk.place.chain.push((id, name.len()));
                    made += 1;
                }
            }
        }
        Ok((walk.place, made))
    }

    /// Moves `walk` to `name`. If `name` is a symbolic link, puts its target in front of the
    /// remaining path.
    fn step(&self, walk: &mut Walk, name: &[u8]) -> Result<LookupStep, String> {
        self.work(1);
        if name == b".." {
            // Only a link's target has `..` here: paths with `..` were refused earlier.
            if walk.place.chain.len() == 1 {
                return Err("a symbolic link that climbs out of the root".into());
            }
            walk.place.chain.pop();
            return Ok(LookupStep::Done);
        }
        let Some(child) = self.child(walk.place.id(), name) else { return Ok(LookupStep::Missing) };
        match &self.inode(child.id).kind {
            NodeKind::Directory(_) => {
                walk.place.chain.push((child.id, name.len()));
                Ok(LookupStep::Done)
            }
            NodeKind::Symlink(target) => walk.follow(target).map(|()| LookupStep::Done),
            _ => Ok(LookupStep::NotAFolder),
        }
    }
}

enum LookupStep {
    Done,
    Missing,
    NotAFolder,
}

/// The state of a path's resolution.
struct Walk {
    place: ResolvedFolder,
    /// The remaining parts, the last part first.
    left: Vec<Vec<u8>>,
    links: usize,
}

impl Walk {
    fn new(path: &[&[u8]]) -> Self {
        let left = path.iter().rev().map(|part| part.to_vec()).collect();
        Self { place: ResolvedFolder::root(), left, links: 0 }
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), String> {
        self.links += 1;
        if self.links > MAX_SYMLINKS {
            return Err("too many symbolic links on the way to a file".into());
        }
        if target.starts_with(b"/") {
            self.place = ResolvedFolder::root();
        }
        let parts = target.split(|&b| b == b'/').filter(|part| !matches!(*part, b"" | b"."));
        let from = self.left.len();
        self.left.extend(parts.map(<[u8]>::to_vec));
        self.left[from..].reverse();
        Ok(())
    }
}

/// Makes a folder that no layer describes.
fn implicit_directory() -> Inode {
    Inode { meta: Meta { mode: 0o755, ..Meta::default() }, kind: NodeKind::new_directory() }
}

/// Refuses a file with `count` extended attributes if they are too many.
///
/// # Errors
/// Text that says so.
pub(crate) fn check_attributes(count: usize) -> Result<(), String> {
    match count > MAX_ATTRIBUTES {
        true => Err(format!("a file with more than {MAX_ATTRIBUTES} extended attributes")),
        false => Ok(()),
    }
}

/// Splits a path of an archive into parts. A leading slash means the image's root, as `.` does.
pub(crate) fn split_path(path: &[u8], max: usize) -> Result<Vec<&[u8]>, String> {
    if path.len() > max {
        return Err(format!("a path longer than {max} bytes"));
    }
    if path.contains(&0) {
        return Err("a path with a NUL byte".into());
    }
    let parts = path.split(|&b| b == b'/').filter(|part| !matches!(*part, b"" | b"."));
    parts
        .map(|part| match part {
            b".." => Err(format!("the path '{}' climbs out of its folder", show(path))),
            _ if part.len() > MAX_NAME => Err(format!("a name longer than {MAX_NAME} bytes")),
            _ => Ok(part),
        })
        .collect()
}

/// Makes a name printable for a message, with at most 100 characters.
pub(crate) fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().take(100).collect()
}
