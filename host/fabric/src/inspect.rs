//! Views of the switches, for people who look for what they wait for.

use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use slipway_switch::{Owner, SwitchView};

use crate::fabric::Fabric;

/// A switch that was asked for a view.
pub struct InspectedSwitch {
    /// The switch's name.
    pub name: String,
    /// The number of the switch's reactor.
    pub reactor: usize,
    /// The view, or `None` if the switch did not answer in time.
    pub view: Option<SwitchView>,
}

impl Fabric {
    /// Returns views of all switches by name, with the ports whose names `wanted` accepts; blocks
    /// for `patience` at most. All switches are asked at once.
    pub fn inspect(
        &self,
        wanted: impl Fn(&str) -> bool + Clone + Send + 'static,
        patience: Duration,
    ) -> Vec<InspectedSwitch> {
        let until = Instant::now() + patience;
        let asked = self.switches().into_iter().map(|(name, switch)| {
            let ((sender, answer), wanted) = (sync_channel(1), wanted.clone());
            let job = move |owner: &mut Owner<'_, '_>| drop(sender.send(owner.inspect(wanted)));
            // A switch that has ended drops the job, and so gives no answer.
            let _ = switch.handle.run(job);
            (name, switch.reactor, answer)
        });
        let asked: Vec<_> = asked.collect();
        let answered = asked.into_iter().map(|(name, reactor, answer)| {
            let left = until.saturating_duration_since(Instant::now());
            InspectedSwitch { name, reactor, view: answer.recv_timeout(left).ok() }
        });
        answered.collect()
    }

    /// Returns the number of the reactor of each switch.
    pub fn switch_reactors(&self) -> Vec<usize> {
        self.switches().values().map(|switch| switch.reactor).collect()
    }
}

#[cfg(test)]
mod tests {
    use slipway_reactor::{Reactor, Settings};
    use slipway_switch::PortConfig;
    use slipway_switch::ports::NullPort;

    use super::*;

    #[test]
    fn a_switch_that_does_not_answer_holds_up_no_other() {
        let reactors: Vec<_> =
            (0..2).map(|_| Reactor::spawn(Settings::default()).unwrap()).collect();
        let fabric = Fabric::new(reactors.iter().map(Reactor::handle).collect(), false);
        let (blue, _red) = (fabric.switch_or_new("blue"), fabric.switch_or_new("red").unwrap());
        assert_eq!(fabric.switch_reactors(), [0, 1]);
        for name in ["one", "two"] {
            let config = PortConfig { name: name.to_owned(), ..PortConfig::default() };
            let attached = fabric.switch("red").unwrap().handle;
            attached.call(|owner| owner.attach(Box::new(NullPort), config)).unwrap().unwrap();
        }
        // The switch waits for the end of the test.
        let (end, ends) = std::sync::mpsc::channel::<()>();
        blue.unwrap().handle.run(move |_| ends.recv().unwrap_or(())).unwrap();
        // Longer each time: on a busy machine, a switch may not get to its answer in a short time.
        let mut patience = Duration::from_millis(200);
        let red = loop {
            let mut views = fabric.inspect(|name| name == "two", patience);
            assert_eq!((views[0].name.as_str(), views[0].view.is_none()), ("blue", true));
            if let Some(red) = views.remove(1).view {
                break red;
            }
            assert!(patience < Duration::from_secs(60), "the other one is held up");
            patience *= 2;
        };
        assert_eq!((red.ports.len(), red.ports[0].name.as_str()), (1, "two"));
        drop(end);
        let views = fabric.inspect(|_| true, Duration::from_secs(60));
        assert!(views.iter().all(|switch| switch.view.is_some()));
    }
}
