//! A way as a subject of turns.

use std::rc::Rc;

use anyhow::Result;
use slipway_bench::arms::{Arm, ArmMeasured, Point};
use slipway_bench::{Own, Subject};

use super::turn::Turns;
use crate::bench::interruptible::Interruptible;

/// The most sandboxes of the start before the first turn.
const FEW: u32 = 4;

/// A way to start sandboxes.
pub struct Way {
    pub arm: Arm,
    /// As many single starts follow those at once.
    pub is_single: bool,
    /// The machine's processors.
    pub processors: u32,
    pub turns: Rc<Turns>,
    pub calls: Rc<Interruptible>,
    /// Starts that were made before, which are not measured: what a node makes once is made by
    /// them.
    pub warm: Vec<Point>,
}

impl Subject for Way {
    type Load = Point;
    type Measured = ArmMeasured;

    fn name(&self) -> &str {
        self.arm.name()
    }

    fn about(&self) -> String {
        self.arm.about().to_owned()
    }

    fn own(&self) -> Own {
        Own::BusyNode
    }

    fn is_ended(&self) -> bool {
        self.calls.check().is_err()
    }

    fn run(&mut self, point: &Point) -> Result<ArmMeasured> {
        let few = Point { count: point.count.min(FEW), ..*point };
        let is_warm = self.warm.contains(&few);
        let measured = self.calls.wait(async {
            if !is_warm {
                self.turns.at_once(self.arm, few).await?;
            }
            let (timelines, busy_ns) = self.turns.at_once(self.arm, *point).await?;
            let singles = match self.is_single {
                true => Some(self.turns.singly(self.arm, *point).await?),
                false => None,
            };
            anyhow::Ok(ArmMeasured { timelines, processors: self.processors, busy_ns, singles })
        });
        if !is_warm {
            self.warm.push(few);
        }
        if measured.is_err() {
            // The names of its sandboxes are those of the next turn's. The first error is the one
            // that tells; after a signal all turns' sandboxes are removed later.
            let _ = self.calls.wait(self.turns.remove_left(self.arm, point.count));
        }
        measured
    }
}
