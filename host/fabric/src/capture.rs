//! Captures the frames of a port for a client: as a pcapng file, or as counts and headers.
//!
//! An observer at the port copies into memory. A thread of the session reads there every few
//! milliseconds and waits for the client. So neither a slow client nor a slow disk slows the
//! switch.
//!
//! A new option of a capture is a field of `CapturePortRequest` (`plane.proto`), whose absence (0)
//! stands for what was before. `Captures::capture` puts it into `Capturing`, by which `Recorder`
//! of `backend/switch` (`decorators/capture.rs`) decides on the switch's thread; that must not
//! wait. One of a trace goes by `TracePortRequest` and `Captures::trace` to `Trace`
//! (`decorators/trace.rs`). The command line has both in `args/port.rs` and `port_tools.rs`. Tests:
//! `tests/decorators.rs` of `backend/switch`, `tests/e2e/49-impair.sh`; `docs/networks.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use slipway_pcapng_spec as pcapng;
use slipway_plane_api::v1;
use slipway_switch::decorators::{
    Captured, Capturing, Counts, Direction, Observer, Record, Summary, Trace, Tracing, record,
};
use slipway_switch::{Handle, PortIndex};
use tokio::sync::mpsc;
use tonic::Status;

use crate::error::Error;
use crate::port::{FoundPort, ways};

/// The largest number of concurrent captures and traces: each takes about 10 MiB and a thread.
const MOST: usize = 16;
/// The time between two checks of an empty buffer.
const LOOK: Duration = Duration::from_millis(5);
/// The approximate size of a chunk in bytes.
const CHUNK: usize = 256 << 10;
/// The number of chunks in flight to the client.
const QUEUE: usize = 4;
/// The number of bytes captured of a frame, unless the client asks for fewer.
const SNAP: u32 = 262_144;
/// The number of headers reported per second, unless the client asks for another number.
const HEADERS: u32 = 100;
/// The largest number of headers per second that a client can ask for.
const MOST_HEADERS: u32 = 10_000;
/// The largest number of headers in a report.
const REPORTED: usize = 4096;
/// The time between two reports of a trace.
const REPORT: Duration = Duration::from_millis(200);

/// The fabric's captures.
#[derive(Default)]
pub struct Captures {
    next: AtomicU64,
    running: Arc<AtomicUsize>,
}

/// An installed observer. Dropping this removes it.
struct Session {
    handle: Handle,
    index: PortIndex,
    number: u64,
    running: Arc<AtomicUsize>,
}

