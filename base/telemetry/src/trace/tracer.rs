//! The source of spans.

use std::sync::Arc;

use super::span::text;
use super::{Queue, Span, SpanKind, TraceContext};
use crate::clock::{monotonic_ns, realtime_ns};

/// The source of a process's spans. One without a queue, as it is by default, makes none.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Queue>>);

impl Tracer {
    /// Makes a tracer whose spans go into `queue`.
    pub fn new(queue: Arc<Queue>) -> Self {
        Self(Some(queue))
    }

    /// Returns the queue. `None` if no spans are made.
    pub fn queue(&self) -> Option<&Queue> {
        self.0.as_deref()
    }

    /// Begins the span of a call. `caller` is the `traceparent` that came with it. Without one, or
    /// with one that is invalid, a trace begins. If the caller's span is not recorded, this one is
    /// not either.
    pub fn call(&self, name: &'static str, caller: Option<&[u8]>) -> Call {
        let Some(queue) = &self.0 else { return Call::default() };
        let caller = caller.and_then(TraceContext::parse);
        if caller.is_some_and(|caller| !caller.sampled) {
            return Call::default();
        }
        let start_ns = monotonic_ns();
        let span = Open {
            queue: Arc::clone(queue),
            context: caller.map_or_else(TraceContext::root, TraceContext::child),
            above: caller.map(|caller| caller.span_id),
            epoch_ns: realtime_ns().saturating_sub(start_ns),
            name,
            start_ns,
            attributes: Vec::new(),
        };
        Call(Some(Box::new(span)))
    }
}

/// The span of a call that has begun. A span that is dropped before [`Call::end`] ends as
/// cancelled. The default value belongs to a call that is not recorded, and does nothing.
#[derive(Debug, Default)]
pub struct Call(Option<Box<Open>>);

#[derive(Debug)]
struct Open {
    queue: Arc<Queue>,
    context: TraceContext,
    above: Option<[u8; 8]>,
    /// The time of the epoch's clock at zero of CLOCK_MONOTONIC, nanoseconds: one for all spans of
    /// a call, so that they keep their distances.
    epoch_ns: u64,
    name: &'static str,
    start_ns: u64,
    attributes: Vec<(&'static str, String)>,
}

impl Call {
    /// Returns whether the call is recorded.
    pub fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Adds an attribute, unless its value is empty.
    pub fn set(&mut self, name: &'static str, value: &str) {
        if let Some(open) = &mut self.0
            && !value.is_empty()
        {
            open.attributes.push((name, text(value)));
        }
    }

    /// Returns the place below which calls belong that follow from this one: its caller's, or its
    /// own if it has no caller. `None` if the call is not recorded.
    pub fn origin(&self) -> Option<TraceContext> {
        let open = self.0.as_ref()?;
        let span_id = open.above.unwrap_or(open.context.span_id);
        Some(TraceContext { span_id, ..open.context })
    }

    /// Puts a call without a caller below the place of a `traceparent`. To be done before the call
    /// is the parent of anything. A value that is invalid changes nothing.
    pub fn adopt(&mut self, value: &[u8]) {
        if let Some(open) = &mut self.0
            && open.above.is_none()
            && let Some(place) = TraceContext::parse(value)
        {
            (open.context, open.above) = (place.child(), Some(place.span_id));
        }
    }

    /// Returns the call as the parent of its parts.
    pub fn parent(&self) -> Parent {
        Parent(self.0.as_ref().map(|open| {
            let Open { queue, context, epoch_ns, .. } = &**open;
            Arc::new(Below { queue: Arc::clone(queue), context: *context, epoch_ns: *epoch_ns })
        }))
    }

