//! Passes the channel between the function and its peer, without waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use slipway_sgiov_spec::function::{Broken, RUNNING};

use crate::Channel;
use crate::attention::Attention;

/// The present owner of the channel.
pub enum ChannelOwner {
    /// There is no channel.
    Nowhere,
    /// The function has the channel, for the peer to take.
    Here(Box<Channel>),
    /// The peer has the channel.
    Away,
}

/// State that the function and its peer share.
pub struct ExchangeState {
    pub place: ChannelOwner,
    /// `true` if the peer is to give the channel back.
    pub recalled: bool,
    /// `true` if the channel is to release the guest's memory.
    pub suspend: bool,
    /// `true` if the channel has released the guest's memory.
    pub suspended: bool,
    /// The value of the status register.
    pub status: u32,
}

/// The connection between the function and its peer.
pub struct Exchange {
    state: Mutex<ExchangeState>,
    /// `true` if the state has changed in a way that the peer must look at.
    notice: AtomicBool,
    peer: Waker,
    pub attention: Attention,
}

impl Exchange {
    pub fn new(peer: Waker, attention: Attention) -> Arc<Self> {
        let place = ChannelOwner::Nowhere;
        let state =
            ExchangeState { place, recalled: false, suspend: false, suspended: false, status: 0 };
        Arc::new(Self { state: Mutex::new(state), notice: AtomicBool::new(false), peer, attention })
    }

    pub fn state(&self) -> MutexGuard<'_, ExchangeState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes the peer look at the state.
    pub fn notify(&self) {
        self.notice.store(true, Ordering::Release);
        self.peer.wake_by_ref();
    }

    /// Makes the peer look at the channel.
    pub fn ring(&self) {
        self.peer.wake_by_ref();
    }

    /// Returns whether the state has changed since the last call, and clears the mark.
    pub fn take_notice(&self) -> bool {
        self.notice.load(Ordering::Relaxed) && self.notice.swap(false, Ordering::Acquire)
    }

    /// Marks the function as broken until it is reset, and interrupts the guest.
    pub fn broken(&self, why: Broken) {
        self.state().status = why.status();
        self.attention.raise();
    }

    /// Notes that the peer has dropped its channel. If the channel was recalled, the function is
    /// reset; if the function was running, it is broken, since nobody serves it.
    pub fn ended(&self) {
        let mut state = self.state();
        if !matches!(state.place, ChannelOwner::Away) {
            return;
        }
        (state.place, state.suspended) = (ChannelOwner::Nowhere, false);
        if std::mem::take(&mut state.recalled) {
            state.status = 0;
        } else if state.status == RUNNING {
            state.status = Broken::Unserved.status();
            drop(state);
            self.attention.raise();
        }
    }
}

/// The function's other end, for the code that serves its guest.
pub struct Peer(pub(crate) Arc<Exchange>);

impl Peer {
    /// Takes the channel, if the guest has started the function since the last one.
    pub fn take(&self) -> Option<Channel> {
        let mut state = self.0.state();
        match std::mem::replace(&mut state.place, ChannelOwner::Nowhere) {
            ChannelOwner::Here(channel) => {
                state.place = ChannelOwner::Away;
                // The channel may be suspended: its new owner must look at the state.
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
