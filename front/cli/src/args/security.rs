//! Arguments for the rights of a container's processes, with docker's meaning.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use slipway_runtime::capabilities::ALL;

#[derive(Clone, Debug, Default, Args)]
pub struct SecurityArgs {
    /// Add a capability, as NET_ADMIN, or ALL
    #[arg(long, value_name = "CAPABILITY")]
    pub cap_add: Vec<CapabilityArg>,
    /// Drop a capability, or ALL
    #[arg(long, value_name = "CAPABILITY")]
    pub cap_drop: Vec<CapabilityArg>,
    /// Add a group to the user's, by its number
    #[arg(long, value_name = "GID")]
    pub group_add: Vec<u32>,
    /// no-new-privileges: no program gains rights by its file. seccomp=FILE: filter system calls by
    /// a profile of docker's or the OCI's form; seccomp=unconfined: none, which is the default
    #[arg(long, value_name = "OPTION")]
    pub security_opt: Vec<OptionArg>,
}

/// A value of `--cap-add` and `--cap-drop`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CapabilityArg {
    /// All capabilities.
    All,
    /// One capability.
    One(&'static str),
}

impl FromStr for CapabilityArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
        if bare == "ALL" {
            return Ok(Self::All);
        }
        let known = ALL.iter().find(|name| name.strip_prefix("CAP_") == Some(bare));
        let unknown = || format!("\"{text}\" is no capability: ALL, or as NET_ADMIN");
        known.map(|name| Self::One(name)).ok_or_else(unknown)
    }
}

/// A value of `--security-opt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionArg {
    /// Set if no program gains rights by its file.
    NoNewPrivileges(bool),
    /// The profile of system calls.
    Profile(PathBuf),
    /// No profile of system calls.
    Unconfined,
}

impl FromStr for OptionArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let at = text.find(['=', ':']).unwrap_or(text.len());
        let (name, value) = (&text[..at], text.get(at + 1..).unwrap_or_default());
        match (name, value) {
            ("no-new-privileges", "" | "true") => Ok(Self::NoNewPrivileges(true)),
            ("no-new-privileges", "false") => Ok(Self::NoNewPrivileges(false)),
            ("seccomp", "unconfined") => Ok(Self::Unconfined),
            ("seccomp", path) if !path.is_empty() => Ok(Self::Profile(path.into())),
            _ => Err(format!(
                "\"{text}\" is not supported: no-new-privileges, seccomp=FILE and \
                 seccomp=unconfined are"
            )),
        }
    }
}

/// A value of `--sysctl`: a name and a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysctlArg {
    /// The name.
    pub name: String,
    /// The value.
    pub value: String,
}

impl FromStr for SysctlArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
        let (name, value) = parts.ok_or_else(|| format!("\"{text}\": expected NAME=VALUE"))?;
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_by_either_name() {
        assert_eq!("net_admin".parse(), Ok(CapabilityArg::One("CAP_NET_ADMIN")));
        assert_eq!("CAP_CHOWN".parse(), Ok(CapabilityArg::One("CAP_CHOWN")));
        assert_eq!("all".parse(), Ok(CapabilityArg::All));
        for text in ["", "CAP_", "CAP_NONE"] {
            assert!(text.parse::<CapabilityArg>().unwrap_err().contains("is no capability"));
        }
    }

    #[test]
    fn options_of_both_spellings() {
        let parse = |text: &str| text.parse::<OptionArg>();
        for text in ["no-new-privileges", "no-new-privileges:true", "no-new-privileges=true"] {
            assert_eq!(parse(text), Ok(OptionArg::NoNewPrivileges(true)), "{text}");
        }
        assert_eq!(parse("no-new-privileges=false"), Ok(OptionArg::NoNewPrivileges(false)));
        assert_eq!(parse("seccomp=/a=b:c"), Ok(OptionArg::Profile("/a=b:c".into())));
        for text in ["", "seccomp", "apparmor=x", "label:disable", "no-new-privileges=1"] {
            assert!(parse(text).unwrap_err().contains("is not supported"), "{text}");
        }
        let expected = SysctlArg { name: "a.b".into(), value: "c=d".into() };
        assert_eq!("a.b=c=d".parse(), Ok(expected));
        assert!("a.b".parse::<SysctlArg>().is_err() && "=1".parse::<SysctlArg>().is_err());
    }
}
