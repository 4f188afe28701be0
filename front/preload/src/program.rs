//! Predicts whether a program will load this library, before the program is executed. A wrong guess
//! costs connections their slots for a while, and nothing else: the engine drops a ticket that
//! nobody resumes.
#![allow(unsafe_code)] // what the loader knows of this library's file

use std::ffi::CStr;
use std::sync::OnceLock;

use libc::c_int;

use crate::real::{self, sys};
use crate::strings::List;

/// The program that is to be executed. A name is `None` if the caller passed a null pointer.
#[derive(Clone, Copy)]
pub enum Program<'a> {
    Path(Option<&'a CStr>),
    /// A name that is searched for as execvp(3) does.
    InPath(Option<&'a CStr>),
    /// Directory, path and flags of execveat(2).
    At(c_int, Option<&'a CStr>, c_int),
}

/// The deepest nesting of scripts whose interpreters are scripts.
const DEPTH: usize = 4;
const PT_INTERP: u32 = 3;
/// The longest path that is examined, in bytes.
const LONGEST: usize = 1024;

static OWN: OnceLock<Vec<u8>> = OnceLock::new();

/// Learns the path of this library's own file, as the loader knows it.
pub fn begin() {
    static MARK: u8 = 0;
    // SAFETY: all of it may be zero.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address of this library, and room for the answer, whose name lives as long as the
    // library.
    let name = unsafe {
        let known = libc::dladdr((&raw const MARK).cast(), &raw mut found) != 0;
        if !known || found.dli_fname.is_null() {
            None
        } else {
            Some(CStr::from_ptr(found.dli_fname))
        }
    };
    let _ = OWN.set(name.map(|name| name.to_bytes().to_vec()).unwrap_or_default());
}

/// Returns whether `program` will load this library if it is executed with the environment `env`.
pub fn takes_library(program: Program<'_>, env: List<'_>) -> bool {
    let own = OWN.get().map_or(&[][..], Vec::as_slice);
    is_named(env, own) && is_of_our_kind(program, DEPTH)
}

/// Returns whether the environment `env` has the library at the path `own` loaded.
fn is_named(env: List<'_>, own: &[u8]) -> bool {
    let preload = env.value(b"LD_PRELOAD=").unwrap_or_default();
    !own.is_empty() && preload.split(|byte| b": ".contains(byte)).any(|name| name == own)
}

/// An open file, closed on drop.
struct File(c_int);

impl Drop for File {
    fn drop(&mut self) {
        real::close(self.0);
    }
}

impl File {
    fn open(folder: c_int, path: &CStr) -> Option<Self> {
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file = sys!(SYS_openat, folder, path.as_ptr(), how);
        c_int::try_from(file).ok().filter(|file| *file >= 0).map(Self)
    }

    fn read(&self, into: &mut [u8], at: u64) -> usize {
        let got = sys!(SYS_pread64, self.0, into.as_mut_ptr(), into.len(), at);
        usize::try_from(got).unwrap_or(0)
    }

    /// Returns whether executing the file changes privileges. The loader then ignores `LD_PRELOAD`.
    fn is_privileged(&self) -> bool {
        let Ok(stat) = rustix::fs::fstat(real::borrowed(self.0)) else { return false };
        let (user, group) = (sys!(SYS_geteuid) as u32, sys!(SYS_getegid) as u32);
        let capable = || {
            let name = c"security.capability";
            user != 0 && sys!(SYS_fgetxattr, self.0, name.as_ptr(), 0, 0) > 0
        };
        (stat.st_mode & libc::S_ISUID != 0 && stat.st_uid != user)
            || (stat.st_mode & libc::S_ISGID != 0 && stat.st_gid != group)
            || capable()
    }
}

/// Returns whether `program` is dynamically linked against this library's C library. A program that
/// cannot be examined counts as such: execve(2) will report what is wrong with it.
fn is_of_our_kind(program: Program<'_>, depth: usize) -> bool {
    let file = match program {
        Program::Path(path) => path.and_then(|path| File::open(libc::AT_FDCWD, path)),
        Program::InPath(name) => name.and_then(find),
        Program::At(folder, path, flags) => match path.filter(|path| !path.is_empty()) {
            None if flags & libc::AT_EMPTY_PATH != 0 => {
                let copy = sys!(SYS_fcntl, folder, libc::F_DUPFD_CLOEXEC, 0);
                c_int::try_from(copy).ok().filter(|file| *file >= 0).map(File)
            }
            path => path.and_then(|path| File::open(folder, path)),
        },
    };
    let Some(file) = file else { return true };
    if file.is_privileged() {
        return false;
    }
    let mut head = [0; 256];
    let got = file.read(&mut head, 0);
    let head = &head[..got];
    match head.strip_prefix(b"#!") {
        Some(line) => script(line, depth),
        // execvp(3) runs a file that the kernel does not recognize by a shell.
        None if !head.starts_with(b"\x7fELF") => true,
        None => loader(&file, head).unwrap_or(false),
    }
}

/// Returns whether the interpreter of a script will load the library. `/usr/bin/env` calls
/// execve(2) again for the program that it starts, so that program is examined then.
fn script(line: &[u8], depth: usize) -> bool {
    let mut path = [0; 256];
    let Some(path) = interpreter(line, &mut path) else { return true };
    depth > 0 && is_of_our_kind(Program::Path(Some(path)), depth - 1)
}

/// Returns the path of the interpreter in the first line of a script, after `#!`, copied to `into`.
/// Returns `None` if it names none, or its path is too long.
fn interpreter<'a>(line: &[u8], into: &'a mut [u8; 256]) -> Option<&'a CStr> {
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let word = line.split(|byte| b" \t".contains(byte)).find(|word| !word.is_empty());
    let word = word.filter(|word| word.len() < into.len())?;
    into[..word.len()].copy_from_slice(word);
    CStr::from_bytes_until_nul(&into[..]).ok()
}

