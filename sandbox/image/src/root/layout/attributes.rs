//! Extended attributes behind their inode: a head, then each with its own head, name and value.

use crate::root::tree::{Meta, show};

/// The head of all attributes of an inode, and that of one of them, bytes.
const ATTRIBUTES_HEAD: u64 = 12;
const HEAD: u64 = 4;
/// Attributes begin at multiples of it, bytes.
const ALIGN: u64 = 4;
/// The longest value, bytes. Linux allows one more, which the format has no room for.
const MAX_VALUE: usize = u16::MAX as usize;
/// The longest name behind its prefix, bytes.
const MAX_NAME: usize = u8::MAX as usize;
/// The most bytes of attributes of one inode, behind their common head.
const MAX_BYTES: u64 = (u16::MAX as u64 - 1) * ALIGN;

/// Returns the length of an inode's attributes with their head, bytes. Returns 0 if there are none.
///
/// # Errors
/// Text: the format has no room for them.
pub(super) fn len(meta: &Meta) -> Result<u64, String> {
    let mut sum = 0;
    for (name, value) in &meta.xattrs {
        let Some((_, rest)) = split(name) else { continue };
        if value.len() > MAX_VALUE || rest.len() > MAX_NAME {
            let (name, bytes) = (show(name), value.len());
            return Err(format!(
                "the extended attribute {name} of {bytes} bytes: a name may have {MAX_NAME} and a \
                 value {MAX_VALUE}"
            ));
        }
        sum += (HEAD + rest.len() as u64 + value.len() as u64).next_multiple_of(ALIGN);
    }
    match sum {
        0 => Ok(0),
        _ if sum > MAX_BYTES => {
            Err(format!("{sum} bytes of extended attributes, of which a file may have {MAX_BYTES}"))
        }
        _ => Ok(ATTRIBUTES_HEAD + sum),
    }
}

/// Returns the length of attributes as an inode has it: the common head counts as one, and four
/// bytes behind it count as one. `len` is what [`len`](self::len) has returned.
pub(super) fn units(len: u64) -> u16 {
    match len.checked_sub(ATTRIBUTES_HEAD) {
        Some(rest) => u16::try_from(1 + rest / ALIGN).unwrap_or(u16::MAX),
        None => 0,
    }
}

/// Returns the bytes of an inode's attributes, as many as [`len`] says.
pub(super) fn bytes(meta: &Meta) -> Vec<u8> {
    let mut bytes = vec![0; ATTRIBUTES_HEAD as usize];
    for (name, value) in &meta.xattrs {
        let Some((prefix, rest)) = split(name) else { continue };
        bytes.extend_from_slice(&[rest.len() as u8, prefix]);
        bytes.extend_from_slice(&(value.len() as u16).to_le_bytes());
        bytes.extend_from_slice(rest);
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(ALIGN as usize), 0);
    }
    match bytes.len() as u64 {
        ATTRIBUTES_HEAD => Vec::new(),
        _ => bytes,
    }
}

/// Returns the index of a name's prefix, and the rest of the name. Returns `None` for names that
/// the format cannot hold, which are left out.
fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    match name {
        b"system.posix_acl_access" => return Some((2, b"")),
        b"system.posix_acl_default" => return Some((3, b"")),
        _ => {}
    }
    let prefixes: [(u8, &[u8]); 3] = [(1, b"user."), (4, b"trusted."), (6, b"security.")];
    let found = prefixes.into_iter().find_map(|(index, prefix)| {
        let rest = name.strip_prefix(prefix)?;
        Some((index, rest))
    });
    found.filter(|(_, rest)| !rest.is_empty())
}
