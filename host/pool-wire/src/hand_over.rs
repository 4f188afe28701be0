//! The VMM's side.

use std::os::fd::{AsFd, OwnedFd};

use slipway_peer::{Bin, Foreign};
use slipway_pool_spec::{Range, SERVED, Traits, faults};

use crate::message::{WireError, receive, send};
use crate::userfault::Userfault;

/// A VMM's side of the connection, until the pool serves its faults.
#[derive(Debug)]
pub struct HandOver {
    connection: OwnedFd,
    token: OwnedFd,
    /// The traits of the memory.
    pub traits: Traits,
    faults: Userfault,
}

impl HandOver {
    /// Takes what the pool sent over `connection`, and makes a userfaultfd of this process.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn begin(connection: OwnedFd) -> Result<Self, WireError> {
        let (message, files) = receive(connection.as_fd(), &Bin::new())?;
        let traits = Traits::decode_token(&message).ok_or(WireError::Malformed)?;
        let [token, device] = files.map(Foreign::into_owned);
        let faults = Userfault::new(device.as_fd());
        let faults = faults.map_err(WireError::io("making a userfaultfd"))?;
        Ok(Self { connection, token, traits, faults })
    }

    /// Hands the faults of `ranges` over: mappings of the file that nobody has touched. From its
    /// return on, every page that this process touches is zero, or that of the template, and is
    /// made on the home of the memory. Returns the connection, to be kept open as long as this
    /// process uses the memory, and the token.
    ///
    /// # Errors
    /// [`WireError`]; the mappings must not be used then.
    pub fn finish(self, ranges: &[Range]) -> Result<(OwnedFd, OwnedFd), WireError> {
        for range in ranges {
            if let Some(home) = self.traits.home {
                // A process that may not use that node's memory has its pages farther away.
                let _ = slipway_numa::prefer(range.address, range.len, home);
            }
            let registered = self.faults.register(range.address, range.len, self.traits.fork);
            registered.map_err(WireError::io("registering the guest's memory for faults"))?;
        }
        send(self.connection.as_fd(), &faults::encode(ranges), &[self.faults.as_fd()])?;
        let (message, []) = receive(self.connection.as_fd(), &Bin::new())?;
        if message != SERVED {
            return Err(WireError::Malformed);
        }
        Ok((self.connection, self.token))
    }
}

#[cfg(test)]
mod tests {
    use slipway_pool_spec::TOKEN;

    use super::*;
    use crate::lease::tests::pair;

    #[test]
    fn tokens_without_their_files_or_of_another_form_are_refused() {
        for (message, files) in [(&[TOKEN, 0, 0, 0][..], 1), (&[TOKEN, 0, 4, 0], 2), (&[TOKEN], 2)]
        {
            let (here, there) = pair();
            send(there.as_fd(), message, &vec![there.as_fd(); files]).unwrap();
            let refused = HandOver::begin(here);
            assert!(matches!(refused, Err(WireError::Malformed)), "{message:?}: {refused:?}");
        }
    }
}