/// Returns whether an ELF file of this machine's kind names the loader of this library's C library.
fn loader(file: &File, head: &[u8]) -> Option<bool> {
    // 64 bits, little-endian.
    if head.get(4..6)? != b"\x02\x01" {
        return Some(false);
    }
    let offset = u64::from_le_bytes(head.get(32..40)?.try_into().ok()?);
    let size = u64::from(u16::from_le_bytes(head.get(54..56)?.try_into().ok()?));
    let count = u64::from(u16::from_le_bytes(head.get(56..58)?.try_into().ok()?));
    for number in 0..count.min(256) {
        let mut segment = [0; 56];
        if file.read(&mut segment, offset.checked_add(number * size)?) < segment.len() {
            return Some(false);
        }
        if segment[..4] != PT_INTERP.to_le_bytes() {
            continue;
        }
        let mut name = [0; 64];
        let at = u64::from_le_bytes(segment.get(8..16)?.try_into().ok()?);
        let got = file.read(&mut name, at);
        let is_musl = name[..got].windows(7).any(|part| part == b"ld-musl");
        return Some(is_musl == cfg!(target_env = "musl"));
    }
    Some(false)
}

/// Opens the file that execvp(3) would execute.
fn find(name: &CStr) -> Option<File> {
    if name.to_bytes().contains(&b'/') {
        return File::open(libc::AT_FDCWD, name);
    }
    let path = List::environment().value(b"PATH=").unwrap_or(b"/bin:/usr/bin");
    path.split(|byte| *byte == b':').find_map(|folder| {
        let mut whole = [0; LONGEST];
        let whole = joined(folder, name, &mut whole)?;
        let runs = sys!(SYS_faccessat, libc::AT_FDCWD, whole.as_ptr(), libc::X_OK) == 0;
        if runs { File::open(libc::AT_FDCWD, whole) } else { None }
    })
}

