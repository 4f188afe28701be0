//! Merges a layer into those below it (OCI image specification, *Image Layer Filesystem
//! Changeset*).
//!
//! The rules, as container runtimes have settled them:
//! * a folder over a folder takes the new attributes and keeps its content; any other combination
//!   replaces the old file with everything below it;
//! * `.wh.NAME` removes NAME, and `.wh..wh..opq` empties its folder; both affect lower layers only,
//!   wherever in the layer they are; other `.wh..wh.` names are internal to aufs and are skipped;
//! * a hard link shares the inode, which stays when its first name is overwritten or hidden;
//! * the last name of a path is never followed if it is a symbolic link; the names before it are
//!   followed, within the root.

use std::fs::File;

use super::Form;
use super::budget::{self, Budget};
use super::erofs::ErofsReader;
use super::read::{ArchiveEntry, EntryContent, TarReader};
use super::tree::{Child, Id, Inode, NodeKind, ROOT, ResolvedFolder, Tree, show, split_path};
use crate::{Digest, Error, Limits};

/// The reason why a layer was not merged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MergeError {
    /// The layer is malformed or malicious.
    Bad(String),
    /// A limit was exceeded.
    TooLarge(String),
}

impl MergeError {
    /// Returns the error for the layer with this digest.
    pub(crate) fn of(self, layer: &Digest) -> Error {
        match self {
            Self::Bad(reason) => Error::bad_layer(layer, reason),
            Self::TooLarge(reason) => Error::too_large(format!("layer {layer}"), reason),
        }
    }
}

impl From<String> for MergeError {
    fn from(reason: String) -> Self {
        Self::Bad(reason)
    }
}

/// The builder of a root from layers, lowest first.
pub(crate) struct Merger<'a> {
    tree: Tree,
    limits: &'a Limits,
    layers: u32,
    entries: usize,
    /// The memory of the tree, and of the reader of an EROFS layer.
    budget: Budget,
    /// Bytes of files, of all layers so far.
    data: u64,
    layer_data: u64,
    /// The most bytes of this layer's files. Holes make files larger than the layer.
    layer_limit: u64,
}

impl<'a> Merger<'a> {
    pub(crate) fn new(limits: &'a Limits) -> Self {
        let tree = Tree::new(limits.path_bytes);
        Self {
            tree,
            limits,
            layers: 0,
            entries: 0,
            budget: Budget::new(limits),
            data: 0,
            layer_data: 0,
            layer_limit: 0,
        }
    }

    /// Merges `layer`, which is uncompressed, into the root.
    pub(crate) fn apply(&mut self, layer: &File, form: Form) -> Result<(), MergeError> {
        let len = layer.metadata().map_err(|e| MergeError::Bad(e.to_string()))?.len();
        self.begin(len);
        match form {
            Form::Changes | Form::Files => {
                let reader = TarReader::new(layer, self.limits.path_bytes);
                let mut reader = reader.map_err(|e| MergeError::Bad(e.to_string()))?;
                while let Some(entry) = reader.next()? {
                    self.take(entry, form == Form::Changes)?;
                }
            }
            Form::Erofs => {
                let mut reader = ErofsReader::new(layer, self.limits, &mut self.budget)?;
                while let Some(entry) = reader.next(&mut self.budget)? {
                    self.take(entry, false)?;
                }
                self.budget.give_back(reader.held());
            }
        }
        self.layers += 1;
        Ok(())
    }

