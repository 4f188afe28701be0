//! The data path: both rings, and everything that moving a frame needs. The function makes it; the
//! port uses it on the switch's thread.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use slipway_e1000_spec::csb as block;
use slipway_ram::{Memory, View};
use slipway_switch::{Abilities, Burst, Delivered, Exchanged, Pick, QueuesView};

use crate::common::{Common, Shared};
use crate::csb::Csb;
use crate::moderation::Sent;
use crate::receive::Receiver;
use crate::ring::Ring;
use crate::rules::Rules;
use crate::transmit::{TransmitState, Transmitter};

pub(crate) struct DataPath {
    common: Common,
    transmitter: Transmitter,
    receiver: Receiver,
    csb: Option<Csb>,
    /// The tails that are in use.
    tdt: u32,
    rdt: u32,
    /// Frames of a burst in loopback.
    picks: Vec<Pick>,
}

impl DataPath {
    pub fn new(memory: Memory, rules: Rules, shared: Arc<Shared>, state: TransmitState) -> Self {
        let view = View::new(memory.clone());
        let (transmit, receive) = (rules.transmit, rules.receive);
        let mut path = Self {
            common: Common { memory, view, rules: rules.clone(), shared },
            transmitter: Transmitter::new(Ring::new(transmit), state),
            receiver: Receiver::new(Ring::new(receive)),
            csb: None,
            tdt: 0,
            rdt: 0,
            picks: Vec::new(),
        };
        path.set_rules(rules);
        path
    }

    /// Returns the transmitter's state for a successor. The caller has called [`DataPath::rest`]
    /// before.
    pub fn transmit_state(&self) -> TransmitState {
        self.transmitter.state()
    }

    /// Loads the transmit tail. The caller looks for new rules afterwards.
    #[inline]
    pub fn look_at_transmit(&mut self) {
        self.tdt = match &mut self.csb {
            Some(csb) => csb.load(&self.common.memory, block::TDT).unwrap_or(self.tdt),
            None => self.common.shared.tdt(),
        };
    }

    /// Loads the receive tail, like [`DataPath::look_at_transmit`].
    #[inline]
    pub fn look_at_receive(&mut self) {
        self.rdt = match &mut self.csb {
            Some(csb) => csb.load(&self.common.memory, block::RDT).unwrap_or(self.rdt),
            None => self.common.shared.rdt(),
        };
    }