/// Returns the path of `name` in `folder`, written to `into`; an empty folder is the current one.
/// Returns `None` if the path is too long.
fn joined<'a>(folder: &[u8], name: &CStr, into: &'a mut [u8; LONGEST]) -> Option<&'a CStr> {
    let name = name.to_bytes();
    let end = folder.len() + 1 + name.len();
    if end >= LONGEST {
        return None;
    }
    into[..folder.len()].copy_from_slice(folder);
    into[folder.len()] = b'/';
    into[folder.len() + 1..end].copy_from_slice(name);
    let begin = usize::from(folder.is_empty());
    CStr::from_bytes_until_nul(&into[begin..]).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    fn is_preloaded(variable: &CStr, own: &[u8]) -> bool {
        let list = [variable.as_ptr(), std::ptr::null()];
        // SAFETY: the list ends with a null pointer, and lives longer than the call.
        is_named(unsafe { List::new(list.as_ptr()) }, own)
    }

    #[test]
    fn a_library_is_loaded_by_its_whole_path() {
        let own = b"/lib/libslipway.so";
        for yes in [
            c"LD_PRELOAD=/lib/libslipway.so",
            c"LD_PRELOAD=/a.so:/lib/libslipway.so",
            c"LD_PRELOAD=/lib/libslipway.so /a.so",
        ] {
            assert!(is_preloaded(yes, own), "{yes:?}");
        }
        for no in [
            c"LD_PRELOAD=",
            c"LD_PRELOAD=/lib/libslipway.so.1",
            c"LD_PRELOAD=/x/lib/libslipway.so",
            c"LD_PRELOADED=/lib/libslipway.so",
        ] {
            assert!(!is_preloaded(no, own), "{no:?}");
        }
        assert!(!is_preloaded(c"LD_PRELOAD=", b""), "a library without a path is never loaded");
    }

    #[test]
    fn the_interpreter_is_the_first_word_of_a_scripts_first_line() {
        let named = |line: &[u8]| {
            let mut path = [0; 256];
            interpreter(line, &mut path).map(CStr::to_owned)
        };
        assert_eq!(named(b"/bin/sh\nexit"), Some(c"/bin/sh".to_owned()));
        assert_eq!(named(b" \t /bin/sh -e\n"), Some(c"/bin/sh".to_owned()));
        assert_eq!(named(b"/bin/sh"), Some(c"/bin/sh".to_owned()), "a line that is cut");
        assert_eq!(named(b"/bin\0/sh\n"), Some(c"/bin".to_owned()));
        for none in [&b""[..], b"\n/bin/sh", b" \t", &[b'a'; 256]] {
            assert_eq!(named(none), None);
        }
        assert_eq!(named(&[b'a'; 255]).map(|path| path.count_bytes()), Some(255));
    }

    #[test]
    fn a_path_has_a_folder_a_slash_and_a_name() {
        let path = |folder: &[u8], name: &CStr| {
            let mut path = [0; LONGEST];
            joined(folder, name, &mut path).map(CStr::to_owned)
        };
        assert_eq!(path(b"/bin", c"sh"), Some(c"/bin/sh".to_owned()));
        assert_eq!(path(b"", c"sh"), Some(c"sh".to_owned()), "the current folder");
        let folder = [b'a'; LONGEST];
        let length = |folder: &[u8]| path(folder, c"sh").map(|path| path.count_bytes());
        assert_eq!(length(&folder[..LONGEST - 4]), Some(LONGEST - 1));
        assert_eq!(length(&folder[..LONGEST - 3]), None);
        assert_eq!(length(&folder), None);
    }

    /// Returns whether a file of these bytes is a program of this C library's.
    fn is_ours(bytes: &[u8]) -> bool {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        is_of_our_kind(Program::At(file.as_raw_fd(), None, libc::AT_EMPTY_PATH), DEPTH)
    }

    /// Returns an ELF file of 64 bits whose only segment names the loader `name`.
    fn elf(name: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64] = 3;
        bytes[72] = 120;
        bytes.extend_from_slice(name);
        bytes
    }

    #[test]
    fn a_program_is_ours_if_it_names_the_loader_of_this_c_library() {
        let (glibc, musl) =
            (elf(b"/lib64/ld-linux-x86-64.so.2\0"), elf(b"/lib/ld-musl-x86_64.so.1"));
        let has_musl = cfg!(target_env = "musl");
        assert_eq!((is_ours(&glibc), is_ours(&musl)), (!has_musl, has_musl));
        let mut of_32_bits = glibc.clone();
        of_32_bits[4] = 1;
        let mut is_static = glibc.clone();
        is_static[64] = 1;
        assert!(!is_ours(&of_32_bits) && !is_ours(&is_static));
    }

    #[test]
    fn a_cut_or_hostile_elf_file_is_not_ours() {
        let whole = elf(b"/lib64/ld-linux-x86-64.so.2\0");
        for cut in 4..120 {
            assert!(!is_ours(&whole[..cut]), "{cut}");
        }
        // Segments at the end of all offsets, and as many as there can be.
        let mut far = whole.clone();
        far[32..40].fill(0xff);
        far[54..58].fill(0xff);
        assert!(!is_ours(&far));
        let mut many = whole;
        (many[56], many[57], many[64]) = (0xff, 0xff, 1);
        assert!(!is_ours(&many));
    }

    #[test]
    fn what_cannot_be_examined_is_left_to_execve() {
        assert!(is_ours(b"") && is_ours(b"exit 0") && is_ours(b"\x7fEL"));
        assert!(is_of_our_kind(Program::Path(None), DEPTH));
        assert!(is_of_our_kind(Program::Path(Some(c"/none/such")), DEPTH));
        assert!(is_of_our_kind(Program::InPath(None), DEPTH));
        assert!(is_of_our_kind(Program::At(-1, Some(c""), libc::AT_EMPTY_PATH), DEPTH));
        assert!(is_of_our_kind(Program::At(-1, Some(c""), 0), DEPTH));
    }

    #[test]
    fn scripts_whose_interpreters_are_scripts_have_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("itself");
        std::fs::write(&path, format!("#!{}\n", path.display())).unwrap();
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        assert!(!is_of_our_kind(Program::Path(Some(&name)), DEPTH));
    }
}
