//! A report of density, with the context needed to judge and repeat it.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::Series;
use crate::environment::Environment;
use crate::json::SavedReport;

/// A measurement of density, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DensityReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The image.
    pub image: String,
    /// The VMM: `qemu`, `slipway-vmm` or `slipway-hollow`.
    pub engine: String,
    /// Set if each sandbox began with a template in place of booting.
    pub forks: bool,
    /// The memory that a guest begins with, bytes.
    pub memory_bytes: u64,
    /// Sandboxes, each with a container.
    pub sandboxes: Series,
    /// Containers of one pod; no points if they were not asked for.
    pub replicas: Series,
    /// The reason why larger counts were not measured; empty if all were.
    pub stopped: String,
}

impl SavedReport for DensityReport {
    const KIND: &'static str = "density";

    fn format(&self) -> u32 {
        self.format
    }

    fn check(&self) -> Result<()> {
        let mut points = self.sandboxes.points.iter().chain(&self.replicas.points);
        ensure!(points.all(|point| point.idle_ns > 0), "a period of idleness has no length");
        Ok(())
    }
}

impl DensityReport {
    /// Returns whether no guest code ran.
    pub fn is_hollow(&self) -> bool {
        self.environment.accelerator == "hollow"
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::density::series::tests::series;

    pub fn report(deployed: &[u32], replicas: &[u32]) -> DensityReport {
        DensityReport {
            format: DensityReport::FORMAT,
            environment: Environment { accelerator: "kvm".into(), ..Environment::default() },
            command: "bench density".into(),
            image: "debian:12".into(),
            engine: "slipway-vmm".into(),
            forks: false,
            memory_bytes: 256 << 20,
            sandboxes: series(deployed),
            replicas: series(replicas),
            stopped: String::new(),
        }
    }

    #[test]
    fn a_report_survives_json() {
        let report = report(&[0, 1, 2], &[0, 1]);
        assert_eq!(DensityReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(DensityReport::from_json("{}").is_err());
    }

    #[test]
    fn a_report_that_contradicts_itself_is_refused() {
        let mut forged = report(&[1], &[]);
        forged.sandboxes.points[0].idle_ns = 0;
        assert!(DensityReport::from_json(&forged.to_json().unwrap()).is_err());
    }
}
