//! The threads on which requests wait for files.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use slipway_vfio_user::Control;
use slipway_virtio_fs::{FileServer, Reply, Request};

use crate::message::ScratchMemory;
use crate::session::{Root, Session};

/// As many requests as wait for slow files at a time.
const THREADS: usize = 8;

/// A session that is made by its first request. A session that cannot be made answers every request
/// with an error.
type Lazy = Arc<OnceLock<Option<Session>>>;

enum WorkerRequest {
    Answer(Request, Lazy),
    /// Closes the files of a session, unless a request of it is under way, which closes them then.
    End(Lazy),
}

#[derive(Default)]
struct Queues {
    jobs: VecDeque<WorkerRequest>,
    replies: VecDeque<Reply>,
}

/// The state that the threads share with the device.
struct Shared {
    root: Root,
    queues: Mutex<Queues>,
    work: Condvar,
    /// The endpoint of the device, which is told of replies.
    control: OnceLock<Control>,
    /// Called when the driver has reset the device, or has gone.
    reset: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: WorkerRequest) {
        self.queues().jobs.push_back(job);
        self.work.notify_one();
    }

    fn next(&self) -> WorkerRequest {
        let mut queues = self.queues();
        loop {
            if let Some(job) = queues.jobs.pop_front() {
                return job;
            }
            queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer(&self, request: Request, session: &Lazy, desk: &ScratchMemory) -> Reply {
        let Request { ticket, message, room } = request;
        let session = session.get_or_init(|| Session::new(&self.root).ok());
        let bytes = desk.answer(&message, room, |reader, writer| match session {
            Some(session) => session.handle(reader, writer),
            None => Err(virtiofsd::Error::MissingParameter),
        });
        Reply { ticket, bytes }
    }
}

/// Serves jobs for as long as the process lives.
fn serve(shared: &Shared, desk: &ScratchMemory) {
    loop {
        let (request, session) = match shared.next() {
            WorkerRequest::Answer(request, session) => (request, session),
            WorkerRequest::End(session) => {
                drop(session);
                continue;
            }
        };
        let reply = shared.answer(request, &session, desk);
        // The session may end here, before its reply is seen.
        drop(session);
        shared.queues().replies.push_back(reply);
        if let Some(control) = shared.control.get() {
            control.poke();
        }
    }
}

/// The file server. The device has it; the threads do the work.
pub struct Pool {
    shared: Arc<Shared>,
    session: Lazy,
}

/// Sets the endpoint of a pool's device.
pub struct Teller(Arc<Shared>);

impl Teller {
    /// Has `control` poke its endpoint whenever there is a reply.
    pub fn tell(&self, control: Control) {
        // Set once, by the function that makes the endpoint.
        let _ = self.0.control.set(control);
    }
}

impl Pool {
    /// Starts the threads. `reset` is called whenever the driver has reset the device, or has gone.
    ///
    /// # Errors
    /// No threads or no memory are left.
    pub fn new(root: Root, reset: Box<dyn Fn() + Send + Sync>) -> Result<(Self, Teller), String> {
        let shared = Arc::new(Shared {
            root,
            queues: Mutex::default(),
            work: Condvar::new(),
            control: OnceLock::new(),
            reset,
        });
        for _ in 0..THREADS {
            let (shared, desk) = (Arc::clone(&shared), ScratchMemory::new()?);
            let named = std::thread::Builder::new().name("files".into());
            let spawned = named.spawn(move || serve(&shared, &desk));
            spawned.map_err(|error| format!("no thread for files: {error}"))?;
        }
        let teller = Teller(Arc::clone(&shared));
        Ok((Self { shared, session: Lazy::default() }, teller))
    }
}

impl FileServer for Pool {
    fn begin(&mut self, request: Request) {
        self.shared.push(WorkerRequest::Answer(request, Arc::clone(&self.session)));
    }

    fn take_reply(&mut self) -> Option<Reply> {
        self.shared.queues().replies.pop_front()
    }

    fn end_session(&mut self) {
        let ended = std::mem::take(&mut self.session);
        self.shared.push(WorkerRequest::End(ended));
        (self.shared.reset)();
    }
}
