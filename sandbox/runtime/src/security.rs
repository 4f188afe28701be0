//! The rights of a container's processes: checked as the user asked for them, kept in the record,
//! and passed to the agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use slipway_agent_protocol::{sysctl, v1 as agent_v1};

use crate::{Error, Result, v1};

/// The most capabilities that can be named: Linux numbers them up to 63.
const MOST_CAPABILITIES: usize = 256;
/// The most groups, `NGROUPS_MAX` of *linux/limits.h*.
const MOST_GROUPS: usize = 65_536;
/// The most paths of a list.
const MOST_PATHS: usize = 1024;
/// The longest path in bytes.
const LONGEST_PATH: usize = 4096;
/// The size of an instruction of a filter, bytes.
const INSTRUCTION: usize = 8;
/// The most instructions of a filter.
const MOST_INSTRUCTIONS: usize = 4096;

/// The rights of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Security {
    /// Groups beside those of the user.
    pub groups: Vec<u32>,
    /// The capabilities that the process can have (its bounding set), or `None` for the agent's
    /// default.
    pub capabilities: Option<Vec<String>>,
    /// Ambient capabilities (capabilities(7)): programs keep them under any user.
    pub ambient: Vec<String>,
    /// Set if no program gains rights by its file.
    pub no_new_privileges: bool,
    /// The paths that are hidden, or `None` for the usual ones.
    pub masked: Option<Vec<String>>,
    /// The paths that are read-only, or `None` for the usual ones.
    pub read_only: Option<Vec<String>>,
    /// Kernel settings of the sandbox.
    pub sysctls: BTreeMap<String, String>,
    /// The filter of system calls in hexadecimal digits; empty: none.
    pub seccomp: String,
}

impl Security {
    /// Checks what a user asks for.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names what is wrong.
    pub fn new(asked: Option<&v1::Security>) -> Result<Self> {
        let Some(asked) = asked else { return Ok(Self::default()) };
        let invalid = |reason: String| Err(Error::Invalid(reason));
        if asked.groups.len() > MOST_GROUPS {
            return invalid(format!("a process has at most {MOST_GROUPS} groups"));
        }
        let (instructions, rest) = asked.seccomp.as_chunks::<INSTRUCTION>();
        if !rest.is_empty() || instructions.len() > MOST_INSTRUCTIONS {
            return invalid(format!(
                "a filter of system calls has at most {MOST_INSTRUCTIONS} instructions of 8 bytes"
            ));
        }
        for (name, value) in &asked.sysctls {
            sysctl::check(name, value).map_err(|error| Error::Invalid(error.to_string()))?;
        }
        let (capabilities, ambient) = match &asked.capabilities {
            Some(asked) => (Some(capabilities(&asked.names)?), capabilities(&asked.ambient)?),
            None => (None, Vec::new()),
        };
        Ok(Self {
            groups: asked.groups.clone(),
            capabilities,
            ambient,
            no_new_privileges: asked.no_new_privileges,
            masked: paths(asked.masked.as_ref())?,
            read_only: paths(asked.read_only.as_ref())?,
            sysctls: asked.sysctls.clone().into_iter().collect(),
            seccomp: hex::encode(&asked.seccomp),
        })
    }

    /// Returns what a further process of the container with these rights may do if it asks for
    /// `asked`. It asks for groups of its own, and gets the container's rights in place of those
    /// that it does not ask for. A process that is `privileged` in its own right has all
    /// capabilities in place of the container's.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names what is wrong.
    pub fn of_exec(&self, asked: Option<&v1::Security>, privileged: bool) -> Result<Self> {
        let own = self.capabilities.clone().filter(|_| !privileged);
        if asked.is_none() {
            return Ok(Self { capabilities: own, ..self.clone() });
        }
        let asked = Self::new(asked)?;
        let (capabilities, ambient) = match asked.capabilities {
            Some(names) => (Some(names), asked.ambient),
            None => (own, self.ambient.clone()),
        };
        Ok(Self {
            groups: asked.groups,
            capabilities,
            ambient,
            no_new_privileges: asked.no_new_privileges || self.no_new_privileges,
            seccomp: if asked.seccomp.is_empty() { self.seccomp.clone() } else { asked.seccomp },
            ..Self::default()
        })
    }

    /// Returns the agent's message with the rights of one process. Paths and kernel settings, which
    /// a container has once, are not in it.
    pub fn of_process(&self) -> agent_v1::Security {
        let named = |names| agent_v1::Capabilities { names, ambient: self.ambient.clone() };
        agent_v1::Security {
            groups: self.groups.clone(),
            capabilities: self.capabilities.clone().map(named),
            no_new_privileges: self.no_new_privileges,
            // The record has what was encoded here.
            seccomp: hex::decode(&self.seccomp).unwrap_or_default(),
        }
    }

    /// Returns the agent's messages with the hidden paths and the read-only paths.
    pub fn paths(&self) -> (Option<agent_v1::Paths>, Option<agent_v1::Paths>) {
        let paths =
            |paths: &Option<Vec<String>>| paths.clone().map(|paths| agent_v1::Paths { paths });
        (paths(&self.masked), paths(&self.read_only))
    }
}

