//! The contract of the file system behind the device.

/// The device's number of a request, which its reply repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(crate) u64);

/// A FUSE request of the guest.
#[derive(Debug)]
pub struct Request {
    /// The number of the request.
    pub ticket: Ticket,
    /// The request's bytes: at least a header (40 bytes), at most
    /// [`LONGEST_REQUEST`](crate::LONGEST_REQUEST). They are the guest's words, and may be
    /// anything.
    pub message: Vec<u8>,
    /// Most bytes of the reply, at most [`LONGEST_REPLY`](crate::LONGEST_REPLY).
    pub room: usize,
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    /// The number of the request.
    pub ticket: Ticket,
    /// The reply's bytes. Empty for requests that FUSE has no reply to.
    pub bytes: Vec<u8>,
}

/// A file system that answers FUSE requests. The device calls it from one thread, the host's.
///
/// Duties of the implementation:
/// - No call blocks: what may wait for a disk is done on other threads, which wake the device's
///   host when they have a reply.
/// - Each request gets exactly one [`Reply`], in any order. The device counts those that are under
///   way, and begins no more while they are many. A reply has no more bytes than the request has
///   room for; the device cuts off the rest.
pub trait FileServer: Send {
    /// Begins a request.
    fn begin(&mut self, request: Request);

    /// Returns the next reply. Returns `None` if none is ready.
    fn take_reply(&mut self) -> Option<Reply>;

    /// Ends the session, since the driver has reset the device. Requests that are under way still
    /// get their replies, which the device drops.
    fn end_session(&mut self);
}
