//! Identity and capabilities, dropped last (credentials(7), capabilities(7)).
//!
//! The bounding set decides: once a program is executed, root's permitted set is the bounding set,
//! and everybody else's is the ambient set, which is empty unless it was asked for.

use anyhow::{Context, Result};
use rustix::fs::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use slipway_agent_protocol::v1::Security;

use super::seccomp::Filter;
use super::user::User;

/// The default capabilities of a container, the same as in other container runtimes.
const DEFAULT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::AUDIT_WRITE);

/// The rights of a process once it executes its program.
pub struct Rights {
    /// The capabilities that the process and its children can ever have.
    capabilities: CapabilitySet,
    /// The ambient capabilities: programs that the process executes have them as any user.
    ambient: CapabilitySet,
    no_new_privileges: bool,
    /// The filter of system calls that is loaded last, if there is one.
    pub filter: Option<Filter>,
}

impl Rights {
    /// Reads what `security` asks for. What it leaves out is as usual for an ordinary or a
    /// privileged process. With `drop_mknod`, an ordinary process does not get CAP_MKNOD.
    ///
    /// # Errors
    /// The filter is malformed.
    pub fn new(security: Option<&Security>, privileged: bool, drop_mknod: bool) -> Result<Rights> {
        let named = security.and_then(|security| security.capabilities.as_ref());
        let all = match (named, privileged) {
            (Some(named), _) => parse(&named.names),
            (None, true) => CapabilitySet::from_bits_retain(u64::MAX),
            (None, false) => DEFAULT,
        };
        let dropped = match drop_mknod && !privileged {
            true => CapabilitySet::MKNOD,
            false => CapabilitySet::empty(),
        };
        let capabilities = all.difference(dropped);
        let ambient = named.map_or(CapabilitySet::empty(), |named| parse(&named.ambient));
        Ok(Rights {
            capabilities,
            // The kernel raises none that the bounding set lacks.
            ambient: ambient.intersection(capabilities),
            no_new_privileges: security.is_some_and(|security| security.no_new_privileges),
            filter: Filter::parse(security.map_or(&[], |security| &security.seccomp))?,
        })
    }

    /// Returns the capability that loading the filter takes (seccomp(2)). The program does not get
    /// it: its own follow from the bounding set.
    fn to_load(&self) -> CapabilitySet {
        match self.filter.is_some() && !self.no_new_privileges {
            true => CapabilitySet::SYS_ADMIN,
            false => CapabilitySet::empty(),
        }
    }
}

/// Returns the capabilities with these names, such as "CAP_CHOWN". Leaves out unknown names: they
/// may be those of a newer kernel.
fn parse(names: &[String]) -> CapabilitySet {
    let known = |name: &String| CapabilitySet::from_name(name.strip_prefix("CAP_")?);
    names.iter().filter_map(known).collect()
}

/// Switches to `user` with `rights`, except for the filter.
pub fn drop_to(user: &User, rights: &Rights) -> Result<()> {
    limit_bounding_set(rights.capabilities)?;
    let kept = rights.to_load().union(rights.ambient);
    // Else setuid clears the permitted set of a user who is not root. Ends at execve.
    set_keep_capabilities(!kept.is_empty()).context("prctl(PR_SET_KEEPCAPS)")?;
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    set_thread_groups(&groups).context("setgroups")?;
    let gid = Gid::from_raw(user.gid);
    set_thread_res_gid(gid, gid, gid).context("setgid")?;
    let uid = Uid::from_raw(user.uid);
    set_thread_res_uid(uid, uid, uid).context("setuid")?;
    // Some kernels have no ambient capabilities to clear; none were raised.
    let _ = clear_ambient_capability_set();
    // Root's sets follow from the bounding set at execute; this limits them until then.
    let own = if user.uid == 0 { rights.capabilities } else { CapabilitySet::empty() };
    // The kernel refuses capabilities that it does not know.
    let known = capabilities(None).context("capget")?.permitted;
    let until = own.union(kept).intersection(known);
    // Only what is permitted and inheritable can be ambient.
    let inheritable = rights.ambient.intersection(known);
    set_capabilities(None, CapabilitySets { effective: until, permitted: until, inheritable })
        .context("capset")?;
    for capability in inheritable.iter() {
        configure_capability_in_ambient_set(capability, true)
            .context("prctl(PR_CAP_AMBIENT_RAISE)")?;
    }
    if rights.no_new_privileges {
        set_no_new_privs(true).context("prctl(PR_SET_NO_NEW_PRIVS)")?;
    }
    Ok(())
}

