//! The ports of a switch as they come, change and go: their settings, impairments and observers.
//!
//! A change that gives a port another peer, or takes its peer away, first releases what earlier
//! bursts hold of the former peer's memory.

use slipway_rate::Bucket;

use super::{Slot, Switch};
use crate::decorators::{
    Impairment, Observed, Observer, pace, replace_innermost, strip, translate, wrap_here,
    wrap_innermost,
};
use crate::index::{MAX_PORTS, PortIndex};
use crate::lookup::Station;
use crate::port::{Layer, Port};
use crate::rules::{BadConfig, PortConfig};
use crate::stats::PortStats;

impl Switch {
    /// Attaches a port.
    ///
    /// # Errors
    /// [`BadConfig`] and the port; the switch is then unchanged.
    pub fn attach(
        &mut self,
        port: Box<dyn Port>,
        config: PortConfig,
    ) -> Result<PortIndex, (BadConfig, Box<dyn Port>)> {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if free == MAX_PORTS {
            return Err((BadConfig::Full, port));
        }
        // The number is below MAX_PORTS.
        let index = free as PortIndex;
        if let Err(error) = self.settle(index, &config) {
            return Err((error, port));
        }
        let mut port = port;
        port.set_link(config.link);
        translate(&mut port, config.translation());
        if let Some(rate) = config.receive_rate {
            pace(&mut port, rate);
        }
        let bucket = config.max_rate.map(Bucket::new);
        let (stats, impairment) = (PortStats::default(), None);
        let (timed, waits, stalled, untold) = (false, false, false, false);
        let slot = Slot { port, timed, waits, stalled, untold, config, stats, bucket, impairment };
        if free == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[free] = Some(Box::new(slot));
        self.fan.grow(self.slots.len());
        self.settle_time(index);
        Ok(index)
    }

    /// Detaches a port and forgets the stations behind it.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`] if there is no such port.
    pub fn detach(&mut self, index: PortIndex) -> Result<Box<dyn Port>, BadConfig> {
        let slot = self.slots.get_mut(usize::from(index)).and_then(Option::take);
        let slot = slot.ok_or(BadConfig::NoSuchPort)?;
        self.lookup.remove(index);
        self.waiting.retain(|waiting| *waiting != index);
        self.stalled.forget(index);
        // Spans of an earlier burst may still refer to the peer's memory.
        self.burst.release();
        self.cutter.release();
        Ok(slot.port)
    }

    /// Replaces a port, which has another peer from now on. The number, settings, counters,
    /// decorators and the stations known behind it stay, and a port that stands still does so for
    /// its new peer, too. Returns the former port.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`], and the new port back.
    pub fn replace(
        &mut self,
        index: PortIndex,
        port: Box<dyn Port>,
    ) -> Result<Box<dyn Port>, (BadConfig, Box<dyn Port>)> {
        // Spans of an earlier burst may still refer to the former peer's memory.
        self.release();
        let Some(slot) = self.slot_mut(index) else { return Err((BadConfig::NoSuchPort, port)) };
        // Waiting frames were from the former peer, or for it.
        close(&mut *slot.port);
        slot.port.account(&mut slot.stats);
        let former = replace_innermost(&mut slot.port, port);
        slot.port.set_link(slot.config.link);
        self.settle_time(index);
        Ok(former)
    }

    /// Changes a port's settings. Another receive rate, link, VLAN or translation of the peer's
    /// address drops the frames that wait in the port.
    ///
    /// # Errors
    /// [`BadConfig`]; the port then keeps its former settings.
    pub fn configure(&mut self, index: PortIndex, config: PortConfig) -> Result<(), BadConfig> {
        let former = self.config(index).ok_or(BadConfig::NoSuchPort)?.clone();
        self.lookup.remove(index);
        if let Err(error) = self.settle(index, &config) {
            // The former settings were valid before, so this cannot fail.
            let _ = self.settle(index, &former);
            return Err(error);
        }
        if let Some(slot) = self.slot_mut(index) {
            if config.max_rate != slot.config.max_rate {
                slot.bucket = config.max_rate.map(Bucket::new);
            }
            if config.receive_rate != slot.config.receive_rate {
                strip(&mut slot.port, Layer::Pacing, &mut slot.stats);
                if let Some(rate) = config.receive_rate {
                    pace(&mut slot.port, rate);
                }
            }
            if config.translation() != slot.config.translation() {
                strip(&mut slot.port, Layer::Translation, &mut slot.stats);
                translate(&mut slot.port, config.translation());
            }
            if (config.link, &config.vlans) != (slot.config.link, &slot.config.vlans) {
                // Waiting frames were checked against the former settings, or would be against the
                // new ones.
                close(&mut *slot.port);
            }
            slot.port.set_link(config.link);
            slot.config = config;
        }
        self.settle_time(index);
        Ok(())
    }

    /// Checks the settings and fixes the port's address in the table.
    fn settle(&mut self, index: PortIndex, config: &PortConfig) -> Result<(), BadConfig> {
        config.check()?;
        let own = config.mac.zip(config.own_vlan());
        match own {
            Some((mac, vlan)) if !self.lookup.fix(Station::new(mac, vlan), index) => {
                Err(BadConfig::MacTaken(mac))
            }
            _ => Ok(()),
        }
    }

    /// Sets or removes the port's impairment. Frames that wait in a former impairment are dropped.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`], [`BadConfig::Impairment`]; nothing has changed then.
    pub fn impair(
        &mut self,
        index: PortIndex,
        impairment: Option<Impairment>,
    ) -> Result<(), BadConfig> {
        if let Some(impairment) = &impairment {
            impairment.check()?;
        }
        // Frames may now go through a decorator's burst, so no turn would clear this burst of the
        // peer's memory.
        self.release();
        let slot = self.slot_mut(index).ok_or(BadConfig::NoSuchPort)?;
        strip(&mut slot.port, Layer::Impairment, &mut slot.stats);
        if let Some(impairment) = &impairment {
            wrap_here(&mut slot.port, |port| impairment.wrap(port));
        }
        slot.impairment = impairment;
        self.settle_time(index);
        Ok(())
    }

    /// Makes `observer` see the port's frames from now on; `number` names it.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`] if there is no such port.
    pub fn observe(
        &mut self,
        index: PortIndex,
        number: u64,
        observer: Box<dyn Observer>,
    ) -> Result<(), BadConfig> {
        let slot = self.slot_mut(index).ok_or(BadConfig::NoSuchPort)?;
        wrap_innermost(&mut slot.port, |port| Box::new(Observed::new(port, number, observer)));
        Ok(())
    }

    /// Removes the observer with this number. Returns `false` if the port has none.
    pub fn unobserve(&mut self, index: PortIndex, number: u64) -> bool {
        let Some(slot) = self.slot_mut(index) else { return false };
        strip(&mut slot.port, Layer::Observer(number), &mut slot.stats)
    }

    /// Records whether the port has timed work, of its own or of a decorator.
    fn settle_time(&mut self, index: PortIndex) {
        if let Some(slot) = self.slot_mut(index) {
            slot.timed = slot.port.timed().is_some();
        }
    }
}

/// Drops the frames that wait in front of a port.
fn close(port: &mut dyn Port) {
    if let Some(timed) = port.timed() {
        timed.close();
    }
}
