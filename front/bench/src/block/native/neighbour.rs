//! A quiet client beside a noisy one, on two controllers of one target.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;

use super::Session;
use crate::block::{Measured, Subject, Workload};

/// Sessions on two controllers that share a reactor and a disk: a quiet client's and a noisy one's.
pub struct Pair {
    /// Whose latencies are measured.
    pub quiet: Session,
    /// Who has the load of the neighbour.
    pub noisy: Session,
}

/// The quiet client, alone or beside a load of the noisy one. One thread puts both loads on, so what
/// the quiet one sees has the work of the neighbour's client in it as well.
pub struct Neighbours {
    name: String,
    pair: Rc<RefCell<Pair>>,
    loud: Option<Workload>,
}

impl Neighbours {
    /// Alone, as `name`, and beside each of `loads`, as `name+LOAD`.
    pub fn of(name: &str, pair: Pair, loads: &[Workload]) -> Vec<Self> {
        let pair = Rc::new(RefCell::new(pair));
        let beside = loads.iter().map(Some);
        let all = [None].into_iter().chain(beside).map(|loud| Self {
            name: loud.map_or_else(|| name.to_owned(), |load| format!("{name}+{load}")),
            pair: Rc::clone(&pair),
            loud: loud.copied(),
        });
        all.collect()
    }
}

impl Subject for Neighbours {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        let about = self.pair.borrow().quiet.about();
        match &self.loud {
            None => format!("{about}; alone"),
            Some(loud) => format!("the same beside {loud} on another controller of the disk"),
        }
    }

    fn takes(&self, workload: &Workload) -> bool {
        let pair = self.pair.borrow();
        pair.quiet.takes(workload) && self.loud.is_none_or(|loud| pair.noisy.takes(&loud))
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let Pair { quiet, noisy } = &mut *self.pair.borrow_mut();
        let neighbour = self.loud.as_ref().map(|loud| (noisy, loud));
        quiet.run_beside(workload, neighbour, (warm_up, time))
    }
}
