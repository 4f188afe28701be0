//! Two e1000 functions over vfio-user sockets, in another process, with the switch between them and
//! our own driver on both, in the ways of *Speeding Up Packet I/O in Virtual Machines*.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use slipway_e1000::driver::{Driver, DriverError, Options, Unread, memory_len};
use slipway_vfio_user_client::{Registers, TestGuest};
use slipway_vfio_user_spec::{IrqSetFlags, irq, region};

use super::native::frame;
use super::served::{MEMORY, Model, PATIENCE, Serve, Served, TargetCounts, Wanted, drive_apart};
use super::{FunctionCounts, PacketLoad, PacketMeasured, Source, Times, Work};
use crate::block::native::Cpus;
use crate::measurement::Subject;

/// Descriptors of each ring: as many as Linux's driver has.
const DESCRIPTORS: u32 = 256;
/// The most frames that a driver gives or takes before it looks at anything else.
const BATCH: usize = 64;
/// ITR of moderated interrupts, in units of 256 ns: the paper's 64 us.
const THROTTLE: u32 = 250;
/// The time without work after which a driver with the block asks for an interrupt.
const IDLE: Duration = Duration::from_micros(50);
/// The time for which a driver looks for the answer to a register access before it sleeps. An exit
/// of a guest does not sleep either.
const SPIN: Duration = Duration::from_micros(50);
/// Bytes of a frame that the receiver reads: addresses, type, number.
const LOOKED_AT: usize = 22;
/// Turns between two looks at the clock.
const TURNS: u32 = 32;
/// The configuration space of a function, as a region of vfio-user, and its Command register with
/// the value for memory and bus mastering.
const CONFIG: (u32, u64, [u8; 2]) = (region::CONFIG, 4, [6, 0]);

/// The way in which the driver works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The register accesses of Linux's driver; interrupts are not moderated.
    Base,
    /// The accesses of [`Mode::Base`], but tails are stored in memory that the function shares, and
    /// an eventfd is raised: what `slipway-vmm` does with a guest's writes.
    Rung,
    /// Interrupts are moderated (the paper's section 3.1).
    Moderated,
    /// Moderated interrupts, and send combining (section 3.2).
    Combining,
    /// The communication status block (section 3.5).
    Block,
}

impl Mode {
    /// All ways: the paper's in its order, and `Rung` beside what it differs from.
    pub const ALL: [Self; 5] =
        [Self::Base, Self::Rung, Self::Moderated, Self::Combining, Self::Block];

    /// Returns the subject's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "e1000-base",
            Self::Rung => "e1000-rung",
            Self::Moderated => "e1000-itr",
            Self::Combining => "e1000-sc",
            Self::Block => "e1000-csb",
        }
    }

    /// Describes the way.
    pub const fn about(self) -> &'static str {
        match self {
            Self::Base => {
                "e1000 functions in place of virtio-net's; exactly the accesses of Linux's driver"
            }
            Self::Rung => {
                "as e1000-base, with tails by shared memory and an eventfd in place of messages"
            }
            Self::Moderated => "as e1000-base, with moderated interrupts, at least 64 us apart",
            Self::Combining => "as e1000-base, with moderated interrupts and send combining",
            Self::Block => "as e1000-base, with a communication status block",
        }
    }

    /// Returns the paper's rate in frames per second for frames of this load: figure 4, between
    /// guests of Linux with one CPU over VALE (UDP of 8 and 1460 bytes). Returns `None` for others.
    pub fn paper(self, load: &PacketLoad) -> Option<f64> {
        let (short, long) = match self {
            Self::Rung => return None,
            Self::Base => (32e3, 31e3),
            Self::Moderated => (125e3, 98e3),
            Self::Combining => (455e3, 186e3),
            Self::Block => (1526e3, 480e3),
        };
        match load.bytes {
            _ if !load.is_plain() => None,
            64 => Some(short),
            1500 => Some(long),
            _ => None,
        }
    }

    fn options(self) -> Options {
        let throttle = if matches!(self, Self::Moderated | Self::Combining) { THROTTLE } else { 0 };
        let block = self == Self::Block;
        let plain = Options { descriptors: DESCRIPTORS, ..Options::default() };
        Options { throttle, csb: block, heads: block, ..plain }
    }
}

/// A path from driver to driver: functions and switch on the target's processors, both drivers on
/// the client's. Offered frames come from the switch, and the receiver has the client's processors
/// for itself.
pub struct E1000 {
    mode: Mode,
    cpus: Cpus,
    times: Times,
    serve: Box<Serve>,
}

impl E1000 {
    /// Makes the subject, whose turns last `times`, with functions that `serve` serves.
    pub fn new(mode: Mode, cpus: Cpus, times: Times, serve: Box<Serve>) -> Self {
        Self { mode, cpus, times, serve }
    }
}