fn limit_bounding_set(kept: CapabilitySet) -> Result<()> {
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // EINVAL means that the number is above the kernel's last capability.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error).context("dropping capabilities"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::v1::Capabilities;

    use super::*;

    fn kept(security: Option<&Security>, privileged: bool, drop_mknod: bool) -> CapabilitySet {
        Rights::new(security, privileged, drop_mknod).unwrap().capabilities
    }

    fn named(names: &[&str]) -> Security {
        ambient(names, &[])
    }

    fn ambient(names: &[&str], ambient: &[&str]) -> Security {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let capabilities = Capabilities { names: owned(names), ambient: owned(ambient) };
        Security { capabilities: Some(capabilities), ..Security::default() }
    }

    #[test]
    fn the_default_set_is_the_usual_one() {
        // The value is CapEff of a container of other runtimes.
        assert_eq!(kept(None, false, false).bits(), 0xa804_25fb);
        assert_eq!(kept(Some(&Security::default()), false, false).bits(), 0xa804_25fb);
        assert!(!kept(None, false, true).contains(CapabilitySet::MKNOD));
        assert!(kept(None, true, true).contains(CapabilitySet::SYS_ADMIN));
    }

    #[test]
    fn named_capabilities_are_exact() {
        let some = named(&["CAP_SYS_PTRACE", "CAP_MKNOD", "CAP_OF_A_LATER_KERNEL", "CHOWN", ""]);
        let both = CapabilitySet::SYS_PTRACE.union(CapabilitySet::MKNOD);
        assert_eq!(kept(Some(&some), false, false), both);
        assert_eq!(kept(Some(&some), true, true), both);
        assert_eq!(kept(Some(&some), false, true), CapabilitySet::SYS_PTRACE);
        assert_eq!(kept(Some(&named(&[])), true, false), CapabilitySet::empty());
    }

    #[test]
    fn only_what_a_process_can_have_is_ambient() {
        let of = |security: &Security, privileged, drop_mknod| {
            Rights::new(Some(security), privileged, drop_mknod).unwrap().ambient
        };
        let asked = ambient(&["CAP_CHOWN", "CAP_MKNOD"], &["CAP_MKNOD", "CAP_KILL", "CAP_LATER"]);
        assert_eq!(of(&asked, false, false), CapabilitySet::MKNOD);
        assert_eq!(of(&asked, true, true), CapabilitySet::MKNOD);
        assert_eq!(of(&asked, false, true), CapabilitySet::empty());
        assert_eq!(of(&named(&["CAP_CHOWN"]), false, false), CapabilitySet::empty());
        assert_eq!(of(&Security::default(), true, false), CapabilitySet::empty());
    }

    #[test]
    fn a_filter_is_loaded_with_a_capability_or_without_new_privileges() {
        let filter = Security { seccomp: vec![6, 0, 0, 0, 0, 0, 0xff, 0x7f], ..named(&[]) };
        let load =
            |security: &Security| Rights::new(Some(security), false, false).unwrap().to_load();
        assert_eq!(load(&filter), CapabilitySet::SYS_ADMIN);
        assert_eq!(load(&Security { no_new_privileges: true, ..filter }), CapabilitySet::empty());
        assert_eq!(load(&named(&["CAP_SYS_ADMIN"])), CapabilitySet::empty());
    }
}
