//! `slipway logs`: a container's output, also across restarts of the daemon.

use std::io::Write;

use anyhow::{Result, anyhow};
use slipway_runtime::{Config, SandboxClient, v1};

use super::named;
use crate::args::LogsArgs;
use crate::client::{Lost, answer, next_daemon, refused};
use crate::keeper;
use crate::size::Tail;
use crate::table::printable;

/// The stream number of standard error in a record.
const STANDARD_ERROR: u32 = 2;

/// Runs `slipway logs`.
pub async fn logs(mut client: SandboxClient, config: &Config, args: &LogsArgs) -> Result<i32> {
    let mut printer = LogPrinter::new(args);
    loop {
        match printer.print_rest(&mut client).await {
            Err(error) if error.is::<Lost>() && args.follow && keeper::waits(config) => {
                client = next_daemon(config).await?;
            }
            outcome => {
                outcome?;
                return tell_failure(client, &args.name).await.map(|()| 0);
            }
        }
    }
}

/// A log that is printed in parts, each from another daemon.
struct LogPrinter {
    /// The request for what is not printed yet.
    request: v1::LogsRequest,
    /// The time is put before each line.
    timestamps: bool,
    /// The next byte begins a line: of standard output, and of standard error.
    fresh_line: [bool; 2],
}

impl LogPrinter {
    fn new(args: &LogsArgs) -> Self {
        let (name, follow) = (args.name.clone(), args.follow);
        let tail = args.tail.and_then(|Tail(lines)| lines);
        let request = v1::LogsRequest { name, follow, tail, position: 0 };
        Self { request, timestamps: args.timestamps, fresh_line: [true; 2] }
    }

    /// Prints what is not printed yet. After an error, another call goes on where this one ended.
    ///
    /// # Errors
    /// The daemon's refusal, or [`Lost`] if the daemon went away.
    async fn print_rest(&mut self, client: &mut SandboxClient) -> Result<()> {
        if self.request.position > 0 {
            // All lines behind the position are printed, however many there are.
            self.request.tail = None;
        }
        let mut records = answer(client.logs(self.request.clone()).await)?;
        while let Some(record) = records.message().await.map_err(refused)? {
            if self.print(record).is_err() {
                // The reader of our output has left.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Prints a record on the stream that it was written to.
    fn print(&mut self, record: v1::LogRecord) -> std::io::Result<()> {
        let is_error = record.stream == STANDARD_ERROR;
        self.request.position = record.position + record.data.len() as u64;
        let data = if self.timestamps {
            stamp(&record, &mut self.fresh_line[usize::from(is_error)])
        } else {
            record.data
        };
        if is_error {
            return std::io::stderr().write_all(&data);
        }
        let mut output = std::io::stdout();
        output.write_all(&data)?;
        output.flush()
    }
}

/// Prints why a sandbox or a container failed, which its output cannot say.
async fn tell_failure(mut client: SandboxClient, name: &str) -> Result<()> {
    let sandbox = answer(client.inspect(named(name)).await)?.sandbox;
    if let Some(reason) = sandbox.as_ref().and_then(|sandbox| failure(sandbox, name)) {
        crate::complain(&anyhow!("{name} failed: {}", printable(reason)));
    }
    Ok(())
}

/// Returns the reason why a sandbox failed, or its container if `name` is POD/CONTAINER. Returns
/// `None` if it did not fail.
fn failure<'a>(sandbox: &'a v1::Sandbox, name: &str) -> Option<&'a str> {
    let (state, reason) = match name.split_once('/') {
        None => (&sandbox.state, &sandbox.reason),
        Some((_, name)) => {
            let container = sandbox.containers.iter().find(|one| one.name == name)?;
            (&container.state, &container.reason)
        }
    };
    (state == "failed").then_some(reason.as_str())
}

/// Puts the time before each line that begins in this record.
fn stamp(record: &v1::LogRecord, fresh_line: &mut bool) -> Vec<u8> {
    let time = utc(record.time_ns);
    let mut text = Vec::with_capacity(record.data.len() + 64);
    for line in record.data.split_inclusive(|byte| *byte == b'\n') {
        if *fresh_line {
            text.extend(time.as_bytes());
            text.push(b' ');
        }
        text.extend(line);
        *fresh_line = line.ends_with(b"\n");
    }
    text
}

/// Formats a time by RFC 3339 in UTC, to the microsecond.
fn utc(time_ns: u64) -> String {
    let (seconds, micros) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000 / 1000);
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days since the epoch, by whole 400-year cycles counted from a March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failure_of_a_container_is_not_that_of_its_pod() {
        let container = v1::Container {
            name: "web".into(),
            state: "failed".into(),
            reason: "no file".into(),
            ..Default::default()
        };
        let pod = v1::Sandbox {
            state: "running".into(),
            containers: vec![container],
            ..Default::default()
        };
        assert_eq!(failure(&pod, "pod/web"), Some("no file"));
        assert_eq!([failure(&pod, "pod"), failure(&pod, "pod/other")], [None; 2]);
    }

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(utc(951_782_400_000_000_000), "2000-02-29T00:00:00.000000Z");
        assert_eq!(utc(1_767_225_599_123_456_000), "2025-12-31T23:59:59.123456Z");
    }

    #[test]
    fn stamps_begin_lines_only() {
        let record =
            |data: &[u8]| v1::LogRecord { stream: 1, time_ns: 0, data: data.to_vec(), position: 0 };
        let mut fresh = true;
        assert!(stamp(&record(b"a"), &mut fresh).starts_with(b"1970"));
        assert_eq!(stamp(&record(b"b"), &mut fresh), b"b");
        assert_eq!(stamp(&record(b"\n"), &mut fresh), b"\n");
        assert!(fresh);
    }
}
