//! The states of an endpoint's function: those of VFIO's migration, and those in between.

use slipway_vfio_user_spec::device_state;

/// The state of a function. Only a running function is polled.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum RunState {
    /// RUNNING.
    #[default]
    Running,
    /// STOP, for a successor: the function has a predecessor's state in its journal, and waits for
    /// the predecessor's client to connect and to resume it.
    Held,
    /// STOP. The function was quiet when it got there.
    Stopped,
    /// STOP_COPY: the client reads the function's state.
    Saving(Saved),
    /// RESUMING: the state that the client has written so far.
    Loading(Vec<u8>),
    /// On the way from RESUMING to STOP: the function was reset, and takes this state over when it
    /// is quiet.
    Restoring(Vec<u8>),
    /// ERROR: the function was reset, and waits for another reset.
    Failed,
}

impl RunState {
    /// Returns the value by which the protocol names the state.
    pub fn code(&self) -> u32 {
        match self {
            Self::Running => device_state::RUNNING,
            Self::Held | Self::Stopped => device_state::STOP,
            Self::Saving(_) => device_state::STOP_COPY,
            Self::Loading(_) | Self::Restoring(_) => device_state::RESUMING,
            Self::Failed => device_state::ERROR,
        }
    }
}

/// A saved state that a client reads from its beginning to its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    bytes: Vec<u8>,
    /// The number of bytes that were read.
    read: usize,
}

impl Saved {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, read: 0 }
    }

    /// Returns the number of bytes of the whole state.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the next bytes, at most `len`. Fewer are the last ones.
    pub fn take(&mut self, len: usize) -> &[u8] {
        let rest = self.bytes.get(self.read..).unwrap_or_default();
        let part = &rest[..rest.len().min(len)];
        self.read += part.len();
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_state_is_read_once() {
        let mut saved = Saved::new(vec![1, 2, 3, 4, 5]);
        assert_eq!(saved.take(2), [1, 2]);
        assert!(saved.take(0).is_empty());
        assert_eq!(saved.take(usize::MAX), [3, 4, 5]);
        assert!(saved.take(7).is_empty());
    }
}
