//! Traces of calls: a caller's place in its trace, spans, and the queue of those that are complete.
//!
//! A [`Tracer`] begins the span of a call ([`Call`]), below the span of its caller
//! ([`TraceContext`]) if that is known. Parts of the call that were measured become spans below it
//! ([`Parent`]). Spans that are complete wait in a [`Queue`], which takes a bounded number and
//! makes nobody wait; some task takes them out and sends them. A tracer without a queue makes no
//! spans and allocates nothing.
//!
//! Sources: W3C, *Trace Context*, level 1; OpenTelemetry, *Tracing API*.
//!
//! Not implemented: events and links of spans, `tracestate`, sampling of own traces.

mod context;
mod queue;
mod span;
mod tracer;

pub use context::TraceContext;
pub use queue::{Queue, QueueCounts};
pub use span::{Span, SpanKind};
pub use tracer::{Call, Parent, Tracer};
