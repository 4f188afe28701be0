//! The command line. Sockets are given as numbers of inherited descriptors.

use std::ffi::OsString;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use lexopt::ValueExt;
use slipway_vfio_user::MemoryFile;

/// The help text.
pub const HELP: &str = "\
slipway-fs serves directories and files of the host to one guest, as a virtio file system device on
a vfio-user socket. The daemon starts it, as root, and mounts them in the process's directory
/shares while it runs.

usage: slipway-fs --ready N --user UID --memory BYTES:DEVICE:INODE --tag TAG --socket N

  --ready N           the inherited descriptor to which \"ready\" is written once it serves
  --user UID          the only user, beside root, whose VMM may connect
  --memory BYTES:DEVICE:INODE
                      the most memory that the VMM may map, and the file that it is of
  --file N            that file, an inherited descriptor, for a VMM whose own descriptor of it only
                      names it: its memory is of a pool
  --pages DEVICE:INODE
                      the file of the pages that the guest shares with others, for reading
  --tag TAG           the name with which the guest mounts the file system
  --socket N          the listening socket, an inherited descriptor
  --help, --version   print this text, or the version
";

/// Everything that the command line says.
#[derive(Debug)]
pub struct Args {
    pub ready: OwnedFd,
    pub user: u32,
    pub memory_bytes: u64,
    pub memory: MemoryFile,
    pub file: Option<OwnedFd>,
    pub pages: Option<MemoryFile>,
    pub tag: String,
    pub socket: OwnedFd,
}

/// The result of parsing.
#[derive(Debug)]
pub enum Parsed {
    /// Serve.
    Run(Args),
    /// Print this text and end.
    Print(String),
}

#[derive(Default)]
struct Words {
    ready: Option<RawFd>,
    user: Option<u32>,
    memory: Option<(u64, MemoryFile)>,
    file: Option<RawFd>,
    pages: Option<MemoryFile>,
    tag: Option<String>,
    socket: Option<RawFd>,
}

/// Parses the command line.
///
/// # Errors
/// The fault in the command line, in one line.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Parsed, String> {
    use lexopt::Arg::Long;
    let mut parser = lexopt::Parser::from_iter(words);
    let mut all = Words::default();
    while let Some(arg) = parser.next().map_err(|error| error.to_string())? {
        let Long(name) = arg else { return Err(arg.unexpected().to_string()) };
        let name = name.to_owned();
        match name.as_str() {
            "help" => return Ok(Parsed::Print(HELP.to_owned())),
            "version" => {
                return Ok(Parsed::Print(format!("slipway-fs {}\n", env!("CARGO_PKG_VERSION"))));
            }
            _ => {
                let value = parser.value().map_err(|error| error.to_string())?;
                option(&mut all, &name, value)?;
            }
        }
    }
    finish(all).map(Parsed::Run)
}

fn option(all: &mut Words, name: &str, value: OsString) -> Result<(), String> {
    let text = value.string().map_err(|error| format!("--{name}: {error}"))?;
    match name {
        "ready" => all.ready = Some(number(&text, name)?),
        "user" => all.user = Some(number(&text, name)?),
        "memory" => {
            let (bytes, file) = text.split_once(':').unwrap_or((&text, ""));
            all.memory = Some((number(bytes, name)?, memory_file(file, name)?));
        }
        "file" => all.file = Some(number(&text, name)?),
        "pages" => all.pages = Some(memory_file(&text, name)?),
        "tag" => all.tag = Some(text),
        "socket" => all.socket = Some(number(&text, name)?),
        _ => return Err(format!("there is no option --{name}; --help lists them")),
    }
    Ok(())
}

fn number<T: std::str::FromStr>(text: &str, name: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("--{name}: \"{text}\" is not the number that it needs"))
}

fn memory_file(text: &str, name: &str) -> Result<MemoryFile, String> {
    let (device, inode) = text.split_once(':').unwrap_or((text, ""));
    Ok(MemoryFile { device: number(device, name)?, inode: number(inode, name)? })
}

fn finish(all: Words) -> Result<Args, String> {
    let missing = |name: &str| format!("--{name} is missing; --help lists the options");
    let (memory_bytes, memory) = all.memory.ok_or_else(|| missing("memory"))?;
    let mut taken = Vec::new();
    let mut take = |number: RawFd| inherited(number, &mut taken);
    Ok(Args {
        ready: take(all.ready.ok_or_else(|| missing("ready"))?)?,
        user: all.user.ok_or_else(|| missing("user"))?,
        memory_bytes,
        memory,
        file: all.file.map(&mut take).transpose()?,
        pages: all.pages,
        tag: all.tag.ok_or_else(|| missing("tag"))?,
        socket: take(all.socket.ok_or_else(|| missing("socket"))?)?,
    })
}

/// Takes over an inherited descriptor, each number once.
fn inherited(number: RawFd, taken: &mut Vec<RawFd>) -> Result<OwnedFd, String> {
    // SAFETY: fcntl of any number is harmless; F_GETFD only tells whether it is a descriptor.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    if number < 3 || !open || taken.contains(&number) {
        return Err(format!("{number} is no descriptor that was passed for this"));
    }
    taken.push(number);
    // SAFETY: the descriptor is open, was passed to this process for this purpose, and is taken
    // once: nothing else in this freshly started process owns a descriptor above 2.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|e| e.to_string())?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};

    use super::*;

    fn refused(words: &[&str]) -> String {
        parse(words.iter().map(OsString::from)).unwrap_err()
    }

    fn descriptor() -> String {
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        file.into_raw_fd().to_string()
    }

    #[test]
    fn a_line_says_whom_to_serve() {
        let (ready, socket, file) = (descriptor(), descriptor(), descriptor());
        let words = format!(
            "slipway-fs --ready {ready} --user 7 --memory 4096:1:2 --file {file} --pages 3:4 \
             --tag a --socket {socket}"
        );
        let parsed = parse(words.split(' ').map(OsString::from)).unwrap();
        let Parsed::Run(args) = parsed else { panic!("{parsed:?}") };
        assert_eq!((args.user, args.memory_bytes, args.tag.as_str()), (7, 4096, "a"));
        assert_eq!(args.memory, MemoryFile { device: 1, inode: 2 });
        assert_eq!(args.pages, Some(MemoryFile { device: 3, inode: 4 }));
        assert_eq!(args.file.map(|file| file.as_raw_fd().to_string()), Some(file));
    }

    #[test]
    fn wrong_words_are_named() {
        for (words, said) in [
            (&["x", "--user", "root"][..], "--user: \"root\""),
            (&["x", "--memory", "4096:1"], "--memory: \"\""),
            (&["x", "--frob", "1"], "no option --frob"),
            (&["x", "y"], "y"),
            (&["x"], "--memory is missing"),
            (&["x", "--memory", "1:1:1", "--ready", "2"], "2 is no descriptor"),
            (&["x", "--memory", "1:1:1", "--ready", "123456"], "123456 is no descriptor"),
            (&["x", "--file", "f"], "--file: \"f\""),
        ] {
            let message = refused(words);
            assert!(message.contains(said), "{message}");
        }
        let one = descriptor();
        let twice = format!("x --memory 1:1:1 --user 0 --ready {one} --tag a --socket {one}");
        assert!(refused(&twice.split(' ').collect::<Vec<_>>()).contains("no descriptor"));
    }
}
