//! Free page reporting: a guest tells which pages it does not use, and the host has them back while
//! the guest runs.

use slipway_hypervisor::VmSpec;

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// Returns why the guest of a sandbox is not asked to report free pages. Returns `None` if it is.
/// `by_default` is the node's setting.
pub(crate) fn not_wanted(record: &Record, by_default: bool) -> Option<&'static str> {
    let (begins, asked) = (record.template.is_some(), record.free_page_reporting_asked);
    let reasons = [
        (record.saves.is_some(), "a template does not report"),
        (record.begins_with_reporting(), "it goes on from a save, in memory of the pool"),
        (begins, "it is a fork of a machine that does not report"),
        (asked == Some(false), "its user wants none (--free-page-reporting=off)"),
        (asked.is_none() && !by_default, "the node's settings want none (free_page_reporting)"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// Notes in a sandbox's record why the host has no free pages of its guest back; empty: it has.
pub(crate) fn note(sandbox: &Sandbox, why_not: impl Into<String>) {
    let why_not = why_not.into();
    sandbox.note(|record| {
        record.free_page_reporting = why_not.is_empty();
        record.free_page_reporting_why_not = why_not;
    });
}

/// Gives a VM the device that its guest reports free pages to. If that is not possible, the guest
/// keeps the pages that it has touched, and the log has the reason. The sandbox's record says which
/// it is.
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
    if let Some(why) = cannot_report(record, spec.memory.is_of_pool()) {
        return no(why);
    }
    if !node.hypervisor.capabilities(spec).await?.reports_free_pages {
        return no("its VMM is QEMU; slipway-vmm can give pages back");
    }
    let needs = Needs { reporting: true, ..Needs::of(record) };
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    (spec.kernel, spec.initramfs) = (boot.kernel, boot.initramfs);
    spec.free_page_reporting = true;
    Ok(())
}

/// Returns why the pages of a sandbox cannot be given back, whatever its VMM is. Hardware reaches
/// the pages that memory had when it was pinned: memory that is given back and comes again has
/// others, which the device would never see. A pool's pages are the pool's to give back.
fn cannot_report(record: &Record, is_of_pool: bool) -> Option<&'static str> {
    let hardware = record.function_room() > 0 || record.has_hardware();
    let of_pool = record.network.as_ref().is_some_and(|network| network.pool.is_some());
    let reasons = [
        (is_of_pool, "its memory is a pool's (memory = \"pool\")"),
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
    use crate::record::{Origin, SandboxState};

    #[test]
    fn a_guest_is_asked_as_its_user_or_the_node_says_and_that_of_a_fork_is_not() {
        let mut record = record_of(SandboxState::Starting);
        assert_eq!(not_wanted(&record, true), None);
        assert!(not_wanted(&record, false).is_some_and(|why| why.contains("settings")));
        record.free_page_reporting_asked = Some(true);
        assert_eq!(not_wanted(&record, false), None);
        record.free_page_reporting_asked = Some(false);
        assert!(not_wanted(&record, true).is_some_and(|why| why.contains("=off")));
        record.free_page_reporting_asked = None;
        record.template = Some("web".to_owned());
        assert!(not_wanted(&record, true).is_some_and(|why| why.contains("does not report")));
        let needs = Needs { reporting: true, ..Needs::default() };
        record.origin = Some(Origin { disks: String::new(), slots: 0, needs });
        assert!(not_wanted(&record, true).is_some_and(|why| why.contains("of the pool")));
    }

    #[test]
    fn memory_of_a_pool_or_that_hardware_pins_stays() {
        let mut record = record_of(SandboxState::Starting);
        assert_eq!(cannot_report(&record, false), None);
        assert!(cannot_report(&record, true).is_some_and(|why| why.contains("a pool's")));
        (record.pod, record.function_slots) = (true, 2);
        assert!(cannot_report(&record, false).is_some_and(|why| why.contains("hardware")));
    }
}