    /// Returns the memory that counts as held for the root.
    pub(crate) fn budget(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// Merges the entries of a layer of changes whose data is elsewhere. `stored` are the layer's
    /// bytes, which limit the size of its files. `further` are the chunks of files beside the first
    /// one of each, which count as files do. The caller has counted the entries as waiting in
    /// [`budget`](Self::budget).
    pub(crate) fn apply_entries(
        &mut self,
        entries: Vec<ArchiveEntry>,
        stored: u64,
        further: usize,
    ) -> Result<(), MergeError> {
        self.begin(stored);
        let many = format!("more than {} files and chunks", self.limits.entries);
        self.count(further).map_err(|_| MergeError::TooLarge(many))?;
        let list = entries.len() * budget::WAITING;
        for entry in entries {
            self.budget.give_back(budget::waiting(&entry) as u64);
            self.take(entry, true)?;
        }
        self.budget.give_back(list as u64);
        self.layers += 1;
        Ok(())
    }

    /// Begins with a layer of `len` bytes.
    fn begin(&mut self, len: u64) {
        self.layer_limit = self.limits.layer_bytes(len);
        self.layer_data = 0;
    }

    /// Merges one entry. If `whiteouts` is false, names that begin with `.wh.` are ordinary names.
    fn take(&mut self, entry: ArchiveEntry, whiteouts: bool) -> Result<(), MergeError> {
        self.charge(&entry)?;
        self.entry(entry, whiteouts)?;
        self.check_work()
    }

    /// Returns the merged root.
    pub(crate) fn finish(self) -> Tree {
        self.tree
    }

    /// Counts the memory and the bytes of `entry` against the limits.
    fn charge(&mut self, entry: &ArchiveEntry) -> Result<(), MergeError> {
        let len = match &entry.what {
            EntryContent::Node(NodeKind::File(data)) => data.len,
            EntryContent::Node(_)
            | EntryContent::HardLink(_)
            | EntryContent::Whiteout
            | EntryContent::Opaque => 0,
        };
        self.data = self.data.saturating_add(len);
        self.layer_data = self.layer_data.saturating_add(len);
        self.count(1)?;
        self.budget.take(budget::entry(entry)).map_err(MergeError::TooLarge)?;
        let limits = self.limits;
        let over =
            |what, limit| Err(MergeError::TooLarge(format!("more than {limit} bytes of {what}")));
        if self.data > limits.image_uncompressed {
            return over("file data", limits.image_uncompressed);
        }
        if self.layer_data > self.layer_limit {
            return over("mostly empty file data", self.layer_limit);
        }
        Ok(())
    }

    /// Limits the work of symbolic links and whiteouts, with which few bytes can cause many
    /// lookups. Ordinary images need some ten names an entry.
    fn check_work(&self) -> Result<(), MergeError> {
        let allowed = (self.limits.entries as u64).saturating_mul(64).max(1 << 20);
        match self.tree.work(0) > allowed {
            true => {
                Err(MergeError::TooLarge("too many symbolic links or whiteouts to follow".into()))
            }
            false => Ok(()),
        }
    }

    fn count(&mut self, entries: usize) -> Result<(), MergeError> {
        self.entries = self.entries.saturating_add(entries);
        match self.entries > self.limits.entries {
            true => Err(MergeError::TooLarge(format!("more than {} files", self.limits.entries))),
            false => Ok(()),
        }
    }

    fn entry(&mut self, entry: ArchiveEntry, whiteouts: bool) -> Result<(), MergeError> {
        let path = split_path(&entry.path, self.limits.path_bytes)?;
        if matches!(entry.what, EntryContent::Opaque) {
            return self.opaque(&path);
        }
        let Some((&name, parents)) = path.split_last() else { return self.root(entry) };
        if matches!(entry.what, EntryContent::Whiteout) {
            return self.whiteout(parents, name);
        }
        if whiteouts && path.iter().any(|part| part.starts_with(b".wh..wh.")) {
            if name == b".wh..wh..opq" {
                self.opaque(parents)?;
            }
            return Ok(());
        }
        if whiteouts && let Some(hidden) = name.strip_prefix(b".wh.") {
            return self.whiteout(parents, hidden);
        }
        // A hard link's target is looked up first, so that `a` linked to `a` does not lose it.
        let target = match &entry.what {
            EntryContent::HardLink(target) => Some(self.link_target(target)?),
            _ => None,
        };
        let (place, made) = self.tree.find_or_make(parents, self.layers)?;
        self.count(made)?;
        self.budget.take(made * budget::MISSING_FOLDER).map_err(MergeError::TooLarge)?;
        let id = match (target, entry.what) {
            (Some(id), _) => id,
            (None, EntryContent::Node(kind)) => self.node(&place, name, entry.meta, kind)?,
            (None, _) => return Ok(()),
        };
        self.tree.link(&place, name, Child { id, layer: self.layers })?;
        Ok(())
    }

    /// Applies an entry for the root itself, which sets the root's attributes.
    fn root(&mut self, entry: ArchiveEntry) -> Result<(), MergeError> {
        match entry.what {
            EntryContent::Node(NodeKind::Directory(_)) => {
                self.tree.inode_mut(ROOT).meta = entry.meta;
                Ok(())
            }
            _ => Err(MergeError::Bad("the root is not a folder".into())),
        }
    }

    /// Returns the inode for a new node: an existing folder's if the node is a folder, otherwise a
    /// new one.
    fn node(
        &mut self,
        place: &ResolvedFolder,
        name: &[u8],
        meta: super::tree::Meta,
        mut kind: NodeKind,
    ) -> Result<Id, MergeError> {
        match &mut kind {
            NodeKind::Directory(_) => {
                let old = self.tree.child(place.id(), name).map(|child| child.id);
                if let Some(id) = old.filter(|&id| self.tree.is_directory(id)) {
                    self.tree.inode_mut(id).meta = meta;
                    return Ok(id);
                }
            }
            NodeKind::File(data) => data.layer = self.layers,
            NodeKind::Symlink(target) if target.is_empty() || target.contains(&0) => {
                return Err(MergeError::Bad("a symbolic link without a usable target".into()));
            }
            NodeKind::Symlink(target) if target.len() > 4095 => {
                return Err(MergeError::Bad("a symbolic link longer than 4095 bytes".into()));
            }
            _ => {}
        }
        Ok(self.tree.add(Inode { meta, kind })?)
    }

    fn link_target(&self, target: &[u8]) -> Result<Id, MergeError> {
        let missing =
            || MergeError::Bad(format!("a hard link to '{}', which is missing", show(target)));
        let path = split_path(target, self.limits.path_bytes)?;
        let (&name, parents) = path.split_last().ok_or_else(missing)?;
        let place = self.tree.find(parents)?.ok_or_else(missing)?;
        let child = self.tree.child(place.id(), name).ok_or_else(missing)?;
        match self.tree.is_directory(child.id) {
            true => Err(MergeError::Bad(format!("a hard link to the folder '{}'", show(target)))),
            false => Ok(child.id),
        }
    }

    fn whiteout(&mut self, parents: &[&[u8]], hidden: &[u8]) -> Result<(), MergeError> {
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(MergeError::Bad(format!("a whiteout of '{}'", show(hidden))));
        }
        if let Some(place) = self.tree.find(parents)?
            && let Some(child) = self.tree.child(place.id(), hidden)
        {
            self.purge_below(child.id);
            self.purge(place.id(), hidden, child);
        }
        Ok(())
    }

