//! The runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use slipway_ethernet_spec::Mac;
use slipway_telemetry::{Histogram, monotonic_ns};

use crate::figures::{Figures, Latency};
use crate::frame::{Probe, Stream, Vary, announcement, turn_round};
use crate::{Pacer, Sequence, Sizes, Wire};

/// Time between two reports.
const REPORT: Duration = Duration::from_secs(1);
/// Longest time without a look whether the run is to end.
const LOOK: Duration = Duration::from_millis(50);
/// How long frames that were made may take to go out at the end.
const FLUSH: Duration = Duration::from_secs(1);
/// Frames taken at a time.
const TAKE: usize = 256;
/// Runs that a sink tells apart; what is of more counts as others'.
const RUNS: usize = 1024;

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// After so many frames.
    pub count: Option<u64>,
    /// After this time.
    pub time: Option<Duration>,
    /// When somebody says so.
    pub stop: &'a AtomicBool,
}

/// What is sent.
#[derive(Clone, Debug)]
pub struct Plan {
    /// To whom.
    pub to: Mac,
    /// From whom; None: what the wire has to say, or one of the run's own.
    pub from: Option<Mac>,
    /// How long frames are.
    pub sizes: Sizes,
    /// Frames per second; None: as fast as can be.
    pub rate: Option<f64>,
    /// Frames at a time, 1 to 256.
    pub burst: u32,
    /// Flows, 1 or more.
    pub flows: u32,
    /// What differs between them.
    pub vary: Vary,
    /// Tells the run from others.
    pub id: u16,
}

impl Plan {
    /// The frames of this plan over a wire, which is told of their lengths.
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

/// Time of a run, and reports on the way.
struct Course<'a, 'b> {
    limits: Limits<'a>,
    begin: Instant,
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

    /// Whether to go on, with so many frames behind.
    fn goes_on(&self, frames: u64, now: Instant) -> bool {
        self.limits.count.is_none_or(|count| frames < count)
            && self.limits.time.is_none_or(|time| now - self.begin < time)
            && !self.limits.stop.load(Ordering::Relaxed)
    }

    /// Whether a second is over.
    fn is_over(&self, now: Instant) -> bool {
        now - self.last >= REPORT
    }

    /// Reports it, given frames, bytes and losses so far and its own latencies.
    fn tell(
        &mut self,
        now: Instant,
        (frames, bytes): (u64, u64),
        lost: Option<u64>,
        latency_ns: Option<Latency>,
    ) {
        let seconds = (now - self.last).as_secs_f64();
        let mut figures = Figures::new(seconds, frames - self.frames, bytes - self.bytes);
        // What was lost a second ago may have come since.
        figures.lost = lost.map(|lost| lost.saturating_sub(self.lost));
        figures.latency_ns = latency_ns;
        (self.report)(&figures);
        (self.last, self.frames, self.bytes) = (now, frames, bytes);
        self.lost = lost.unwrap_or(0);
    }

    /// How long may be waited for anything.
    fn left(&self, now: Instant) -> Duration {
        let end = self.limits.time.map_or(LOOK, |time| time.saturating_sub(now - self.begin));
        end.min(LOOK)
    }

