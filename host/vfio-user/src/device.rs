//! The function that an endpoint presents, and the state that stays with it from client to client.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::io::Errno;
use slipway_pci::{Bar, DoorbellRegisters, Function, StateError, TurnLength};
use slipway_peer::Bin;
use slipway_ram::DmaMap;
use slipway_vfio_user_spec::irq;

use crate::doorbells::SharedPage;
use crate::interrupts::{EventSink, Line};
use crate::kept::KeptRun;
use crate::pace::{Cells, Pace};
use crate::run_state::RunState;
use crate::{DoorbellMode, EndpointParts, Hardware};

/// A doorbell page that clients map.
pub(crate) struct Mapped {
    pub(crate) page: Arc<SharedPage>,
    /// The BAR that holds the page.
    pub(crate) bar: u8,
    /// The offset of the page in the BAR, in bytes.
    pub(crate) offset: u64,
}

/// Doorbell cells that a client stores to and announces.
pub(crate) struct Rung {
    pub(crate) page: Arc<SharedPage>,
    /// The BAR that holds the registers.
    pub(crate) bar: u8,
    /// The offset of each cell's register in the BAR, in bytes.
    pub(crate) offsets: Vec<u64>,
}

pub(crate) struct Device {
    pub(crate) function: Box<dyn Function>,
    /// The driver of the hardware behind the function, if there is hardware. Dropped before `map`:
    /// memory that nobody has mapped may be another client's the next moment.
    pub(crate) hardware: Option<Box<dyn Hardware>>,
    pub(crate) map: DmaMap,
    /// The bin that closes clients' descriptors and unmaps their memory.
    pub(crate) bin: Bin,
    pub(crate) sink: Arc<EventSink>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) mapped: Option<Mapped>,
    /// The doorbells that the client stores to and rings for.
    pub(crate) rung: Option<Rung>,
    /// The eventfd that the client raises instead of sending messages. Made by us, for one client.
    bell: Option<Arc<OwnedFd>>,
    /// `bell` may have changed.
    bell_changed: bool,
    /// The client has raised the eventfd, for so many writes, and the function does not know yet.
    event: Option<u64>,
    /// Error and device-request interrupts: the client may route them, but they are never
    /// signalled.
    pub(crate) error: Line,
    pub(crate) request: Line,
    /// The function has a pin.
    pub(crate) has_pin: bool,
    /// The line whose route is the eventfd by which the client unmasks the pin.
    pub(crate) unmasking: Line,
    /// The route of `unmasking` may have changed.
    unmasking_changed: AtomicBool,
    /// The timing of the function's polls.
    pub(crate) pace: Pace,
    /// A message of the present turn has had the function polled.
    polled: bool,
    turn: TurnLength,
    /// Other threads poll parts of the function.
    pub(crate) has_lanes: bool,
    /// The state of the function; only a running one is polled.
    pub(crate) run: RunState,
}

impl Device {
    /// # Errors
    /// The function's description cannot be presented: a programmer's error, reported at
    /// construction.
    pub(crate) fn new(parts: EndpointParts, function: Box<dyn Function>) -> std::io::Result<Self> {
        let description = function.description().clone();
        parts.sink.size(description.vectors);
        let mut pace = Pace::new(parts.clock);
        let page = parts.page.as_ref().map(|(page, _)| page.clone());
        let (mapped, rung) = find_doorbells(page, parts.mode, &description.bars)?;
        if mapped.is_some() {
            pace.cells = parts.page.map(|(page, doorbells)| Cells { page, doorbells });
        }
        Ok(Self {
            function,
            hardware: parts.hardware,
            map: parts.map,
            bin: parts.bin,
            sink: parts.sink,
            bars: description.bars,
            mapped,
            rung,
            bell: None,
            bell_changed: false,
            event: None,
            error: Line::default(),
            request: Line::default(),
            has_pin: description.pin,
            unmasking: Line::default(),
            unmasking_changed: AtomicBool::new(true),
            pace,
            polled: false,
            turn: TurnLength::default(),
            has_lanes: false,
            run: RunState::default(),
        })
    }

    pub(crate) fn bar(&self, index: u32) -> Option<&Bar> {
        self.bars.iter().find(|bar| u32::from(bar.index) == index)
    }

    /// Tells the function whether other tasks on the thread have work, too.
    #[inline]
    pub(crate) fn share(&mut self, shared: bool) {
        let turn = if shared { TurnLength::Short } else { TurnLength::Long };
        if turn != self.turn {
            self.turn = turn;
            self.function.set_turn(turn);
        }
    }

