//! Stopping the function, and moving its state: `VFIO_USER_DEVICE_FEATURE`,
//! `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE`.
//!
//! A function whose state may move to another endpoint ([`slipway_pci::Function::max_state`]) has
//! VFIO's migration states RUNNING, STOP, STOP_COPY, RESUMING and ERROR. A request for a state that
//! is not next to the present one goes through STOP.
//!
//! - RUNNING to STOP: the function finishes what it has begun (it is quiesced), within
//!   [`Config::reply_deadline`](crate::Config::reply_deadline). If it does not, the request fails
//!   with `EBUSY`, and the function goes on. From STOP on it is not polled, and neither are its
//!   lanes' queues served.
//! - STOP to STOP_COPY: the state is saved once, for the client to read.
//! - RESUMING to STOP: the function is reset, and then takes over the state that the client has
//!   written. A state that is refused leaves the function in ERROR, as after a reset.
//!
//! Memory maps, interrupt routes and eventfds belong to the connection, and are in no state.
//! Registers can be accessed in every state. Writes to a stopped function have their effects when
//! it runs, and those to a function in RESUMING are lost.
//!
//! The features that log writes to the client's memory are in `log`.

use rustix::io::Errno;
use slipway_vfio_user_spec::{
    DeviceFeature, DeviceState, Migration, MigrationData, U32, U64, device_state, feature,
    migration,
};
use slipway_vfio_user_wire::MAX_DATA_XFER_SIZE;
use zerocopy::IntoBytes;

use super::{Answer, BYTES_PER_COST, Session, Waiting, exactly, prefix};
use crate::device::Device;
use crate::run_state::{RunState, Saved};

/// The outcome of a step towards another state.
enum Walk {
    /// Another step may follow.
    Next,
    /// The function is not quiet yet.
    Waits,
}

/// A change of the function's state that waits for the function to become quiet.
pub(super) struct Transition {
    /// The state to reach, one of `device_state`.
    to: u32,
    flags: u32,
}

