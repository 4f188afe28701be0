//! Figures of tasks, in the form of the host's control groups.

use slipway_sandbox_api::v1;

use super::Service;
use crate::containerd as cd;
use crate::daemon::failure;
use crate::process::Phase;
use crate::stats;
use crate::task::TaskKind;
use crate::ttrpc::Failure;

impl Service {
    /// Returns the figures of a task; zeros before its start and after its end, when containerd
    /// asks for them too.
    pub(super) async fn stats(
        &self,
        request: &cd::ProcessRequest,
    ) -> Result<cd::StatsResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        if task.init.phase() != Phase::Running {
            return Ok(cd::StatsResponse { stats: Some(stats::none(self.form)) });
        }
        let mut client = self.daemon.connect().await?;
        let request = v1::Name { name: task.name.clone() };
        let stats = client.stats(request).await.map_err(|status| failure(&status))?;
        let stats = stats.get_ref();
        let stats = match task.kind {
            TaskKind::Pod { .. } => stats::of_pod(stats, self.form),
            TaskKind::Alone => stats::of_container(stats, stats.vmm_cpu_ns, self.form),
            TaskKind::Member(_) => stats::of_container(stats, stats.guest_cpu_busy_ns, self.form),
        };
        Ok(cd::StatsResponse { stats: Some(stats) })
    }
}
