//! Ways in which a function scales, as a turn runs them.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};

use super::server::{FunctionSettings, Server};
use super::{FunctionLoad, FunctionMeasured};
use crate::density::{Rollup, available_bytes};
use crate::measurement::Subject;
use crate::outside::Own;

/// The most invocations of a function at once that its server takes.
const MOST_PLACES: u32 = 160;
/// The most bursts until there are as many replicas as requests.
const MOST_TRIES: u32 = 20;

/// A way to scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Replicas in sandboxes that are there, and further sandboxes.
    Both,
    /// A further sandbox for each replica.
    Horizontal,
    /// Replicas in the sandboxes that are there, and no further sandbox.
    Vertical,
}

impl Scaling {
    /// Returns the most replicas in a sandbox, and the most sandboxes, for a load.
    fn bounds(self, settings: &FunctionSettings, load: &FunctionLoad) -> (u32, u32) {
        let replicas = if self == Self::Horizontal { 1 } else { settings.replicas };
        let most = settings.sandboxes.min(MOST_PLACES / replicas.max(1));
        let sandboxes = if self == Self::Vertical { load.sandboxes } else { most };
        (replicas, sandboxes.max(load.sandboxes))
    }
}

/// A function that scales in one way.
pub struct FunctionWay {
    name: String,
    about: String,
    scaling: Scaling,
    settings: Arc<FunctionSettings>,
}

impl FunctionWay {
    /// Returns the subject `name`.
    pub fn new(
        name: &str,
        about: &str,
        scaling: Scaling,
        settings: &Arc<FunctionSettings>,
    ) -> Self {
        let (name, about) = (name.to_owned(), about.to_owned());
        Self { name, about, scaling, settings: Arc::clone(settings) }
    }
}

impl Subject for FunctionWay {
    type Load = FunctionLoad;
    type Measured = FunctionMeasured;

    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    /// Returns whether the server takes as many places as the sandboxes of the load have.
    fn takes(&self, load: &FunctionLoad) -> bool {
        let (replicas, sandboxes) = self.scaling.bounds(&self.settings, load);
        replicas * sandboxes <= MOST_PLACES
    }

    fn own(&self) -> Own {
        Own::Node
    }

    /// Starts a server, has it make the load's sandboxes with a replica each, sends the burst, and
    /// ends the server.
    fn run(&mut self, load: &FunctionLoad) -> Result<FunctionMeasured> {
        let available = available_bytes();
        let (replicas, sandboxes) = self.scaling.bounds(&self.settings, load);
        let mut server = Server::start(&self.settings, replicas, (load.sandboxes, sandboxes))?;
        let measured = measure(&mut server, load, available);
        let ended = server.end();
        let measured = measured?;
        ended?;
        Ok(measured)
    }
}

/// Measures a burst. `available` is the memory that the host had before the server, bytes.
fn measure(server: &mut Server, load: &FunctionLoad, available: u64) -> Result<FunctionMeasured> {
    server.wait_for_sandboxes(load.sandboxes)?;
    make_replicas(server, load.sandboxes)?;
    server.wait_for_replicas(load.sandboxes)?;
    let before = server.status()?;
    ensure!(
        before.has_one_in_each(load.sandboxes),
        "not each of the {} sandboxes had one replica before the burst",
        load.sandboxes
    );
    let burst = server.burst(load.requests)?;
    let now = server.status()?;
    let vmms = server.vmms()?;
    ensure!(!vmms.is_empty(), "the function has no sandboxes after the burst");
    let memory = vmms.iter().map(|id| Ok(Rollup::of(*id)?.all())).sum::<Result<u64>>()?;
    Ok(FunctionMeasured {
        p50_ns: burst.p50_ns,
        p99_ns: burst.p99_ns,
        max_ns: burst.max_ns,
        replicas_made: now.replicas_made.saturating_sub(before.replicas_made),
        sandboxes_made: now.sandboxes_made.saturating_sub(before.sandboxes_made),
        vmm_bytes: memory,
        host_bytes: available.saturating_sub(available_bytes()),
    })
}

/// Sends as many requests at once as there are sandboxes, which makes a replica in each, and again
/// if one of them found a replica that was ready already.
fn make_replicas(server: &Server, count: u32) -> Result<()> {
    for _ in 0..MOST_TRIES {
        if server.status()?.replicas >= count {
            return Ok(());
        }
        server.burst(count)?;
    }
    bail!("{count} requests at once make fewer than {count} replicas")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_bounds_of_its_own() {
        let settings = FunctionSettings { replicas: 8, sandboxes: 32, ..Default::default() };
        let settings = Arc::new(settings);
        let load: FunctionLoad = "s4-q24".parse().unwrap();
        let of = |scaling: Scaling| scaling.bounds(&settings, &load);
        assert_eq!(of(Scaling::Both), (8, 20));
        assert_eq!(of(Scaling::Horizontal), (1, 32));
        assert_eq!(of(Scaling::Vertical), (8, 4));
        let many: FunctionLoad = "s40-q8".parse().unwrap();
        let takes = |scaling| FunctionWay::new("x", "", scaling, &settings).takes(&many);
        assert!(takes(Scaling::Horizontal) && !takes(Scaling::Both) && !takes(Scaling::Vertical));
    }
}
