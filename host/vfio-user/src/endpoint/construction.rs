//! The constructors of an endpoint: on a new socket, on the socket and session that a predecessor
//! left, or on a socket of another party; and its lanes on other reactors.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use slipway_pci::Function;
use slipway_reactor::{Handle, Reactor, Settings};
use slipway_vfio_user_wire::Wire;

use super::connected::Connection;
use super::entrance::{Entrance, listen};
use super::residence::Residence;
use super::wakes::Wakes;
use super::{Endpoint, EndpointState};
use crate::channel::Channel;
use crate::control::{Shared, TaskGuard};
use crate::device::Device;
use crate::keeping::Keeping;
use crate::lane::{Door, Doors, Home, LaneHome, LaneTask};
use crate::listener::Listener;
use crate::run_state::RunState;
use crate::server::Session;
use crate::stats::ClientInfo;
use crate::{Config, EndpointParts, kept, slots};

impl Endpoint {
    /// Makes an endpoint. Its socket is bound at once; clients are served once the endpoint is
    /// added to a reactor.
    ///
    /// `home` is that reactor: the endpoint returns to it from a thread of its own. `wakes` are
    /// duplicates of the backends' wake descriptors. The function is polled when one of them is
    /// readable, and the backend clears its descriptor in that poll.
    ///
    /// # Errors
    /// The socket cannot be bound (the text holds its path); the function's doorbells do not fit
    /// its doorbell registers; the session of a predecessor cannot be resumed, or comes with
    /// hardware, which has none.
    pub fn new(
        config: Config,
        parts: EndpointParts,
        function: Box<dyn Function>,
        wakes: Vec<OwnedFd>,
        home: &Handle,
    ) -> std::io::Result<Self> {
        let mut parts = parts;
        let kept = parts.kept.take();
        if kept.is_some() && parts.hardware.is_some() {
            let text = "hardware does not outlive the process that drives it";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        let device = Device::new(parts, function)?;
        let (listener, kept) = listen(&config, kept, &device.bin)?;
        let mut endpoint = Self::with(config, device, listener, wakes, home)?;
        if let Some((parts, keeping)) = kept {
            endpoint.resume(*parts, keeping)?;
        }
        Ok(endpoint)
    }

    /// Makes an endpoint on a Unix socket that another party has bound and listens on. The socket's
    /// path in `config` is ignored.
    ///
    /// # Errors
    /// `socket` is not a listening Unix socket, or the function's doorbells do not fit its doorbell
    /// registers.
    pub fn on(
        socket: OwnedFd,
        config: Config,
        parts: EndpointParts,
        function: Box<dyn Function>,
        home: &Handle,
    ) -> std::io::Result<Self> {
        let listener = Listener::given(socket, &parts.bin)?;
        Self::with(config, Device::new(parts, function)?, listener, Vec::new(), home)
    }

    /// Makes an endpoint without a client.
    fn with(
        config: Config,
        device: Device,
        listener: Listener,
        wakes: Vec<OwnedFd>,
        home: &Handle,
    ) -> std::io::Result<Self> {
        let path = config.location.socket();
        let shut = listener.shut()?;
        let is_open = shut.is_none();
        let door = (shut, path);
        let shared = Arc::new(Shared::new(device.pace.progress_counter(), &device.bin, door)?);
        device.sink.failure.tell(Waker::from(Arc::new(Home(shared.clone()))));
        Ok(Self {
            config: Arc::new(config),
            state: EndpointState::Listening,
            device,
            wakes: Wakes::new(wakes),
            entrance: Entrance { listener, is_open, watched: is_open, retry_at: None },
            home: home.clone(),
            residence: Residence::Home,
            began: Instant::now(),
            kept: None,
            lanes: Doors::default(),
            _gone: TaskGuard::new(&shared),
            shared,
        })
    }

    /// Continues with the client that a predecessor had. Without such a client the function is
    /// held for a client that resumes it, if the predecessor has left its state.
    fn resume(&mut self, mut parts: kept::Parts, mut keeping: Keeping) -> std::io::Result<()> {
        let socket = parts.found.remove(&slots::CLIENT);
        let (Some(socket), Some(peer)) = (socket, keeping.client()) else {
            if keeping.holds() {
                self.device.run = RunState::Held;
                // The predecessor may have been killed while it released the session.
                keeping.release();
            }
            self.kept = Some(Box::new(keeping));
            return Ok(());
        };
        let wire = Wire::new(socket, &self.device.bin, self.config.max_queued_bytes);
        let channel = Channel::new(wire, self.config.remote_deadline);
        let live = self.shared.live.clone();
        live.connected(ClientInfo { pid: peer.pid, uid: peer.uid, private: false });
        let around = (&mut self.device, &mut parts);
        let session = Session::resume_kept(channel, self.config.clone(), live, keeping, around);
        let session = session.map_err(|end| std::io::Error::other(end.to_string()))?;
        self.device.pace.kick();
        self.state = EndpointState::Connected(Connection::new(session, Instant::now()));
        Ok(())
    }

    /// Serves clients on a thread of the endpoint's own until the endpoint is closed, instead of on
    /// a reactor that it is added to. Calls of its function or its hardware may block there, since
    /// they delay no other endpoint. `name` is the thread's name.
    ///
    /// # Errors
    /// No descriptor or thread is left. The endpoint is dropped then.
    pub fn serve_alone(mut self, name: &str) -> std::io::Result<()> {
        self.residence = Residence::OwnForGood;
        let settings = Settings { name: name.to_owned(), ..Settings::default() };
        Reactor::detached(settings, Box::new(self)).map(drop).map_err(|(error, _)| error)
    }

    /// Has other reactors poll the function's lanes, one lane for each of `homes`, until lanes or
    /// homes run out. Call this before the endpoint is added to its reactor. The lanes end
    /// with the endpoint, wherever the endpoint is then. A client of such an endpoint cannot have
    /// message-only memory above [`Config::remote_threshold`], for which all of the function would
    /// have to move.
    ///
    /// # Errors
    /// No descriptors are left, or a reactor has ended. The endpoint cannot be used then.
    pub fn spread(&mut self, homes: Vec<LaneHome>) -> std::io::Result<()> {
        let doors = homes.iter().map(|_| Door::new());
        self.lanes = Doors(doors.collect::<Result<_, _>>()?);
        let home = Waker::from(Arc::new(Home(self.shared.clone())));
        let lanes = self.device.function.take_lanes(home, self.lanes.wakers());
        self.device.has_lanes = !lanes.is_empty();
        for ((lane, home), door) in lanes.into_iter().zip(homes).zip(&self.lanes.0) {
            let (pace, period) = (self.device.pace.beside(), self.config.sweep_period);
            let entrance = (door.clone(), home.wakes);
            let task = LaneTask::new(lane, entrance, pace, period, &self.shared);
            home.reactor.add(Box::new(task)).map_err(std::io::Error::other)?;
        }
        Ok(())
    }
}