    /// Polls the function once. Returns whether the poll made progress.
    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        let found = self.function.poll();
        self.pace.note(found, now)
    }

    /// Begins a turn of the client's messages.
    pub(crate) fn begin_turn(&mut self) {
        self.polled = false;
    }

    /// Polls the function after a message has written to it, so that the effect precedes the reply.
    /// A function that does not run is polled when it does.
    /// After the first such message of a turn, polls are short: however many messages a client
    /// sends, its function works little more than others on the same thread.
    pub(crate) fn poll_after_write(&mut self, now: Instant) {
        if std::mem::replace(&mut self.polled, true) {
            self.share(true);
        }
        if self.runs() {
            self.poll(now);
        }
    }

    /// Tells the function that it will not be polled, if it has to be told. Returns whether polling
    /// goes on nevertheless.
    pub(crate) fn rest(&mut self, now: Instant) -> bool {
        if !self.pace.is_watching() {
            return false;
        }
        let found = self.function.rest();
        self.pace.note(found, now) || self.pace.is_watching()
    }

    /// Returns whether the function is polled.
    #[inline]
    pub(crate) fn runs(&self) -> bool {
        self.run == RunState::Running
    }

    /// Returns whether the function waits for the client of its predecessor.
    pub(crate) fn is_held(&self) -> bool {
        self.run == RunState::Held
    }

    /// Has the function polled from now on.
    pub(crate) fn start(&mut self) {
        self.run = RunState::Running;
        self.pace.kick();
    }

    /// Gives the function's state up: it is reset, and runs after another reset.
    pub(crate) fn fail(&mut self) {
        self.function.reset();
        self.run = RunState::Failed;
    }

    /// Brings the function into the state in which its predecessor was.
    pub(crate) fn take_over_run(&mut self, run: KeptRun) {
        match run {
            KeptRun::Running => self.run = RunState::Running,
            KeptRun::Stopped => self.run = RunState::Stopped,
            KeptRun::Lost => self.fail(),
        }
    }

    /// Has a held function go on where the predecessor was killed. The client has mapped its memory
    /// and routed its interrupts.
    ///
    /// # Errors
    /// The predecessor's state cannot be taken over. The function is then in its state after a
    /// reset.
    pub(crate) fn resume(&mut self) -> Result<(), StateError> {
        self.start();
        // Whatever the client has rung meanwhile, or the predecessor took and did nothing about.
        self.note_event(0);
        self.function.recover()
    }

    /// Gives up the state of a held function, since its client does not resume it.
    pub(crate) fn abandon(&mut self) {
        self.run = RunState::Running;
        self.function.abandon();
        // The doorbell cells are the predecessor's. Without memory for others the next client has
        // the same ones: it is a client of the same user.
        let _ = self.renew_page();
        self.function.reset();
        self.pace.renew();
    }

    /// Cleans up after a client: removes routes and memory, resets the function, renews the
    /// doorbells. A held function stays held.
    ///
    /// # Errors
    /// Hardware is not cut off from the client, or no memory is left for new doorbells.
    pub(crate) fn renew(&mut self) -> std::io::Result<()> {
        if let Some(hardware) = &mut self.hardware {
            hardware.release()?;
        }
        self.map.clear();
        self.unroute();
        if self.is_held() {
            return Ok(());
        }
        self.run = RunState::Running;
        self.function.reset();
        // Have the function polled once: it may have been poked meanwhile, and the reset has a step
        // to take.
        self.pace.renew();
        self.renew_page()
    }

    /// Gives the next client doorbell cells that no earlier one can store to.
    fn renew_page(&self) -> std::io::Result<()> {
        let mapped = self.mapped.as_ref().map(|mapped| &mapped.page);
        match mapped.or(self.rung.as_ref().map(|rung| &rung.page)) {
            Some(page) => page.renew(page.offset()),
            None => Ok(()),
        }
    }

    /// Returns every interrupt: MSI-X vectors, error, device request, the pin; and the line that
    /// unmasks the pin.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &Line> {
        let others = [&self.error, &self.request, &self.sink.pin, &self.unmasking];
        self.sink.lines().iter().chain(others)
    }

    /// Tells the hardware, if there is any, the routes of the interrupts of type `index`.
    pub(crate) fn pass_routes(&mut self, index: u32) -> Result<(), Errno> {
        let Some(hardware) = &mut self.hardware else { return Ok(()) };
        match index {
            irq::MSIX => {
                let routes: Vec<_> = self.sink.lines().iter().map(Line::routed).collect();
                hardware.route_vectors(&routes)
            }
            irq::INTX => hardware.route_pin(self.sink.pin.routed().as_ref()),
            // Error and device request are never signalled.
            _ => Ok(()),
        }
    }

    /// Masks the pin of the hardware, if there is any, as the client has masked it.
    pub(crate) fn pass_mask(&mut self) -> Result<(), Errno> {
        match &mut self.hardware {
            Some(hardware) => hardware.mask_pin(self.sink.pin.is_masked()),
            None => Ok(()),
        }
    }

    /// Removes every interrupt's route, and the client's eventfd.
    pub(crate) fn unroute(&mut self) {
        self.lines().for_each(Line::clear);
        self.note_unmasking();
        (self.bell, self.bell_changed, self.event) = (None, true, None);
    }

    /// Returns the eventfd that the present client raises instead of sending messages, if it has
    /// one.
    pub(crate) fn bell(&self) -> Option<&Arc<OwnedFd>> {
        self.bell.as_ref()
    }

    /// Gives the present client an eventfd to raise.
    pub(crate) fn hang(&mut self, bell: Arc<OwnedFd>) {
        (self.bell, self.bell_changed) = (Some(bell), true);
    }

    /// Notes that the client's eventfd may have changed.
    pub(crate) fn note_bell(&mut self) {
        self.bell_changed = true;
    }

    /// Returns whether the client's eventfd may have changed since the last call.
    pub(crate) fn take_bell_changed(&mut self) -> bool {
        std::mem::take(&mut self.bell_changed)
    }

    /// Takes the readable eventfd of the client. The event stays noted until the function may be
    /// told.
    pub(crate) fn take_event(&mut self) {
        let taken = self.bell.as_ref().map(|bell| slipway_peer::eventfd::take(bell.as_fd()));
        // A client may claim any number.
        self.note_event(taken.unwrap_or(0).min(MOST_WRITES));
    }

    /// Notes that the client has raised its eventfd, for so many writes.
    pub(crate) fn note_event(&mut self, writes: u64) {
        self.event = Some(self.event.unwrap_or(0).saturating_add(writes));
        self.pace.kick();
    }

    /// Tells the function of the client's event, if there was one.
    pub(crate) fn pass_event(&mut self) {
        if let Some(writes) = self.event.take() {
            self.function.notified(writes);
        }
    }

    /// Notes that the eventfd by which the client unmasks the pin may have changed.
    pub(crate) fn note_unmasking(&self) {
        self.unmasking_changed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the eventfd by which the client unmasks the pin may have changed since the
    /// last call.
    pub(crate) fn take_unmasking_changed(&mut self) -> bool {
        std::mem::take(self.unmasking_changed.get_mut())
    }

    /// Unmasks the pin, as the client's eventfd for that is readable. Returns false if the eventfd
    /// cannot be drained.
    pub(crate) fn unmask_pin(&mut self) -> bool {
        let drained =
            self.unmasking.routed().is_none_or(|file| slipway_peer::eventfd::drain(file.as_fd()));
        self.sink.pin.unmask();
        // An error: the hardware's pin is not routed, so there is nothing to unmask.
        let _ = self.pass_mask();
        drained
    }
}

