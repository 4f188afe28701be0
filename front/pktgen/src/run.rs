//! The runs: source, sink, ping and pong.
//!
//! Each run is a loop that asks its [`Course`] whether the run continues and whether a report is
//! due, and then sends or receives a few frames. A [`Plan`] describes the frames that a source or a
//! ping sends, at the rate of a [`Pacer`]; [`ReceivedFrames`] counts those that a sink or a ping
//! receives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use slipway_ethernet_spec::Mac;
use slipway_telemetry::monotonic_ns;

use crate::figures::{Figures, Latency};
use crate::frame::{Probe, Stream, Vary, announcement, turn_round};
use crate::received::ReceivedFrames;
use crate::{Pacer, Sequence, Sizes, Wire};

/// The time between two reports.
const REPORT: Duration = Duration::from_secs(1);
/// The longest time between two checks whether the run is to end.
const LOOK: Duration = Duration::from_millis(50);
/// The longest time that the wire may take at the end of a run to send frames that were made.
const FLUSH: Duration = Duration::from_secs(1);
/// The most frames taken at a time.
const TAKE: usize = 256;

/// The conditions that end a run. The run ends as soon as one of them is met.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// The number of frames.
    pub count: Option<u64>,
    /// The duration.
    pub time: Option<Duration>,
    /// Set by the caller to end the run.
    pub stop: &'a AtomicBool,
}

/// The frames that a run sends.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The destination address.
    pub to: Mac,
    /// The source address. `None` stands for the address of the wire, or one of the run's own.
    pub from: Option<Mac>,
    /// The lengths of frames.
    pub sizes: Sizes,
    /// Frames per second, or `None` without a limit.
    pub rate: Option<f64>,
    /// Frames per burst, 1 to 256.
    pub burst: u32,
    /// The number of flows, 1 or more.
    pub flows: u32,
    /// The fields that differ between flows.
    pub vary: Vary,
    /// The run's id, by which receivers tell its frames from those of other runs.
    pub id: u16,
}

impl Plan {
    /// Makes the stream of this plan's frames, and announces their greatest length to the wire.
    ///
    /// # Errors
    /// If the wire cannot carry frames of that length or allows another source address only, or if
    /// source and destination are equal.
    fn stream(&self, wire: &mut dyn Wire) -> Result<Stream> {
        wire.reserve(self.sizes.longest())?;
        let own = wire.mac();
        if let Some(own) = own {
            ensure!(
                self.from.is_none_or(|from| from == own),
                "the port may send from {own} only; leave --from out"
            );
            ensure!(
                !self.vary.mac || self.flows == 1,
                "the port may send from {own} only: flows cannot differ in it; --vary ip,port"
            );
        }
        let from = own.or(self.from).unwrap_or_else(|| Mac::local(u64::from(self.id) << 24));
        ensure!(from != self.to, "{from} would send to itself; --to takes the receiver's address");
        Ok(Stream::new(from, self.to, self.id, self.flows, self.vary))
    }
}

/// The progress of a run: its limits, and its reports every second.
struct Course<'a, 'b> {
    limits: Limits<'a>,
    begin: Instant,
    /// The time of the last report. The counts below are those of the run until then.
    last: Instant,
    frames: u64,
    bytes: u64,
    lost: u64,
    report: &'b mut dyn FnMut(&Figures),
}

impl<'a, 'b> Course<'a, 'b> {
    fn new(limits: Limits<'a>, report: &'b mut dyn FnMut(&Figures)) -> Self {
        let begin = Instant::now();
        Self { limits, begin, last: begin, frames: 0, bytes: 0, lost: 0, report }
    }

    /// Returns whether the run continues after `frames` frames.
    fn goes_on(&self, frames: u64, now: Instant) -> bool {
        self.limits.count.is_none_or(|count| frames < count)
            && self.limits.time.is_none_or(|time| now - self.begin < time)
            && !self.limits.stop.load(Ordering::Relaxed)
    }

    /// Returns whether a second has passed since the last report.
    fn is_report_due(&self, now: Instant) -> bool {
        now - self.last >= REPORT
    }

    /// Reports the time since the last report, given the run's frames, bytes and losses so far and
    /// the latencies since that report.
    fn tell(
        &mut self,
        now: Instant,
        (frames, bytes): (u64, u64),
        lost: Option<u64>,
        latency_ns: Option<Latency>,
    ) {
        let seconds = (now - self.last).as_secs_f64();
        let mut figures = Figures::new(seconds, frames - self.frames, bytes - self.bytes);
        // Frames that counted as lost a second ago may have arrived since.
        figures.lost = lost.map(|lost| lost.saturating_sub(self.lost));
        figures.latency_ns = latency_ns;
        (self.report)(&figures);
        (self.last, self.frames, self.bytes) = (now, frames, bytes);
        self.lost = lost.unwrap_or(0);
    }

