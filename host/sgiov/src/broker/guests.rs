//! Socket functions of guests: requested by the administrator, served by
//! [`Guests`](crate::guests::Guests).

use slipway_peer::Foreign;
#[cfg(feature = "guests")]
use slipway_sgiov_spec::control::Reply;

use super::{Broker, Errno, Outcome};

#[cfg(feature = "guests")]
impl Broker {
    pub(super) fn serve_function(
        &mut self,
        client: u32,
        bytes: u64,
        files: Vec<Foreign>,
    ) -> Result<Outcome, Errno> {
        use std::os::fd::AsFd;

        use slipway_sgiov_spec::function::ADDRESSES;

        use crate::Function;

        // A user id is not enough: root in a container has the user id of root.
        if self.clients.get(client).is_none_or(|client| !client.administers) {
            return Err(Errno::PERM);
        }
        let guests = self.remote.as_mut().and_then(|remote| remote.guests.as_mut());
        let guests = guests.ok_or(Errno::OPNOTSUPP)?;
        let mut files = files.into_iter();
        let (Some(listener), Some(file), memory, None) =
            (files.next(), files.next(), files.next(), files.next())
        else {
            return Ok(Outcome::HangUp("it asked for a function without its descriptors"));
        };
        let function = match Function::from_file(file, bytes) {
            Ok(function) if (1..=ADDRESSES).contains(&function.addresses.len()) => function,
            Ok(_) => return Err(Errno::INVAL),
            Err(error) => {
                let text =
                    format_args!("a function was asked for by what is no description: {error}");
                self.log.line("function", text);
                return Err(Errno::INVAL);
            }
        };
        let name = function.name.clone();
        // The client has the socket as well, so the copy here is never the last one that is closed
        // unless it goes through the bin. Likewise the memory, which is mapped, too, once it is
        // taken: its pages go with the mapping.
        let copy = |file: &Foreign| file.as_fd().try_clone_to_owned().map_err(super::lack);
        let (listener, copied) = (copy(&listener)?, memory.as_ref().map(copy).transpose()?);
        match guests.add(client, listener, copied, function) {
            Ok(()) => Ok(Outcome::Answer(Reply::Done, Vec::new())),
            Err(error) => {
                let text = format_args!("guest {name} has no socket function: {error}");
                self.log.line("function", text);
                Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
            }
        }
    }

    /// Ends the functions of a client that has gone, if it asked for any.
    pub(super) fn asker_left(&mut self, client: u32) {
        if let Some(guests) = self.remote.as_mut().and_then(|remote| remote.guests.as_mut()) {
            guests.asker_left(client);
        }
    }

    /// Returns whether any guest's function is served.
    pub fn has_guests(&self) -> bool {
        let guests = self.remote.as_ref().and_then(|remote| remote.guests.as_ref());
        guests.is_some_and(|guests| !guests.is_empty())
    }
}

#[cfg(not(feature = "guests"))]
impl Broker {
    /// Refuses the request: this engine serves programs only.
    pub(super) fn serve_function(
        &mut self,
        _: u32,
        _: u64,
        _: Vec<Foreign>,
    ) -> Result<Outcome, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    pub(super) fn asker_left(&mut self, _: u32) {}

    pub fn has_guests(&self) -> bool {
        false
    }
}
