//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use slipway_runtime::Config;
use slipway_runtime::config::CONFIG_FILE;

use crate::mounts::check_root;

/// The help text.
const HELP: &str = include_str!("help.txt");

/// The settings of a snapshotter.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's settings.
    pub config: Config,
    /// The directory of snapshots and of their ledger.
    pub root: PathBuf,
    /// The path of the socket.
    pub socket: PathBuf,
}

/// The result of parsing.
#[derive(Debug)]
pub enum Parsed {
    /// Serve.
    Serve(Box<Settings>),
    /// Print this text and end.
    Print(String),
}

/// Paths as they are given by options, or else by the environment.
#[derive(Default)]
struct GivenPaths {
    root: Option<PathBuf>,
    socket: Option<PathBuf>,
    config: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    data_dir: Option<PathBuf>,
}

/// Parses the command line, and reads the settings. `environment` returns a variable.
///
/// # Errors
/// The fault in the command line or in the settings, in one line.
pub fn parse(
    words: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<Parsed, String> {
    use lexopt::Arg::Long;
    let mut parser = lexopt::Parser::from_iter(words);
    let variable = |name| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut given = GivenPaths {
        config: variable("SLIPWAY_CONFIG"),
        run_dir: variable("SLIPWAY_RUN_DIR"),
        data_dir: variable("SLIPWAY_DATA_DIR"),
        ..GivenPaths::default()
    };
    let unknown = |what: &str| format!("there is no {what}; --help lists the options");
    while let Some(arg) = parser.next().map_err(|error| error.to_string())? {
        let Long(name) = arg else { return Err(unknown("argument without an option")) };
        let name = name.to_owned();
        let place = match name.as_str() {
            "root" => &mut given.root,
            "socket" => &mut given.socket,
            "config" => &mut given.config,
            "run-dir" => &mut given.run_dir,
            "data-dir" => &mut given.data_dir,
            "help" => return Ok(Parsed::Print(HELP.to_owned())),
            "version" => {
                let version = env!("CARGO_PKG_VERSION");
                return Ok(Parsed::Print(format!("slipway-snapshotter {version}\n")));
            }
            _ => return Err(unknown(&format!("option --{name}"))),
        };
        let value = parser.value().map_err(|error| error.to_string())?;
        if value.is_empty() {
            return Err(format!("--{name} needs a path"));
        }
        *place = Some(value.into());
    }
    Ok(Parsed::Serve(Box::new(settings(given)?)))
}

fn settings(given: GivenPaths) -> Result<Settings, String> {
    let file = given.config.unwrap_or_else(|| CONFIG_FILE.into());
    // The default file may be missing, but not one that the user named.
    if file != Path::new(CONFIG_FILE) && !file.exists() {
        return Err(format!("there is no settings file {}", file.display()));
    }
    let mut config = Config::load(&file).map_err(|error| error.to_string())?;
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    if let Some(dir) = given.run_dir {
        config.run_dir = absolute(dir)?;
    }
    if let Some(dir) = given.data_dir {
        config.data_dir = absolute(dir)?;
    }
    let root = given.root.unwrap_or_else(|| config.data_dir.join("snapshotter"));
    let root = check_root(&root)?;
    let socket = given.socket.unwrap_or_else(|| config.run_dir.join("snapshotter.sock"));
    Ok(Settings { config, root, socket: absolute(socket)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str, variables: &[(&str, &str)]) -> Result<Parsed, String> {
        let words = std::iter::once("slipway-snapshotter").chain(words.split_whitespace());
        parse(words.map(OsString::from), |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    fn served(words: &str, variables: &[(&str, &str)]) -> Settings {
        match parsed(words, variables).unwrap() {
            Parsed::Serve(settings) => *settings,
            Parsed::Print(text) => panic!("{text}"),
        }
    }

    #[test]
    fn paths_follow_from_the_nodes_directories() {
        let dirs = [("SLIPWAY_RUN_DIR", "/r"), ("SLIPWAY_DATA_DIR", "/d")];
        let settings = served("", &dirs);
        assert_eq!(settings.root, Path::new("/d/snapshotter"));
        assert_eq!(settings.socket, Path::new("/r/snapshotter.sock"));
        assert_eq!(settings.config.images_dir(), Path::new("/d/images"));
        let settings = served("--root /x --socket=/y.sock --data-dir /z", &dirs);
        assert_eq!((settings.root, settings.socket), ("/x".into(), "/y.sock".into()));
        assert_eq!(settings.config.data_dir, Path::new("/z"));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        let bad = ["serve", "--roof /x", "--root", "--root=", "--config /no/such", "--root a,b"];
        for bad in bad {
            let Err(why) = parsed(bad, &[]) else { panic!("{bad}") };
            assert!(!why.is_empty() && !why.contains('\n'), "{why}");
        }
        for (word, text) in [("--help", "usage: slipway-snapshotter"), ("--version", "slipway")] {
            let Ok(Parsed::Print(printed)) = parsed(word, &[]) else { panic!("{word}") };
            assert!(printed.contains(text), "{printed}");
        }
    }
}
