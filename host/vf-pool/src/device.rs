//! The contract of a VF.

/// The reason why an operation on a device failed: a sentence without a full stop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub String);

/// A virtual function as the pool sees it.
///
/// The pool calls one operation of a device at a time, and any operation from any thread. An
/// operation may block, also for ever: it holds up no other VF. A panic counts as a [`Fault`].
/// [`admit`](Self::admit), [`expel`](Self::expel) and [`access`](Self::access) are exceptions: they
/// run on the caller's thread, and must neither block nor panic.
///
/// The order of calls is [`open`](Self::open), [`reset`](Self::reset) and [`scrub`](Self::scrub),
/// after which the VF is ready; for each owner `admit`, `expel`, `reset` and `scrub`; and
/// [`close`](Self::close) at the end. [`adopt`](Self::adopt) stands for all calls up to an owner's
/// `admit`. The device lets nobody use the VF before `admit` or after `expel`.
pub trait Device: Send + 'static {
    /// The handle that an owner gets: a path, a descriptor.
    type Access: Clone + Send + Sync + 'static;

    /// Binds and opens the device. A second call after a fault, or on a device that an earlier
    /// process left open, must lead to the same result as a first one.
    ///
    /// # Errors
    /// The device cannot be opened, or somebody else uses it. It is tried again, or closed: what is
    /// held by then is given back by [`close`](Self::close) at the latest.
    fn open(&mut self) -> Result<(), Fault>;

    /// Takes the device over as an owner has it who got it from an earlier process, without
    /// disturbing that owner. The earlier process may have ended before `admit`.
    ///
    /// # Errors
    /// The device has ended with the earlier process.
    fn adopt(&mut self) -> Result<(), Fault>;

    /// Resets the device alone (a function-level reset). On return it does no DMA, and nothing of
    /// its last owner can reach it.
    ///
    /// # Errors
    /// The device is not fit for another owner.
    fn reset(&mut self) -> Result<(), Fault>;

    /// Removes all data of the last owner. Called after a reset.
    ///
    /// # Errors
    /// Data may be left.
    fn scrub(&mut self) -> Result<(), Fault>;

    /// Resets all devices of a set together (a bus reset). Called only while no VF of the set is
    /// attached or in use by any other operation. Some may be closed, or were never opened.
    ///
    /// # Errors
    /// No device of the set is fit for an owner.
    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault>
    where
        Self: Sized;

    /// Lets an owner use the device. Called on a device that is reset and scrubbed, and again when
    /// the owner is to have another client; must not wait for a client.
    ///
    /// # Errors
    /// The device is not fit for use, and is reset then; or for the other client, and stays as it
    /// was.
    fn admit(&mut self) -> Result<(), Fault>;

    /// Lets nobody use the device any more. Called before the reset; must not block.
    fn expel(&mut self);

    /// Returns the handle for an owner. Called on an open device; must not block.
    fn access(&self) -> Self::Access;

    /// Closes the device and gives back what `open` took.
    ///
    /// # Errors
    /// Part of it is left.
    fn close(&mut self) -> Result<(), Fault>;
}
