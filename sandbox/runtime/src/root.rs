//! The root of a sandbox that starts: pages that it shares with others, or a disk.

use slipway_hypervisor::VmSpec;

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// Gives a VM its root as shared pages. If that is not possible, its root is a disk and the log has
/// the reason. The sandbox's record says which it is.
///
/// # Errors
/// Never; a result as of every stage of a start.
pub(crate) async fn share(node: &Node, sandbox: &Sandbox, spec: &mut VmSpec) -> Result<()> {
    if let Err(error) = try_share(node, sandbox, &sandbox.record(), spec).await {
        tracing::warn!(sandbox = sandbox.name, %error, "its root is a disk");
    }
    Ok(())
}

async fn try_share(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
    spec: &mut VmSpec,
) -> Result<()> {
    let no = |why: &str| Err(Error::SharedRoot(why.to_owned()));
    if let Some(why) = cannot_share(record) {
        return no(why);
    }
    if !node.hypervisor.capabilities(spec).await?.shares_pages {
        return no("its VMM is QEMU; slipway-vmm can share roots");
    }
    let needs = Needs { shared_root: true, ..Needs::of(record) };
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    let (digest, path) = (&record.settings.image_digest, &record.settings.image_path);
    let root = node.roots.of_image(digest, path, &sandbox.lane).await?;
    (spec.kernel, spec.initramfs) = (boot.kernel, boot.initramfs);
    spec.shared = Some(root.pages().clone());
    sandbox.note(|record| record.shared_root = Some(root.pages().identity()));
    sandbox.hold_root(Some(root));
    Ok(())
}

/// Returns why a sandbox cannot share its root, whatever its VMM is.
fn cannot_share(record: &Record) -> Option<&'static str> {
    let reasons = [
        (record.pod, "a pod has no root"),
        (record.sockets.is_some(), "a socket engine takes the memory of its sandbox alone"),
        (record.settings.lazy, "its image was pulled lazily and was not there in full"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    #[test]
    fn an_image_that_was_not_there_in_full_is_a_disk() {
        let mut record = record_of(SandboxState::Starting);
        assert_eq!(cannot_share(&record), None);
        record.settings.lazy = true;
        assert!(cannot_share(&record).is_some_and(|why| why.contains("pulled lazily")));
    }
}
