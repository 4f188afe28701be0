//! The device as a port of the switch.

use std::sync::Arc;

use slipway_switch::{
    Abilities, Burst, Delivered, Exchange, ExchangePort, LinkSetting, Pick, Port, QueuesView, Waker,
};

use crate::path::DataPath;

/// The switch's end of a device; [`crate::Device::new`] makes both. It belongs to the switch's
/// thread. [`Port::attached`] gives it the waker with which the device wakes that thread.
///
/// While the driver does not run, or the function needs the queues for itself, the port has no
/// frames and takes none. The port's link is the carrier that the driver is told of by the
/// function's next poll. The link is down when the port is gone, unless it was set to stay
/// [`LinkSetting::Up`].
pub struct DevicePort {
    end: ExchangePort<DataPath>,
}

impl DevicePort {
    pub(crate) fn new(exchange: Arc<Exchange<DataPath>>) -> Self {
        Self { end: ExchangePort::new(exchange) }
    }
}

impl Port for DevicePort {
    #[inline]
    fn abilities(&self) -> Abilities {
        self.end.path().map_or(Abilities::ALL, |path| path.abilities())
    }

    #[inline]
    fn is_up(&self) -> bool {
        self.end.is_up()
    }

    #[inline]
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        // Between `release` and `take` no memory of the path is in use.
        if self.end.has_post() {
            // The function wants the memory back that an earlier burst has pinned, too.
            burst.release();
            self.end.serve();
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
        match self.end.path_mut() {
            Some(path) => path.deliver(burst, picks),
            None => Delivered { full: picks.len() as u32, ..Delivered::default() },
        }
    }

    fn arm(&mut self) -> bool {
        if self.end.has_post() {
            return true;
        }
        self.end.path_mut().is_some_and(|path| path.arm())
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
        let Some(path) = self.end.path_mut() else { return 0 };
        path.transmitters.iter_mut().flatten().map(|one| one.take_malformed()).sum()
    }
}
