//! The socket function from this side: its registers, its control memory, and the messages that
//! wait for room there.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use slipway_sgiov_spec::function::{BROKEN, MAGIC, Message, RUNNING, VERSION, asleep, register};

use super::control::Control;
use super::streams::Arenas;
use super::{Device, FunctionError, Piece, broken};

/// The time that a reset, or the answer of the machine's engine, may take.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// The shortest time between two readings of the status that only a timer asked for.
const BETWEEN: Duration = Duration::from_millis(400);

/// A socket function that was started.
pub struct Machine {
    device: Box<dyn Device>,
    /// The control memory, or `None` after [`Machine::stop`].
    control: Option<Control>,
    /// Messages that are sent as soon as there is room.
    waiting: VecDeque<Message>,
    /// The time at which the device was last asked for its status.
    asked: Instant,
}

impl Machine {
    /// Resets the function and starts it.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn start(mut device: Box<dyn Device>) -> Result<Self, FunctionError> {
        let control = Control::new(begin(&mut *device)?)?;
        for (half, value) in [control.at as u32, (control.at >> 32) as u32].into_iter().enumerate()
        {
            device.write(register::MEMORY + half as u64 * 4, value);
        }
        // From here on the machine may access the memory, until a reset has ended.
        device.write(register::CONTROL, 1);
        let (waiting, asked) = (VecDeque::new(), Instant::now());
        let mut machine = Self { device, control: Some(control), waiting, asked };
        let status = machine.device.read(register::STATUS);
        if status & RUNNING == 0 {
            machine.stop(&mut Arenas::default());
            return Err(broken(status).unwrap_or(FunctionError::Stuck("start")));
        }
        machine.device.unmask();
        Ok(machine)
    }

    /// Resets the function and releases the memory that the machine knows: the control memory and
    /// `arenas`. If the reset does not end, the memory stays allocated, since the machine may still
    /// access it.
    pub fn stop(&mut self, arenas: &mut Arenas) {
        let memory = (self.control.take(), std::mem::take(arenas));
        self.waiting.clear();
        if !reset(&mut *self.device) {
            std::mem::forget(memory);
        }
    }

    /// Returns whether the function was not stopped.
    pub fn is_running(&self) -> bool {
        self.control.is_some()
    }

    /// Returns a descriptor that is readable when the function has interrupted. Returns `None` if
    /// the function cannot interrupt.
    pub fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        self.device.interrupt()
    }

    /// Acknowledges an interrupt. Returns whether the function has interrupted since it is broken.
    pub fn acknowledge(&mut self) -> bool {
        self.device.take_interrupt();
        let cause = self.device.read(register::CAUSE);
        self.device.unmask();
        cause & BROKEN != 0
    }

    /// Returns whether the status was not read for a while.
    pub fn is_status_due(&self) -> bool {
        self.asked.elapsed() > BETWEEN
    }

    /// Reads the function's status. Returns the fault, or `None` if the function is not broken.
    pub fn fault(&mut self) -> Option<FunctionError> {
        self.asked = Instant::now();
        broken(self.device.read(register::STATUS))
    }

    /// Returns a new piece of memory.
    ///
    /// # Errors
    /// No memory is left.
    pub fn piece(&mut self) -> std::io::Result<Piece> {
        self.device.piece()
    }

    /// Queues a message. [`Machine::flush`] sends it.
    pub fn queue(&mut self, message: Message) {
        if self.is_running() {
            self.waiting.push_back(message);
        }
    }

    /// Returns whether messages wait for room.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Sends queued messages as far as there is room. Returns whether any was sent.
    ///
    /// # Errors
    /// [`FunctionError`]: the machine's counters are invalid.
    pub fn flush(&mut self) -> Result<bool, FunctionError> {
        let Some(control) = &self.control else { return Ok(false) };
        let mut some = false;
        while let Some(message) = self.waiting.front() {
            if !control.send(message)? {
                break;
            }
            self.waiting.pop_front();
            some = true;
        }
        if some {
            self.ring(true, false);
        }
        Ok(some)
    }

    /// Takes the machine's next message. Returns `None` if there is none.
    ///
    /// # Errors
    /// [`FunctionError`]: the machine's counters or its message are invalid.
    pub fn receive(&self) -> Result<Option<Message>, FunctionError> {
        self.control.as_ref().map_or(Ok(None), Control::receive)
    }

    /// Signals an event of a stream to the machine.
    ///
    /// # Errors
    /// [`FunctionError`]: the machine's counter is invalid.
    pub fn signal(&mut self, event: u64) -> Result<(), FunctionError> {
        self.control.as_mut().map_or(Ok(()), |control| control.signal(event))
    }

    /// Takes the machine's next signal of a stream. Returns `None` if there is none.
    ///
    /// # Errors
    /// [`FunctionError`]: the machine's counter is invalid.
    pub fn take_signal(&mut self) -> Result<Option<u64>, FunctionError> {
        self.control.as_mut().map_or(Ok(None), Control::take_signal)
    }

    /// Returns whether signals were lost, so that any stream may have changed on the machine's
    /// side.
    pub fn overflowed(&self) -> bool {
        self.control.as_ref().is_some_and(Control::overflowed)
    }

    /// Wakes the machine's engine if it sleeps and waits for `work`, or for `room` for its
    /// messages.
    pub fn ring(&mut self, work: bool, room: bool) {
        let control = self.control.as_ref();
        if control.is_some_and(|control| control.is_to_be_told(work, room)) {
            self.device.write(register::BELL, 1);
        }
    }

    /// Has the machine interrupt from now on, for work, and for room if messages wait for it. A
    /// full barrier and a look for both must follow.
    pub fn announce_sleep(&self) {
        if let Some(control) = &self.control {
            control.asleep().announce(asleep::events(true, self.has_waiting()));
        }
    }

    /// Has the machine interrupt no more.
    pub fn withdraw_sleep(&self) {
        if let Some(control) = &self.control {
            control.asleep().withdraw();
        }
    }
}

/// Checks that the device is a socket function and resets it. Returns memory for its control.
fn begin(device: &mut dyn Device) -> Result<Piece, FunctionError> {
    let low = u64::from(device.read(register::MAGIC));
    let magic = low | u64::from(device.read(register::MAGIC + 4)) << 32;
    if magic != MAGIC {
        return Err(FunctionError::Other(magic));
    }
    let version = device.read(register::VERSION);
    if version != VERSION {
        return Err(FunctionError::Version(version));
    }
    if !reset(device) {
        return Err(FunctionError::Stuck("end a reset"));
    }
    Ok(device.piece()?)
}

/// Resets the device. Returns whether it has ended all accesses to memory.
fn reset(device: &mut dyn Device) -> bool {
    device.write(register::CONTROL, 0);
    let begun = Instant::now();
    // A device that is gone reads as ones.
    while !matches!(device.read(register::STATUS), 0 | u32::MAX) {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
