//! Namespaces of a running controller come, go and change their size.
//!
//! These are calls for the controller's own thread; others post them to its
//! [`Mailbox`](crate::Mailbox). The guest learns of each by a Namespace Attribute Changed event, if
//! it asked for such (section 5.21.1.11), and by the Changed Namespace List (section 5.14.1.4).

use crate::Namespace;
use crate::controller::Controller;
use crate::parts::MAX_NSID;

/// Why a namespace was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The namespace ID is in use, 0, or above 1,024.
    #[error("namespace ID {0} is taken or not within 1 to 1024")]
    NamespaceId(u32),
    /// The controller has no such namespace, or no longer.
    #[error("the controller has no namespace {0}")]
    Unknown(u32),
    /// The disk's shape is none, or its block size is another one.
    #[error("the disk of namespace {0} has an impossible shape")]
    Geometry(u32),
    /// There is no disk of the namespace for each lane.
    #[error("namespace {0} needs its disk once more for each lane")]
    Lanes(u32),
}

/// Who is told when a change is complete. Dropped without a call when the controller is dropped
/// first.
pub type Done = Box<dyn FnOnce(Result<(), ChangeError>) + Send>;

impl Controller {
    /// Adds a namespace.
    ///
    /// # Errors
    /// [`ChangeError::NamespaceId`], [`ChangeError::Geometry`], [`ChangeError::Lanes`].
    pub fn attach(&mut self, mut namespace: Namespace) -> Result<(), ChangeError> {
        let nsid = namespace.nsid;
        // A number is free when its last disk is gone: commands in flight know it by that.
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
    /// Format; those in flight end as the disk ends them, and then the disk is dropped, `done` is
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

    /// Has a namespace take over its disk's size ([`slipway_block::Disk::refresh`]). Requests that
    /// were checked against the old size have ended when `done` is called; new ones wait meanwhile.
    pub fn refresh(&mut self, nsid: u32, done: Done) {
        if let Some(done) = self.refresh_far(nsid, done) {
            self.namespaces.refresh(nsid, done);
        }
    }

    /// In a lane all requests of a namespace that was taken away have ended.
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

    /// Notes a change for the Changed Namespace List, and raises its event when the host asked for
    /// such events.
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
