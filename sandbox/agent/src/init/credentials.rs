//! Identity and capabilities, dropped last (credentials(7), capabilities(7)).

use anyhow::{Context, Result};
use rustix::fs::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

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

/// Switches to `user`, with the capabilities of an ordinary or a privileged container.
pub fn drop_to(user: &User, privileged: bool, drop_mknod: bool) -> Result<()> {
    let kept = kept(privileged, drop_mknod);
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
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    set_thread_groups(&groups).context("setgroups")?;
    let gid = Gid::from_raw(user.gid);
    set_thread_res_gid(gid, gid, gid).context("setgid")?;
    let uid = Uid::from_raw(user.uid);
    set_thread_res_uid(uid, uid, uid).context("setuid")?;
    // Some kernels have no ambient capabilities to clear; none were raised.
    let _ = clear_ambient_capability_set();
    if user.uid == 0 && !privileged {
        // Root's sets follow from the bounding set at execute; this limits them until then.
        let none = CapabilitySet::empty();
        set_capabilities(
            None,
            CapabilitySets { effective: kept, permitted: kept, inheritable: none },
        )
        .context("capset")?;
    }
    Ok(())
}

fn kept(privileged: bool, drop_mknod: bool) -> CapabilitySet {
    match (privileged, drop_mknod) {
        (true, _) => CapabilitySet::from_bits_retain(u64::MAX),
        (false, false) => DEFAULT,
        (false, true) => DEFAULT.difference(CapabilitySet::MKNOD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_set_is_the_usual_one() {
        // The value is CapEff of a container of other runtimes.
        assert_eq!(kept(false, false).bits(), 0xa804_25fb);
        assert!(!kept(false, true).contains(CapabilitySet::MKNOD));
        assert!(kept(true, true).contains(CapabilitySet::SYS_ADMIN));
    }
}
