//! Attaches, detaches and resizes namespaces of a running controller.
//!
//! These are calls for the controller's own thread; other threads post them to its
//! [`Mailbox`](crate::Mailbox). The guest learns of each change by a Namespace Attribute Changed
//! event, if it enabled such events (section 5.21.1.11), and by the Changed Namespace List (section
//! 5.14.1.4).

use super::Home;
use crate::namespace::{ChangeError, Done, Namespace};
use crate::parts::MAX_NSID;
use crate::phase::Phase;

impl Home {
    /// Adds a namespace.
    ///
    /// # Errors
    /// [`ChangeError::NamespaceId`], [`ChangeError::Taken`], [`ChangeError::Geometry`],
    /// [`ChangeError::Lanes`].
    pub fn attach(&mut self, mut namespace: Namespace) -> Result<(), ChangeError> {
        let nsid = namespace.nsid;
        if !(1..=MAX_NSID).contains(&nsid) {
            return Err(ChangeError::NamespaceId(nsid));
        }
        // A number is free when the last disk with it is gone, since commands in flight find their
        // disk by it.
        if self.engine.namespaces.working(nsid).is_some() {
            return Err(ChangeError::Taken(nsid));
        }
        if !namespace.has_shape() {
            return Err(ChangeError::Geometry(nsid));
        }
        let lanes = self.fleet.len();
        if namespace.lanes.len() < lanes {
            return Err(ChangeError::Lanes(nsid));
        }
        let far = (0..lanes).filter_map(|_| namespace.of_lane());
        self.fleet.attach(far.collect());
        self.engine.namespaces.attach(namespace);
        self.namespace_changed(nsid);
        Ok(())
    }

    /// Takes a namespace away. Commands that are fetched from then on end with Invalid Namespace or
    /// Format. Commands in flight end as the disk ends them; then the disk is dropped, `done` is
    /// called and the number is free.
    pub fn detach(&mut self, nsid: u32, done: Done) {
        match self.engine.detach(nsid, done, self.fleet.len()) {
            Ok(()) => {
                self.namespace_changed(nsid);
                self.fleet.detach(nsid);
                self.engine.complete_changes();
            }
            Err(done) => done(Err(ChangeError::Unknown(nsid))),
        }
    }

    /// Makes a namespace take over its disk's size ([`slipway_block::Disk::refresh`]). When `done`
    /// is called, requests that were checked against the old size have ended; new requests wait
    /// meanwhile.
    pub fn refresh(&mut self, nsid: u32, done: Done) {
        if let Some(done) = self.fleet.refresh(nsid, done) {
            self.engine.namespaces.refresh(nsid, done);
        }
    }

    /// Notes that one lane has ended all requests of a namespace that was taken away.
    pub fn namespace_left(&mut self, nsid: u32) {
        self.engine.namespaces.left(nsid);
        self.engine.complete_changes();
    }

    /// Notes a change for the Changed Namespace List, and raises its event if the host enabled such
    /// events.
    pub fn namespace_changed(&mut self, nsid: u32) {
        // A host that has not enabled the controller reads everything when it does.
        if self.phase == Phase::Enabled && !self.registers.status.fatal() {
            self.events.namespace_changed(nsid, self.features.namespace_notices());
            self.changed = true;
        }
    }
}
