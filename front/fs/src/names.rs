//! The names in requests: each is a single name in a directory.
//!
//! virtiofsd's library opens files beneath a directory whatever their name says, but it makes,
//! renames and removes them by calls that follow a path. So a request with a path in place of a
//! name is refused before it gets there.

/// Bytes of a request's header, and the offset of the operation in it.
const HEADER: usize = 40;
const OPCODE: usize = 4;

/// Returns whether all names of files in a request are single names, other than `.` and `..`. A
/// request that lacks a name has none; the library refuses it.
pub fn are_single(message: &[u8]) -> bool {
    let Some(&[a, b, c, d]) = message.get(OPCODE..OPCODE + 4) else { return true };
    let Some((skipped, count)) = place(u32::from_le_bytes([a, b, c, d])) else { return true };
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
}
