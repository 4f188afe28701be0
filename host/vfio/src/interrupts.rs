//! The interrupts of a device, raised by the kernel at the eventfds of a client.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::Device;
use crate::device::irq;
use crate::ioctl::{SetIrqs, irq_set};

/// An eventfd of the client.
type Route = Arc<OwnedFd>;

/// The kind of interrupts that is on in the device. At most one kind is on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    None,
    Pin,
    Vectors,
}

/// The routes of a device's interrupts.
///
/// MSI-X is on while a vector is routed, with all vectors that the device has: kernels before 6.5
/// change the number of vectors only while MSI-X is off, and interrupts would be lost meanwhile.
/// The pin is on while it is routed and MSI-X is off. After a failure to route vectors, both are
/// off until the next request that routes.
pub(crate) struct Interrupts {
    device: Arc<Device>,
    mode: Mode,
    vectors: Vec<Option<Route>>,
    pin: Option<Route>,
}

impl Interrupts {
    pub fn new(device: Arc<Device>) -> Self {
        Self { device, mode: Mode::None, vectors: Vec::new(), pin: None }
    }

    /// Routes all vectors.
    ///
    /// # Errors
    /// The kernel has no interrupts left. No vector is routed then.
    pub fn route_vectors(&mut self, routes: &[Option<Route>]) -> Result<(), Errno> {
        if routes.iter().all(Option::is_none) {
            self.vectors.clear();
            if self.mode == Mode::Vectors {
                self.switch_off()?;
            }
            return self.switch_pin();
        }
        // The request that switches MSI-X on sets the number of vectors, so it has all of them.
        let range = match self.mode {
            Mode::Vectors => changed(&self.vectors, routes),
            Mode::None | Mode::Pin => 0..routes.len(),
        };
        if self.mode == Mode::Pin {
            self.switch_off()?;
        }
        if range.is_empty() {
            return Ok(());
        }
        let files = routes[range.clone()].iter().map(number);
        let outcome = self.device.set_irqs(&SetIrqs::routes(irq::MSIX, range.start as u32, files));
        match outcome {
            Ok(()) => (self.mode, self.vectors) = (Mode::Vectors, routes.to_vec()),
            // If MSI-X was off, the kernel has left it off. If it was on, some routes may have
            // changed.
            Err(_) => {
                self.vectors.clear();
                let _ = self.switch_off();
            }
        }
        outcome
    }

    /// Routes the pin.
    ///
    /// # Errors
    /// The kernel has no interrupt left.
    pub fn route_pin(&mut self, route: Option<&Route>) -> Result<(), Errno> {
        if self.mode == Mode::Pin {
            self.switch_off()?;
        }
        self.pin = route.cloned();
        self.switch_pin()
    }

    /// Masks or unmasks the pin. Has no effect while the pin is off.
    ///
    /// # Errors
    /// The errors of `VFIO_DEVICE_SET_IRQS`.
    pub fn mask_pin(&self, masked: bool) -> Result<(), Errno> {
        let action = if masked { irq_set::MASK } else { irq_set::UNMASK };
        match self.mode {
            Mode::Pin => self.device.set_irqs(&SetIrqs::plain(irq::INTX, action, 1)),
            Mode::None | Mode::Vectors => Ok(()),
        }
    }

    /// Removes all routes.
    ///
    /// # Errors
    /// An interrupt may still be routed.
    pub fn clear(&mut self) -> Result<(), Errno> {
        self.vectors.clear();
        self.pin = None;
        self.switch_off()
    }

    /// Switches the pin on if it is routed, unless MSI-X is on.
    fn switch_pin(&mut self) -> Result<(), Errno> {
        let Some(pin) = self.pin.as_ref().filter(|_| self.mode == Mode::None) else {
            return Ok(());
        };
        let files = std::iter::once(pin.as_raw_fd());
        self.device.set_irqs(&SetIrqs::routes(irq::INTX, 0, files))?;
        self.mode = Mode::Pin;
        Ok(())
    }

    fn switch_off(&mut self) -> Result<(), Errno> {
        let index = match self.mode {
            Mode::None => return Ok(()),
            Mode::Pin => irq::INTX,
            Mode::Vectors => irq::MSIX,
        };
        self.device.set_irqs(&SetIrqs::plain(index, irq_set::TRIGGER, 0))?;
        self.mode = Mode::None;
        Ok(())
    }
}

/// Returns the descriptor of a route, or -1, by which the kernel removes a route.
fn number(route: &Option<Route>) -> i32 {
    route.as_ref().map_or(-1, AsRawFd::as_raw_fd)
}

/// Returns the range of `after` from the first to the last route that differs from `before`, or an
/// empty range if none does.
fn changed(before: &[Option<Route>], after: &[Option<Route>]) -> Range<usize> {
    let is_same = |at: &usize| match (before.get(*at), after.get(*at)) {
        (Some(Some(before)), Some(Some(after))) => Arc::ptr_eq(before, after),
        (Some(None), Some(None)) => true,
        _ => false,
    };
    let mut differing = (0..after.len()).filter(|at| !is_same(at));
    let first = differing.next();
    let last = differing.next_back().or(first);
    first.zip(last).map_or(0..0, |(first, last)| first..last + 1)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::device::tests::fake;

    fn event() -> Option<Route> {
        Some(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()))
    }

    #[test]
    fn only_the_range_that_differs_is_set() {
        let [a, b, c] = [event(), event(), event()];
        let before = [a.clone(), None, b.clone(), None];
        assert_eq!(changed(&before, &before), 0..0);
        assert_eq!(changed(&before, &[a.clone(), None, c.clone(), None]), 2..3);
        assert_eq!(changed(&before, &[a, c, b.clone(), event()]), 1..4);
        assert_eq!(changed(&before, &[None, None, b, None]), 0..1);
    }

    #[test]
    fn a_device_without_interrupts_stays_off() {
        let mut interrupts = Interrupts::new(Arc::new(fake(&[])));
        interrupts.route_vectors(&[None, None]).unwrap();
        interrupts.mask_pin(true).unwrap();
        assert_eq!(interrupts.route_vectors(&[event(), None]), Err(Errno::NOTTY));
        assert!(interrupts.vectors.is_empty());
        assert_eq!(interrupts.route_pin(event().as_ref()), Err(Errno::NOTTY));
    }
}