    fn seconds(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }
}

/// Sends; `report` is called every second, and the whole run's figures are returned.
///
/// # Errors
/// The wire is gone, or does not take what is planned.
pub fn source(
    wire: &mut dyn Wire,
    plan: &Plan,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut stream = plan.stream(wire)?;
    let mut course = Course::new(limits, report);
    let mut pacer = Pacer::new(plan.rate, course.begin);
    let mut bytes = 0;
    loop {
        let now = Instant::now();
        if !course.goes_on(stream.made(), now) {
            break;
        }
        if course.is_over(now) {
            course.tell(now, (stream.made(), bytes), None, None);
            wire.check()?;
        }
        let left = limits.count.map_or(u64::MAX, |count| count - stream.made());
        let wanted = u64::from(plan.burst).min(left) as u32;
        match pacer.due(wanted, now) {
            Err(early) => Pacer::rest(early.min(LOOK)),
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
    let end = Instant::now();
    while !wire.flush()? {
        if end.elapsed() > FLUSH {
            bail!("the last frames did not go out within {} s", FLUSH.as_secs());
        }
        std::thread::yield_now();
    }
    let refused = Some(wire.refused()).filter(|refused| *refused > 0);
    let frames = stream.made() - refused.unwrap_or(0);
    Ok(Figures { refused, ..Figures::new(course.seconds(), frames, bytes) })
}

/// What has come of runs.
#[derive(Default)]
struct Seen {
    runs: BTreeMap<u16, Sequence>,
    /// Of the second that is not over yet.
    second: Histogram,
    /// Of those before.
    latency: Histogram,
    frames: u64,
    bytes: u64,
    others: u64,
    /// When the first frame of a run came, and the last.
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Seen {
    /// A frame came at `now_ns`.
    #[inline]
    fn look(&mut self, frame: &[u8], len: usize, now_ns: u64) {
        let Some(probe) = Probe::read(frame) else {
            self.others += 1;
            return;
        };
        if self.runs.len() == RUNS && !self.runs.contains_key(&probe.id) {
            self.others += 1;
            return;
        }
        self.runs.entry(probe.id).or_default().see(probe.number);
        self.frames += 1;
        self.bytes += len as u64;
        // A sender on another host has another clock.
        if let Some(took) = now_ns.checked_sub(probe.time_ns) {
            self.second.record(took);
        }
    }

    fn sum(&self, of: impl Fn(&Sequence) -> u64) -> u64 {
        self.runs.values().map(of).fold(0, u64::saturating_add)
    }

    /// Latencies since the last call.
    fn take_second(&mut self) -> Option<Latency> {
        let latency = Latency::of(&self.second);
        self.latency.merge(&self.second);
        self.second.clear();
        latency
    }

    fn figures(mut self, seconds: f64) -> Figures {
        self.take_second();
        Figures {
            lost: Some(self.sum(Sequence::lost)),
            late: Some(self.sum(Sequence::late)),
            duplicates: Some(self.sum(Sequence::duplicates)),
            others: Some(self.others),
            latency_ns: Latency::of(&self.latency),
            ..Figures::new(seconds, self.frames, self.bytes)
        }
    }
}

/// Receives. The switch is told where `mac` is, so that frames to it come here and nowhere else. Rates are
/// over the time from the first frame to the last.
///
/// # Errors
/// The wire is gone.
pub fn sink(
    wire: &mut dyn Wire,
    mac: Mac,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut course = Course::new(limits, report);
    let mut seen = Seen::default();
    announce(wire, mac)?;
    loop {
        let now = Instant::now();
        if !course.goes_on(seen.frames, now) {
            let seconds = seen.first.zip(seen.last).map_or(0.0, |(a, b)| (b - a).as_secs_f64());
            return Ok(seen.figures(seconds));
        }
        if course.is_over(now) {
            let latency = seen.take_second();
            course.tell(now, (seen.frames, seen.bytes), Some(seen.sum(Sequence::lost)), latency);
            wire.check()?;
            announce(wire, mac)?;
        }
        let left = limits.count.map_or(u64::MAX, |count| count - seen.frames);
        let limit = (TAKE as u64).min(left) as usize;
        // One look at the clock for all that is there.
        let mut time = None;
        let there = wire.receive(limit, &mut |frame, len| {
            seen.look(frame, len, *time.get_or_insert_with(monotonic_ns));
        })?;
        if there == 0 {
            wire.wait(course.left(now))?;
        } else if seen.frames > 0 {
            seen.first.get_or_insert(now);
            seen.last = Some(Instant::now());
        }
    }
}

/// Tells a switch where `mac` is.
fn announce(wire: &mut dyn Wire, mac: Mac) -> Result<()> {
    // A wire that has no room is no reason to stop: there is another second.
    wire.send(1, &mut |slot| announcement(slot, mac)).map(drop)
}

/// Sends frames back where they came from, until its limits are reached.
///
/// # Errors
/// The wire is gone.
pub fn pong(
    wire: &mut dyn Wire,
    mac: Mac,
    limits: Limits<'_>,
    report: &mut dyn FnMut(&Figures),
) -> Result<Figures> {
    let mut reserved = 0;
    let mut course = Course::new(limits, report);
    let (mut frames, mut bytes) = (0_u64, 0_u64);
    // What the switch gave and what is to go back: the head, and how long the frame was.
    let mut turned: Vec<([u8; crate::SHORTEST], usize)> = Vec::with_capacity(TAKE);
    announce(wire, mac)?;
    loop {
        let now = Instant::now();
        if !course.goes_on(frames, now) {
            return Ok(Figures::new(course.seconds(), frames, bytes));
        }
        if course.is_over(now) {
            course.tell(now, (frames, bytes), None, None);
            wire.check()?;
            announce(wire, mac)?;
        }
        turned.clear();
        wire.receive(TAKE, &mut |frame, len| {
            let ours = frame.get(..6) == Some(&mac.0) && Probe::read(frame).is_some();
            if let (true, Some(head)) = (ours, frame.first_chunk()) {
                let mut head = *head;
                turn_round(&mut head);
                turned.push((head, len));
            }
        })?;
        if turned.is_empty() {
            wire.wait(course.left(now))?;
            continue;
        }
        let longest = turned.iter().map(|(_, len)| *len).max().unwrap_or(0);
        if longest > reserved {
            wire.reserve(longest)?;
            reserved = longest;
        }
        let mut at = 0;
        // What there is no room for is lost, as on any wire.
        let sent = wire.send(turned.len(), &mut |slot| {
            let (head, len) = turned[at];
            slot[..head.len()].copy_from_slice(&head);
            at += 1;
            bytes += len as u64;
            len
        })?;
        frames += sent as u64;
    }
}

/// Sends a frame, waits for it to come back from a [`pong`], and sends the next. One that does not come
/// within `patience` is lost.
///
/// # Errors
/// The wire is gone, or does not take what is planned.
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
    let mut seen = Seen::default();
    loop {
        let now = Instant::now();
        // Whoever forges replies may have more of them come than were due.
        let back = seen.frames.saturating_sub(seen.sum(Sequence::duplicates));
        let lost = stream.made().saturating_sub(back);
        if !course.goes_on(stream.made(), now) {
            let figures = seen.figures(course.seconds());
            return Ok(Figures { lost: Some(lost), late: None, ..figures });
        }
        if course.is_over(now) {
            let latency = seen.take_second();
            course.tell(now, (seen.frames, seen.bytes), Some(lost), latency);
            wire.check()?;
        }
        if let Err(early) = pacer.due(1, now) {
            Pacer::rest(early.min(LOOK));
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
        let sent = Instant::now();
        while !take_replies(wire, (plan.id, number), &mut seen)? {
            let left = patience.saturating_sub(sent.elapsed());
            if left.is_zero() || limits.stop.load(Ordering::Relaxed) {
                break;
            }
            wire.wait(left.min(LOOK))?;
        }
    }
}

/// Looks at what came back; whether frame `number` of run `id`, the last that was sent, is among it.
fn take_replies(wire: &mut dyn Wire, (id, number): (u16, u64), seen: &mut Seen) -> Result<bool> {
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