    /// Implements [`slipway_switch::Port::take`].
    #[inline]
    pub fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let Self { common, transmitter, csb, tdt, .. } = self;
        if !transmitter.ring().has_work(&common.memory, *tdt) {
            return false;
        }
        common.shared.stay_awake();
        if let Some(csb) = csb {
            csb.stay_awake(&common.memory);
        }
        let more = transmitter.take(common, *tdt, burst, limit);
        if common.rules.loops && !burst.is_empty() {
            self.loop_back(burst);
        }
        more
    }

    /// Gives the driver its own frames, and takes them from the burst.
    #[cold]
    fn loop_back(&mut self, burst: &mut Burst) {
        self.picks.clear();
        self.picks.extend((0..burst.len()).map(|frame| Pick { frame: frame as u16, tci: 0 }));
        self.look_at_receive();
        // The frames are complete for a driver only if none of their work is left to the switch.
        let frames = burst.frames();
        self.picks.retain(|pick| !frames[usize::from(pick.frame)].offload.is_some());
        let picks = std::mem::take(&mut self.picks);
        self.deliver(burst, &picks);
        self.picks = picks;
        burst.clear();
        self.notify();
    }

    /// Implements [`slipway_switch::Port::release`].
    #[inline]
    pub fn release(&mut self) {
        let Self { common, transmitter, csb, tdt, .. } = self;
        let Some((head, sent)) = transmitter.release(common, *tdt) else { return };
        let shared = &common.shared;
        shared.tdh.store(head, Ordering::Release);
        if let Some(csb) = csb {
            csb.store(&common.memory, block::TDH, head);
            // Pairs with the driver's barrier between its store of the word and its look at the
            // ring.
            fence(Ordering::SeqCst);
            if !csb.wants(&common.memory, block::WANT_TX) {
                return;
            }
            let sent = Sent { at_once: true, ..sent };
            return shared.line.with(|line| line.sent(shared.clock.nanos(), sent));
        }
        if sent != Sent::default() {
            shared.line.with(|line| line.sent(shared.clock.nanos(), sent));
        }
    }

    /// Implements [`slipway_switch::Port::inspect`].
    pub fn inspect(&self, view: &mut QueuesView) {
        let place = |ring: &Ring, tail| [ring.entries(), ring.next(), ring.waiting(tail)];
        view.add_ring("rx0".to_owned(), place(self.receiver.ring(), self.rdt));
        view.add_ring("tx0".to_owned(), place(self.transmitter.ring(), self.tdt));
        view.filter = Some(self.common.rules.filter.view());
    }

    /// Implements [`slipway_switch::Port::abilities`].
    #[inline]
    pub fn abilities(&self) -> Abilities {
        match self.common.rules.offloads {
            // Linux 6.1 knows no datagrams that are still to be cut.
            true => Abilities { udp: false, ..Abilities::ALL },
            false => Abilities::NONE,
        }
    }

    /// Implements [`slipway_switch::Port::deliver`].
    #[inline]
    pub fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let Self { common, receiver, csb, rdt, .. } = self;
        let delivered = receiver.deliver(common, *rdt, burst, picks);
        if receiver.arrived {
            let head = receiver.ring().next();
            common.shared.rdh.store(head, Ordering::Release);
            if let Some(csb) = csb {
                csb.store(&common.memory, block::RDH, head);
            }
        }
        delivered
    }

    /// Implements [`slipway_switch::Port::notify`]: interrupts for frames that have come. A full
    /// barrier lies between the delivery and this.
    #[inline]
    pub fn notify(&mut self) {
        let arrived = std::mem::take(&mut self.receiver.arrived);
        let causes = std::mem::take(&mut self.receiver.causes);
        if !arrived && causes == 0 {
            return;
        }
        let Self { common, csb, .. } = self;
        if let Some(csb) = csb {
            if common.rules.loops {
                fence(Ordering::SeqCst);
            }
            if !csb.wants(&common.memory, block::WANT_RX) {
                return;
            }
        }
        let shared = &common.shared;
        shared.line.with(|line| {
            let now = shared.clock.nanos();
            if arrived {
                line.received(now);
            }
            if causes != 0 {
                line.cause(now, causes);
            }
        });
    }

    /// Implements [`slipway_switch::Port::arm`].
    pub fn arm(&mut self) -> bool {
        let shared = &self.common.shared;
        shared.live.arms.add(1);
        shared.fall_asleep();
        if let Some(csb) = &mut self.csb {
            csb.ask(&self.common.memory);
        }
        self.look_at_transmit();
        self.transmitter.ring().has_work(&self.common.memory, self.tdt)
    }

    /// Returns the number of invalid frames since the last call.
    pub fn take_malformed(&mut self) -> u64 {
        self.transmitter.take_malformed()
    }
}

impl Exchanged for DataPath {
    type Rules = Rules;

    fn set_rules(&mut self, rules: Rules) {
        self.transmitter.set_rules(rules.transmit);
        self.receiver.set_rules(rules.receive);
        if self.csb.as_ref().map(Csb::address) != rules.csb {
            self.csb = rules.csb.map(Csb::new);
        }
        self.common.rules = rules;
    }

    fn rest(&mut self) {
        self.receiver.rest();
        self.transmitter.rest();
        if let Some(csb) = &mut self.csb {
            csb.release(&self.common.memory);
        }
        self.common.view.release();
    }
}
