//! Free page reporting: a guest tells which pages it does not use, and the host has them back while
//! the guest runs.

use slipway_hypervisor::{FreePages, VmSpec};

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// Returns why the free pages of a sandbox's guest are not wanted back. Returns `None` if they are.
/// `begins` says of a sandbox that begins with a saved machine whether that has the device for
/// reports, and is `None` for one that boots. `by_default` is the node's setting, which counted for
/// a saved machine when that booted.
pub(crate) fn not_wanted(
    record: &Record,
    begins: Option<bool>,
    by_default: bool,
) -> Option<&'static str> {
    let asked = record.reporting.asked;
    let is_default = asked.is_none() && begins.is_none();
    let reasons = [
        (begins == Some(false), "it is a fork of a machine that does not report"),
        (asked == Some(false), "its user wants none (--free-page-reporting=off)"),
        (is_default && !by_default, "the node's settings want none (free_page_reporting)"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// Notes in a sandbox's record why the host has no free pages of its guest back; empty: it has.
pub(crate) fn note(sandbox: &Sandbox, why_not: impl Into<String>) {
    sandbox.note(|record| record.reporting.note(why_not.into()));
}

/// Gives a VM the device that its guest reports free pages to, unless it begins with that, and has
/// the VMM give them back. If that is not possible, the guest keeps the pages that it has touched,
/// and the log has the reason. The sandbox's record says which it is.
///
/// # Errors
/// Never; a result as of every stage of a start.
pub(crate) async fn offer(node: &Node, sandbox: &Sandbox, spec: &mut VmSpec) -> Result<()> {
    let why_not = match try_offer(node, &sandbox.record(), spec).await {
        Ok(()) => String::new(),
        Err(error) => {
            tracing::warn!(sandbox = sandbox.name, %error, "its guest reports no free pages");
            error.to_string()
        }
    };
    note(sandbox, why_not);
    Ok(())
}

async fn try_offer(node: &Node, record: &Record, spec: &mut VmSpec) -> Result<()> {
    let no = |why: &str| Err(Error::FreePageReporting(why.to_owned()));
    // Memory that begins as a template has pages that no other sandbox had or will have.
    let begins = spec.free_pages == FreePages::Kept;
    if let Some(why) = cannot_report(record, spec.memory.is_of_pool() && !begins) {
        return no(why);
    }
    if begins {
        spec.free_pages = FreePages::GivenBack;
        return Ok(());
    }
    if !node.hypervisor.capabilities(spec).await?.reports_free_pages {
        return no("its VMM is QEMU; slipway-vmm can give pages back");
    }
    let needs = Needs { reporting: true, ..Needs::of(record) };
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    (spec.kernel, spec.initramfs) = (boot.kernel, boot.initramfs);
    spec.free_pages = FreePages::GivenBack;
    Ok(())
}

/// Returns why the pages of a sandbox cannot be given back, whatever its VMM is. Hardware reaches
/// the pages that memory had when it was pinned: memory that is given back and comes again has
/// others, which the device would never see. A pool's recycled pages are the pool's to give back.
fn cannot_report(record: &Record, is_recycled: bool) -> Option<&'static str> {
    let hardware = record.function_room() > 0 || record.plugged.has_hardware();
    let of_pool = record.network.as_ref().is_some_and(|network| network.pool.is_some());
    let reasons = [
        (is_recycled, "its memory is a pool's (memory = \"pool\")"),
        (hardware, "a function of hardware pins its memory, or may (pod_functions)"),
        (of_pool, "its interface is a function of a pool, which may pin its memory"),
        (record.assigned_function.is_some(), "its VMM pins its memory for a function of hardware"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    #[test]
    fn a_guest_that_boots_is_asked_as_its_user_or_the_node_says() {
        let mut record = record_of(SandboxState::Starting);
        assert_eq!(not_wanted(&record, None, true), None);
        assert!(not_wanted(&record, None, false).is_some_and(|why| why.contains("settings")));
        record.reporting.asked = Some(true);
        assert_eq!(not_wanted(&record, None, false), None);
        record.reporting.asked = Some(false);
        assert!(not_wanted(&record, None, true).is_some_and(|why| why.contains("=off")));
    }

    #[test]
    fn a_fork_reports_if_its_machine_has_the_device_unless_its_user_wants_none() {
        let mut record = record_of(SandboxState::Starting);
        for by_default in [false, true] {
            assert_eq!(not_wanted(&record, Some(true), by_default), None);
            let without = not_wanted(&record, Some(false), by_default);
            assert!(without.is_some_and(|why| why.contains("does not report")));
        }
        record.reporting.asked = Some(false);
        assert!(not_wanted(&record, Some(true), true).is_some_and(|why| why.contains("=off")));
    }

    #[test]
    fn memory_of_a_pool_or_that_hardware_pins_stays() {
        let mut record = record_of(SandboxState::Starting);
        assert_eq!(cannot_report(&record, false), None);
        assert!(cannot_report(&record, true).is_some_and(|why| why.contains("a pool's")));
        (record.pod, record.plugged.slots) = (true, 2);
        assert!(cannot_report(&record, false).is_some_and(|why| why.contains("hardware")));
    }
}
