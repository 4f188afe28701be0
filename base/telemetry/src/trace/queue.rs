//! Complete spans that wait for the task that sends them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use super::Span;

/// A queue of spans, which never makes who adds one wait: a span that finds it full is dropped.
#[derive(Debug)]
pub struct Queue {
    /// The most spans that wait.
    most: usize,
    waiting: Mutex<Waiting>,
    sent: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    spans: VecDeque<Span>,
    /// The task that waits for spans.
    taker: Option<Waker>,
}

/// The numbers of spans that have left a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Spans that a collector has taken.
    pub sent: u64,
    /// Spans that found the queue full, or that no collector took.
    pub dropped: u64,
}

impl Queue {
    /// Makes a queue in which at most `most` spans wait.
    pub fn new(most: usize) -> Self {
        let (sent, dropped) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { most, waiting: Mutex::default(), sent, dropped }
    }

    /// Adds a span, or drops it if the queue is full.
    pub fn push(&self, span: Span) {
        let mut waiting = self.lock();
        if waiting.spans.len() >= self.most {
            drop(waiting);
            return self.count_dropped(1);
        }
        waiting.spans.push_back(span);
        let taker = waiting.taker.take();
        drop(waiting);
        if let Some(taker) = taker {
            taker.wake();
        }
    }

    /// Waits until a span waits. One task at a time may do so.
    pub async fn filled(&self) {
        poll_fn(|context| {
            let mut waiting = self.lock();
            if !waiting.spans.is_empty() {
                return Poll::Ready(());
            }
            waiting.taker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Takes the oldest spans, at most `most`.
    pub fn take(&self, most: usize) -> Vec<Span> {
        let mut waiting = self.lock();
        let count = waiting.spans.len().min(most);
        waiting.spans.drain(..count).collect()
    }

    /// Counts spans that a collector has taken.
    pub fn count_sent(&self, spans: u64) {
        self.sent.fetch_add(spans, Ordering::Relaxed);
    }

    /// Counts spans that are lost.
    pub fn count_dropped(&self, spans: u64) {
        self.dropped.fetch_add(spans, Ordering::Relaxed);
    }

    /// Returns the numbers of spans that have left the queue.
    pub fn counts(&self) -> QueueCounts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        QueueCounts { sent: read(&self.sent), dropped: read(&self.dropped) }
    }

    /// Locks what waits; a panic of another thread leaves whole spans.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake};

    use super::*;
    use crate::trace::{SpanKind, TraceContext};

    fn span(name: &str) -> Span {
        Span {
            context: TraceContext::root(),
            parent: None,
            name: name.to_owned(),
            kind: SpanKind::Internal,
            start_ns: 1,
            end_ns: 2,
            attributes: Vec::new(),
            error: None,
        }
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let queue = Queue::new(2);
        for name in ["a", "b", "c", "d"] {
            queue.push(span(name));
        }
        assert_eq!(queue.counts(), QueueCounts { sent: 0, dropped: 2 });
        let taken = queue.take(1);
        assert_eq!(taken[0].name, "a", "the oldest are kept");
        queue.push(span("e"));
        let rest: Vec<_> = queue.take(9).into_iter().map(|span| span.name).collect();
        assert_eq!(rest, ["b", "e"]);
        queue.count_sent(3);
        assert_eq!(queue.counts(), QueueCounts { sent: 3, dropped: 2 });
        assert!(queue.take(9).is_empty());
    }

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_waits_is_woken_by_a_span() {
        let (queue, woken) = (Queue::new(2), Arc::new(Woken(AtomicBool::new(false))));
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let mut filled = pin!(queue.filled());
        assert!(filled.as_mut().poll(&mut context).is_pending());
        assert!(!woken.0.load(Ordering::Relaxed));
        queue.push(span("a"));
        assert!(woken.0.load(Ordering::Relaxed));
        assert!(filled.as_mut().poll(&mut context).is_ready());
    }
}
