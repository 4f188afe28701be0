//! Decorators: ports in front of ports that observe, change, lose, delay or slow frames. Each wraps
//! any port, also another decorator; a port without decorators pays nothing.
//!
//! *Inward* is from the peer to the switch, *outward* to the peer. Observers ([`Observed`]) are
//! nearest to the peer and see what it sends and gets. The translation of the peer's address
//! ([`Translated`]) is in front of them, the queue of a receive rate ([`Queued`]) in front of that,
//! and impairments ([`Loss`], [`Queued`]) are in front of all. No decorator waits, makes system
//! calls, or allocates once warm.
//!
//! A new observer is an `Observer`, which `Owner::observe` puts in front of a port: `Observed`
//! needs no change. `host/fabric` attaches it (`capture`), and `plane.proto` has the call. A new
//! impairment needs none of the following steps: see the head of `impairment`.
//!
//! A new decorator of another kind takes these steps:
//! - a variant of [`Layer`] (`port.rs`), by which `strip` finds the decorator and removes it with
//!   the frames that wait in it. If frames wait in it, it implements [`Timed`] (`port.rs`), too;
//! - its place in the order above: a function of this file that puts it there. `translate` and
//!   `wrap_behind_impairments` pass over the layers in front of their own, and their `match` names
//!   the new one if it is such a layer;
//! - a field of `PortConfig` (`rules.rs`). `Switch::attach` (`switch/settings.rs`) puts the
//!   decorator in front of a new port that has the setting, and `Switch::configure` strips it and
//!   puts it there again when the setting changes. The head of `host/fabric/src/settings.rs` says
//!   where settings come from;
//! - tests in `tests/decorators.rs` of this crate. The order is also in `docs/walks/frame.md`,
//!   "Decorators", and in `docs/networks.md`.

/// The methods that every decorator forwards to the port behind it, its field `inner`; with
/// `nothing_waits` also those that a decorator forwards in which no frame waits.
macro_rules! forward_to_inner {
    (nothing_waits) => {
        super::forward_to_inner!();

        fn inspect(&self, view: &mut $crate::QueuesView) {
            self.inner.inspect(view);
        }

        fn release(&mut self) {
            self.inner.release();
        }

        fn timed(&mut self) -> Option<&mut dyn $crate::decorators::Timed> {
            self.inner.timed()
        }
    };
    () => {
        fn abilities(&self) -> $crate::Abilities {
            self.inner.abilities()
        }

        fn is_up(&self) -> bool {
            self.inner.is_up()
        }

        fn set_link(&mut self, link: $crate::LinkSetting) {
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
mod pacing;
mod queued;
mod random;
mod trace;
mod translated;

pub use capture::{Captured, Capturing, Record, Recorder, record};
pub use impairment::{BadImpairment, Impairment, MAX_DELAY, MAX_QUEUE};
pub use loss::Loss;
pub use observed::{Direction, Directions, Observed, Observer};
pub use queued::{ByDelay, ByRate, Queued, Schedule};
pub use trace::{Counts, Summary, Trace, Tracing};
pub use translated::Translated;

pub use slipway_ethernet_spec::FrameKind;

pub use crate::port::{Layer, Timed};

use crate::port::Port;
use crate::{Mac, PortStats, Rate};

/// Replaces the innermost port by the port that `wrap` makes of it.
pub(crate) fn wrap_innermost(
    port: &mut Box<dyn Port>,
    wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
) {
    match port.inner() {
        Some((_, inner)) => wrap_innermost(inner, wrap),
        None => wrap_here(port, wrap),
    }
}

/// Replaces the innermost port by `new`, behind the same decorators, and returns the former one.
pub(crate) fn replace_innermost(port: &mut Box<dyn Port>, new: Box<dyn Port>) -> Box<dyn Port> {
    match port.inner() {
        Some((_, inner)) => replace_innermost(inner, new),
        None => std::mem::replace(port, new),
    }
}

/// Replaces a port by the port that `wrap` makes of it.
pub(crate) fn wrap_here(
    port: &mut Box<dyn Port>,
    wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
) {
    let bare = std::mem::replace(port, Box::new(crate::ports::NullPort));
    *port = wrap(bare);
}

/// Holds the frames for the port's peer to `rate`, behind all impairments.
pub(crate) fn pace(port: &mut Box<dyn Port>, rate: Rate) {
    wrap_behind_impairments(port, |port| pacing::paced(port, rate));
}

/// Translates between two addresses of the port's peer, if there are two ([`Translated`]), behind
/// everything in which frames wait.
pub(crate) fn translate(port: &mut Box<dyn Port>, addresses: Option<(Mac, Mac)>) {
    match port.inner() {
        Some((Layer::Impairment | Layer::Pacing, inner)) => translate(inner, addresses),
        _ => {
            if let Some((peer, network)) = addresses {
                wrap_here(port, |port| Box::new(Translated::new(port, peer, network)));
            }
        }
    }
}

/// Replaces the port behind all impairments by the port that `wrap` makes of it.
fn wrap_behind_impairments(
    port: &mut Box<dyn Port>,
    wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
) {
    match port.inner() {
        Some((Layer::Impairment, inner)) => wrap_behind_impairments(inner, wrap),
        _ => wrap_here(port, wrap),
    }
}

/// Removes all decorators of this kind, drops the frames that wait in the port, unless the kind is
/// an observer, and counts these in `stats`. Returns whether there was one.
pub(crate) fn strip(port: &mut Box<dyn Port>, layer: Layer, stats: &mut PortStats) -> bool {
    if !matches!(layer, Layer::Observer(_))
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
