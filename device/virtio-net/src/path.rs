//! The data path: the queues of frames, and everything that moving a frame needs. The function
//! makes it; the port uses it on the switch's thread.

use std::sync::Arc;

use slipway_ram::{Memory, View};
use slipway_switch::{Abilities, Burst, Delivered, Exchanged, Pick, QueuesView};
use slipway_virtio::queue::{Broken, Queue};

use crate::common::{Common, Rules};
use crate::counters::Live;
use crate::filter::Steering;
use crate::header::abilities;
use crate::receive::Receiver;
use crate::transmit::Transmitter;

pub(crate) struct DataPath {
    pub common: Common,
    /// Receivers by pair. `None` if the driver has not enabled the queue.
    pub receivers: Vec<Option<Receiver>>,
    pub transmitters: Vec<Option<Transmitter>>,
    /// The transmitter that the next turn looks at first.
    turn: usize,
    /// `true` if nothing moves until the function has reset the device.
    broken: bool,
    abilities: Abilities,
}

impl DataPath {
    /// Makes a path for `pairs` queue pairs, none of them enabled.
    pub fn new(memory: Memory, rules: Rules, live: Arc<Live>, pairs: usize) -> Self {
        let abilities = abilities(rules.features);
        let (view, steering) = (View::new(memory.clone()), Steering::default());
        Self {
            common: Common { view, memory, rules, steering, live },
            receivers: (0..pairs).map(|_| None).collect(),
            transmitters: (0..pairs).map(|_| None).collect(),
            turn: 0,
            broken: false,
            abilities,
        }
    }

    #[inline]
    pub fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn pairs(&self) -> usize {
        usize::from(self.common.rules.pairs).min(self.transmitters.len())
    }

    /// Tells the driver that the device needs a reset (section 2.1.2).
    #[cold]
    fn fail(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            self.common.live.set_broken(true);
            if let Some(interrupt) = &self.common.rules.config {
                interrupt.signal();
            }
        }
    }

    /// Implements [`slipway_switch::Port::take`]: serves all enabled transmit queues, beginning
    /// with another one each time, so that none is left behind. Queues of pairs that are no longer
    /// in use are served as well: a driver still has frames in them, and Linux waits for a segment
    /// to leave its queue before it sends it again in another.
    #[inline]
    pub fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let pairs = self.transmitters.len();
        if self.broken || pairs == 0 {
            return false;
        }
        let mut left = limit.min(burst.room());
        let mut more = false;
        let first = if self.turn < pairs { self.turn } else { 0 };
        for step in 0..pairs {
            let number = if first + step < pairs { first + step } else { first + step - pairs };
            let Some(transmitter) = &mut self.transmitters[number] else { continue };
            let before = burst.len();
            match transmitter.take(&mut self.common, number as u8, burst, left) {
                Ok(waits) => more |= waits,
                Err(_) => {
                    self.fail();
                    return false;
                }
            }
            left -= burst.len() - before;
        }
        self.turn = if first + 1 < pairs { first + 1 } else { 0 };
        more
    }

    /// Implements [`slipway_switch::Port::release`].
    #[inline]
    pub fn release(&mut self) {
        if self.broken {
            return;
        }
        for transmitter in self.transmitters.iter_mut().flatten() {
            if transmitter.release(&self.common).is_err() {
                return self.fail();
            }
        }
    }

    /// Implements [`slipway_switch::Port::deliver`].
    #[inline]
    pub fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let nothing = Delivered { full: picks.len() as u32, ..Delivered::default() };
        let pairs = self.pairs().min(self.receivers.len());
        if self.broken || pairs == 0 {
            return nothing;
        }
        let delivered = match pairs {
            1 => match &mut self.receivers[0] {
                Some(receiver) => receiver.deliver(&mut self.common, burst, picks),
                None => Ok(nothing),
            },
            _ => self.steer(burst, picks, pairs),
        };
        let Ok(delivered) = delivered else {
            self.fail();
            return nothing;
        };
        let live = &self.common.live;
        if delivered.full + delivered.refused > 0 {
            live.no_buffer.add(delivered.full.into());
            live.too_large.add(delivered.refused.into());
        }
        delivered
    }

    /// Delivers to several queues. Frames of one flow stay in order: a flow has one queue, which
    /// gets the flow's frames in order. A full queue drops only frames of its own flows.
    fn steer(&mut self, burst: &Burst, picks: &[Pick], pairs: usize) -> Result<Delivered, Broken> {
        let mut sum = Delivered::default();
        let mut rest = picks;
        while let Some(first) = rest.first() {
            let queue = |pick: &Pick| {
                let queue = self.common.steering.pick(burst.head(usize::from(pick.frame)));
                if usize::from(queue) < pairs { usize::from(queue) } else { 0 }
            };
            let number = queue(first);
            let run = rest.iter().take_while(|pick| queue(pick) == number).count();
            let (here, others) = rest.split_at(run);
            let one = match &mut self.receivers[number] {
                Some(receiver) => receiver.deliver(&mut self.common, burst, here)?,
                None => Delivered { full: run as u32, ..Delivered::default() },
            };
            sum.add(&one);
            rest = others;
        }
        Ok(sum)
    }

    /// Implements [`slipway_switch::Port::inspect`].
    pub fn inspect(&self, view: &mut QueuesView) {
        let rings = |queue: &Queue| {
            let (size, next) = queue.place();
            [size, next, queue.waiting()].map(u32::from)
        };
        for (number, receiver) in self.receivers.iter().enumerate() {
            if let Some(receiver) = receiver {
                view.add_ring(format!("rx{number}"), rings(&receiver.virtqueue.queue));
            }
        }
        for (number, transmitter) in self.transmitters.iter().enumerate() {
            if let Some(transmitter) = transmitter {
                view.add_ring(format!("tx{number}"), rings(&transmitter.virtqueue.queue));
            }
        }
        view.filter = Some(self.common.rules.filter.view());
    }

    /// Implements [`slipway_switch::Port::arm`].
    pub fn arm(&mut self) -> bool {
        if self.broken {
            return false;
        }
        self.common.live.arms.add(1);
        let mut more = false;
        for transmitter in self.transmitters.iter_mut().flatten() {
            match transmitter.virtqueue.queue.arm(&self.common.memory) {
                Ok(waits) => more |= waits,
                Err(_) => {
                    self.fail();
                    return false;
                }
            }
        }
        more
    }
}

impl Exchanged for DataPath {
    type Rules = Rules;

    fn set_rules(&mut self, rules: Rules) {
        self.abilities = abilities(rules.features);
        self.common.rules = rules;
    }

    fn rest(&mut self) {
        for receiver in self.receivers.iter_mut().flatten() {
            receiver.rest();
        }
        for transmitter in self.transmitters.iter_mut().flatten() {
            transmitter.rest();
        }
        self.common.view.release();
    }
}
