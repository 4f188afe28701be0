//! Extended attributes of an EROFS file: behind its inode, or in an area that files share.

use std::collections::{BTreeMap, BTreeSet};

use super::volume::{ATTRIBUTES_HEAD, Inode, Volume, u16_at, u32_at};
use crate::root::budget;
use crate::root::read::{is_kept, overlay_name};
use crate::root::tree::{check_attributes, show};

/// The head of an attribute: the lengths of its name and value, and its prefix.
const HEAD: usize = 4;
/// Set in a prefix that is one of the file system's own.
const OWN_PREFIX: u8 = 0x80;

/// The extended attributes of a file.
#[derive(Debug, Default)]
pub(super) struct Attributes {
    /// The attributes that are written to the image: names and values.
    pub(super) kept: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Set for a folder that hides what lower layers have in it.
    pub(super) is_opaque: bool,
    /// Set for an empty file that removes its name from lower layers.
    pub(super) is_whiteout: bool,
    /// The bytes of all attributes that were read, with their allocations.
    pub(super) bytes: usize,
}

impl Volume<'_> {
    /// Reads the attributes of a file.
    pub(super) fn attributes(&self, inode: &Inode) -> Result<Attributes, String> {
        let (at, len) = inode.attributes;
        let mut found = ParsedAttributes::default();
        if len <= ATTRIBUTES_HEAD {
            return Ok(found.attributes);
        }
        let body = self.bytes(at, len)?;
        let head = ATTRIBUTES_HEAD as usize;
        let shared = head + 4 * usize::from(body[4]);
        let ids = body.get(head..shared).ok_or("attributes that are garbage")?;
        for id in ids.chunks_exact(4) {
            let at = self.shared + 4 * u64::from(u32_at(id, 0));
            let size = size(&self.bytes(at, HEAD as u64)?);
            found.add(&self.bytes(at, size as u64)?)?;
        }
        let mut rest = &body[shared..];
        while rest.len() >= HEAD {
            let size = size(rest);
            found.add(rest.get(..size).ok_or("attributes that are garbage")?)?;
            rest = rest.get(size.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(found.attributes)
    }
}

/// Returns the size of the attribute that begins with these bytes, of which there are [`HEAD`].
fn size(bytes: &[u8]) -> usize {
    HEAD + usize::from(bytes[0]) + usize::from(u16_at(bytes, 2))
}

#[derive(Default)]
struct ParsedAttributes {
    attributes: Attributes,
    names: BTreeSet<Vec<u8>>,
}

impl ParsedAttributes {
    /// Adds an attribute of the size that its head says.
    fn add(&mut self, bytes: &[u8]) -> Result<(), String> {
        // The file may have changed since its size was read.
        let garbage = "attributes that are garbage";
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or(garbage)?;
        let (name, value) = rest.split_at_checked(usize::from(head[0])).ok_or(garbage)?;
        self.attributes.bytes += budget::allocated(bytes.len());
        if head[1] & OWN_PREFIX != 0 {
            return Err("attributes with prefixes of the layer's own are not supported".into());
        }
        let Some(prefix) = prefix(head[1]) else { return Ok(()) };
        let name = [prefix, name].concat();
        if name.contains(&0) || name.len() > 255 {
            return Err("an extended attribute that Linux would not take".into());
        }
        match overlay_name(&name) {
            // The value `x` announces whiteouts that are attributes.
            Some(b"opaque") => self.attributes.is_opaque |= value == b"y",
            Some(b"whiteout") => self.attributes.is_whiteout = true,
            Some(b"redirect" | b"metacopy") => {
                return Err(format!("overlayfs has moved it ({})", show(&name)));
            }
            _ => {}
        }
        if !self.names.insert(name.clone()) {
            return Err(format!("it has the attribute {} twice", show(&name)));
        }
        check_attributes(self.names.len())?;
        if is_kept(&name) {
            self.attributes.kept.insert(name, value.to_vec());
        }
        Ok(())
    }
}

/// Returns the beginning of an attribute's name. Returns `None` for those of no interest.
fn prefix(index: u8) -> Option<&'static [u8]> {
    let prefix: &'static [u8] = match index {
        1 => b"user.",
        2 => b"system.posix_acl_access",
        3 => b"system.posix_acl_default",
        4 => b"trusted.",
        6 => b"security.",
        _ => return None,
    };
    Some(prefix)
}
