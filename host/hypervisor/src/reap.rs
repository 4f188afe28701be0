//! Reaping of killed children.

use crate::child::Child;

/// Reaps a killed child on a thread of its own. The child stays a zombie if no thread can be
/// started.
pub(crate) fn reap_elsewhere(mut child: Child) {
    let reap = move || drop(child.wait());
    let _ = std::thread::Builder::new().name("vmm-reap".into()).spawn(reap);
}
