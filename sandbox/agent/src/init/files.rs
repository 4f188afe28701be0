//! Directories and files inside the container's root. These functions run after the root was
//! entered, so a hostile image's symbolic link leads at most to another place in the same
//! container.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use rustix::rand::{GetRandomFlags, getrandom};
use slipway_agent_protocol::v1::Names;

/// Creates the directory `path` (absolute) and its missing parents, with mode 0755.
pub fn create_directory(path: &str) -> Result<()> {
    if !path.starts_with('/') {
        bail!("{path:?} is not an absolute path");
    }
    match std::fs::create_dir_all(path) {
        Ok(()) => Ok(()),
        Err(_) if Path::new(path).is_dir() => Ok(()),
        Err(error) => Err(error).with_context(|| format!("creating {path}")),
    }
}

/// Creates the directory `path` if it is missing. Refuses a symbolic link or any other file,
/// because a mount on it would land elsewhere.
pub fn mount_point(path: &str) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => bail!("{path} of the image is not a directory"),
        Err(_) => std::fs::create_dir(path).with_context(|| format!("creating {path}")),
    }
}

/// Writes the file `path`, unless the image has a link, a directory or another special file there.
/// The image has that on purpose, so it stays.
pub fn replace(path: &str, content: &str) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        _ => return Ok(()),
    }
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))
        .with_context(|| format!("writing {path}"))?;
    rustix::io::write(&file, content.as_bytes()).with_context(|| format!("writing {path}"))?;
    Ok(())
}

/// Writes the image's `/etc/hostname`, `/etc/hosts` and `/etc/resolv.conf`.
pub fn write_etc(names: Option<&Names>) -> Result<()> {
    if !matches!(std::fs::symlink_metadata("/etc"), Ok(metadata) if metadata.is_dir()) {
        if std::fs::symlink_metadata("/etc").is_ok() {
            return Ok(());
        }
        std::fs::create_dir("/etc").context("creating /etc")?;
    }
    let files = etc(names);
    files.iter().try_for_each(|(path, content)| replace(path, content))
}

/// The file with the machine id (machine-id(5)).
pub const MACHINE_ID: &str = "/etc/machine-id";

/// Writes a machine id of the container's own, if the image has the file. Containers of an image
/// would have the same one otherwise, and so would forks.
pub fn write_machine_id() -> Result<()> {
    match std::fs::symlink_metadata(MACHINE_ID) {
        Ok(metadata) if metadata.is_file() => replace(MACHINE_ID, &machine_id()?),
        _ => Ok(()),
    }
}

/// Makes the content of a file with a new machine id: a random UUID of version 4 without hyphens.
pub fn machine_id() -> Result<String> {
    let mut random = [0; 16];
    getrandom(&mut random, GetRandomFlags::empty()).context("a random machine id")?;
    let id = u128::from_be_bytes(random);
    let id = (id & !(0xf << 76)) | (4 << 76);
    let id = (id & !(3 << 62)) | (2 << 62);
    Ok(format!("{id:032x}\n"))
}

/// Returns the paths and contents of `/etc/hostname`, `/etc/hosts` and `/etc/resolv.conf` in a
/// container with the host name of this thread's UTS namespace.
pub fn etc(names: Option<&Names>) -> [(&'static str, String); 3] {
    let uname = rustix::system::uname();
    let hostname = uname.nodename().to_string_lossy();
    let addresses = names.map_or(&[][..], |names| &names.addresses);
    // Without a reachable name server, the image's own list would only make lookups wait.
    let servers = names.map(resolv_conf).unwrap_or_default();
    [
        ("/etc/hostname", format!("{hostname}\n")),
        ("/etc/hosts", hosts(&hostname, addresses)),
        ("/etc/resolv.conf", servers),
    ]
}

/// Returns the content of resolv.conf. With ndots:0, names of one label are looked up as they are,
/// since the names of other sandboxes have one label.
fn resolv_conf(names: &Names) -> String {
    if names.servers.is_empty() {
        return String::new();
    }
    let servers = names.servers.iter().map(|server| format!("nameserver {server}\n"));
    servers.chain(["options ndots:0\n".to_owned()]).collect()
}

/// Returns the content of hosts. The container's name maps to its addresses, and without a network
/// to one of the loopback's.
fn hosts(hostname: &str, addresses: &[String]) -> String {
    let own = match (hostname, addresses) {
        ("" | "localhost" | "(none)", _) => String::new(),
        (name, []) => format!("127.0.1.1\t{name}\n"),
        (name, own) => own.iter().map(|address| format!("{address}\t{name}\n")).collect(),
    };
    format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n{own}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_neither_followed_nor_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(at("target"), "old").unwrap();
        std::os::unix::fs::symlink(at("target"), at("link")).unwrap();
        replace(&at("link"), "new").unwrap();
        assert_eq!(std::fs::read_to_string(at("target")).unwrap(), "old");
        replace(&at("target"), "new").unwrap();
        assert_eq!(std::fs::read_to_string(at("target")).unwrap(), "new");
        replace(&at("fresh"), "made").unwrap();
        assert_eq!(std::fs::read_to_string(at("fresh")).unwrap(), "made");
        std::os::unix::fs::symlink(dir.path(), at("dirlink")).unwrap();
        assert!(mount_point(&at("dirlink")).is_err());
        assert!(mount_point(&at("target")).is_err());
        mount_point(&at("new")).unwrap();
        mount_point(&at("new")).unwrap();
    }

    #[test]
    fn relative_working_directories_are_refused() {
        assert!(create_directory("a/b").is_err());
    }

    #[test]
    fn hosts_names_the_container() {
        assert!(hosts("web", &[]).contains("127.0.1.1\tweb\n"));
        assert!(!hosts("localhost", &[]).contains("127.0.1.1"));
        let own = ["10.213.0.2".to_owned(), "fd00::2".to_owned()];
        let text = hosts("web", &own);
        assert!(text.ends_with("10.213.0.2\tweb\nfd00::2\tweb\n"), "{text}");
        assert!(!text.contains("127.0.1.1"));
    }

    #[test]
    fn machine_ids_are_uuids_and_differ() {
        let [one, other] = [(); 2].map(|()| machine_id().unwrap());
        assert_ne!(one, other);
        for id in [one, other] {
            assert_eq!((id.len(), &id[12..13], &id[32..]), (33, "4", "\n"), "{id}");
            assert!("89ab".contains(&id[16..17]), "{id}");
            assert!(id.trim().bytes().all(|digit| digit.is_ascii_hexdigit()), "{id}");
        }
    }

    #[test]
    fn name_servers_are_listed() {
        let servers = vec!["10.213.0.1".to_owned()];
        let names = Names { servers, addresses: Vec::new() };
        assert_eq!(resolv_conf(&names), "nameserver 10.213.0.1\noptions ndots:0\n");
        assert_eq!(resolv_conf(&Names { servers: Vec::new(), ..names }), "");
    }
}