impl Subject for E1000 {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        self.mode.name()
    }

    fn about(&self) -> String {
        self.mode.about().to_owned()
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        let bare = PacketLoad { offered: 0, window: 0, ..*load };
        bare.is_plain() && load.bytes <= 1514 && (load.offered == 0 || load.window == 0)
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        let directory = tempfile::tempdir().context("no place for sockets")?;
        let (path, cpus) = (directory.path(), &self.cpus);
        let model = if self.mode == Mode::Block { Model::E1000Csb } else { Model::E1000 };
        let source = Source { bytes: load.bytes, rate: load.offered };
        let source = (load.offered > 0).then_some(source);
        let mut served = (self.serve)(&Wanted { directory: path, cpus, model, source })?;
        let (mode, times, counts) = (self.mode, self.times, &mut *served);
        drive_apart(cpus, || drive(mode, path, load, times, counts))
    }
}

/// A driver with memory of its own, and its interrupts.
struct Station {
    driver: Driver<Registers>,
    mode: Mode,
    /// Counts interrupts.
    raised: OwnedFd,
    /// Ends an interrupt: stands for the interrupt controller of a VM.
    ended: OwnedFd,
    /// The frame that is sent. Each is written anew, with its number.
    bytes: Vec<u8>,
    sent: u64,
    received: u64,
    /// The number of the next frame. Missing frames with lower numbers were dropped.
    due: u64,
    /// The time since which there was no work.
    idle: Option<Instant>,
    /// The driver with the block waits for an interrupt.
    waits: bool,
}

impl Station {
    /// Makes station 1 or 2, which sends frames of `len` bytes to the other.
    fn new(mode: Mode, directory: &Path, number: u32, len: u32) -> Result<Self> {
        let guest = TestGuest::new(0, MEMORY)?;
        let mut registers = guest.connect(&directory.join(number.to_string()), PATIENCE)?;
        let client = &mut registers.client;
        let (raised, ended) =
            (eventfd(0, EventfdFlags::NONBLOCK)?, eventfd(0, EventfdFlags::NONBLOCK)?);
        let intx = irq::INTX;
        client.route_irqs(intx, 0, 1, &[raised.as_fd()])?;
        let unmask = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::UNMASK;
        client.set_irqs(unmask, intx, 0, 1, &[], &[ended.as_fd()])?;
        let (region, offset, enabled) = CONFIG;
        client.write(region, offset, &enabled)?;
        ensure!(memory_len(DESCRIPTORS) as u64 <= MEMORY, "no memory for the rings");
        client.spin(SPIN);
        if matches!(mode, Mode::Rung | Mode::Block) {
            registers = registers.with_io_fds()?;
        }
        let driver = Driver::new(registers, &guest.memory, (0, MEMORY), mode.options())?;
        Ok(Self {
            driver,
            mode,
            raised,
            ended,
            bytes: frame(number, 3 - number, len),
            sent: 0,
            received: 0,
            due: 0,
            idle: None,
            waits: false,
        })
    }

    /// Sends up to `most` frames, as many as there is room for. Returns their number.
    fn send(&mut self, most: usize) -> Result<usize> {
        let mut count = 0;
        if self.mode == Mode::Block {
            self.driver.clean()?;
        }
        while count < most {
            let number = LOOKED_AT - 8..LOOKED_AT;
            self.bytes[number].copy_from_slice(&self.sent.to_le_bytes());
            if !self.driver.sending.queue(&self.bytes, 0)? {
                break;
            }
            self.sent += 1;
            count += 1;
        }
        match self.mode {
            _ if count == 0 => {}
            Mode::Combining => self.driver.combine()?,
            _ => self.driver.flush()?,
        }
        Ok(count)
    }

    /// Serves an interrupt if one came. Returns the number of frames received.
    fn interrupted(&mut self) -> Result<usize> {
        if rustix::io::read(&self.raised, &mut [0; 8]).is_err() {
            return Ok(0);
        }
        let before = self.received;
        if self.mode == Mode::Block {
            self.driver.get(slipway_e1000_spec::register::ICR)?;
            self.awake()?;
        } else {
            let Self { driver, received, due, .. } = self;
            driver.interrupt_unread(|one| note(&one, received, due))?;
            if self.mode == Mode::Combining {
                self.driver.combine()?;
            }
        }
        rustix::io::write(&self.ended, &1_u64.to_ne_bytes())?;
        Ok((self.received - before) as usize)
    }

    /// Takes received frames from the ring, in the way that a driver with the block does.
    fn poll(&mut self) -> Result<usize> {
        if self.waits {
            return Ok(0);
        }
        let Self { driver, received, due, .. } = self;
        Ok(driver.receive_unread(BATCH, |one| note(&one, received, due))?)
    }

    /// Notes that the driver looks at its rings by itself.
    fn awake(&mut self) -> Result<()> {
        (self.idle, self.waits) = (None, false);
        Ok(self.driver.want(false, false)?)
    }

    /// Counts a turn without work, after which the driver may ask for interrupts. Then the rings
    /// are looked at once more. Returns the number of frames received in that look.
    fn rest(&mut self, sends: bool) -> Result<usize> {
        if self.waits || self.idle.get_or_insert_with(Instant::now).elapsed() < IDLE {
            return Ok(0);
        }
        self.driver.want(sends, true)?;
        let count = self.poll()?;
        if count > 0 || (sends && self.driver.clean()? > 0) {
            self.awake()?;
        } else {
            self.waits = true;
        }
        Ok(count)
    }
}

