//! What passes a port, told to a client: as a pcapng file, or as counts and headers.
//!
//! An observer at the port copies into memory; a thread of the session's own reads there every few
//! milliseconds and waits for the client. So neither a slow client nor a slow disk slows the switch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use slipway_pcapng_spec as pcapng;
use slipway_plane_api::v1;
use slipway_switch::decorators::{
    Captured, Capturing, Counts, Observer, Record, Summary, Trace, Tracing, Way, record,
};
use slipway_switch::{Handle, PortIndex};
use tokio::sync::mpsc;
use tonic::Status;

use crate::ports::{Found, port_text, ways};
use crate::{Error, Plane};

/// Most captures and traces at once: each takes about 10 MiB and a thread.
const MOST: usize = 16;
/// Time between two looks at an empty buffer.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of a chunk, about.
const CHUNK: usize = 256 << 10;
/// Chunks under way to the client.
const QUEUE: usize = 4;
/// Bytes of a frame unless something else is said.
const SNAP: u32 = 262_144;
/// Frames told of in a second unless something else is said.
const HEADERS: u32 = 100;
/// Most of them whatever is said.
const MOST_HEADERS: u32 = 10_000;
/// Most of them in a report.
const REPORTED: usize = 4096;
/// Time between two reports of a trace.
const REPORT: Duration = Duration::from_millis(200);

/// The plane's captures.
#[derive(Default)]
pub struct Captures {
    next: AtomicU64,
    running: Arc<AtomicUsize>,
}

/// An observer that is at work; dropped, it is none.
struct Session {
    handle: Handle,
    index: PortIndex,
    number: u64,
    running: Arc<AtomicUsize>,
}

impl Drop for Session {
    fn drop(&mut self) {
        let (index, number) = (self.index, self.number);
        // A switch that is gone has no ports. Numbers are never used twice, so another port that has the
        // index by now has no such observer.
        let _ = self.handle.run(move |owner| {
            owner.switch().unobserve(index, number);
        });
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

type Sender<T> = mpsc::Sender<Result<T, Status>>;
type Receiver<T> = mpsc::Receiver<Result<T, Status>>;

impl Plane {
    /// Captures what passes a port, until the chunks are dropped; blocks until it has begun.
    ///
    /// # Errors
    /// As `find_port`; [`Error::Resources`].
    pub fn capture_port(
        &self,
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
        let (session, name, captured) = self.observe(request.port.as_ref(), recorder)?;
        let (sender, chunks) = mpsc::channel(QUEUE);
        let writer = Writer { captured, snap, chunk: v1::CaptureChunk::default(), missed: 0 };
        spawn(move || {
            writer.run(&name, &sender);
            drop(session);
        })?;
        Ok(chunks)
    }

    /// Counts what passes a port and tells of some of it, until the reports are dropped; blocks until it
    /// has begun.
    ///
    /// # Errors
    /// As [`Plane::capture_port`].
    pub fn trace_port(
        &self,
        request: &v1::TracePortRequest,
    ) -> Result<Receiver<v1::TraceReport>, Error> {
        let headers = match request.headers_per_second {
            0 => HEADERS,
            headers => headers.min(MOST_HEADERS),
        };
        let ways = ways(request.direction());
        let trace = || Ok(Trace::new(headers, ways, now));
        let (session, _, tracing) = self.observe(request.port.as_ref(), trace)?;
        let (sender, reports) = mpsc::channel(QUEUE);
        spawn(move || {
            report(&tracing, &sender);
            drop(session);
        })?;
        Ok(reports)
    }

    /// Puts an observer at a port; what `make` gives besides is its reader's side.
    fn observe<O: Observer + 'static, R>(
        &self,
        port: Option<&v1::PortReference>,
        make: impl FnOnce() -> Result<(O, R), Error>,
    ) -> Result<(Session, String, R), Error> {
        let Found { fabric, index, name } = self.find_port(port)?;
        let captures = self.captures();
        let running = Arc::clone(&captures.running);
        if running.fetch_add(1, Ordering::Relaxed) >= MOST {
            running.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::Resources(format!("{MOST} captures run already")));
        }
        let number = captures.next.fetch_add(1, Ordering::Relaxed);
        let session = Session { handle: fabric.handle.clone(), index, number, running };
        let (observer, reader) = make()?;
        let wanted = name.clone();
        let begun = fabric.handle.call(move |owner| {
            // Another port may have its index by now.
            let same = owner.switch().config(index).is_some_and(|config| config.name == wanted);
            same && owner.switch().observe(index, number, Box::new(observer)).is_ok()
        });
        match begun {
            Ok(true) => Ok((session, name, reader)),
            _ => Err(Error::UnknownPort(port_text(port))),
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name("capture".to_owned()).spawn(work);
    thread.map(drop).map_err(|error| Error::Resources(format!("no thread to capture: {error}")))
}

/// The time since the epoch.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Turns what was captured into a file.
struct Writer {
    captured: Captured,
    snap: u32,
    /// What is sent next.
    chunk: v1::CaptureChunk,
    /// As the file says so far.
    missed: u64,
}

impl Writer {
    fn run(mut self, name: &str, sender: &Sender<v1::CaptureChunk>) {
        let mut put = |bytes: &[u8]| self.chunk.pcapng.extend_from_slice(bytes);
        pcapng::section(&mut put);
        pcapng::interface(&mut put, name, self.snap);
        let mut ended = false;
        while self.send(sender) && !ended {
            // Before the buffer is looked at: what is in it then is all.
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

    /// Sends the chunk if there is anything in it. False: the client is gone.
    fn send(&mut self, sender: &Sender<v1::CaptureChunk>) -> bool {
        if self.chunk.pcapng.is_empty() {
            return !sender.is_closed();
        }
        self.chunk.missed = self.captured.missed();
        let pcapng = std::mem::take(&mut self.chunk.pcapng);
        sender.blocking_send(Ok(v1::CaptureChunk { pcapng, ..self.chunk })).is_ok()
    }

    /// Takes frames out of the buffer, a chunk's worth at most.
    fn fill(&mut self) {
        while self.chunk.pcapng.len() < CHUNK {
            let Some(Record { time_ns, way, len, bytes }) = self.captured.next() else { return };
            let direction = match way {
                Way::In => pcapng::Direction::Outbound,
                Way::Out => pcapng::Direction::Inbound,
            };
            let mut put = |bytes: &[u8]| self.chunk.pcapng.extend_from_slice(bytes);
            pcapng::packet(&mut put, time_ns, direction, len, &bytes);
            self.chunk.captured += 1;
        }
    }

    /// Statistics: at the end, and when frames were missed.
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

/// What is told until then, [`REPORTED`] frames at most, and whether that was the last.
fn gather(
    headers: &std::sync::mpsc::Receiver<Summary>,
    until: Instant,
) -> (Vec<v1::TracedFrame>, bool) {
    let mut frames = Vec::new();
    // Under a flood there is a header each time, however late it is.
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
        Way::In => v1::PortDirection::Sent,
        Way::Out => v1::PortDirection::Received,
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
    use slipway_switch::Mac;
    use slipway_switch::decorators::Kind;

    use super::*;

    #[test]
    fn a_flood_does_not_keep_a_report_from_ending() {
        let summary = Summary {
            time: Duration::from_nanos(7),
            way: Way::In,
            len: 60,
            to: Mac([1; 6]),
            from: Mac([2; 6]),
            vlan: None,
            ethertype: 0x88b5,
            kind: Kind::Other,
            addresses: None,
            ports: None,
        };
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
