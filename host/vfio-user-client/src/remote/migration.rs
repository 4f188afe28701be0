//! Stopping a function, and moving its state to another one.

use slipway_vfio_user_spec::device_state;

use super::{FunctionError, RemoteFunction, ServerLink, lock};
use crate::migration::PAGE;
use crate::{Client, ClientError, MAX_STATE};

/// A snapshot or a migration, step by step:
/// 1. The VMM pauses its guest, and then stops the function ([`RemoteFunction::stop`]). From then
///    on the function accesses no memory and raises no interrupt.
/// 2. [`RemoteFunction::save`] returns the state. RAM, interrupt routes and pending eventfds are
///    the VMM's, and are no part of it.
/// 3. The guest goes on after [`RemoteFunction::start`], or another function takes the state over
///    ([`RemoteFunction::load`]): one of the same kind and size, with the same RAM mapped and its
///    interrupts routed. Its serial number, MAC address, disks and limits stay its own.
impl RemoteFunction {
    /// Stops the function. When this returns, what it had begun is done, its effects are in guest
    /// memory, and it begins nothing more. Registers can be read, and writes take effect when the
    /// function is started. A function that is stopped already stays so. A connection that is lost
    /// and made again finds the function stopped.
    ///
    /// # Errors
    /// [`FunctionError::Refused`]: the function goes on. With `EBUSY`, it did not finish in the
    /// server's time. With `EOPNOTSUPP`, functions of this kind, or of this server, cannot be
    /// stopped. [`FunctionError::Broken`].
    pub fn stop(&self) -> Result<(), FunctionError> {
        self.stay_stopped(|client| client.set_device_state(device_state::STOP))
    }

    /// Lets a stopped function go on. A function that runs already goes on.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn start(&self) -> Result<(), FunctionError> {
        let run = |client: &mut Client| client.set_device_state(device_state::RUNNING);
        self.perform_and_note(run, |told| told.stopped = false)
    }

    /// Returns the state of the function, of at most [`MAX_STATE`] bytes; stops the function first,
    /// and leaves it stopped. Every call returns the whole state.
    ///
    /// # Errors
    /// As for [`RemoteFunction::stop`].
    pub fn save(&self) -> Result<Vec<u8>, FunctionError> {
        self.stay_stopped(|client| {
            client.set_device_state(device_state::STOP_COPY)?;
            let state = client.read_state()?;
            client.set_device_state(device_state::STOP)?;
            Ok(state)
        })
    }

    /// Replaces the state of the function by a saved one, and lets the function go on from there.
    /// RAM is mapped and interrupts are routed before. Doorbells that were rung on the saved
    /// function, and not seen, are in the state. Every routed MSI-X vector is raised once at the
    /// end, since an interrupt may have been lost.
    ///
    /// # Errors
    /// [`FunctionError::Refused`] with `EFBIG` if the state is longer than such a function's can
    /// be, and with `EINVAL` if it is not a state of such a function; the function is then stopped,
    /// and [`RemoteFunction::reset`] brings it back. [`FunctionError::Broken`].
    pub fn load(&self, state: &[u8]) -> Result<(), FunctionError> {
        if state.len() > MAX_STATE {
            return Err(FunctionError::Refused(rustix::io::Errno::FBIG));
        }
        self.stay_stopped(|client| {
            client.set_device_state(device_state::RESUMING)?;
            client.write_state(state)?;
            client.set_device_state(device_state::STOP)
        })?;
        self.start()?;
        // An interrupt may have been lost on the way. A driver tolerates one more.
        lock(&self.inner).told.raise_vectors();
        Ok(())
    }

    /// Has the function note the pages of RAM that it writes to, of all that is mapped. A function
    /// that runs goes on. A log belongs to a connection: another one has none.
    ///
    /// # Errors
    /// As for [`RemoteFunction::stop`].
    pub fn log_writes(&self) -> Result<(), FunctionError> {
        self.perform(Client::start_log)
    }

    /// Ends the log of [`RemoteFunction::log_writes`].
    ///
    /// # Errors
    /// As for [`RemoteFunction::stop`].
    pub fn end_log(&self) -> Result<(), FunctionError> {
        self.perform(Client::stop_log)
    }

    /// Returns a bit for each of `pages` pages from `iova` on that is set if the function has
    /// written to the page since it was last reported: the first page's is the lowest of the first
    /// word. The first page is a multiple of 64 pages behind the start of a region of memory, and
    /// the number of pages is a multiple of 64 or reaches to the region's end. Each message has the
    /// whole patience, since the function becomes quiet for each, and accesses of other threads
    /// come in between.
    ///
    /// # Errors
    /// [`FunctionError::Refused`] if there is no log, as after the loss of a connection, with
    /// which the log is lost. The bits of earlier messages are lost then. As for
    /// [`RemoteFunction::stop`].
    pub fn report_log(&self, iova: u64, pages: usize) -> Result<Vec<u64>, FunctionError> {
        let mut words = Vec::with_capacity(pages.div_ceil(64));
        while words.len() * 64 < pages {
            let done = words.len() * 64;
            let part = self.perform(|client| {
                let count = client.most_reported().min(pages - done);
                client.report_log(iova + done as u64 * PAGE, count)
            })?;
            words.extend(part);
        }
        Ok(words)
    }

    /// Carries out `request` so that a connection made meanwhile, or afterwards, finds the function
    /// stopped. If the function refuses to stop, it runs as before.
    fn stay_stopped<T>(
        &self,
        request: impl FnMut(&mut Client) -> Result<T, ClientError>,
    ) -> Result<T, FunctionError> {
        let before = {
            let mut inner = lock(&self.inner);
            std::mem::replace(&mut inner.told.stopped, true)
        };
        let outcome = self.perform(request);
        if outcome.is_err() && !before {
            let mut inner = lock(&self.inner);
            if let ServerLink::Up(client) = &mut inner.link {
                client.limit(std::time::Instant::now() + self.patience);
                let runs = matches!(
                    client.device_state(),
                    Ok(device_state::RUNNING) | Err(ClientError::Refused(_))
                );
                inner.told.stopped = !runs;
            }
        }
        outcome
    }
}