/// Checks a received frame, of which the header is read only.
#[inline]
fn note(one: &Unread<'_>, received: &mut u64, due: &mut u64) -> Result<(), DriverError> {
    let mut bytes = [0; LOOKED_AT];
    one.read(&mut bytes)?;
    let number = bytes.last_chunk().map_or(0, |number| u64::from_le_bytes(*number));
    if number < *due {
        return Err(DriverError::Device("a frame came late or twice"));
    }
    *due = number + 1;
    *received += 1;
    Ok(())
}

/// The traffic of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    /// From the first station to the second, as fast as possible.
    Flood,
    /// There and back, with so many frames on their way.
    Window(u32),
    /// From the switch to the second station.
    Offered,
}

/// Both stations, on one thread.
struct Pair {
    mode: Mode,
    traffic: Traffic,
    one: Station,
    two: Station,
    /// Frames that each station still has to send, in traffic there and back.
    owed: [usize; 2],
}

impl Pair {
    fn new(mode: Mode, directory: &Path, load: &PacketLoad) -> Result<Self> {
        let station = |number| Station::new(mode, directory, number, load.bytes);
        let traffic = match (load.window, load.offered) {
            (0, 0) => Traffic::Flood,
            (0, _) => Traffic::Offered,
            (window, _) => Traffic::Window(window),
        };
        let first = if let Traffic::Window(window) = traffic { window as usize } else { 0 };
        Ok(Self { mode, traffic, one: station(1)?, two: station(2)?, owed: [first, 0] })
    }

    /// Sends what is to be sent, and serves both stations. Returns whether there was work.
    fn turn(&mut self) -> Result<bool> {
        // One frame for each write of the tail, as Linux sends them.
        let most =
            if matches!(self.mode, Mode::Base | Mode::Rung | Mode::Moderated) { 1 } else { BATCH };
        let sent = match self.traffic {
            Traffic::Flood => self.one.send(most)?,
            Traffic::Offered => 0,
            Traffic::Window(_) => {
                let [one, two] = &mut self.owed;
                let sent = (self.one.send((*one).min(most))?, self.two.send((*two).min(most))?);
                (*one, *two) = (*one - sent.0, *two - sent.1);
                sent.0 + sent.1
            }
        };
        let full = self.traffic == Traffic::Flood && sent == 0;
        let one = serve(&mut self.one, sent > 0, full)?;
        let two = serve(&mut self.two, false, false)?;
        if matches!(self.traffic, Traffic::Window(_)) {
            self.owed = [self.owed[0] + one, self.owed[1] + two];
        }
        Ok(sent + one + two > 0)
    }

    /// Sleeps until an interrupt comes, unless a driver still looks at its rings.
    fn wait(&self) -> Result<()> {
        if self.mode == Mode::Block && !(self.one.waits && self.two.waits) {
            return Ok(());
        }
        let mut all = [&self.one, &self.two].map(|one| PollFd::new(&one.raised, PollFlags::IN));
        let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        match rustix::event::poll(&mut all, Some(&limit)) {
            Ok(0) => anyhow::bail!("the functions have not interrupted for {PATIENCE:?}"),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn run(&mut self, time: Duration) -> Result<Duration> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..TURNS {
                if !self.turn()? {
                    self.wait()?;
                    break;
                }
            }
        }
        Ok(begin.elapsed())
    }

    fn received(&self) -> u64 {
        self.one.received + self.two.received
    }
}

/// Serves a station, which may have sent frames, or have had no room for them. Returns the number
/// of frames received.
fn serve(station: &mut Station, sent: bool, full: bool) -> Result<usize> {
    if station.mode != Mode::Block {
        return station.interrupted();
    }
    if station.waits {
        station.interrupted()?;
    }
    let count = station.poll()?;
    if count == 0 && !sent {
        return station.rest(full);
    }
    station.idle = None;
    Ok(count)
}

fn drive(
    mode: Mode,
    directory: &Path,
    load: &PacketLoad,
    Times { warm_up, time }: Times,
    served: &mut dyn Served,
) -> Result<PacketMeasured> {
    let mut pair = Pair::new(mode, directory, load)?;
    pair.run(warm_up)?;
    let (received, before) = (pair.received(), served.counts()?);
    let elapsed = pair.run(time)?;
    let (delivered, after) = (pair.received() - received, served.counts()?);
    let work = work(&before, &after).context("the process with the functions counts nothing")?;
    let sent = match pair.traffic {
        Traffic::Offered => after.offered - before.offered,
        _ => work.one.sent + work.two.sent,
    };
    let elapsed_ns = elapsed.as_nanos() as u64;
    let work = Some(work);
    Ok(PacketMeasured { sent, delivered, elapsed_ns, work, ..PacketMeasured::default() })
}

/// Returns the functions' work between two counts.
fn work(before: &TargetCounts, after: &TargetCounts) -> Option<Work> {
    let between = |at: usize| -> Option<FunctionCounts> {
        Some(after.functions.get(at)?.since(before.functions.get(at)?))
    };
    Some(Work { one: between(0)?, two: between(1)? })
}
