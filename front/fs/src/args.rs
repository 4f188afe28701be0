//! The command line. Sockets are given as numbers of inherited descriptors.

use std::ffi::OsString;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use lexopt::ValueExt;
use slipway_vfio_user::MemoryFile;

/// The help text.
pub const HELP: &str = "\
slipway-fs serves directories and files of the host to one guest, as virtio file system devices on
vfio-user sockets. It is started by the daemon, as root.

usage: slipway-fs --ready N --user UID --memory BYTES:DEVICE:INODE --share TAG … [--share TAG …]…

  --ready N           the inherited descriptor to which \"ready\" is written once all is served
  --user UID          the only user, beside root, whose VMM may connect
  --memory BYTES:DEVICE:INODE
                      the most memory that the VMM may map, and the file that it is of
  --pages DEVICE:INODE
                      the file of the pages that the guest shares with others, for reading
  --share TAG         a share, by the name with which the guest mounts it; with the options that
                      follow:
    --source PATH       the directory or the regular file
    --socket N          the listening socket, an inherited descriptor
    --read-only         refuse all that changes something
  --help, --version   print this text, or the version
";

/// Everything that the command line says.
#[derive(Debug)]
pub struct Args {
    pub ready: OwnedFd,
    pub user: u32,
    pub memory_bytes: u64,
    pub memory: MemoryFile,
    pub pages: Option<MemoryFile>,
    pub shares: Vec<Share>,
}

/// A directory or file to serve.
#[derive(Debug)]
pub struct Share {
    pub tag: String,
    pub source: PathBuf,
    pub socket: OwnedFd,
    pub read_only: bool,
}

/// The result of parsing.
#[derive(Debug)]
pub enum Parsed {
    /// Serve.
    Run(Args),
    /// Print this text and end.
    Print(String),
}

/// A share whose options are being read.
#[derive(Default)]
struct Begun {
    tag: String,
    source: Option<PathBuf>,
    socket: Option<RawFd>,
    read_only: bool,
}

#[derive(Default)]
struct Words {
    ready: Option<RawFd>,
    user: Option<u32>,
    memory: Option<(u64, MemoryFile)>,
    pages: Option<MemoryFile>,
    shares: Vec<Begun>,
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
            "read-only" => last(&mut all)?.read_only = true,
            _ => {
                let value = parser.value().map_err(|error| error.to_string())?;
                option(&mut all, &name, value)?;
            }
        }
    }
    finish(all).map(Parsed::Run)
}

fn option(all: &mut Words, name: &str, value: OsString) -> Result<(), String> {
    if name == "source" {
        last(all)?.source = Some(value.into());
        return Ok(());
    }
    let text = value.string().map_err(|error| format!("--{name}: {error}"))?;
    match name {
        "ready" => all.ready = Some(number(&text, name)?),
        "user" => all.user = Some(number(&text, name)?),
        "memory" => {
            let (bytes, file) = text.split_once(':').unwrap_or((&text, ""));
            all.memory = Some((number(bytes, name)?, memory_file(file, name)?));
        }
        "pages" => all.pages = Some(memory_file(&text, name)?),
        "share" => all.shares.push(Begun { tag: text, ..Begun::default() }),
        "socket" => last(all)?.socket = Some(number(&text, name)?),
        _ => return Err(format!("there is no option --{name}; --help lists them")),
    }
    Ok(())
}

fn last(all: &mut Words) -> Result<&mut Begun, String> {
    all.shares.last_mut().ok_or_else(|| "an option of a share comes before --share".to_owned())
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
    let ready = take(all.ready.ok_or_else(|| missing("ready"))?)?;
    let shares = all.shares.into_iter().map(|one| {
        let source = one.source.ok_or_else(|| missing("source"))?;
        let socket = take(one.socket.ok_or_else(|| missing("socket"))?)?;
        Ok(Share { tag: one.tag, source, socket, read_only: one.read_only })
    });
    let shares = shares.collect::<Result<Vec<_>, String>>()?;
    if shares.is_empty() {
        return Err(missing("share"));
    }
    let user = all.user.ok_or_else(|| missing("user"))?;
    Ok(Args { ready, user, memory_bytes, memory, pages: all.pages, shares })
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
    use std::os::fd::IntoRawFd;

    use super::*;

    fn refused(words: &[&str]) -> String {
        parse(words.iter().map(OsString::from)).unwrap_err()
    }

    fn descriptor() -> String {
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        file.into_raw_fd().to_string()
    }

    #[test]
    fn shares_have_options_of_their_own() {
        let (ready, one, two) = (descriptor(), descriptor(), descriptor());
        let words = format!(
            "slipway-fs --ready {ready} --user 7 --memory 4096:1:2 --pages 3:4 --share a \
             --source /x --socket {one} --share b --socket {two} --read-only --source /y"
        );
        let parsed = parse(words.split(' ').map(OsString::from)).unwrap();
        let Parsed::Run(args) = parsed else { panic!("{parsed:?}") };
        assert_eq!((args.user, args.memory_bytes), (7, 4096));
        assert_eq!(args.memory, MemoryFile { device: 1, inode: 2 });
        assert_eq!(args.pages, Some(MemoryFile { device: 3, inode: 4 }));
        let shares: Vec<_> = args
            .shares
            .iter()
            .map(|share| (share.tag.as_str(), share.source.to_str().unwrap(), share.read_only))
            .collect();
        assert_eq!(shares, [("a", "/x", false), ("b", "/y", true)]);
    }

    #[test]
    fn wrong_words_are_named() {
        for (words, said) in [
            (&["x", "--read-only"][..], "before --share"),
            (&["x", "--source", "/a"], "before --share"),
            (&["x", "--user", "root"], "--user: \"root\""),
            (&["x", "--memory", "4096:1"], "--memory: \"\""),
            (&["x", "--frob", "1"], "no option --frob"),
            (&["x", "y"], "y"),
            (&["x"], "--memory is missing"),
            (&["x", "--memory", "1:1:1", "--ready", "2"], "2 is no descriptor"),
            (&["x", "--memory", "1:1:1", "--ready", "123456"], "123456 is no descriptor"),
        ] {
            let message = refused(words);
            assert!(message.contains(said), "{message}");
        }
        let one = descriptor();
        let twice = format!("x --memory 1:1:1 --ready {one} --share a --source / --socket {one}");
        assert!(refused(&twice.split(' ').collect::<Vec<_>>()).contains("no descriptor"));
    }
}