    /// Returns the longest time that the run may wait for frames: it checks its limits after that.
    fn left(&self, now: Instant) -> Duration {
        let end = self.limits.time.map_or(LOOK, |time| time.saturating_sub(now - self.begin));
        end.min(LOOK)
    }

    /// Returns the duration of the run so far, in seconds.
    fn seconds(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }
}

/// Sends frames. Calls `report` every second, and returns the figures of the whole run. Frames that
/// the interface refused are counted apart in the figures of the whole run, and are among the
/// frames of a second.
///
/// # Errors
/// If the wire is gone, or does not take the planned frames.
pub fn source(
    wire: &mut dyn Wire,
    plan: &Plan,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut stream = plan.stream(wire)?;
    let mut course = Course::new(limits, report);
    let mut pacer = Pacer::new(plan.rate, course.begin);
    let mut bytes = 0_u64;
    loop {
        let now = Instant::now();
        if !course.goes_on(stream.made(), now) {
            break;
        }
        if course.is_report_due(now) {
            course.tell(now, (stream.made(), bytes), None, None);
            wire.check()?;
        }
        let left = limits.count.map_or(u64::MAX, |count| count - stream.made());
        let wanted = u64::from(plan.burst).min(left) as u32;
        match pacer.due(wanted, now) {
            Err(early) => Pacer::pause(early.min(LOOK)),
            Ok(due) => {
                let time = monotonic_ns();
                let sent = wire.send(due as usize, &mut |slot| {
                    let len = plan.sizes.of(stream.made());
                    stream.make(slot, len, time);
                    bytes += len as u64;
                    len
                })?;
                pacer.went(sent as u64);
                if sent == 0 {
                    std::thread::yield_now();
                }
            }
        }
    }
    flush(wire)?;
    let (refused, refused_bytes) = wire.refused();
    let (frames, bytes) = (stream.made() - refused, bytes - refused_bytes);
    let refused = Some(refused).filter(|refused| *refused > 0);
    Ok(Figures { refused, ..Figures::new(course.seconds(), frames, bytes) })
}