impl Drop for Session {
    fn drop(&mut self) {
        let (index, number) = (self.index, self.number);
        // An error means that the switch is gone, and its ports with it. Numbers are never reused,
        // so another port that got the index meanwhile has no such observer.
        let _ = self.handle.run(move |owner| {
            owner.switch().unobserve(index, number);
        });
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

type Sender<T> = mpsc::Sender<Result<T, Status>>;
/// The receiver of a capture's chunks or of a trace's reports.
pub type Receiver<T> = mpsc::Receiver<Result<T, Status>>;

impl Captures {
    /// Captures the frames of a port until the receiver of the chunks is dropped; blocks until the
    /// capture has begun.
    ///
    /// # Errors
    /// [`Error::UnknownPort`] if the port is gone; [`Error::Resources`].
    pub fn capture(
        &self,
        port: FoundPort,
        request: &v1::CapturePortRequest,
    ) -> Result<Receiver<v1::CaptureChunk>, Error> {
        let snap = if request.snap_bytes == 0 { SNAP } else { request.snap_bytes.min(SNAP) };
        let what = Capturing {
            snap,
            count: (request.count > 0).then_some(request.count),
            ways: ways(request.direction()),
            clock: now,
        };
        let recorder = || {
            record(what).map_err(|error| Error::Resources(format!("no memory to capture: {error}")))
        };
        let (session, name, captured) = self.observe(port, recorder)?;
        let (sender, chunks) = mpsc::channel(QUEUE);
        let writer = Writer { captured, snap, chunk: v1::CaptureChunk::default(), missed: 0 };
        spawn(move || {
            writer.run(&name, &sender);
            drop(session);
        })?;
        Ok(chunks)
    }

    /// Counts the frames of a port and reports some of them until the receiver of the reports is
    /// dropped; blocks until the trace has begun.
    ///
    /// # Errors
    /// [`Error::UnknownPort`] if the port is gone; [`Error::Resources`].
    pub fn trace(
        &self,
        port: FoundPort,
        request: &v1::TracePortRequest,
    ) -> Result<Receiver<v1::TraceReport>, Error> {
        let headers = match request.headers_per_second {
            0 => HEADERS,
            headers => headers.min(MOST_HEADERS),
        };
        let ways = ways(request.direction());
        let trace = || Ok(Trace::new(headers, ways, now));
        let (session, _, tracing) = self.observe(port, trace)?;
        let (sender, reports) = mpsc::channel(QUEUE);
        spawn(move || {
            report(&tracing, &sender);
            drop(session);
        })?;
        Ok(reports)
    }

    /// Installs an observer at a port. `make` returns the observer and its reader's side, which is
    /// passed on.
    fn observe<O: Observer + 'static, R>(
        &self,
        port: FoundPort,
        make: impl FnOnce() -> Result<(O, R), Error>,
    ) -> Result<(Session, String, R), Error> {
        let FoundPort { switch, index, name } = port;
        let running = Arc::clone(&self.running);
        if running.fetch_add(1, Ordering::Relaxed) >= MOST {
            running.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::Resources(format!("{MOST} captures run already")));
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let session = Session { handle: switch.handle.clone(), index, number, running };
        let (observer, reader) = make()?;
        let wanted = name.clone();
        let begun = switch.handle.call(move |owner| {
            // Another port may have got the index meanwhile.
            let same = owner.switch().config(index).is_some_and(|config| config.name == wanted);
            same && owner.switch().observe(index, number, Box::new(observer)).is_ok()
        });
        match begun {
            Ok(true) => Ok((session, name, reader)),
            _ => Err(Error::UnknownPort(name)),
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name("capture".to_owned()).spawn(work);
    thread.map(drop).map_err(|error| Error::Resources(format!("no thread to capture: {error}")))
}

/// Returns the time since the epoch.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Writes the captured frames as a pcapng file.
struct Writer {
    captured: Captured,
    snap: u32,
    /// The next chunk to send.
    chunk: v1::CaptureChunk,
    /// The number of missed frames that the file states so far.
    missed: u64,
}

impl Writer {
    fn run(mut self, name: &str, sender: &Sender<v1::CaptureChunk>) {
        let mut put = |bytes: &[u8]| self.chunk.pcapng.extend_from_slice(bytes);
        pcapng::section(&mut put);
        pcapng::interface(&mut put, name, self.snap);
        let mut ended = false;
        while self.send(sender) && !ended {
            // Checked before the buffer is read: once the capture has ended, the buffer holds all
            // remaining frames.
            ended = self.captured.has_ended();
            self.fill();
            while ended && self.chunk.pcapng.len() >= CHUNK {
                if !self.send(sender) {
                    return;
                }
                self.fill();
            }
            self.tell_missed(ended);
            if self.chunk.pcapng.is_empty() && !ended {
                std::thread::sleep(LOOK);
            }
        }
        self.send(sender);
    }

    /// Sends the chunk if it is not empty. Returns false if the client is gone.
    fn send(&mut self, sender: &Sender<v1::CaptureChunk>) -> bool {
        if self.chunk.pcapng.is_empty() {
            return !sender.is_closed();
        }
        self.chunk.missed = self.captured.missed();
        let pcapng = std::mem::take(&mut self.chunk.pcapng);
        sender.blocking_send(Ok(v1::CaptureChunk { pcapng, ..self.chunk })).is_ok()
    }

    /// Moves frames from the buffer to the chunk, up to a chunk's size.
    fn fill(&mut self) {
        while self.chunk.pcapng.len() < CHUNK {
            let Some(Record { time_ns, way, len, bytes }) = self.captured.next() else { return };
            let direction = match way {
                Direction::In => pcapng::Direction::Outbound,
                Direction::Out => pcapng::Direction::Inbound,
            };
            let mut put = |bytes: &[u8]| self.chunk.pcapng.extend_from_slice(bytes);
            pcapng::packet(&mut put, time_ns, direction, len, &bytes);
            self.chunk.captured += 1;
        }
    }

    /// Writes statistics at the end, and whenever frames were missed.
    fn tell_missed(&mut self, ended: bool) {
        let missed = self.captured.missed();
        if ended || missed != self.missed {
            self.missed = missed;
            let time = u64::try_from(now().as_nanos()).unwrap_or(u64::MAX);
            let mut put = |bytes: &[u8]| self.chunk.pcapng.extend_from_slice(bytes);
            pcapng::statistics(&mut put, time, self.chunk.captured + missed, missed);
        }
    }
}

/// Sends reports until the client or the port is gone.
fn report(tracing: &Tracing, sender: &Sender<v1::TraceReport>) {
    let mut ended = false;
    while !ended {
        let frames;
        (frames, ended) = gather(&tracing.headers, Instant::now() + REPORT);
        let counts = tracing.counts().iter().map(count).collect();
        let report = v1::TraceReport { frames, counts, untold: tracing.untold() };
        if sender.blocking_send(Ok(report)).is_err() {
            return;
        }
    }
}

/// Collects headers until `until`, at most [`REPORTED`]. Returns them, and whether the trace has
/// ended.
fn gather(
    headers: &std::sync::mpsc::Receiver<Summary>,
    until: Instant,
) -> (Vec<v1::TracedFrame>, bool) {
    let mut frames = Vec::new();
    // Under a flood a header is always available, even after `until`; hence the limit.
    while frames.len() < REPORTED {
        match headers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(summary) => frames.push(v1::TracedFrame {
                time_ns: u64::try_from(summary.time.as_nanos()).unwrap_or(u64::MAX),
                header: summary.to_string(),
            }),
            Err(RecvTimeoutError::Timeout) => break,
            Err(RecvTimeoutError::Disconnected) => return (frames, true),
        }
    }
    (frames, false)
}

fn count(count: &Counts) -> v1::TraceCount {
    let direction = match count.way {
        Direction::In => v1::PortDirection::Sent,
        Direction::Out => v1::PortDirection::Received,
    };
    v1::TraceCount {
        direction: direction.into(),
        kind: count.kind.to_string(),
        frames: count.frames,
        bytes: count.bytes,
    }
}

#[cfg(test)]
mod tests {
    use slipway_switch::HEAD;

    use super::*;

    #[test]
    fn a_flood_does_not_keep_a_report_from_ending() {
        let summary =
            Summary { time: Duration::from_nanos(7), way: Direction::In, len: 60, head: [1; HEAD] };
        let (told, headers) = std::sync::mpsc::channel();
        for _ in 0..=REPORTED {
            told.send(summary).unwrap();
        }
        let (frames, ended) = gather(&headers, Instant::now() + Duration::from_secs(3600));
        assert_eq!((frames.len(), frames[0].time_ns, ended), (REPORTED, 7, false));
        assert_eq!(gather(&headers, Instant::now()).0.len(), 1);
        assert_eq!(gather(&headers, Instant::now()), (Vec::new(), false));
        drop(told);
        assert_eq!(gather(&headers, Instant::now()), (Vec::new(), true));
    }
}
