//! The file of a fork's memory, for another process that serves the fork's guest.
//!
//! That process has no pool: it would find zeros where the template's bytes were not copied yet. So
//! all of the template is copied first. Recycled memory is not handed out, since the process could
//! still have it when the next sandbox does.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use slipway_pool_spec::{Answer, Completion, Traits};
use slipway_pool_wire::{WireError, send};
use slipway_ram::LateMemory;

use crate::settle::settle_all;
use crate::shared::Shared;

/// Answers a launcher's request.
///
/// # Errors
/// [`WireError`]; [`WireError::Refused`] after the launcher was told so.
pub(crate) fn answer(
    shared: &Shared,
    connection: &OwnedFd,
    completion: Completion,
) -> Result<(), WireError> {
    match complete(shared, completion) {
        Ok(memory) => {
            let traits = Traits { home: memory.home(), fork: true };
            send(connection.as_fd(), &Answer::Given(traits).encode(), &[memory.file()])
        }
        Err(text) => {
            send(connection.as_fd(), &Answer::Refused(text.as_bytes()).encode(), &[])?;
            Err(WireError::Refused(text.to_owned()))
        }
    }
}

fn complete(
    shared: &Shared,
    Completion { device, inode }: Completion,
) -> Result<Arc<LateMemory>, &'static str> {
    let fork = shared.lent((device, inode)).filter(|memory| memory.template().is_some());
    let memory = fork.ok_or("no fork has this memory")?;
    settle_all(&memory).map_err(|_| "the host has no memory left")?;
    Ok(memory)
}
