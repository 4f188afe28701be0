//! The claim of one daemon to a data directory and a run directory: a lock in each. A second daemon
//! would take the first one's sandboxes for leftovers.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use slipway_lock::Lock;
use slipway_runtime::Config;

/// The outcome of a claim to a directory.
#[derive(Debug)]
enum Claim {
    /// The directory is this daemon's. The lock is released when its file is closed, at the latest
    /// by the kernel.
    Ours(Lock),
    /// The directory is another daemon's, which serves this socket.
    Theirs(PathBuf),
}

/// Takes the locks of the data directory and of the run directory, to be held while the daemon
/// lives. Returns `None` if another daemon serves the caller of a daemon that ends when idle.
///
/// # Errors
/// Another daemon has one of the directories, or a lock cannot be taken.
pub fn directories(config: &Config, ends_when_idle: bool) -> Result<Option<[Lock; 2]>> {
    let data = match claim(&config.lock(), config)? {
        Claim::Ours(lock) => lock,
        // Another command was quicker, and its daemon serves this one's caller, too.
        Claim::Theirs(socket) if ends_when_idle && socket == config.socket() => return Ok(None),
        Claim::Theirs(socket) => {
            let (data, socket) = (config.data_dir.display(), socket.display());
            bail!("another daemon has {data}; it serves {socket}");
        }
    };
    // Another daemon's socket and its sandboxes' would be taken for leftovers, too.
    let run = match claim(&config.run_dir.join("daemon.lock"), config)? {
        Claim::Ours(lock) => lock,
        Claim::Theirs(_) => {
            let run = config.run_dir.display();
            bail!("a daemon with another data directory uses {run}; --run-dir names another place")
        }
    };
    Ok(Some([data, run]))
}

/// Takes the lock at `path`, and writes into it which socket this daemon serves.
fn claim(path: &Path, config: &Config) -> Result<Claim> {
    match Lock::try_take(path) {
        Ok(lock) => {
            let mut file = lock.file();
            file.set_len(0)?;
            file.write_all(config.socket().as_os_str().as_encoded_bytes())?;
            Ok(Claim::Ours(lock))
        }
        // The holder took the lock while the file was readable to everybody, as older versions
        // created it.
        Err(slipway_lock::Error::Held { holders, .. }) if holders.are_strangers() => {
            bail!("{} is locked by {holders}, which is no daemon: end it", path.display())
        }
        Err(slipway_lock::Error::Held { .. }) => {
            let socket = std::fs::read_to_string(path).unwrap_or_default();
            // The other daemon has not written its socket yet: it is starting, most likely for the
            // same command.
            let socket = if socket.is_empty() { config.socket() } else { socket.into() };
            Ok(Claim::Theirs(socket))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    use super::*;

    fn config_in(dir: &Path) -> Config {
        Config { data_dir: dir.to_owned(), run_dir: dir.join("run"), ..Config::default() }
    }

    #[test]
    fn a_second_daemon_learns_where_the_first_one_serves() {
        let dir = tempfile::tempdir().unwrap();
        let config = config_in(dir.path());
        let first = claim(&config.lock(), &config).unwrap();
        assert!(matches!(first, Claim::Ours(_)));
        let second = claim(&config.lock(), &config).unwrap();
        assert!(
            matches!(&second, Claim::Theirs(socket) if *socket == config.socket()),
            "{second:?}"
        );
        let mode = std::fs::metadata(config.lock()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn one_daemon_has_both_directories() {
        let dir = tempfile::tempdir().unwrap();
        let config = config_in(dir.path());
        std::fs::create_dir(&config.run_dir).unwrap();
        let first = directories(&config, false).unwrap();
        assert!(first.is_some());
        // A command's own daemon leaves its caller to the first one.
        assert!(directories(&config, true).unwrap().is_none());
        let text = directories(&config, false).unwrap_err().to_string();
        assert!(text.contains("another daemon has"), "{text}");
        let other = Config { data_dir: dir.path().join("other"), ..config };
        std::fs::create_dir(&other.data_dir).unwrap();
        let text = directories(&other, true).unwrap_err().to_string();
        assert!(text.contains("a daemon with another data directory"), "{text}");
    }

    /// Checks that another user cannot lock the daemon's file, which would keep the node from its
    /// next daemon.
    #[test]
    fn another_user_holds_no_lock_of_the_daemons_as_root() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!(
                "SKIPPED: another_user_holds_no_lock_of_the_daemons_as_root: needs root to act as \
                 another user"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        // The same mode as the daemon's data directory: other users can pass through.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
        let config = config_in(dir.path());
        drop(claim(&config.lock(), &config).unwrap());
        let attack = || {
            let mut command = std::process::Command::new("flock");
            command.args(["--shared", "--nonblock", "--no-fork"]).arg(config.lock());
            command.args(["sh", "-c", "echo held; exec sleep 600"]).uid(65534).gid(65534);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null());
            let mut child = command.spawn().unwrap();
            let mut said = String::new();
            let out = child.stdout.take().unwrap();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut said).unwrap();
            (child, said)
        };
        let (mut child, said) = attack();
        assert_eq!(said, "", "the attacker has the lock");
        child.wait().unwrap();
        assert!(matches!(claim(&config.lock(), &config).unwrap(), Claim::Ours(_)));
        // A lock that was taken before the file was closed to others is reported with its holder,
        // which is no daemon.
        std::fs::set_permissions(config.lock(), PermissionsExt::from_mode(0o644)).unwrap();
        let (mut child, said) = attack();
        assert_eq!(said, "held\n");
        let error = claim(&config.lock(), &config).unwrap_err().to_string();
        assert!(error.contains("daemon.lock is locked by process"), "{error}");
        assert!(error.contains("of user 65534, which is no daemon"), "{error}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(claim(&config.lock(), &config).unwrap(), Claim::Ours(_)));
    }
}
