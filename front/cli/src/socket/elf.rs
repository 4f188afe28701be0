//! The kind of a program file: whether a library can be preloaded, and for which C library.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How a program makes its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    /// Through glibc, or another C library with the same kind of loader.
    Glibc,
    /// Through musl.
    Musl,
    /// Directly, without a C library that could be replaced.
    Static,
    /// Directly, too: Go programs do so even with a C library.
    Go,
    /// Unknown: the file is neither an ELF file of this machine's kind nor a script.
    Unknown,
}

/// The deepest nesting of scripts whose interpreters are scripts.
const DEPTH: usize = 4;
/// The most bytes of a file that are read for one purpose.
const LONGEST: u64 = 1 << 16;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;

/// Finds the file that a name on the command line stands for.
pub fn find(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 || name.is_absolute() {
        return Some(name.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Returns the kind of the program in `file`.
///
/// # Errors
/// If the file cannot be read.
pub fn kind(file: &Path) -> std::io::Result<Linkage> {
    let mut path = file.to_owned();
    for _ in 0..DEPTH {
        let file = File::open(&path)?;
        match interpreter(&file)? {
            Some(next) => path = next,
            None => return Ok(elf(&file).unwrap_or(Linkage::Unknown)),
        }
    }
    Ok(Linkage::Unknown)
}

/// Returns the interpreter in a script's first line, or `None` if the file is no script.
fn interpreter(file: &File) -> std::io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    BufReader::new(file).take(256).read_until(b'\n', &mut line)?;
    let line = String::from_utf8_lossy(&line).into_owned();
    let Some(rest) = line.strip_prefix("#!") else { return Ok(None) };
    let mut words = rest.split_whitespace();
    let Some(first) = words.next() else { return Ok(None) };
    // `env` searches for its argument as a shell does.
    let is_env = Path::new(first).file_name().is_some_and(|name| name == "env");
    let named = words.find(|word| is_env && !word.starts_with('-') && !word.contains('='));
    Ok(named.and_then(|name| find(Path::new(name))).or_else(|| Some(first.into())))
}

fn elf(file: &File) -> Option<Linkage> {
    let mut head = [0; 64];
    file.read_exact_at(&mut head, 0).ok()?;
    // 64 bits, little-endian.
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let offset = u64::from_le_bytes(head.get(32..40)?.try_into().ok()?);
    let size = u16::from_le_bytes(head.get(54..56)?.try_into().ok()?);
    let count = u16::from_le_bytes(head.get(56..58)?.try_into().ok()?);
    let mut kind = Linkage::Static;
    for number in 0..u64::from(count).min(256) {
        let mut segment = [0; 56];
        let at = offset.checked_add(number * u64::from(size))?;
        file.read_exact_at(&mut segment, at).ok()?;
        let word = |at: usize| Some(u64::from_le_bytes(segment.get(at..at + 8)?.try_into().ok()?));
        let (from, long) = (word(8)?, word(32)?);
        match u32::from_le_bytes(segment.get(..4)?.try_into().ok()?) {
            PT_INTERP => {
                let loader = bytes(file, from, long)?;
                let musl = loader.windows(7).any(|part| part == b"ld-musl");
                kind = if musl { Linkage::Musl } else { Linkage::Glibc };
            }
            // A note with the owner "Go": the program's build id (cmd/link).
            PT_NOTE
                if bytes(file, from, long)?.windows(8).any(|part| part == b"\x04\0\0\0Go\0\0") =>
            {
                return Some(Linkage::Go);
            }
            _ => {}
        }
    }
    Some(kind)
}

fn bytes(file: &File, from: u64, long: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; long.min(LONGEST) as usize];
    file.read_exact_at(&mut bytes, from).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_scripts_are_told_apart() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(kind(&own).unwrap(), Linkage::Glibc);
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let script = write("a", format!("#!{}\n", own.display()).as_bytes());
        assert_eq!(kind(&script).unwrap(), Linkage::Glibc);
        let by_env = write("b", b"#!/usr/bin/env -S sh -e\n");
        assert_eq!(kind(&by_env).unwrap(), Linkage::Glibc);
        let endless = write("c", b"");
        std::fs::write(&endless, format!("#!{}\n", endless.display())).unwrap();
        assert_eq!(kind(&endless).unwrap(), Linkage::Unknown);
        assert_eq!(kind(&write("d", b"text")).unwrap(), Linkage::Unknown);
        // The head of an ELF file without segments counts as static; a file that ends within its
        // head is unknown.
        let mut elf = std::fs::read(&own).unwrap()[..64].to_vec();
        elf[56..58].fill(0);
        assert_eq!(kind(&write("e", &elf)).unwrap(), Linkage::Static);
        elf[56] = 9;
        assert_eq!(kind(&write("f", &elf)).unwrap(), Linkage::Unknown);
        assert!(kind(Path::new("/nowhere")).is_err());
    }
}
