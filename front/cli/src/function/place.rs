//! The files of functions' servers: a lock and a socket for each, in a folder of root's.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use slipway_lock::{Error, Lock};
use slipway_runtime::Config;
use tokio::net::UnixListener;

/// The most letters of a function's name: it is part of its sandboxes' names, and of a socket's
/// path.
const LONGEST_NAME: usize = 40;
/// The most connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// The end of the names of sockets.
const SOCKET: &str = "sock";

/// Returns the folder of the files.
fn folder(run_dir: &Path) -> PathBuf {
    run_dir.join("functions")
}

/// Checks the name of a function, since it becomes part of paths and of sandboxes' names.
///
/// # Errors
/// If it is none.
pub fn check_name(name: &str) -> Result<()> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if first && rest && name.len() <= LONGEST_NAME {
        return Ok(());
    }
    bail!(
        "\"{name}\" is no name for a function: 1 to {LONGEST_NAME} letters, digits, '-' or '_', \
         beginning with a letter or a digit"
    )
}

/// Returns the path of the socket of a function's server.
///
/// # Errors
/// If the name is none.
pub fn socket(config: &Config, name: &str) -> Result<PathBuf> {
    check_name(name)?;
    Ok(folder(&config.run_dir).join(name).with_extension(SOCKET))
}

/// Returns the names of functions whose servers have made a socket, in alphabetical order.
///
/// # Errors
/// If the folder cannot be read.
pub fn names(config: &Config) -> Result<Vec<String>> {
    let folder = folder(&config.run_dir);
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let sockets = paths.filter(|path| path.extension().is_some_and(|end| end == SOCKET));
    let names = sockets.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    let mut names: Vec<_> = names.collect();
    names.sort();
    Ok(names)
}

/// The socket of a function's running server, and the lock that keeps a second server away.
/// Dropping it removes the socket.
pub struct FunctionSocket {
    socket: PathBuf,
    _lock: Lock,
}

impl FunctionSocket {
    /// Takes the lock and the socket of the function `name`.
    ///
    /// # Errors
    /// Another process serves the function, or files cannot be made.
    pub fn take(config: &Config, name: &str) -> Result<Self> {
        let socket = socket(config, name)?;
        let folder = folder(&config.run_dir);
        let made = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&folder);
        made.with_context(|| format!("cannot create {}", folder.display()))?;
        let lock = match Lock::try_take(&socket.with_extension("lock")) {
            Err(Error::Held { holders, .. }) => bail!("{holders} serves the function {name}"),
            lock => lock?,
        };
        Ok(Self { socket, _lock: lock })
    }

    /// Listens at the socket, where only root can connect.
    ///
    /// # Errors
    /// The errors of socket(2), bind(2) and listen(2).
    pub fn listen(&self) -> Result<UnixListener> {
        // Left by a server that was killed: nobody else has the lock.
        let _ = std::fs::remove_file(&self.socket);
        slipway_private::listen_async(&self.socket, BACKLOG)
            .with_context(|| format!("cannot listen at {}", self.socket.display()))
    }
}

impl Drop for FunctionSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_paths_and_of_names() {
        for good in ["f", "0a", "thumbs-2_x", &"x".repeat(40)] {
            check_name(good).unwrap();
        }
        for bad in ["", "-f", "a/b", "a.b", "..", "ä", &"x".repeat(41)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_function_has_one_server_and_a_socket_while_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { run_dir: dir.path().to_owned(), ..Config::default() };
        assert_eq!(names(&config).unwrap(), Vec::<String>::new());
        let place = FunctionSocket::take(&config, "f").unwrap();
        let _listener = place.listen().unwrap();
        assert_eq!(names(&config).unwrap(), ["f"]);
        let second = FunctionSocket::take(&config, "f").err().unwrap().to_string();
        assert!(second.ends_with("serves the function f"), "{second}");
        FunctionSocket::take(&config, "g").unwrap();
        drop(place);
        assert_eq!(names(&config).unwrap(), Vec::<String>::new());
    }
}
