//! Updates of the limits of a container with a sandbox of its own: those that the guest's kernel
//! keeps beside the memory and the CPUs of the machine.

use crate::node::Node;
use crate::pod;
use crate::record::{Limits, Record, SandboxState};
use crate::target::Target;
use crate::v1::Resources;
use crate::{Error, Result};

impl Node {
    /// Changes limits of the container of a sandbox that is no pod. Waits for its turn. The change
    /// goes on to its end if the caller stops waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::WrongState`] if the container does not run; [`Error::Busy`] if
    /// too many updates wait; [`Error::Refused`] if the guest refuses; [`Error::Agent`]; errors of
    /// saving the record.
    pub(crate) async fn update_own(&self, target: &Target, asked: &Resources) -> Result<()> {
        let asked = pod::limits(Some(asked))?;
        if asked == Limits::default() {
            return Err(Error::Invalid("the update names no limit".to_owned()));
        }
        pod::check_huge_pages(target.sandbox.look(|record| record.limits), asked)?;
        if target.container.state() != SandboxState::Running {
            return Err(target.wrong_state("the limits of a container that runs can be changed"));
        }
        let place = target.sandbox.update_of_limits()?;
        let target = target.clone();
        let updated = self.guests.spawn(async move {
            let _place = place;
            let _turn = target.sandbox.wait_to_change_size().await;
            pod::limit_in_guest(&target, asked).await?;
            let change = |record: &mut Record| {
                record.limits = record.limits.changed_by(asked);
            };
            target.sandbox.update(change).await
        });
        updated.await.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}