    /// Ends the span now, with an error if there is one. Only the first end counts.
    pub fn end(&mut self, error: Option<&str>) {
        let Some(open) = self.0.take() else { return };
        let Open { queue, context, above, epoch_ns, name, start_ns, attributes } = *open;
        queue.push(Span {
            context,
            parent: above,
            name: name.to_owned(),
            kind: SpanKind::Server,
            start_ns: epoch_ns.saturating_add(start_ns),
            end_ns: epoch_ns.saturating_add(monotonic_ns().max(start_ns)),
            attributes,
            error: error.map(text),
        });
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(Some("cancelled"));
    }
}

/// A call as the parent of its parts, which may end later than the call does. The default is a call
/// that is not recorded.
#[derive(Clone, Debug, Default)]
pub struct Parent(Option<Arc<Below>>);

#[derive(Debug)]
struct Below {
    queue: Arc<Queue>,
    context: TraceContext,
    epoch_ns: u64,
}

impl Parent {
    /// Returns whether the call is recorded.
    pub fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Adds a part that is over. Its times are those of CLOCK_MONOTONIC, nanoseconds; an end before
    /// the beginning is set to that.
    pub fn add(&self, name: &str, start_ns: u64, end_ns: u64, error: Option<&str>) {
        let Some(below) = &self.0 else { return };
        below.queue.push(Span {
            context: below.context.child(),
            parent: Some(below.context.span_id),
            name: text(name),
            kind: SpanKind::Internal,
            start_ns: below.epoch_ns.saturating_add(start_ns),
            end_ns: below.epoch_ns.saturating_add(end_ns.max(start_ns)),
            attributes: Vec::new(),
            error: error.map(text),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: &[u8] = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn tracer() -> Tracer {
        Tracer::new(Arc::new(Queue::new(8)))
    }

    fn spans(tracer: &Tracer) -> Vec<Span> {
        tracer.queue().unwrap().take(8)
    }

    #[test]
    fn a_call_with_a_caller_is_below_it_and_has_its_parts_below() {
        let tracer = tracer();
        let mut call = tracer.call("Run", Some(CALLER));
        call.set("container.name", "one");
        call.set("container.image.name", "");
        let (parent, start_ns) = (call.parent(), monotonic_ns());
        parent.add("vmm", start_ns, start_ns + 1_000, None);
        call.end(None);
        call.end(Some("too late"));
        parent.add("network", start_ns + 9, start_ns, Some("no address"));
        drop(call);
        let spans = spans(&tracer);
        let [vmm, call, network] = &spans[..] else { panic!("{spans:?}") };
        let caller = TraceContext::parse(CALLER).unwrap();
        assert_eq!((call.context.trace_id, call.parent), (caller.trace_id, Some(caller.span_id)));
        assert_eq!((call.kind, call.error.as_deref()), (SpanKind::Server, None));
        assert_eq!(call.attributes, [("container.name", "one".to_owned())]);
        for part in [vmm, network] {
            assert_eq!(part.context.trace_id, caller.trace_id);
            assert_eq!((part.parent, part.kind), (Some(call.context.span_id), SpanKind::Internal));
        }
        assert_ne!(vmm.context.span_id, network.context.span_id);
        assert_eq!((vmm.name.as_str(), vmm.end_ns - vmm.start_ns), ("vmm", 1_000));
        assert!(call.start_ns <= vmm.start_ns && call.start_ns <= call.end_ns);
        assert_eq!((network.start_ns, network.start_ns - vmm.start_ns), (network.end_ns, 9));
        assert_eq!(network.error.as_deref(), Some("no address"));
    }

    #[test]
    fn a_trace_begins_without_a_valid_caller() {
        let tracer = tracer();
        for caller in [None, Some(&b"00-nothing"[..])] {
            tracer.call("Run", caller).end(Some("no image"));
        }
        let spans = spans(&tracer);
        assert_eq!(spans.len(), 2);
        assert!(spans.iter().all(|span| span.parent.is_none() && span.error.is_some()));
        assert_ne!(spans[0].context.trace_id, spans[1].context.trace_id);
    }

    #[test]
    fn a_call_without_a_caller_follows_from_another_one() {
        let tracer = tracer();
        let caller = TraceContext::parse(CALLER).unwrap();
        let mut first = tracer.call("Attach", Some(CALLER));
        assert_eq!(first.origin(), Some(caller));
        first.adopt(TraceContext::root().to_string().as_bytes());
        first.end(None);
        let mut second = tracer.call("Run", None);
        let own = second.origin().unwrap();
        second.adopt(b"nothing");
        assert_eq!(second.origin(), Some(own));
        second.adopt(CALLER);
        second.parent().add("vmm", 1, 2, None);
        second.end(None);
        let spans = spans(&tracer);
        let [first, part, second] = &spans[..] else { panic!("{spans:?}") };
        for call in [first, second] {
            let place = (call.context.trace_id, call.parent);
            assert_eq!(place, (caller.trace_id, Some(caller.span_id)), "{call:?}");
        }
        assert_eq!(part.parent, Some(second.context.span_id));
        assert_eq!(Call::default().origin(), None);
    }

    #[test]
    fn a_call_that_is_dropped_was_cancelled() {
        let tracer = tracer();
        drop(tracer.call("Run", None));
        assert_eq!(spans(&tracer)[0].error.as_deref(), Some("cancelled"));
    }

    #[test]
    fn calls_of_callers_that_are_not_recorded_are_not_either() {
        let (on, off) = (tracer(), Tracer::default());
        let unsampled = [&CALLER[..CALLER.len() - 1], b"0"].concat();
        for mut call in [on.call("Run", Some(&unsampled)), off.call("Run", Some(CALLER))] {
            assert!(!call.is_recorded() && !call.parent().is_recorded());
            call.set("container.name", "one");
            call.parent().add("vmm", 1, 2, None);
            call.end(None);
        }
        assert!(spans(&on).is_empty() && off.queue().is_none());
    }
}
