//! The way of a container's output: from its guest to the log and to the attached clients.

use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::agent::{Agent, CALL};
use crate::running::Carry;
use crate::stdio::{self, Pieces};
use crate::target::Target;
use crate::{Error, Result, log};

/// The time in which the streams of a container that runs since an earlier daemon are attached.
/// Without them the container is lost, so a guest on a busy machine has longer than for a call. The
/// wait ends with the guest's VMM.
const REATTACH: Duration = Duration::from_secs(600);

/// The streams of a container's first process, attached and not yet carried.
pub(crate) struct OutputCarrier {
    output: Pieces,
    log: log::Writer,
}

impl OutputCarrier {
    /// Attaches the streams of a container that the guest has, with the output that follows the
    /// kept output. The kept output has at most `most` bytes. `session` is held until the output
    /// has ended.
    ///
    /// # Errors
    /// [`Error::File`] for the log, [`Error::Agent`] for the guest, or if the streams were attached
    /// before.
    pub(crate) async fn attach(
        target: &Target,
        agent: &Agent,
        most: u64,
        session: Option<OwnedSemaphorePermit>,
    ) -> Result<Self> {
        Self::attach_within(CALL, target, agent, most, session).await
    }

    /// Does what [`attach`](Self::attach) does, for a container that runs since an earlier daemon:
    /// its guest may take long to answer.
    ///
    /// # Errors
    /// The errors of [`attach`](Self::attach).
    pub(crate) async fn reattach(
        target: &Target,
        agent: &Agent,
        most: u64,
        session: Option<OwnedSemaphorePermit>,
    ) -> Result<Self> {
        Self::attach_within(REATTACH, target, agent, most, session).await
    }

    async fn attach_within(
        limit: Duration,
        target: &Target,
        agent: &Agent,
        most: u64,
        session: Option<OwnedSemaphorePermit>,
    ) -> Result<Self> {
        let (container, lane) = (&target.container, &target.sandbox.lane);
        let path = container.log();
        let file = path.clone();
        let log = lane.run(move || log::Writer::open(&file, most)).await;
        let mut log = log.map_err(Error::file("cannot write", &path))?;
        let input = container.take_input()?;
        let process = container.process();
        let input = (input, limit);
        let (output, from) = stdio::resume(agent, process, log.position(), input, session).await?;
        if from != log.position() {
            // Bytes are missing from the log: the disk was full, and the container went on.
            let sought = lane.run(move || log.seek(from).map(|()| log)).await;
            log = sought.map_err(Error::file("cannot write", &path))?;
        }
        Ok(Self { output, log })
    }

    /// Carries the output in a task of its own, which ends with the output.
    pub(crate) fn carry(self, target: &Target, agent: &Agent) -> Carry {
        let (container, agent) = (target.container.clone(), agent.clone());
        let (name, lane) = (target.name(), target.sandbox.lane.clone());
        let Self { output, log } = self;
        tokio::spawn(async move {
            container.fanout.carry(&name, agent, container.process(), output, log, lane).await
        })
    }
}
