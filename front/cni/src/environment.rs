//! The parameters of an operation, from the environment (CNI specification, *Parameters*).

use std::ffi::OsString;

use slipway_plane_api::{attachments, trace};

use crate::failure::{Code, Failure};

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Makes a container's interface.
    Add,
    /// Removes a container's interface.
    Del,
    /// Compares a container's interface with what was made.
    Check,
    /// Removes the interfaces of containers that are gone.
    Gc,
    /// Says whether ADD would work.
    Status,
    /// Says which versions are spoken.
    Version,
}

impl Command {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "ADD" => Self::Add,
            "DEL" => Self::Del,
            "CHECK" => Self::Check,
            "GC" => Self::Gc,
            "STATUS" => Self::Status,
            "VERSION" => Self::Version,
            _ => return None,
        })
    }

    /// Returns the operation's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// Returns whether the operation is about one container.
    pub fn names_container(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }
}

/// The parameters of an operation. Those that an operation does not have are empty.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The operation.
    pub command: Command,
    /// The container's id.
    pub container: String,
    /// The name of the interface in the container.
    pub interface: String,
    /// The path of the container's network namespace; DEL may have none.
    pub namespace: String,
    /// The name of the container for others, from the pod's name in `CNI_ARGS`.
    pub name: String,
    /// The directories with plugins.
    pub path: OsString,
    /// The daemon's directories, if the environment names them.
    pub run_dir: Option<OsString>,
    /// As `run_dir`: the directory of the daemon's state.
    pub data_dir: Option<OsString>,
    /// The runtime's place in its trace, if it says one.
    pub trace: Option<OsString>,
}

impl Environment {
    /// Takes the parameters out of `variables`.
    ///
    /// # Errors
    /// [`Code::Environment`].
    pub fn of(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Self, Failure> {
        let mut all = std::collections::BTreeMap::new();
        let ours = |name: &OsString| {
            let is_ours = |name: &str| {
                name.starts_with("CNI_") || name.starts_with("SLIPWAY_") || name == trace::VARIABLE
            };
            name.to_str().is_some_and(is_ours)
        };
        all.extend(variables.filter(|(name, value)| ours(name) && !value.is_empty()));
        let mut take = |name: &str| all.remove(std::ffi::OsStr::new(name));
        let text = |name: &str, value: Option<OsString>| match value.map(OsString::into_string) {
            Some(Ok(text)) => Ok(text),
            Some(Err(_)) => Err(bad(format!("{name} is no text in UTF-8"))),
            None => Ok(String::new()),
        };
        let word = text("CNI_COMMAND", take("CNI_COMMAND"))?;
        let command = Command::parse(&word).ok_or_else(|| {
            bad(format!(
                "CNI_COMMAND is {word:?}; it is ADD, DEL, CHECK, GC, STATUS or VERSION, and a \
                 runtime sets it, for example `cnitool`"
            ))
        })?;
        let args = text("CNI_ARGS", take("CNI_ARGS"))?;
        let found = Self {
            command,
            container: text("CNI_CONTAINERID", take("CNI_CONTAINERID"))?,
            interface: text("CNI_IFNAME", take("CNI_IFNAME"))?,
            namespace: text("CNI_NETNS", take("CNI_NETNS"))?,
            name: pod_name(&args).to_owned(),
            path: take("CNI_PATH").unwrap_or_default(),
            run_dir: take("SLIPWAY_RUN_DIR"),
            data_dir: take("SLIPWAY_DATA_DIR"),
            trace: take(trace::VARIABLE),
        };
        found.check()?;
        Ok(found)
    }

    fn check(&self) -> Result<(), Failure> {
        let Self { command, container, interface, namespace, .. } = self;
        if !command.names_container() {
            return Ok(());
        }
        let needs_namespace = *command != Command::Del;
        for (name, value, needed) in [
            ("CNI_CONTAINERID", container, true),
            ("CNI_IFNAME", interface, true),
            ("CNI_NETNS", namespace, needs_namespace),
        ] {
            if needed && value.is_empty() {
                return Err(bad(format!("{name} is missing; {} needs it", command.name())));
            }
        }
        attachments::check("any", container, interface).map_err(bad)?;
        if needs_namespace && !namespace.starts_with('/') {
            return Err(bad(format!(
                "CNI_NETNS is {namespace:?}; it is an absolute path, as /run/netns/NAME"
            )));
        }
        Ok(())
    }
}

fn bad(text: impl AsRef<str>) -> Failure {
    Failure::new(Code::Environment, text)
}

/// Returns the pod's name in `CNI_ARGS`, a list `KEY=VALUE;…`; empty if there is none. Other keys
/// are for other plugins.
fn pod_name(args: &str) -> &str {
    let pairs = args.split(';').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == "K8S_POD_NAME").map(|(_, name)| name).next().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Environment, Failure> {
        Environment::of(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    const ADD: [(&str, &str); 4] = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/run/netns/c1"),
    ];

    #[test]
    fn parameters_are_found() {
        let args = ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=web-1;X");
        let more = [args, ("CNI_PATH", "/a:/b"), ("TRACEPARENT", "any"), ("TRACE", "other")];
        let found = parse(&[&ADD[..], &more].concat()).unwrap();
        assert_eq!((found.command, found.name.as_str()), (Command::Add, "web-1"));
        assert_eq!((found.container.as_str(), found.interface.as_str()), ("c1", "eth0"));
        assert_eq!(found.path, "/a:/b");
        assert_eq!(found.trace, Some(OsString::from("any")));
        // DEL needs no namespace, and the others no container.
        let mut del = ADD[..3].to_vec();
        del[0].1 = "DEL";
        assert_eq!(parse(&del).unwrap().namespace, "");
        for word in ["GC", "STATUS", "VERSION"] {
            assert_eq!(parse(&[("CNI_COMMAND", word)]).unwrap().command.name(), word);
        }
    }

    #[test]
    fn what_is_missing_or_invalid_is_named() {
        for (name, value) in [
            ("CNI_COMMAND", ""),
            ("CNI_COMMAND", "add"),
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", "0123456789abcdef"),
            ("CNI_NETNS", ""),
            ("CNI_NETNS", "relative"),
        ] {
            let changed: Vec<_> =
                ADD.iter().map(|one| if one.0 == name { (name, value) } else { *one }).collect();
            let failure = parse(&changed).unwrap_err();
            assert_eq!(failure.code(), 4, "{name}={value}");
        }
    }
}