/// The most writes of registers that one event of the client counts for.
const MOST_WRITES: u64 = 1 << 20;
/// The size of a doorbell in bytes.
pub(crate) const DOORBELL: u64 = 4;

/// Returns the page of doorbell cells with its registers: as one that clients map, or as one that
/// they store to and announce. A function without doorbells has neither, and so has one whose
/// registers no client can reach in this mode.
fn find_doorbells(
    page: Option<Arc<SharedPage>>,
    mode: DoorbellMode,
    bars: &[Bar],
) -> std::io::Result<(Option<Mapped>, Option<Rung>)> {
    let found = bars.iter().find_map(|bar| Some((bar.index, bar.doorbells.as_ref()?)));
    let (Some(page), Some((bar, registers))) = (page, found) else { return Ok((None, None)) };
    let count = page.count() as u64;
    let fits = match registers {
        DoorbellRegisters::Page(range) => page.len() <= range.end.saturating_sub(range.start),
        DoorbellRegisters::Apart(offsets) => count == offsets.len() as u64,
    };
    if !fits {
        let text = "doorbells that the function has no registers for";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    let (start, offsets) = match registers {
        DoorbellRegisters::Page(range) => {
            (range.start, (0..count).map(|cell| range.start + cell * DOORBELL).collect())
        }
        DoorbellRegisters::Apart(offsets) => (0, offsets.clone()),
    };
    page.place(start)?;
    Ok(match (mode, registers) {
        (DoorbellMode::Trapped, _) | (DoorbellMode::Mapped, DoorbellRegisters::Apart(_)) => {
            (None, None)
        }
        (DoorbellMode::Mapped, _) => (Some(Mapped { page, bar, offset: start }), None),
        (DoorbellMode::Rung, _) => (None, Some(Rung { page, bar, offsets })),
    })
}
