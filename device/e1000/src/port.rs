//! The device as a port of the switch.

use std::sync::Arc;
use std::time::Duration;

use slipway_switch::decorators::Timed;
use slipway_switch::{
    Abilities, Burst, Delivered, Exchange, ExchangePort, LinkSetting, Pick, Port, QueuesView, Waker,
};

use crate::common::Shared;
use crate::path::DataPath;

/// The switch's end of a device; [`crate::Device::new`] makes both. It belongs to the switch's
/// thread. [`Port::attached`] gives it the waker with which the device wakes that thread.
///
/// While the driver does not run, or the function needs the path for itself, the port has no frames
/// and takes none. The port's link is the device's link, which the function negotiates in its next
/// poll. The link is down when the port is gone, unless it was set to stay [`LinkSetting::Up`].
///
/// The port has timed work: the delays of interrupts for the frames that it moved.
pub struct DevicePort {
    end: ExchangePort<DataPath>,
    shared: Arc<Shared>,
    /// The switch's time at which the device's clock was at zero, in nanoseconds; negative if the
    /// device's clock is older.
    began: i128,
}

impl DevicePort {
    pub(crate) fn new(exchange: Arc<Exchange<DataPath>>, shared: Arc<Shared>) -> Self {
        Self { end: ExchangePort::new(exchange), shared, began: 0 }
    }
}

impl Port for DevicePort {
    /// Complete frames only, unless the driver has asked for others by the communication status
    /// block: no descriptor of the 82540EM can say that a checksum is still to be filled in, so a
    /// driver that forwarded such a frame would send a wrong one. Linux's drops a frame that needs
    /// several buffers, too.
    #[inline]
    fn abilities(&self) -> Abilities {
        self.end.path().map_or(Abilities::NONE, |path| path.abilities())
    }

    #[inline]
    fn is_up(&self) -> bool {
        self.end.is_up()
    }

    #[inline]
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        if let Some(path) = self.end.path_mut() {
            path.look_at_transmit();
        }
        // Between `release` and `take` no memory of the path is in use.
        while self.end.has_post() {
            // The function wants the memory back that an earlier burst has pinned, too.
            burst.release();
            self.end.serve();
            if let Some(path) = self.end.path_mut() {
                path.look_at_transmit();
            }
        }
        match self.end.path_mut() {
            Some(path) => path.take(burst, limit),
            None => false,
        }
    }

    #[inline]
    fn release(&mut self) {
        if let Some(path) = self.end.path_mut() {
            path.release();
        }
    }

    #[inline]
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let nothing = Delivered { full: picks.len() as u32, ..Delivered::default() };
        let (exchange, Some(path)) = self.end.parts() else { return nothing };
        path.look_at_receive();
        while exchange.has_post() {
            if !exchange.serve_rules(path) {
                return nothing;
            }
            path.look_at_receive();
        }
        path.deliver(burst, picks)
    }

    #[inline]
    fn notify(&mut self) {
        if let Some(path) = self.end.path_mut() {
            path.notify();
        }
    }

    fn arm(&mut self) -> bool {
        if self.end.has_post() {
            return true;
        }
        let waits = self.end.path_mut().is_some_and(|path| path.arm());
        waits || self.end.has_post()
    }

    fn attend(&mut self) {
        if self.end.has_post() {
            self.end.serve();
        }
    }

    fn attached(&mut self, waker: Waker) {
        self.end.set_waker(waker);
    }

    fn set_link(&mut self, link: LinkSetting) {
        self.end.set_link(link);
    }

    fn inspect(&self, view: &mut QueuesView) {
        if let Some(path) = self.end.path() {
            path.inspect(view);
        }
    }

    fn malformed(&mut self) -> u64 {
        self.end.path_mut().map_or(0, |path| path.take_malformed())
    }

    fn timed(&mut self) -> Option<&mut dyn Timed> {
        Some(self)
    }
}

impl Timed for DevicePort {
    fn tick(&mut self, now: Duration) -> bool {
        let own = self.shared.clock.nanos();
        self.began = now.as_nanos() as i128 - i128::from(own);
        self.shared.line.advance(own);
        false
    }

    fn due(&mut self, _: bool) -> Option<Duration> {
        let at = i128::from(self.shared.line.deadline()?) + self.began;
        Some(Duration::from_nanos(u64::try_from(at.max(0)).unwrap_or(u64::MAX)))
    }

    fn close(&mut self) {}
}