/// Checks names of capabilities, and returns them.
fn capabilities(names: &[String]) -> Result<Vec<String>> {
    let is_name = |name: &String| {
        let bare = name.strip_prefix("CAP_").unwrap_or_default();
        (1..64).contains(&bare.len()) && bare.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
    };
    match names.iter().find(|name| !is_name(name)) {
        Some(name) => {
            let name: String = name.chars().take(64).collect();
            Err(Error::Invalid(format!("{name:?} is no capability: as CAP_NET_ADMIN")))
        }
        None if names.len() > MOST_CAPABILITIES => {
            Err(Error::Invalid(format!("more than {MOST_CAPABILITIES} capabilities are named")))
        }
        None => Ok(names.to_vec()),
    }
}

/// Checks a list of paths in the container, and returns it.
fn paths(asked: Option<&v1::Paths>) -> Result<Option<Vec<String>>> {
    let Some(asked) = asked else { return Ok(None) };
    let is_path =
        |path: &String| path.starts_with('/') && path.len() <= LONGEST_PATH && !path.contains('\0');
    match asked.paths.iter().find(|path| !is_path(path)) {
        Some(path) => {
            let path: String = path.chars().take(80).collect();
            Err(Error::Invalid(format!(
                "{path:?} cannot be hidden or read-only: not an absolute path"
            )))
        }
        None if asked.paths.len() > MOST_PATHS => Err(Error::Invalid(format!(
            "more than {MOST_PATHS} paths are hidden or read-only in a container"
        ))),
        None => Ok(Some(asked.paths.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> v1::Security {
        ambient(names, &[])
    }

    fn ambient(names: &[&str], ambient: &[&str]) -> v1::Security {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let capabilities = v1::Capabilities { names: owned(names), ambient: owned(ambient) };
        v1::Security { capabilities: Some(capabilities), ..Default::default() }
    }

    #[test]
    fn what_is_asked_for_reaches_the_agent() {
        let asked = v1::Security {
            groups: vec![7],
            no_new_privileges: true,
            masked: Some(v1::Paths::default()),
            read_only: Some(v1::Paths { paths: vec!["/etc".into()] }),
            sysctls: [("net.core.somaxconn".into(), "9".into())].into(),
            seccomp: vec![6, 0, 0, 0, 0, 0, 0xff, 0x7f],
            ..ambient(&["CAP_CHOWN"], &["CAP_KILL"])
        };
        let security = Security::new(Some(&asked)).unwrap();
        let kept: Security =
            serde_json::from_str(&serde_json::to_string(&security).unwrap()).unwrap();
        assert_eq!(kept, security);
        let process = kept.of_process();
        assert_eq!((process.groups, process.seccomp), (vec![7], asked.seccomp));
        let capabilities = process.capabilities.unwrap();
        assert_eq!(capabilities.names, ["CAP_CHOWN"]);
        assert_eq!(capabilities.ambient, ["CAP_KILL"]);
        let (masked, read_only) = kept.paths();
        assert_eq!((masked.unwrap().paths.len(), read_only.unwrap().paths.len()), (0, 1));
        assert_eq!(kept.sysctls["net.core.somaxconn"], "9");
    }

    #[test]
    fn what_an_exec_leaves_out_is_the_containers() {
        let own = v1::Security {
            groups: vec![7],
            no_new_privileges: true,
            seccomp: vec![1; 8],
            ..ambient(&["CAP_CHOWN"], &["CAP_CHOWN"])
        };
        let own = Security::new(Some(&own)).unwrap();
        assert_eq!(own.of_exec(None, false).unwrap(), own);
        let exec = own.of_exec(Some(&v1::Security::default()), false).unwrap();
        assert_eq!(exec, Security { groups: vec![], ..own.clone() });
        assert_eq!(own.of_exec(None, true).unwrap().capabilities, None);
        let asked = v1::Security { seccomp: vec![2; 8], ..named(&[]) };
        let exec = own.of_exec(Some(&asked), true).unwrap();
        assert_eq!((exec.capabilities.unwrap(), exec.ambient), (vec![], vec![]));
        assert_eq!(exec.seccomp, "02".repeat(8));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let path = |path: &str| Some(v1::Paths { paths: vec![path.to_owned()] });
        let sysctls = [("vm.swappiness".to_owned(), "1".to_owned())].into();
        let usual = v1::Security::default;
        for (asked, said) in [
            (named(&["CHOWN"]), "\"CHOWN\" is no capability"),
            (named(&["CAP_"]), "is no capability"),
            (named(&["CAP_A"; 257]), "more than 256"),
            (ambient(&[], &["KILL"]), "\"KILL\" is no capability"),
            (v1::Security { masked: path("a"), ..usual() }, "not an absolute path"),
            (v1::Security { read_only: path("/a\0"), ..usual() }, "not an absolute path"),
            (v1::Security { sysctls, ..usual() }, "vm.swappiness"),
            (v1::Security { seccomp: vec![0; 9], ..usual() }, "4096 instructions"),
            (v1::Security { seccomp: vec![0; 8 * 4097], ..usual() }, "4096 instructions"),
            (v1::Security { groups: vec![0; 65_537], ..usual() }, "65536 groups"),
        ] {
            let error = Security::new(Some(&asked)).unwrap_err().to_string();
            assert!(error.contains(said) && !error.contains('\n'), "{error}");
        }
    }
}