impl Session {
    /// Reads, sets or probes a feature of the device.
    pub(super) fn device_feature(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let (request, data): (DeviceFeature, _) = prefix(payload)?;
        let flags = request.flags.get();
        let may = self.operations(device, flags & feature::NUMBER);
        let operations = flags & !feature::NUMBER;
        if may == 0 {
            return Err(Errno::NOTSUP);
        }
        if operations & !(may | feature::PROBE) != 0 {
            return Err(Errno::INVAL);
        }
        let room = request.argsz.get() as usize;
        match (operations, flags & feature::NUMBER) {
            (feature::GET, feature::MIGRATION) => {
                let states = Migration { flags: U64::new(migration::STOP_COPY) };
                reply(flags, room, states.as_bytes())
            }
            (feature::SET, feature::LOG_START) => self.start_log(device, (flags, data)),
            (feature::SET, feature::LOG_STOP) => self.stop_log(device, flags),
            (feature::GET, feature::LOG_REPORT) => self.report_log(device, (flags, room), data),
            (feature::GET, _) => reply(flags, room, state_of(device.run.code()).as_bytes()),
            (feature::SET, _) => {
                let wanted: DeviceState = exactly(data)?;
                let to = wanted.state.get();
                check_target(device, to)?;
                // A reply that has no room is refused before anything changes.
                reply(flags, room, wanted.as_bytes())?;
                self.walk(device, Transition { to, flags }, false)
            }
            // A probe has the flags of the operations that the client asks about. The reply to a
            // probe is the request.
            (operations, _) if operations & feature::PROBE != 0 => {
                Ok(Answer::Reply(request.as_bytes().to_vec()))
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns the operations on a feature that the client may use.
    fn operations(&self, device: &Device, number: u32) -> u32 {
        let migrates = device.function.max_state() > 0;
        let resumes = self.negotiated.is_some_and(|agreed| agreed.resume);
        match number {
            feature::MIGRATION if migrates => feature::GET,
            feature::DEVICE_STATE if migrates || resumes => feature::GET | feature::SET,
            feature::LOG_START | feature::LOG_STOP if migrates => feature::SET,
            feature::LOG_REPORT if migrates => feature::GET,
            _ => 0,
        }
    }

    /// Takes steps towards the state that `transition` is to reach, until the function is in it or
    /// has to become quiet first. `expired` is set if the function has had its time for that.
    ///
    /// # Errors
    /// `EBUSY` if the function did not become quiet in time; the errors of [`step`].
    pub(super) fn walk(
        &mut self,
        device: &mut Device,
        transition: Transition,
        expired: bool,
    ) -> Result<Answer, Errno> {
        let Transition { to, flags } = transition;
        while device.is_held() || device.run.code() != to {
            let before = state_len(&device.run);
            let stepped = step(device, to);
            // A step saves or restores a state as a whole, so all of it is its cost.
            self.cost += before.max(state_len(&device.run)) / BYTES_PER_COST;
            match stepped {
                Ok(Walk::Next) => {}
                Ok(Walk::Waits) if expired => {
                    self.stuck = true;
                    self.give_up(device);
                    return Err(Errno::BUSY);
                }
                Ok(Walk::Waits) => return Ok(Answer::Later(Waiting::Quiet(transition))),
                Err(errno) => {
                    self.note_run(device);
                    return Err(errno);
                }
            }
        }
        self.stuck = false;
        self.note_run(device);
        reply(flags, usize::MAX, state_of(to).as_bytes())
    }

    /// Ends a change for which the function did not become quiet in time.
    fn give_up(&mut self, device: &mut Device) {
        match device.run {
            // The function was asked to become quiet, and goes on.
            RunState::Running => device.pace.kick(),
            RunState::Restoring(_) => device.run = RunState::Failed,
            _ => {}
        }
        self.note_run(device);
    }

    /// Notes the function's state for a successor.
    pub(super) fn note_run(&mut self, device: &Device) {
        if let Some(kept) = &mut self.kept {
            kept.run_changed(&device.run);
        }
    }

    /// Answers with the next bytes of the function's state.
    pub(super) fn migration_read(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let request: MigrationData = exactly(payload)?;
        check_migrates(device)?;
        let len = self.check_data(&request)?;
        let RunState::Saving(saved) = &mut device.run else { return Err(Errno::INVAL) };
        let part = saved.take(len);
        self.cost += part.len() / BYTES_PER_COST;
        Ok(Answer::Reply([data_header(part.len()).as_bytes(), part].concat()))
    }

    /// Takes the next bytes of a state. A state that grows too long is given up.
    pub(super) fn migration_write(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let (request, data): (MigrationData, _) = prefix(payload)?;
        check_migrates(device)?;
        let len = self.check_data(&request)?;
        if data.len() != len {
            return Err(Errno::INVAL);
        }
        let most = device.function.max_state();
        let RunState::Loading(state) = &mut device.run else { return Err(Errno::INVAL) };
        if len > most.saturating_sub(state.len()) {
            device.fail();
            self.note_run(device);
            return Err(Errno::FBIG);
        }
        state.extend_from_slice(data);
        self.cost += len / BYTES_PER_COST;
        Ok(Answer::Reply(Vec::new()))
    }

    /// Returns the number of bytes of state that a request is about.
    fn check_data(&self, request: &MigrationData) -> Result<usize, Errno> {
        let theirs = self.negotiated.map_or(0, |agreed| agreed.max_xfer);
        let len = request.size.get() as usize;
        let whole = size_of::<MigrationData>() + len;
        let fits = len <= theirs.min(MAX_DATA_XFER_SIZE) && request.argsz.get() as usize >= whole;
        fits.then_some(len).ok_or(Errno::INVAL)
    }
}

/// Checks that the function can be brought to the state `to`.
///
/// # Errors
/// `ENOTSUP` if the function's state cannot move; `EINVAL` if there is no such state.
fn check_target(device: &Device, to: u32) -> Result<(), Errno> {
    match to {
        device_state::RUNNING => Ok(()),
        device_state::STOP | device_state::STOP_COPY | device_state::RESUMING => {
            check_migrates(device)
        }
        _ => Err(Errno::INVAL),
    }
}

/// Takes one step from the function's state towards the state `to`, which must be another one
/// unless the function is held.
///
/// # Errors
/// `ESTALE` if the function cannot go on where a predecessor left it; `EINVAL` if a state is
/// refused, or the function has failed.
fn step(device: &mut Device, to: u32) -> Result<Walk, Errno> {
    match (&mut device.run, to) {
        (RunState::Running, _) => {
            if !device.function.quiesce() {
                return Ok(Walk::Waits);
            }
            device.run = RunState::Stopped;
        }
        (RunState::Held, device_state::RESUMING) => device.abandon(),
        (RunState::Held, _) => device.resume().map_err(|_| Errno::STALE)?,
        (RunState::Stopped, device_state::STOP_COPY) => {
            // The client may have written a register since the stop, which can make work.
            if !device.function.quiesce() {
                return Ok(Walk::Waits);
            }
            device.run = RunState::Saving(Saved::new(device.function.save()));
        }
        (RunState::Stopped, device_state::RESUMING) => device.run = RunState::Loading(Vec::new()),
        (RunState::Stopped, _) => device.start(),
        (RunState::Saving(_), _) => device.run = RunState::Stopped,
        (RunState::Loading(state), _) => {
            let state = std::mem::take(state);
            device.function.reset();
            device.run = RunState::Restoring(state);
        }
        (RunState::Restoring(state), _) => {
            if !device.function.quiesce() {
                return Ok(Walk::Waits);
            }
            let state = std::mem::take(state);
            if device.function.restore(&state).is_err() {
                device.fail();
                return Err(Errno::INVAL);
            }
            device.run = RunState::Stopped;
        }
        (RunState::Failed, _) => return Err(Errno::INVAL),
    }
    Ok(Walk::Next)
}

/// Returns the number of bytes of a state that the next step, or the last one, works on.
fn state_len(run: &RunState) -> usize {
    match run {
        RunState::Saving(saved) => saved.len(),
        RunState::Restoring(state) => state.len(),
        _ => 0,
    }
}

/// Checks that the function's state can move to another endpoint.
///
/// # Errors
/// `ENOTSUP` if it cannot.
fn check_migrates(device: &Device) -> Result<(), Errno> {
    if device.function.max_state() > 0 { Ok(()) } else { Err(Errno::NOTSUP) }
}

/// Returns the data of a reply that says the function's state.
fn state_of(code: u32) -> DeviceState {
    DeviceState { state: U32::new(code), ..DeviceState::default() }
}

/// Returns the start of a reply with `len` bytes of state.
fn data_header(len: usize) -> MigrationData {
    let whole = size_of::<MigrationData>() + len;
    MigrationData { argsz: U32::new(whole as u32), size: U32::new(len as u32) }
}

/// Returns a reply with a feature's data. `room` is the longest payload that the client takes.
///
/// # Errors
/// `EINVAL` if the reply does not fit into `room`.
pub(super) fn reply(flags: u32, room: usize, data: &[u8]) -> Result<Answer, Errno> {
    let len = size_of::<DeviceFeature>() + data.len();
    if room < len {
        return Err(Errno::INVAL);
    }
    let head = DeviceFeature { argsz: U32::new(len as u32), flags: U32::new(flags) };
    Ok(Answer::Reply([head.as_bytes(), data].concat()))
}