/// Waits until the wire has sent the frames that were made.
///
/// # Errors
/// If the wire is gone, or takes longer than [`FLUSH`].
fn flush(wire: &mut dyn Wire) -> Result<()> {
    let begin = Instant::now();
    while !wire.flush()? {
        if begin.elapsed() > FLUSH {
            bail!("the last frames did not go out within {} s", FLUSH.as_secs());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Receives frames of runs. Announces `mac` to the switch, which then sends frames to `mac` to this
/// port only. Rates cover the time from the first frame of a run to the last one: frames of others
/// are counted, and do not extend it.
///
/// # Errors
/// If the wire is gone.
pub fn sink(
    wire: &mut dyn Wire,
    mac: Mac,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut course = Course::new(limits, report);
    let mut seen = ReceivedFrames::default();
    announce(wire, mac)?;
    loop {
        let now = Instant::now();
        if !course.goes_on(seen.frames, now) {
            let seconds = seen.seconds();
            return Ok(seen.figures(seconds));
        }
        if course.is_report_due(now) {
            let latency = seen.take_second();
            course.tell(now, (seen.frames, seen.bytes), Some(seen.sum(Sequence::lost)), latency);
            wire.check()?;
            announce(wire, mac)?;
        }
        let before = seen.frames;
        let left = limits.count.map_or(u64::MAX, |count| count - before);
        let limit = (TAKE as u64).min(left) as usize;
        // The clock is read once for all frames that the wire has now.
        let mut time = None;
        let there = wire.receive(limit, &mut |frame, len| {
            seen.look(frame, len, *time.get_or_insert_with(monotonic_ns));
        })?;
        if there == 0 {
            wire.wait(course.left(now))?;
        } else if seen.frames > before {
            seen.first.get_or_insert(now);
            seen.last = Some(Instant::now());
        }
    }
}

/// Sends a frame from `mac`, by which a switch learns the port of that address.
fn announce(wire: &mut dyn Wire, mac: Mac) -> Result<()> {
    // If the wire has no room, the next announcement is a second later.
    wire.send(1, &mut |slot| announcement(slot, mac)).map(drop)
}

/// Sends frames of runs to `mac` back to their senders. Announces `mac` to the switch, which then
/// sends frames to `mac` to this port only.
///
/// # Errors
/// If the wire is gone.
pub fn pong(
    wire: &mut dyn Wire,
    mac: Mac,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut course = Course::new(limits, report);
    let (mut frames, mut bytes) = (0_u64, 0_u64);
    let mut turned = TurnedFrames::new();
    announce(wire, mac)?;
    loop {
        let now = Instant::now();
        if !course.goes_on(frames, now) {
            return Ok(Figures::new(course.seconds(), frames, bytes));
        }
        if course.is_report_due(now) {
            course.tell(now, (frames, bytes), None, None);
            wire.check()?;
            announce(wire, mac)?;
        }
        if !turned.receive(wire, mac)? {
            wire.wait(course.left(now))?;
            continue;
        }
        let sent = turned.send(wire)?;
        (frames, bytes) = (frames + sent.0, bytes + sent.1);
    }
}

/// The received frames that a pong is about to send back.
struct TurnedFrames {
    /// The head and the whole length of each frame.
    frames: Vec<([u8; crate::SHORTEST], usize)>,
    /// The greatest length that was announced to the wire.
    reserved: usize,
}

impl TurnedFrames {
    fn new() -> Self {
        Self { frames: Vec::with_capacity(TAKE), reserved: 0 }
    }

    /// Receives frames of runs to `mac`, and exchanges their source and destination. Returns
    /// whether there are any.
    fn receive(&mut self, wire: &mut dyn Wire, mac: Mac) -> Result<bool> {
        self.frames.clear();
        wire.receive(TAKE, &mut |frame, len| {
            let ours = frame.get(..6) == Some(&mac.0) && Probe::read(frame).is_some();
            if let (true, Some(head)) = (ours, frame.first_chunk()) {
                let mut head = *head;
                turn_round(&mut head);
                self.frames.push((head, len));
            }
        })?;
        Ok(!self.frames.is_empty())
    }

    /// Sends the frames back. A frame for which the wire has no room is lost, as on any wire.
    /// Returns the number of frames and of bytes that were sent.
    fn send(&mut self, wire: &mut dyn Wire) -> Result<(u64, u64)> {
        let longest = self.frames.iter().map(|(_, len)| *len).max().unwrap_or(0);
        if longest > self.reserved {
            wire.reserve(longest)?;
            self.reserved = longest;
        }
        let (mut at, mut bytes) = (0, 0);
        let sent = wire.send(self.frames.len(), &mut |slot| {
            let (head, len) = self.frames[at];
            slot[..head.len()].copy_from_slice(&head);
            at += 1;
            bytes += len as u64;
            len
        })?;
        Ok((sent as u64, bytes))
    }
}

/// Sends a frame, waits for it to come back from a [`pong`], and sends the next. A frame that does
/// not come back within `patience` is lost.
///
/// # Errors
/// If the wire is gone, or does not take the planned frames.
pub fn ping(
    wire: &mut dyn Wire,
    plan: &Plan,
    patience: Duration,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut stream = plan.stream(wire)?;
    let mut course = Course::new(limits, report);
    let mut pacer = Pacer::new(plan.rate, course.begin);
    let mut seen = ReceivedFrames::default();
    loop {
        let now = Instant::now();
        // Forged replies may make more frames come back than were sent.
        let back = seen.frames.saturating_sub(seen.sum(Sequence::duplicates));
        let lost = stream.made().saturating_sub(back);
        if !course.goes_on(stream.made(), now) {
            let figures = seen.figures(course.seconds());
            return Ok(Figures { lost: Some(lost), late: None, ..figures });
        }
        if course.is_report_due(now) {
            let latency = seen.take_second();
            course.tell(now, (seen.frames, seen.bytes), Some(lost), latency);
            wire.check()?;
        }
        if let Err(early) = pacer.due(1, now) {
            Pacer::pause(early.min(LOOK));
            continue;
        }
        let number = stream.made();
        let sent = wire.send(1, &mut |slot| {
            let len = plan.sizes.of(number);
            stream.make(slot, len, monotonic_ns());
            len
        })?;
        if sent == 0 {
            std::thread::yield_now();
            continue;
        }
        pacer.went(1);
        wait_for_reply(wire, (plan.id, number), (patience, limits.stop), &mut seen)?;
    }
}

/// Counts the frames that come back until frame `number` of run `id` is among them, `patience` is
/// over or `stop` is set.
fn wait_for_reply(
    wire: &mut dyn Wire,
    (id, number): (u16, u64),
    (patience, stop): (Duration, &AtomicBool),
    seen: &mut ReceivedFrames,
) -> Result<()> {
    let sent = Instant::now();
    while !take_replies(wire, (id, number), seen)? {
        let left = patience.saturating_sub(sent.elapsed());
        if left.is_zero() || stop.load(Ordering::Relaxed) {
            break;
        }
        wire.wait(left.min(LOOK))?;
    }
    Ok(())
}

/// Counts the frames that came back. Returns whether frame `number` of run `id`, the last one sent,
/// is among them.
fn take_replies(
    wire: &mut dyn Wire,
    (id, number): (u16, u64),
    seen: &mut ReceivedFrames,
) -> Result<bool> {
    let mut back = false;
    wire.receive(TAKE, &mut |frame, len| match Probe::read(frame) {
        Some(probe) if probe.id == id && probe.number <= number => {
            back |= probe.number == number;
            seen.look(frame, len, monotonic_ns());
        }
        _ => seen.others += 1,
    })?;
    Ok(back)
}
