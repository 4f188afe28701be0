//! Names of kernel settings that a container engine may set: those of network, IPC and UTS
//! namespaces (Linux, *admin-guide/sysctl*; sysctl(8) for the two spellings).

use std::fmt;

/// The longest name and the longest value of a setting, bytes.
pub const LONGEST: usize = 4096;
/// The first letters of settings of IPC namespaces.
const IPC: [&str; 4] = ["kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue."];
/// Settings of UTS namespaces.
const UTS: [&str; 2] = ["kernel.hostname", "kernel.domainname"];

/// The reason why a kernel setting cannot be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SysctlError {
    /// The setting is one of the whole kernel, or of a namespace of another kind.
    Foreign(String),
    /// The name leads to no setting.
    Name(String),
    /// The value is no line of text, or too long. Holds the name.
    Value(String),
}

impl fmt::Display for SysctlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign(name) => {
                write!(
                    f,
                    "the kernel setting {name:?} is not one of a network, IPC or UTS namespace: \
                     leave it out"
                )
            }
            Self::Name(name) => write!(f, "{name:?} is not the name of a kernel setting"),
            Self::Value(name) => {
                write!(f, "the value of the kernel setting {name} is no line of text")
            }
        }
    }
}

impl std::error::Error for SysctlError {}

/// Checks a setting. Returns its path below `/proc/sys`.
///
/// # Errors
/// [`SysctlError`].
pub fn check(name: &str, value: &str) -> Result<String, SysctlError> {
    let dotted = dotted(name);
    let own = dotted.starts_with("net.") || is_ipc(name) || UTS.contains(&dotted.as_str());
    if !own || name.len() > LONGEST {
        return Err(SysctlError::Foreign(name.chars().take(80).collect()));
    }
    let parts: Vec<String> = dotted.split('.').map(|part| part.replace('/', ".")).collect();
    let leads_astray =
        |part: &String| ["", ".", ".."].contains(&part.as_str()) || part.contains('\0');
    if parts.iter().any(leads_astray) {
        return Err(SysctlError::Name(name.to_owned()));
    }
    if value.len() > LONGEST || value.contains(|c: char| c.is_control() && c != '\t') {
        return Err(SysctlError::Value(name.to_owned()));
    }
    Ok(parts.join("/"))
}

/// Returns whether a setting is one of an IPC namespace.
pub fn is_ipc(name: &str) -> bool {
    let dotted = dotted(name);
    IPC.iter().any(|first| dotted.starts_with(first))
}

/// Returns a name with dots between its parts. In a name whose first separator is a slash, slashes
/// separate and dots belong to the parts.
fn dotted(name: &str) -> String {
    match name.find(['.', '/']).map(|at| name.as_bytes()[at]) {
        Some(b'/') => name
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_spellings_are_paths() {
        for (name, expected) in [
            ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
            ("net/ipv4/ip_forward", "net/ipv4/ip_forward"),
            ("net/ipv4/conf/eth0.7/rp_filter", "net/ipv4/conf/eth0.7/rp_filter"),
            ("net.ipv4.conf.eth0/7.rp_filter", "net/ipv4/conf/eth0.7/rp_filter"),
            ("kernel.shm_rmid_forced", "kernel/shm_rmid_forced"),
            ("fs.mqueue.msg_max", "fs/mqueue/msg_max"),
            ("kernel.domainname", "kernel/domainname"),
        ] {
            assert_eq!(check(name, "1\t2 3"), Ok(expected.to_owned()), "{name}");
        }
    }

    #[test]
    fn settings_of_the_whole_kernel_are_refused() {
        for name in ["", "vm.swappiness", "kernel.modprobe", "kernel.core_pattern", "fs.file-max"] {
            assert_eq!(check(name, "1"), Err(SysctlError::Foreign(name.to_owned())));
        }
        for name in ["net.", "net..ipv4", "net.//.vm", "net/../kernel/x", "net/./x", "net.a\0b"] {
            assert_eq!(check(name, "1"), Err(SysctlError::Name(name.to_owned())));
        }
    }

    #[test]
    fn settings_of_ipc_namespaces_are_told_apart() {
        assert!(is_ipc("kernel/shmmax") && is_ipc("fs.mqueue.msg_max") && is_ipc("kernel.sem"));
        assert!(!is_ipc("net.core.somaxconn") && !is_ipc("kernel.hostname"));
    }

    #[test]
    fn a_value_is_a_line() {
        for value in ["1\n2", "1\0", &"1".repeat(LONGEST + 1)] {
            let refused = SysctlError::Value("net.core.somaxconn".to_owned());
            assert_eq!(check("net.core.somaxconn", value), Err(refused));
        }
    }
}
