//! Ports in front of ports: what passes is watched, lost, delayed or held to a rate. Each wraps any port,
//! also one that is itself a decorator; a port without one pays nothing.
//!
//! *Inward* is from the peer to the switch, *outward* to the peer. Observers ([`Observed`]) are nearest to
//! the peer and see what it sends and what it gets; impairments ([`Loss`], [`Queued`]) are in front of
//! them. None of them waits, calls the system or allocates once it is warm.

/// What every decorator hands on to the port that it is in front of, its field `inner`.
macro_rules! forward_to_inner {
    () => {
        fn abilities(&self) -> $crate::Abilities {
            self.inner.abilities()
        }

        fn is_up(&self) -> bool {
            self.inner.is_up()
        }

        fn set_link(&mut self, link: $crate::Link) {
            self.inner.set_link(link);
        }

        fn notify(&mut self) {
            self.inner.notify();
        }

        fn prepare(&self, frames: usize) {
            self.inner.prepare(frames);
        }

        fn arm(&mut self) -> bool {
            self.inner.arm()
        }

        fn attached(&mut self, waker: $crate::Waker) {
            self.inner.attached(waker);
        }

        fn attend(&mut self) {
            self.inner.attend();
        }

        fn descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            self.inner.descriptor()
        }
    };
}
use forward_to_inner;

mod capture;
mod impairment;
mod line;
mod loss;
mod observed;
mod queued;
mod random;
mod trace;

pub use capture::{Captured, Capturing, Record, Recorder, record};
pub use impairment::{BadImpairment, Impairment, MAX_DELAY, MAX_QUEUE};
pub use loss::Loss;
pub use observed::{Observed, Observer, Way, Ways};
pub use queued::{ByDelay, ByRate, Queued, Schedule};
pub use trace::{Counts, Kind, Summary, Trace, Tracing};

use std::time::Duration;

use crate::{Port, PortStats};

/// What a decorator is in front of its port for, so that it is found again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A part of the port's impairment.
    Impairment,
    /// An observer, by the number that its owner gave it.
    Observer(u64),
}

/// A port that does things by time: frames wait in it.
///
/// The switch calls [`Timed::tick`] before each turn and each delivery of the port, and whenever
/// [`Timed::due`] has passed.
pub trait Timed {
    /// It is `now`, on the clock of [`crate::Switch::turn`]: gives the peer what is due. Tells whether
    /// frames from the peer are due, for which the port wants a turn.
    fn tick(&mut self, now: Duration) -> bool;

    /// When something is due next: a frame for the peer or, with `inward`, one from it.
    fn due(&mut self, inward: bool) -> Option<Duration>;

    /// Drops all that waits, and counts it.
    fn close(&mut self);
}

/// Puts what `wrap` makes of the innermost port in its place.
pub(crate) fn wrap_innermost(
    port: &mut Box<dyn Port>,
    wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
) {
    match port.inner() {
        Some((_, inner)) => wrap_innermost(inner, wrap),
        None => wrap_here(port, wrap),
    }
}

/// Puts `new` in the innermost port's place, behind the same decorators; gives the former one.
pub(crate) fn replace_innermost(port: &mut Box<dyn Port>, new: Box<dyn Port>) -> Box<dyn Port> {
    match port.inner() {
        Some((_, inner)) => replace_innermost(inner, new),
        None => std::mem::replace(port, new),
    }
}

/// Puts what `wrap` makes of a port in its place.
pub(crate) fn wrap_here(
    port: &mut Box<dyn Port>,
    wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
) {
    let bare = std::mem::replace(port, Box::new(crate::ports::NullPort));
    *port = wrap(bare);
}

/// Takes all decorators of this kind away; what waits in them is dropped, and counted in `stats`. Tells
/// whether there was one.
pub(crate) fn strip(port: &mut Box<dyn Port>, layer: Layer, stats: &mut PortStats) -> bool {
    if layer == Layer::Impairment
        && let Some(timed) = port.timed()
    {
        timed.close();
    }
    port.account(stats);
    strip_counted(port, layer)
}

fn strip_counted(port: &mut Box<dyn Port>, layer: Layer) -> bool {
    let mut any = false;
    while let Some((kind, inner)) = port.inner() {
        if kind != layer {
            return strip_counted(inner, layer) || any;
        }
        *port = std::mem::replace(inner, Box::new(crate::ports::NullPort));
        any = true;
    }
    any
}
