//! A quiet client beside a noisy one, on two controllers of one target.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;

use super::Session;
use crate::block::{Measured, Subject, Workload};

/// Two sessions on controllers that share a reactor and a disk: a quiet client's and a noisy one's.
pub struct Pair {
    /// The session whose latencies are measured.
    pub quiet: Session,
    /// The session with the neighbour's load.
    pub noisy: Session,
}

/// The condition under which the quiet client is measured.
#[derive(Clone, Copy)]
enum Beside {
    /// Alone.
    Nobody,
    /// Alone, with commands that are so many times as large. This is the control: such commands
    /// take longer, as commands beside a neighbour do, but only the machine makes some of them take
    /// far longer.
    Larger(u32),
    /// Beside a load of the noisy client.
    Load(Workload),
}

/// The size of the control's commands, as a multiple: it adds about as much time as a neighbour's
/// turn.
const LARGER: u32 = 4;

/// The quiet client, alone or beside a load of the noisy one. One thread runs both loads, so the
/// quiet client's latencies include work of the noisy client's driver.
pub struct Neighbours {
    name: String,
    pair: Rc<RefCell<Pair>>,
    beside: Beside,
}

impl Neighbours {
    /// Makes the subjects: alone, as `name`; alone with larger commands, as `name+4x`; and beside
    /// each of `loads`, as `name+LOAD`.
    pub fn of(name: &str, pair: Pair, loads: &[Workload]) -> Vec<Self> {
        let pair = Rc::new(RefCell::new(pair));
        let alone = [Beside::Nobody, Beside::Larger(LARGER)];
        let all = alone.into_iter().chain(loads.iter().copied().map(Beside::Load));
        let subject = |beside| Self {
            name: match beside {
                Beside::Nobody => name.to_owned(),
                Beside::Larger(times) => format!("{name}+{times}x"),
                Beside::Load(load) => format!("{name}+{load}"),
            },
            pair: Rc::clone(&pair),
            beside,
        };
        all.map(subject).collect()
    }

    /// Returns the quiet client's load.
    fn quiet(&self, workload: &Workload) -> Workload {
        match self.beside {
            Beside::Larger(times) => Self::larger(workload, times),
            _ => *workload,
        }
    }

    fn larger(workload: &Workload, times: u32) -> Workload {
        Workload { block_size: workload.block_size.saturating_mul(times), ..*workload }
    }

    /// Returns all loads of the quiet client when it is asked for `workloads`, controls included.
    pub fn all_of(workloads: &[Workload]) -> Vec<Workload> {
        let larger = workloads.iter().map(|workload| Self::larger(workload, LARGER));
        workloads.iter().copied().chain(larger).collect()
    }
}

impl Subject for Neighbours {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        let about = self.pair.borrow().quiet.about();
        match &self.beside {
            Beside::Nobody => format!("{about}; alone"),
            Beside::Larger(times) => format!(
                "the same alone with commands {times} times as large: what longer commands have to \
                 bear from the machine itself"
            ),
            Beside::Load(loud) => {
                format!("the same beside {loud} on another controller of the disk")
            }
        }
    }

    fn takes(&self, workload: &Workload) -> bool {
        let pair = self.pair.borrow();
        let loud = match &self.beside {
            Beside::Load(loud) => pair.noisy.takes(loud),
            _ => true,
        };
        loud && pair.quiet.takes(&self.quiet(workload))
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let Pair { quiet, noisy } = &mut *self.pair.borrow_mut();
        let neighbour = match &self.beside {
            Beside::Load(loud) => Some((noisy, loud)),
            _ => None,
        };
        quiet.run_beside(&self.quiet(workload), neighbour, (warm_up, time))
    }
}
