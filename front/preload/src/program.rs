//! Predicts whether a program will load this library, before the program is executed. A wrong guess
//! costs connections their slots for a while, and nothing else: the engine drops a ticket that
//! nobody resumes.

use std::ffi::CStr;
use std::sync::OnceLock;

use libc::{c_char, c_int};

use crate::libcs::Strings;
use crate::real::{self, sys};

/// The program that is to be executed.
#[derive(Clone, Copy)]
pub enum Program<'a> {
    Path(*const c_char),
    /// A name that is searched for as execvp(3) does.
    InPath(*const c_char),
    /// Directory, path and flags of execveat(2).
    At(c_int, *const c_char, c_int),
    /// A path in this library's memory.
    Named(&'a CStr),
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
///
/// # Safety
/// The strings of `program`, and `env`, are as execve(2) demands, for the time of the call.
pub unsafe fn takes_library(program: Program<'_>, env: Strings) -> bool {
    // SAFETY: the caller guarantees both.
    unsafe { is_named(env) && is_of_our_kind(program, DEPTH) }
}

/// Returns whether the environment `env` names this library.
///
/// # Safety
/// As for [`takes_library`].
unsafe fn is_named(env: Strings) -> bool {
    let own = OWN.get().map_or(&[][..], Vec::as_slice);
    // SAFETY: the caller guarantees an environment.
    let preload = unsafe { variable(env, b"LD_PRELOAD=") }.unwrap_or_default();
    !own.is_empty() && preload.split(|byte| b": ".contains(byte)).any(|name| name == own)
}

/// Returns the value of the variable in `env` that begins with `name`.
///
/// # Safety
/// `env` is null, or an environment that ends with a null pointer and lives as long as `'a`.
unsafe fn variable<'a>(env: Strings, name: &[u8]) -> Option<&'a [u8]> {
    if env.is_null() {
        return None;
    }
    for at in 0.. {
        // SAFETY: the caller guarantees an environment that ends with a null pointer.
        let one = unsafe { *env.add(at) };
        if one.is_null() {
            return None;
        }
        // SAFETY: each entry of an environment is a string.
        let text = unsafe { CStr::from_ptr(one) }.to_bytes();
        if let Some(value) = text.strip_prefix(name) {
            return Some(value);
        }
    }
    None
}

/// An open file, closed on drop.
struct File(c_int);

impl Drop for File {
    fn drop(&mut self) {
        real::close(self.0);
    }
}

impl File {
    fn open(folder: c_int, path: *const c_char) -> Option<Self> {
        let file =
            sys!(SYS_openat, folder, path, libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK);
        c_int::try_from(file).ok().filter(|file| *file >= 0).map(Self)
    }

    fn read(&self, into: &mut [u8], at: u64) -> usize {
        let got = sys!(SYS_pread64, self.0, into.as_mut_ptr(), into.len(), at);
        usize::try_from(got).unwrap_or(0)
    }

    /// Returns whether executing the file changes privileges. The loader then ignores `LD_PRELOAD`.
    fn is_privileged(&self) -> bool {
        // SAFETY: all of it may be zero.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        if sys!(SYS_fstat, self.0, &raw mut stat) < 0 {
            return false;
        }
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
///
/// # Safety
/// As for [`takes_library`].
unsafe fn is_of_our_kind(program: Program<'_>, depth: usize) -> bool {
    let file = match program {
        Program::Path(path) => File::open(libc::AT_FDCWD, path),
        Program::Named(path) => File::open(libc::AT_FDCWD, path.as_ptr()),
        // SAFETY: the caller guarantees a string.
        Program::InPath(name) => unsafe { find(name) },
        Program::At(folder, path, flags) => {
            // SAFETY: the caller guarantees a string.
            let empty = unsafe { path.is_null() || *path == 0 };
            if empty && flags & libc::AT_EMPTY_PATH != 0 {
                let copy = sys!(SYS_fcntl, folder, libc::F_DUPFD_CLOEXEC, 0);
                c_int::try_from(copy).ok().filter(|file| *file >= 0).map(File)
            } else {
                File::open(folder, path)
            }
        }
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
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let word = line.split(|byte| b" \t".contains(byte)).find(|word| !word.is_empty());
    let mut path = [0; 256];
    let Some(word) = word.filter(|word| word.len() < path.len()) else { return true };
    path[..word.len()].copy_from_slice(word);
    let path = CStr::from_bytes_until_nul(&path).unwrap_or(c"");
    // SAFETY: the path is a string of this function's.
    depth > 0 && unsafe { is_of_our_kind(Program::Named(path), depth - 1) }
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
///
/// # Safety
/// `name` is a string.
unsafe fn find(name: *const c_char) -> Option<File> {
    // SAFETY: the caller guarantees a string.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
    if bytes.contains(&b'/') {
        return File::open(libc::AT_FDCWD, name);
    }
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: libc's own variable, an environment.
    let path = unsafe { variable(environ, b"PATH=") }.unwrap_or(b"/bin:/usr/bin");
    path.split(|byte| *byte == b':').find_map(|folder| {
        let mut whole = [0; LONGEST];
        let end = folder.len() + 1 + bytes.len();
        if end >= LONGEST {
            return None;
        }
        whole[..folder.len()].copy_from_slice(folder);
        whole[folder.len()] = b'/';
        whole[folder.len() + 1..end].copy_from_slice(bytes);
        let whole = if folder.is_empty() { &whole[1..] } else { &whole[..] };
        let runs = sys!(SYS_faccessat, libc::AT_FDCWD, whole.as_ptr(), libc::X_OK) == 0;
        if runs { File::open(libc::AT_FDCWD, whole.as_ptr().cast()) } else { None }
    })
}
