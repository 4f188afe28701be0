//! Attaches, detaches and resizes namespaces of a running controller.
//!
//! These are calls for the controller's own thread; other threads post them to its
//! [`Mailbox`](crate::Mailbox). The guest learns of each change by a Namespace Attribute Changed
//! event, if it enabled such events (section 5.21.1.11), and by the Changed Namespace List (section
//! 5.14.1.4).

use crate::Namespace;
use crate::controller::Controller;
use crate::parts::MAX_NSID;

/// The reason why a namespace was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The namespace ID is in use, 0, or above 1,024.
    #[error("namespace ID {0} is taken or not within 1 to 1024")]
    NamespaceId(u32),
    /// The controller has no such namespace, or no longer has it.
    #[error("the controller has no namespace {0}")]
    Unknown(u32),
    /// The disk's shape is impossible, or its block size has changed.
    #[error("the disk of namespace {0} has an impossible shape")]
    Geometry(u32),
    /// The namespace has fewer disks than there are lanes besides its first disk.
    #[error("namespace {0} needs its disk once more for each lane")]
    Lanes(u32),
}

/// The callback that is called when a change is complete. It is dropped without a call if the
/// controller is dropped first.
pub type Done = Box<dyn FnOnce(Result<(), ChangeError>) + Send>;

impl Controller {
    /// Adds a namespace.
    ///
    /// # Errors
    /// [`ChangeError::NamespaceId`], [`ChangeError::Geometry`], [`ChangeError::Lanes`].
    pub fn attach(&mut self, mut namespace: Namespace) -> Result<(), ChangeError> {
        let nsid = namespace.nsid;
        // A number is free when the last disk with it is gone, since commands in flight find their
        // disk by it.
        let taken = self.namespaces.working(nsid).is_some();
        if taken || !(1..=MAX_NSID).contains(&nsid) {
            return Err(ChangeError::NamespaceId(nsid));
        }
        if !namespace.has_shape() {
            return Err(ChangeError::Geometry(nsid));
        }
        let lanes = self.lane_count();
        if namespace.lanes.len() < lanes {
            return Err(ChangeError::Lanes(nsid));
        }
        let far = (0..lanes).filter_map(|_| namespace.of_lane());
        self.attach_far(far.collect());
        self.namespaces.attach(namespace);
        self.namespace_changed(nsid);
        Ok(())
    }

    /// Takes a namespace away. Commands that are fetched from then on end with Invalid Namespace or
    /// Format. Commands in flight end as the disk ends them; then the disk is dropped, `done` is
    /// called and the number is free.
    pub fn detach(&mut self, nsid: u32, done: Done) {
        match self.namespaces.detach(nsid) {
            Some(namespace) => {
                self.namespace_changed(nsid);
                self.namespaces.leave(namespace, done, self.lane_count());
                self.detach_far(nsid);
                self.settle_namespaces();
            }
            None => done(Err(ChangeError::Unknown(nsid))),
        }
    }

    /// Makes a namespace take over its disk's size ([`slipway_block::Disk::refresh`]). When `done`
    /// is called, requests that were checked against the old size have ended; new requests wait
    /// meanwhile.
    pub fn refresh(&mut self, nsid: u32, done: Done) {
        if let Some(done) = self.refresh_far(nsid, done) {
            self.namespaces.refresh(nsid, done);
        }
    }

    /// Notes that one lane has ended all requests of a namespace that was taken away.
    pub(crate) fn namespace_left(&mut self, nsid: u32) {
        self.namespaces.left(nsid);
        self.settle_namespaces();
    }

    /// Completes changes whose requests have ended.
    #[cold]
    pub(crate) fn settle_namespaces(&mut self) {
        for nsid in self.namespaces.settle() {
            self.namespace_changed(nsid);
        }
    }

    /// Notes a change for the Changed Namespace List, and raises its event if the host enabled such
    /// events.
    pub(crate) fn namespace_changed(&mut self, nsid: u32) {
        if self.link.is_some() {
            // The guest is told by the home.
            return;
        }
        // A host that has not enabled the controller reads everything when it does.
        if self.may_post() {
            self.events.namespace_changed(nsid, self.features.namespace_notices());
            self.changed = true;
        }
    }
}
