//! Arguments of `slipway cp`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

#[derive(Debug, Args)]
pub struct CpArgs {
    /// Keep the owners of files, by their numbers [default: they are root's in a container, and
    /// this user's on the host]
    #[arg(short, long)]
    pub archive: bool,
    /// Copy what SRC leads to, if it is a symbolic link, in place of the link
    #[arg(short = 'L', long)]
    pub follow_link: bool,
    /// File or directory: NAME:PATH or POD/CONTAINER:PATH in a container, PATH on the host, or "-"
    #[arg(value_name = "SRC", value_hint = ValueHint::AnyPath)]
    pub source: CopyEnd,
    /// Its place: as SRC, on the other side
    #[arg(value_name = "DEST", value_hint = ValueHint::AnyPath)]
    pub dest: CopyEnd,
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// A path in a container.
    Container {
        /// The sandbox or container.
        name: String,
        /// The path, which is absolute.
        path: String,
    },
    /// A path on the host.
    Host(PathBuf),
    /// An archive at this program's standard input or output.
    Archive,
}

impl std::str::FromStr for CopyEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("expected PATH, NAME:PATH or \"-\"".to_owned());
        }
        if text == "-" {
            return Ok(Self::Archive);
        }
        let is_host = text.starts_with(['/', '.']);
        match text.split_once(':') {
            Some((name, path)) if !is_host && !name.is_empty() => match path {
                "" => Err(format!("{text:?} names no path in {name}, as {name}:/etc/hosts")),
                path => {
                    let slash = if path.starts_with('/') { "" } else { "/" };
                    let (name, path) = (name.to_owned(), format!("{slash}{path}"));
                    Ok(Self::Container { name, path })
                }
            },
            _ => Ok(Self::Host(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_as_docker_writes_them() {
        let container =
            |name: &str, path: &str| CopyEnd::Container { name: name.into(), path: path.into() };
        for (text, end) in [
            ("-", CopyEnd::Archive),
            ("file", CopyEnd::Host("file".into())),
            ("./a:b", CopyEnd::Host("./a:b".into())),
            ("/a:b", CopyEnd::Host("/a:b".into())),
            ("../x/", CopyEnd::Host("../x/".into())),
            (":x", CopyEnd::Host(":x".into())),
            ("web:/etc", container("web", "/etc")),
            ("web:etc/.", container("web", "/etc/.")),
            ("pod/log:/a:b", container("pod/log", "/a:b")),
        ] {
            assert_eq!(text.parse(), Ok(end), "{text}");
        }
        for text in ["", "web:"] {
            assert!(text.parse::<CopyEnd>().is_err(), "{text}");
        }
    }
}
