//! Programs for other machines: the kernel says of them no more than that it does not know their
//! format. The headers of ELF files are by elf(5).

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The part of a program in which the kernel looks for its format, bytes.
const HEADER: u64 = 256;
/// This machine's name.
const OWN: &str = std::env::consts::ARCH;
/// This machine's name in the platforms of images.
const PLATFORM: &str = match OWN.as_bytes() {
    b"x86_64" => "amd64",
    b"aarch64" => "arm64",
    _ => OWN,
};

/// Returns why the kernel does not execute the program at `path`, if the program is for another
/// machine, or a script whose interpreter is. Reads the beginnings of both files: returns `None` if
/// this process may not read them.
pub fn reason(path: &Path) -> Option<String> {
    let header = read(path)?;
    let (path, machine) = match interpreter(&header) {
        Some(interpreter) => (interpreter, machine(&read(interpreter)?)?),
        None => (path, machine(&header)?),
    };
    if machine == OWN {
        return None;
    }
    // A path of a container's may have line breaks.
    let path = path.to_string_lossy();
    Some(format!(
        "{} in the image is a program for {machine} and this machine is {OWN}: pull the image for \
         linux/{PLATFORM}",
        path.escape_debug()
    ))
}

/// Reads the beginning of a regular file.
fn read(path: &Path) -> Option<Vec<u8>> {
    // A path that has become a FIFO has no writer to wait for.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut header = Vec::new();
    if file.metadata().ok()?.is_file() {
        file.take(HEADER).read_to_end(&mut header).ok()?;
    }
    Some(header)
}

/// Returns the path of a script's interpreter.
fn interpreter(header: &[u8]) -> Option<&Path> {
    let line = header.strip_prefix(b"#!")?.trim_ascii_start();
    let end = line.iter().position(|byte| byte.is_ascii_whitespace() || *byte == 0);
    let path = &line[..end.unwrap_or(line.len())];
    (!path.is_empty()).then(|| Path::new(OsStr::from_bytes(path)))
}

/// Returns the name of the machine for which an ELF file is, as of `uname -m`. Returns `None` for
/// other files.
fn machine(header: &[u8]) -> Option<String> {
    let [0x7f, b'E', b'L', b'F', class, order, ..] = *header else { return None };
    let number = [*header.get(18)?, *header.get(19)?];
    let number = match order {
        1 => u16::from_le_bytes(number),
        2 => u16::from_be_bytes(number),
        _ => return None,
    };
    let name = match (number, class, order) {
        (3, ..) => "i386",
        (8, 1, _) => "mips",
        (8, 2, _) => "mips64",
        (20, ..) => "ppc",
        (21, _, 1) => "ppc64le",
        (21, ..) => "ppc64",
        (22, 2, _) => "s390x",
        (40, ..) => "arm",
        (62, 2, _) => "x86_64",
        (183, 2, _) => "aarch64",
        (243, 1, _) => "riscv32",
        (243, 2, _) => "riscv64",
        (258, 2, _) => "loongarch64",
        _ => return Some(format!("the machine {number} of ELF's")),
    };
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the beginning of an ELF file.
    fn elf(class: u8, order: u8, number: u16) -> Vec<u8> {
        let mut header = vec![0; 64];
        header[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, order]);
        let number = if order == 2 { number.to_be_bytes() } else { number.to_le_bytes() };
        header[18..20].copy_from_slice(&number);
        header
    }

    /// Returns the header of a program for a machine that this one is not, and that machine's name.
    fn another() -> (Vec<u8>, &'static str) {
        if OWN == "aarch64" { (elf(2, 1, 62), "x86_64") } else { (elf(2, 1, 183), "aarch64") }
    }

    #[test]
    fn machines_have_names() {
        for (class, order, number, name) in [
            (1, 1, 3, "i386"),
            (2, 1, 62, "x86_64"),
            (2, 1, 183, "aarch64"),
            (1, 1, 40, "arm"),
            (2, 1, 243, "riscv64"),
            (2, 1, 21, "ppc64le"),
            (2, 2, 21, "ppc64"),
            (2, 2, 22, "s390x"),
            (1, 1, 62, "the machine 62 of ELF's"),
            (2, 1, 0xffff, "the machine 65535 of ELF's"),
        ] {
            assert_eq!(machine(&elf(class, order, number)).as_deref(), Some(name));
        }
        let (header, _) = another();
        for length in 0..20 {
            assert_eq!(machine(&header[..length]), None, "{length} bytes");
        }
        assert_eq!(machine(&elf(2, 3, 183)), None);
        assert_eq!(machine(b"#!/bin/sh\n"), None);
        // This program's own header, as the linker made it.
        let own = read(Path::new("/proc/self/exe")).unwrap();
        assert_eq!((own.len() as u64, machine(&own).as_deref()), (HEADER, Some(OWN)));
    }

    #[test]
    fn a_program_for_another_machine_is_named_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let (header, name) = another();
        let file = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let program = file("a\nb", &header);
        let said = reason(&program).unwrap();
        let wanted =
            format!("a\\nb in the image is a program for {name} and this machine is {OWN}");
        assert!(said.contains(&wanted) && !said.contains('\n'), "{said}");
        assert!(said.ends_with(&format!(": pull the image for linux/{PLATFORM}")), "{said}");
        // The interpreter of a script is what the kernel could not execute.
        let shell = file("shell", &header);
        for script in ["#!{} -e\nexit\n", "#! \t{}\n", "#!{}"] {
            let script = script.replace("{}", shell.to_str().unwrap());
            let said = reason(&file("script", script.as_bytes())).unwrap();
            assert!(said.starts_with(&format!("{} in the image", shell.display())), "{said}");
        }
        assert_eq!(PLATFORM == "amd64", OWN == "x86_64");
    }

    #[test]
    fn other_programs_have_no_such_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let missing = format!("#!{}\n", dir.path().join("missing").display());
        let own = read(Path::new("/proc/self/exe")).unwrap();
        for content in
            [&b""[..], b"echo\n", b"#!\n", b"#!", b"\x7fELF", missing.as_bytes(), own.as_slice()]
        {
            std::fs::write(&path, content).unwrap();
            assert_eq!(reason(&path), None, "{}", String::from_utf8_lossy(content));
        }
        assert_eq!(reason(dir.path()), None);
        assert_eq!(reason(&dir.path().join("missing")), None);
    }
}
