//! How the function and whoever has its channel come to terms, without waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use slipway_sgiov_spec::function::{Broken, RUNNING};

use crate::Channel;
use crate::attention::Attention;

/// Where the channel is.
pub enum Place {
    /// There is none.
    Nowhere,
    /// It waits to be taken.
    Here(Box<Channel>),
    /// The peer has it.
    Away,
}

/// What both know.
pub struct State {
    pub place: Place,
    /// The peer is to give the channel back.
    pub recalled: bool,
    /// The channel is to hold no memory.
    pub suspend: bool,
    /// It does not.
    pub suspended: bool,
    /// The register.
    pub status: u32,
}

/// Between the function and its peer.
pub struct Exchange {
    state: Mutex<State>,
    /// Something of it has changed that the peer is to look at.
    notice: AtomicBool,
    peer: Waker,
    pub attention: Attention,
}

impl Exchange {
    pub fn new(peer: Waker, attention: Attention) -> Arc<Self> {
        let place = Place::Nowhere;
        let state = State { place, recalled: false, suspend: false, suspended: false, status: 0 };
        Arc::new(Self { state: Mutex::new(state), notice: AtomicBool::new(false), peer, attention })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Has the peer look at the state.
    pub fn notify(&self) {
        self.notice.store(true, Ordering::Release);
        self.peer.wake_by_ref();
    }

    /// Has the peer look at the channel.
    pub fn ring(&self) {
        self.peer.wake_by_ref();
    }

    /// Whether there is something to look at, once.
    pub fn take_notice(&self) -> bool {
        self.notice.load(Ordering::Relaxed) && self.notice.swap(false, Ordering::Acquire)
    }

    /// The function is broken from now on, until it is reset.
    pub fn broken(&self, why: Broken) {
        self.state().status = why.status();
        self.attention.raise();
    }

    /// A channel has ended. The function is reset, or nobody serves it.
    pub fn ended(&self) {
        let mut state = self.state();
        if !matches!(state.place, Place::Away) {
            return;
        }
        (state.place, state.suspended) = (Place::Nowhere, false);
        if std::mem::take(&mut state.recalled) {
            state.status = 0;
        } else if state.status == RUNNING {
            state.status = Broken::Unserved.status();
            drop(state);
            self.attention.raise();
        }
    }
}

/// The function as who serves its guest has it.
pub struct Peer(pub(crate) Arc<Exchange>);

impl Peer {
    /// The channel, when the guest has started the function since.
    pub fn take(&self) -> Option<Channel> {
        let mut state = self.0.state();
        match std::mem::replace(&mut state.place, Place::Nowhere) {
            Place::Here(channel) => {
                state.place = Place::Away;
                // It may be suspended: the new owner has to look.
                self.0.notice.store(true, Ordering::Release);
                Some(*channel)
            }
            other => {
                state.place = other;
                None
            }
        }
    }
}
