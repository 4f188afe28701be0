//! Traces across the daemon's interface: a call has its caller's place in a trace as the metadata
//! `traceparent` (W3C, *Trace Context*), and its span has the attributes of a gRPC server
//! (OpenTelemetry, *Semantic conventions for gRPC*).

use std::ffi::OsStr;

use slipway_telemetry::trace::{Call, TraceContext, Tracer};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Code, Request, Status};

/// The environment variable with the `traceparent` of the program that started this one.
pub const VARIABLE: &str = "TRACEPARENT";
/// The name of the metadata.
const METADATA: &str = "traceparent";

/// The names of gRPC's status codes, by their numbers.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The place in a trace of a program that calls the daemon. As an interceptor of a client it goes
/// with each call.
#[derive(Clone, Debug, Default)]
pub struct Caller(Option<MetadataValue<Ascii>>);

impl Caller {
    /// Makes the caller of the value of [`VARIABLE`]. A value that is invalid is left out, and the
    /// daemon begins a trace.
    pub fn of(value: Option<&OsStr>) -> Self {
        let context = value.and_then(|value| TraceContext::parse(value.as_encoded_bytes()));
        Self(context.and_then(|context| context.to_string().parse().ok()))
    }

    /// Makes the caller of this program's environment.
    pub fn of_environment() -> Self {
        Self::of(std::env::var_os(VARIABLE).as_deref())
    }

    /// Makes the request of a call of the daemon.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.add_to(&mut request);
        request
    }

    fn add_to<T>(&self, request: &mut Request<T>) {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert(METADATA, value.clone());
        }
    }
}

impl Interceptor for Caller {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        self.add_to(&mut request);
        Ok(request)
    }
}

/// Begins the span of a call that the daemon serves. `method` is the name of the service with its
/// package, a slash, and the name of the method.
pub fn call<T>(tracer: &Tracer, method: &'static str, request: &Request<T>) -> Call {
    let caller = request.metadata().get(METADATA).map(MetadataValue::as_encoded_bytes);
    let mut call = tracer.call(method, caller);
    call.set("rpc.system.name", "grpc");
    call.set("rpc.method", method);
    call
}

/// Ends the span of a call with its status; without one it succeeded.
pub fn end(call: &mut Call, failure: Option<&Status>) {
    let code = failure.map_or(Code::Ok, Status::code);
    let name = CODES.get(code as usize).copied().unwrap_or("UNKNOWN");
    call.set("rpc.response.status_code", name);
    if failure.is_some() {
        call.set("error.type", name);
    }
    call.end(failure.map(Status::message));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use slipway_telemetry::trace::{Queue, Span};

    use super::*;

    const VALUE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    /// Returns the span of a call with this request and outcome.
    fn span<T>(request: &Request<T>, failure: Option<&Status>) -> Span {
        let tracer = Tracer::new(Arc::new(Queue::new(1)));
        end(&mut call(&tracer, "slipway.Service/Run", request), failure);
        tracer.queue().unwrap().take(1).remove(0)
    }

    #[test]
    fn a_callers_place_goes_with_its_calls() {
        let mut caller = Caller::of(Some(OsStr::new(VALUE)));
        let context = TraceContext::parse(VALUE.as_bytes()).unwrap();
        let intercepted = caller.call(Request::new(())).unwrap();
        for request in [caller.request(()), intercepted] {
            let span = span(&request, None);
            assert_eq!(span.context.trace_id, context.trace_id);
            assert_eq!(span.parent, Some(context.span_id));
        }
        for invalid in [None, Some(OsStr::new("")), Some(OsStr::new("00-1-2-3\n"))] {
            let request = Caller::of(invalid).request(());
            assert!(request.metadata().is_empty());
            assert_eq!(span(&request, None).parent, None);
        }
    }

    #[test]
    fn a_span_has_the_status_of_its_call() {
        let request = Request::new(());
        let of = |span: &Span, name: &str| {
            let mut all = span.attributes.iter().filter(|(one, _)| *one == name);
            all.next().map(|(_, value)| value.clone())
        };
        let good = span(&request, None);
        assert_eq!(of(&good, "rpc.method").as_deref(), Some("slipway.Service/Run"));
        assert_eq!(of(&good, "rpc.response.status_code").as_deref(), Some("OK"));
        assert_eq!((of(&good, "error.type"), good.error), (None, None));
        for code in 1..CODES.len() {
            let code = Code::from_i32(i32::try_from(code).unwrap());
            let failed = span(&request, Some(&Status::new(code, "why")));
            // The name is gRPC's, and the enumeration has it in other letters.
            let name = format!("{code:?}").to_uppercase();
            let told = of(&failed, "rpc.response.status_code");
            assert_eq!(told.as_ref().map(|told| told.replace('_', "")), Some(name));
            assert_eq!(of(&failed, "error.type"), told);
            assert_eq!(failed.error.as_deref(), Some("why"));
        }
    }
}
