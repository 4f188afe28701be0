//! The environment of a process: the host's variables, completed as in docker.

use slipway_agent_protocol::v1::ProcessSpec;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the process's environment, with `PATH`, `HOSTNAME`, `TERM` (with a terminal) and `HOME`
/// added if the host gave none. Of duplicate names, the last one counts. Entries without `=` are
/// left out.
pub fn complete(process: &ProcessSpec, home: &str) -> Vec<(String, String)> {
    let mut environment: Vec<(String, String)> = Vec::with_capacity(process.env.len() + 4);
    for entry in &process.env {
        let Some((name, value)) = entry.split_once('=') else { continue };
        set(&mut environment, name, value);
    }
    let mut default = |name: &str, value: &str| {
        if !environment.iter().any(|(existing, _)| existing == name) {
            environment.push((name.to_owned(), value.to_owned()));
        }
    };
    default("PATH", DEFAULT_PATH);
    let uname = rustix::system::uname();
    default("HOSTNAME", &uname.nodename().to_string_lossy());
    if process.terminal {
        default("TERM", "xterm");
    }
    default("HOME", home);
    environment
}

/// Sets `name` to `value`, and replaces an earlier value.
pub fn set(environment: &mut Vec<(String, String)>, name: &str, value: &str) {
    match environment.iter_mut().find(|(existing, _)| existing == name) {
        Some((_, old)) => value.clone_into(old),
        None => environment.push((name.to_owned(), value.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get<'a>(environment: &'a [(String, String)], name: &str) -> Option<&'a str> {
        environment.iter().find(|(existing, _)| existing == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn defaults_fill_gaps_only() {
        let env = ["A=1", "PATH=/x", "A=2=3", "broken"].map(String::from).to_vec();
        let spec = ProcessSpec { env, ..Default::default() };
        let environment = complete(&spec, "/home/ada");
        assert_eq!(get(&environment, "A"), Some("2=3"));
        assert_eq!(get(&environment, "PATH"), Some("/x"));
        assert_eq!(get(&environment, "HOME"), Some("/home/ada"));
        assert_eq!(get(&environment, "TERM"), None);
        assert_eq!(get(&environment, "broken"), None);
    }

    #[test]
    fn a_terminal_has_a_type() {
        let spec = ProcessSpec { terminal: true, ..Default::default() };
        assert_eq!(get(&complete(&spec, "/"), "TERM"), Some("xterm"));
        assert_eq!(get(&complete(&spec, "/"), "PATH"), Some(DEFAULT_PATH));
    }
}