    fn opaque(&mut self, parents: &[&[u8]]) -> Result<(), MergeError> {
        if let Some(place) = self.tree.find(parents)? {
            self.purge_below(place.id());
        }
        Ok(())
    }

    /// Removes everything that lower layers put into `folder`.
    fn purge_below(&mut self, folder: Id) {
        let mut folders = vec![folder];
        let (mut next, mut names) = (0, 0);
        while let Some(&folder) = folders.get(next) {
            for (_, child) in self.tree.children(folder) {
                names += 1;
                if self.tree.is_directory(child.id) {
                    folders.push(child.id);
                }
            }
            next += 1;
        }
        self.tree.work(names);
        // In reverse order, the content of a folder comes before the folder.
        let layer = self.layers;
        for folder in folders.into_iter().rev() {
            self.tree.retain(folder, |tree, child| stays(tree, child, layer));
        }
    }

    /// Removes a name, unless this layer has added it or a file below it.
    fn purge(&mut self, folder: Id, name: &[u8], child: Child) {
        if !stays(&self.tree, child, self.layers) {
            self.tree.unlink(folder, name);
        }
    }
}

/// Returns whether `layer` has added a name or a file below it.
fn stays(tree: &Tree, child: Child, layer: u32) -> bool {
    child.layer >= layer || tree.children(child.id).next().is_some()
}
