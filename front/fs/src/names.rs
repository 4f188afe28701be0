//! Requests that are refused before virtiofsd's library sees them.
//!
//! The names in requests are single names in a directory.
//! virtiofsd's library opens files beneath a directory whatever their name says, but it makes,
//! renames and removes them by calls that follow a path. So a request with a path in place of a
//! name is refused before it gets there.
//!
//! A guest must know mounts within the file system (FUSE_SUBMOUNTS, Linux 5.10). The library prints
//! a line for each attempt of another, and would do so without end.

/// Bytes of a request's header, and the offset of the operation in it.
const HEADER: usize = 40;
const OPCODE: usize = 4;

/// The operation that begins a session, with the offset of the guest's flags in its body, and the
/// flag of mounts within the file system (`linux/fuse.h`).
const INIT: u32 = 26;
const FLAGS: usize = 12;
const SUBMOUNTS: u32 = 1 << 27;

/// Returns whether the library may have a request.
pub fn is_allowed(message: &[u8]) -> bool {
    are_single(message) && knows_mounts(message)
}

/// Returns whether a guest that begins a session knows mounts within the file system. Other
/// requests do not say.
fn knows_mounts(message: &[u8]) -> bool {
    word(message, OPCODE) != Some(INIT)
        || word(message, HEADER + FLAGS).is_some_and(|flags| flags & SUBMOUNTS != 0)
}

fn word(message: &[u8], at: usize) -> Option<u32> {
    let bytes = message.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

/// Returns whether all names of files in a request are single names, other than `.` and `..`. A
/// request that lacks a name has none; the library refuses it.
fn are_single(message: &[u8]) -> bool {
    let Some((skipped, count)) = word(message, OPCODE).and_then(place) else { return true };
    let names = message.get(HEADER + skipped..).unwrap_or_default();
    names.split(|byte| *byte == 0).take(count).all(is_single)
}

/// Returns how many bytes are between the header and the first name of an operation
/// (`linux/fuse.h`), and how many names there are. Returns `None` for operations without names of
/// files.
fn place(opcode: u32) -> Option<(usize, usize)> {
    Some(match opcode {
        // LOOKUP, SYMLINK (its target is no name), UNLINK, RMDIR.
        1 | 6 | 10 | 11 => (0, 1),
        // MKNOD, CREATE.
        8 | 35 => (16, 1),
        // MKDIR, LINK.
        9 | 13 => (8, 1),
        // RENAME, RENAME2.
        12 => (8, 2),
        45 => (16, 2),
        _ => return None,
    })
}

fn is_single(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.contains(&b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, tail: &[u8]) -> Vec<u8> {
        let mut message = vec![0; HEADER];
        message[OPCODE..OPCODE + 4].copy_from_slice(&opcode.to_le_bytes());
        [message, tail.to_vec()].concat()
    }

    #[test]
    fn paths_are_no_names() {
        for (opcode, skipped) in
            [(1, 0), (6, 0), (8, 16), (9, 8), (10, 0), (11, 0), (13, 8), (35, 16)]
        {
            let with = |name: &[u8]| request(opcode, &[&vec![b'/'; skipped], name, b"\0"].concat());
            for good in [&b"a"[..], b"...", b"..a", b"a b", b"\xff"] {
                assert!(are_single(&with(good)), "{opcode} {good:?}");
            }
            for bad in [&b""[..], b".", b"..", b"/", b"a/b", b"../a", b"a/"] {
                assert!(!are_single(&with(bad)), "{opcode} {bad:?}");
            }
            assert!(!are_single(&with(b"a/b")[..HEADER + skipped + 2]), "without an end");
        }
        assert!(are_single(&request(6, b"link\0../any/where\0")), "a link's target");
        for (opcode, skipped) in [(12, 8), (45, 16)] {
            let with = |names: &[u8]| request(opcode, &[&vec![0; skipped], names].concat());
            assert!(are_single(&with(b"old\0new\0")));
            assert!(!are_single(&with(b"old\0../new\0")));
            assert!(!are_single(&with(b"../old\0new\0")));
            assert!(!are_single(&with(b"old\0")), "no second name");
        }
        assert!(are_single(&request(15, b"/")), "a read has no name");
        assert!(are_single(&[]));
        assert!(!are_single(&request(1, b"")));
    }

    #[test]
    fn a_guest_that_knows_no_mounts_begins_no_session() {
        let with = |flags: u32| [7_u32, 38, 0, flags].map(u32::to_le_bytes).concat();
        assert!(is_allowed(&request(INIT, &with(SUBMOUNTS | 1))));
        assert!(!is_allowed(&request(INIT, &with(!SUBMOUNTS))));
        assert!(!is_allowed(&request(INIT, &with(SUBMOUNTS)[..15])));
        assert!(is_allowed(&request(15, &with(0))), "a read says nothing of it");
    }
}
