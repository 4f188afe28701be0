//! The abilities of agents, by their version.

use slipway_agent_protocol::v1;

use crate::{Error, Result};

/// The abilities of an agent that earlier ones lack.
#[derive(Clone, Copy, Default)]
pub(super) struct Abilities {
    /// It gives processes ambient capabilities.
    pub gives_ambient: bool,
    /// It makes directories that containers share by name.
    pub makes_empty_dirs: bool,
    /// It makes directories of a container's own for files.
    pub makes_file_dirs: bool,
    /// It has the guest's kernel make huge pages.
    pub makes_huge_pages: bool,
    /// It forks processes of zygotes.
    pub has_zygotes: bool,
    /// It starts processes that no host attaches to.
    pub detaches: bool,
    /// It bounds directories for files, and has no program in them executed, as is asked.
    pub bounds_file_dirs: bool,
}

impl Abilities {
    /// Returns the abilities of the agent that answered.
    pub fn of(reply: &v1::HelloReply) -> Self {
        Self {
            gives_ambient: reply.ambient_capabilities,
            makes_empty_dirs: reply.empty_dirs,
            makes_file_dirs: reply.file_dirs,
            makes_huge_pages: reply.huge_pages,
            has_zygotes: reply.zygotes,
            detaches: reply.detached_execs,
            bounds_file_dirs: reply.bounded_file_dirs,
        }
    }
}

impl super::Agent {
    /// Checks that the agent starts processes that no host attaches to: with an earlier one, they
    /// would never begin.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub(crate) fn check_detach(&self) -> Result<()> {
        if self.abilities.detaches {
            return Ok(());
        }
        let old = "the sandbox's agent is of an earlier version, which detaches no processes: \
                   leave --detach out, or start the sandbox anew";
        Err(Error::Agent(old.to_owned()))
    }

    /// Checks that the agent honours bounds of directories for files: earlier ones ignore these.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub(crate) fn check_file_dirs(&self, dirs: &[v1::FileDir]) -> Result<()> {
        let is_bounded = |dir: &v1::FileDir| dir.size_bytes.is_some() || dir.no_exec;
        if self.abilities.bounds_file_dirs || !dirs.iter().any(is_bounded) {
            return Ok(());
        }
        let old = "the sandbox's agent is of an earlier version, which has no --tmpfs: make its \
                   template anew, or leave --tmpfs out";
        Err(Error::Agent(old.to_owned()))
    }
}

/// Refuses ambient capabilities of a process that the agent would start without them.
pub(super) fn check_ambient(gives: bool, process: Option<&v1::ProcessSpec>) -> Result<()> {
    let security = process.and_then(|process| process.security.as_ref());
    let asked = security.and_then(|security| security.capabilities.as_ref());
    if gives || asked.is_none_or(|asked| asked.ambient.is_empty()) {
        return Ok(());
    }
    let old = "the sandbox's agent is of an earlier version, which gives no ambient capabilities: \
               ask for none, or start the sandbox anew";
    Err(Error::Agent(old.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_agent_gets_no_ambient_capabilities() {
        let spec = |ambient: &[&str]| {
            let ambient = ambient.iter().map(|name| (*name).to_owned()).collect();
            let capabilities = Some(v1::Capabilities { names: Vec::new(), ambient });
            let security = Some(v1::Security { capabilities, ..Default::default() });
            v1::ProcessSpec { security, ..Default::default() }
        };
        for gives in [false, true] {
            check_ambient(gives, None).unwrap();
            check_ambient(gives, Some(&v1::ProcessSpec::default())).unwrap();
            check_ambient(gives, Some(&spec(&[]))).unwrap();
            let asked = check_ambient(gives, Some(&spec(&["CAP_CHOWN"])));
            assert_eq!(asked.is_ok(), gives, "{asked:?}");
        }
    }
}
