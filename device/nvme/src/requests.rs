//! Requests of other threads to a controller.
//!
//! The control thread never touches a controller: it posts a [`Request`], which the controller
//! carries out on its own thread at the start of its next poll. The answer is a callback, called on
//! that thread, which may for example send into a channel. A request that is never carried out,
//! because the controller was dropped first, is dropped together with its callback.

use crate::fleet::Answer;
use crate::inspect::ThreadView;
use crate::limiter::Rates;
use crate::mailbox::Sender;
use crate::namespace::{Done, Namespace};
use crate::trace::{Latencies, Tracer};

/// A request to a controller. Callbacks run on a data path: they must be short and wait for
/// nothing.
pub enum Request {
    /// [`Controller::attach`](crate::Controller::attach).
    Attach(Namespace, Done),
    /// [`Controller::detach`](crate::Controller::detach), by namespace ID.
    Detach(u32, Done),
    /// [`Controller::refresh`](crate::Controller::refresh), by namespace ID.
    Refresh(u32, Done),
    /// [`Controller::limit`](crate::Controller::limit).
    Limit(Rates, Done),
    /// Asks for the controller's threads.
    Threads(Answer<Threads>),
    /// Traces with this tracer on one thread, from 0 on, or stops tracing there. The answer is the
    /// previous tracer, which is large: drop it on another thread.
    Trace(usize, Option<Box<Tracer>>, Answer<Option<Box<Tracer>>>),
    /// Goes on counting in these latencies on one thread, from 0 on. The answer is the latencies
    /// counted so far, or `None` if nothing is traced there.
    TakeLatencies(usize, Latencies, Answer<Option<Latencies>>),
    /// Asks for a view of one thread, from 0 on. If there is no such thread, the callback is
    /// dropped.
    Inspect(usize, Answer<ThreadView>),
}

/// The threads of a controller, which are traced separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    /// The number of threads: the controller's own and one for each lane.
    pub count: usize,
    /// The highest number of an I/O submission queue, which is the size for [`Latencies`].
    pub queues: u16,
}

/// A handle for posting requests to a controller; see
/// [`Controller::mailbox`](crate::Controller::mailbox). It is cheap to clone, and harmless after
/// the controller is gone.
#[derive(Clone)]
pub struct Mailbox(pub(crate) Sender<Request>);

impl Mailbox {
    /// Leaves a request for the controller's next poll. Requests are carried out in the order in
    /// which they were posted. A request to a controller that is gone is dropped.
    ///
    /// A controller that sleeps does not look for requests: the caller must have its host poll it
    /// afterwards (`slipway_vfio_user::Control::poke`), except for a controller with lanes, which
    /// is woken here.
    pub fn post(&self, request: Request) -> Posted {
        Posted { number: self.0.post_numbered(request), mailbox: self.0.clone() }
    }
}

/// A request that was posted.
pub struct Posted {
    mailbox: Sender<Request>,
    number: u64,
}

impl Posted {
    /// Takes the request back. Returns `None` if the controller has begun it, so that an answer
    /// comes, or is gone.
    pub fn take_back(&self) -> Option<Request> {
        self.mailbox.take_back(self.number)
    }
}
