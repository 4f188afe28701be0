//! Sizes and limits of sandboxes and containers that run.

use std::sync::Arc;

use super::Service;
use crate::Error;
use crate::pod::GivenBack;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::v1;

impl Service {
    /// Changes a sandbox's memory and CPUs. 0 bytes stand for no change, as do 0 CPUs beside a
    /// size of memory.
    async fn resize(&self, sandbox: &Arc<Sandbox>, cpus: u32, memory: u64) -> Result<(), Error> {
        if memory != 0 {
            self.node.set_memory(sandbox, memory).await?;
        }
        if memory == 0 || cpus != 0 {
            self.node.set_cpus(sandbox, cpus).await?;
        }
        Ok(())
    }

    /// Makes the part of an update that concerns limits and sizes. Returns what memory a pod gave
    /// back for its limits.
    pub(super) async fn limit(
        &self,
        target: &Target,
        request: &v1::UpdateRequest,
    ) -> Result<GivenBack, Error> {
        let v1::UpdateRequest { resources, cpus, memory_bytes, placement, .. } = request;
        match (target.is_own(), resources, *cpus, *memory_bytes) {
            (_, None, 0, 0) if placement.is_some() => Ok(GivenBack::default()),
            (true, None, cpus, memory) => {
                self.resize(&target.sandbox, cpus, memory).await?;
                Ok(GivenBack::default())
            }
            (true, Some(resources), cpus, memory) => {
                let mut given_back = GivenBack::default();
                match target.sandbox.look(|record| record.pod) {
                    true => given_back = self.node.update_pod(&target.sandbox, resources).await?,
                    false => self.node.update_own(target, resources).await?,
                }
                if (cpus, memory) != (0, 0) {
                    self.resize(&target.sandbox, cpus, memory).await?;
                }
                Ok(given_back)
            }
            (false, Some(resources), 0, 0) => self.node.update_added(target, resources).await,
            _ => {
                let why = "a sandbox has CPUs and memory, and a container of a pod has limits";
                Err(Error::Invalid(why.to_owned()))
            }
        }
    }
}
