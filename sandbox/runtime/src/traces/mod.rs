//! Traces of calls, which are sent to a collector by OpenTelemetry's protocol (OTLP over gRPC).
//!
//! Calls and stages of starts put their spans into a bounded queue ([`Queue`]) and go on. One task
//! takes them out in batches and sends them, with a deadline for each batch. What finds the queue
//! full, or is not taken in time, is dropped and counted. Without a collector there is neither a
//! queue nor a task, and no span is made.
//!
//! Not implemented: TLS, OTLP over HTTP, repetition of a batch that was not taken.

mod collector;
mod message;

use std::sync::Arc;
use std::time::Duration;

use slipway_plane_api::trace;
use slipway_telemetry::trace::{Call, Queue, Tracer};
use tonic::transport::Channel;

use self::otlp::trace_service_client::TraceServiceClient;
use crate::error::MOST_MESSAGE;
use crate::{Error, v1};

pub use self::collector::Collector;

/// Messages, client and server of a collector's service; `proto/otlp.proto`.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod otlp {
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

/// The most spans that wait: those of a hundred starts at once.
const MOST_WAITING: usize = 2048;
/// The most spans of a message. With the longest texts it is far below the 4 MiB that receivers
/// take.
const BATCH: usize = 256;
/// The time for which spans are gathered, so that those of a start come together.
const GATHERING: Duration = Duration::from_millis(500);
/// The longest time that a collector may take for a batch, which is lost after that: longer than a
/// busy machine stands still. Further spans wait in the queue meanwhile.
const DEADLINE: Duration = Duration::from_secs(60);
/// The pause after a batch that was not taken.
const PAUSE: Duration = Duration::from_secs(5);

/// Starts the task that sends spans to `collector`, on the caller's runtime. Returns the source of
/// the spans, which makes none if there is no collector.
pub fn start(collector: Option<Collector>) -> Tracer {
    let Some(collector) = collector else { return Tracer::default() };
    let queue = Arc::new(Queue::new(MOST_WAITING));
    tokio::spawn(export(Arc::clone(&queue), collector));
    Tracer::new(queue)
}

/// Ends the span of a call.
pub(crate) fn end(call: &mut Call, failure: Option<&Error>) {
    let failure = failure.filter(|_| call.is_recorded()).map(Error::status);
    trace::end(call, failure.as_ref());
}

/// Returns the numbers of spans that were sent and dropped. `None` if there is no collector.
pub(crate) fn figures(tracer: &Tracer) -> Option<v1::TraceFigures> {
    let counts = tracer.queue()?.counts();
    Some(v1::TraceFigures { sent_spans: counts.sent, dropped_spans: counts.dropped })
}

/// Sends spans for as long as the daemon runs. Without spans it sleeps.
async fn export(queue: Arc<Queue>, collector: Collector) {
    let Collector { endpoint, service } = collector;
    let mut client = TraceServiceClient::new(endpoint.connect_lazy());
    let mut fails = false;
    loop {
        queue.filled().await;
        tokio::time::sleep(GATHERING).await;
        match send_all(&queue, &service, &mut client).await {
            Ok(()) => {
                if std::mem::take(&mut fails) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut fails, true) {
                    tracing::warn!(error, "the collector takes no spans; they are dropped");
                }
                tokio::time::sleep(PAUSE).await;
                // A connection whose peer went without a word would take batches for minutes.
                client = TraceServiceClient::new(endpoint.connect_lazy());
            }
        }
    }
}

/// Sends all spans that wait, batch by batch.
///
/// # Errors
/// The reason why the collector did not take a batch, which is lost.
async fn send_all(
    queue: &Queue,
    service: &str,
    client: &mut TraceServiceClient<Channel>,
) -> Result<(), String> {
    loop {
        let batch = queue.take(BATCH);
        if batch.is_empty() {
            return Ok(());
        }
        let count = batch.len() as u64;
        let request = message::request(service, batch);
        let reply = in_time(client.export(request)).await.map_err(|error| {
            queue.count_dropped(count);
            slipway_printable::line(&error, MOST_MESSAGE)
        })?;
        let rejected = reply.into_inner().partial_success.map_or(0, |part| part.rejected_spans);
        let rejected = u64::try_from(rejected).unwrap_or_default().min(count);
        queue.count_dropped(rejected);
        queue.count_sent(count - rejected);
    }
}

/// Returns what a call of the collector returns, within [`DEADLINE`].
///
/// # Errors
/// The text of the call's error; that the time is over.
async fn in_time<T>(call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, String> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(taken) => taken.map_err(|status| status.to_string()),
        Err(_) => Err(format!("no answer within {} s", DEADLINE.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_stands_still_for_half_a_minute_loses_nothing() {
        let answer = |seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok(seconds)
        };
        assert_eq!(in_time(answer(45)).await, Ok(45));
        assert_eq!(in_time(answer(600)).await, Err("no answer within 60 s".to_owned()));
    }

    #[tokio::test]
    async fn spans_for_which_no_collector_is_there_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let otlp_endpoint = format!("unix:{}", dir.path().join("nobody").display());
        let config = Config { otlp_endpoint, ..Config::default() };
        let tracer = start(Collector::find(&config, |_| None).unwrap());
        tracer.call("Run", None).end(None);
        let dropped = async {
            while figures(&tracer).unwrap().dropped_spans == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // Only a machine that stands still takes so long.
        tokio::time::timeout(Duration::from_secs(300), dropped).await.unwrap();
        assert_eq!(figures(&tracer).unwrap().sent_spans, 0);
        assert!(figures(&Tracer::default()).is_none());
    }
}
