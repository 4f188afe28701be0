//! The kept output of sandboxes, for `slipway logs` and for clients that lost their daemon.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::Status;

use crate::files::Lane;
use crate::log;
use crate::target::Target;
use crate::{Error, v1};

/// The interval at which a follower of a log looks for more.
const FOLLOW: Duration = Duration::from_millis(100);
/// The most bytes that are held to find the last lines of a log. Output without line ends is cut to
/// this.
const MOST_TAIL: usize = 16 << 20;

pub(super) type LogSender = mpsc::Sender<Result<v1::LogRecord, Status>>;

/// The kept output of a sandbox, read in the sandbox's lane.
pub(super) struct KeptOutput {
    lane: Lane,
    path: PathBuf,
    reader: Option<log::Reader>,
    _place: OwnedSemaphorePermit,
}

impl KeptOutput {
    /// The number of bytes that are read at once.
    const BYTES: usize = 256 << 10;

    /// Makes the reader. The file is opened at the first read.
    ///
    /// # Errors
    /// [`Error::Busy`] if there are too many readers.
    pub(super) fn open(target: &Target) -> Result<Self, Error> {
        let Target { sandbox, container } = target;
        let (lane, path) = (sandbox.lane.clone(), container.log());
        Ok(Self { lane, path, reader: None, _place: sandbox.reader()? })
    }

    /// Returns the next records. Returns no records at the end of the log.
    pub(super) async fn read(&mut self) -> Result<Vec<log::Record>, Status> {
        let (reader, path) = (self.reader.take(), self.path.clone());
        let read = self.lane.run(move || {
            let mut reader = reader.unwrap_or_else(|| log::Reader::open(&path));
            (reader.read_some(Self::BYTES), reader)
        });
        let (records, reader) = read.await;
        self.reader = Some(reader);
        let lost = |error| Status::data_loss(format!("the kept output cannot be read: {error}"));
        records.map_err(lost)
    }
}

/// Sends the records that a request asks for to its client.
pub(super) async fn send_logs(
    target: Target,
    mut reader: KeptOutput,
    request: v1::LogsRequest,
    sender: LogSender,
) {
    if let Err(status) = tell_logs(&target, &mut reader, &request, &sender).await {
        let _ = sender.send(Err(status)).await;
    }
}

async fn tell_logs(
    target: &Target,
    reader: &mut KeptOutput,
    request: &v1::LogsRequest,
    sender: &LogSender,
) -> Result<(), Status> {
    if let Some(lines) = request.tail {
        let (held, failed) = read_tail(reader, lines).await;
        for record in held {
            if send_log(sender, record).await.is_err() {
                return Ok(());
            }
        }
        failed?;
    }
    loop {
        // The state is read before the log's end, so that no output before the container's end is
        // missed.
        let over = !target.container.state().is_live();
        loop {
            let records = reader.read().await?;
            if records.is_empty() {
                break;
            }
            for record in records.into_iter().filter_map(|record| record.from(request.position)) {
                if send_log(sender, record).await.is_err() {
                    return Ok(());
                }
            }
        }
        if over || !request.follow || sender.is_closed() {
            return Ok(());
        }
        tokio::time::sleep(FOLLOW).await;
    }
}

/// Returns the last `lines` lines of the log, as far as it can be read.
async fn read_tail(
    reader: &mut KeptOutput,
    lines: u64,
) -> (VecDeque<log::Record>, Result<(), Status>) {
    let mut held = VecDeque::new();
    let (mut newlines, mut bytes) = (0, 0);
    let failed = loop {
        match reader.read().await {
            Ok(records) if records.is_empty() => break Ok(()),
            Err(status) => break Err(status),
            Ok(records) => {
                for record in records {
                    newlines += count_lines(&record);
                    bytes += record.data.len();
                    held.push_back(record);
                    drop_oldest(&mut held, lines, &mut newlines, &mut bytes);
                }
            }
        }
    };
    cut_lines(&mut held, newlines.saturating_sub(lines));
    (held, failed)
}

/// Drops the oldest records: those before the last `lines` lines, and those beyond the bytes that
/// may be held.
fn drop_oldest(
    held: &mut VecDeque<log::Record>,
    lines: u64,
    newlines: &mut u64,
    bytes: &mut usize,
) {
    let enough = |oldest: &log::Record, newlines: u64, bytes: usize| {
        newlines - count_lines(oldest) >= lines || bytes > MOST_TAIL
    };
    while held.front().is_some_and(|oldest| enough(oldest, *newlines, *bytes)) {
        let oldest = held.pop_front();
        *newlines -= oldest.as_ref().map_or(0, count_lines);
        *bytes -= oldest.map_or(0, |oldest| oldest.data.len());
    }
}

fn count_lines(record: &log::Record) -> u64 {
    record.data.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Drops the first `lines` lines.
fn cut_lines(held: &mut VecDeque<log::Record>, mut lines: u64) {
    while let Some(record) = held.front_mut().filter(|_| lines > 0) {
        match record.data.iter().position(|byte| *byte == b'\n') {
            Some(end) => {
                record.data.drain(..=end);
                record.position += end as u64 + 1;
                lines -= 1;
            }
            None => {
                held.pop_front();
            }
        }
    }
}

async fn send_log(sender: &LogSender, record: log::Record) -> Result<(), ()> {
    let log::Record { position, stream, time_ns, data } = record;
    let record = v1::LogRecord { stream: stream as u32, time_ns, data, position };
    sender.send(Ok(record)).await.map_err(|_| ())
}
