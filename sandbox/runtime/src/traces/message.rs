//! Spans as messages of OTLP.

use slipway_telemetry::trace::{self, Span};

use super::otlp::{
    AnyValue, ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans,
    ScopeSpans, Span as Message, SpanKind, Status, StatusCode, any_value,
};

/// Makes the message with the spans of this daemon, as those of the service `service`.
pub(super) fn request(service: &str, spans: Vec<Span>) -> ExportTraceServiceRequest {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let attributes = vec![
        attribute("service.name", service.to_owned()),
        attribute("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        attribute("host.name", host),
    ];
    let scope = InstrumentationScope {
        name: env!("CARGO_PKG_NAME").to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let spans = spans.into_iter().map(message).collect();
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes }),
            scope_spans: vec![ScopeSpans { scope: Some(scope), spans }],
        }],
    }
}

fn message(span: Span) -> Message {
    let Span { context, parent, name, kind, start_ns, end_ns, attributes, error } = span;
    let kind = match kind {
        trace::SpanKind::Server => SpanKind::Server,
        trace::SpanKind::Internal => SpanKind::Internal,
    };
    Message {
        trace_id: context.trace_id.to_vec(),
        span_id: context.span_id.to_vec(),
        parent_span_id: parent.map(|id| id.to_vec()).unwrap_or_default(),
        name,
        kind: kind.into(),
        start_time_unix_nano: start_ns,
        end_time_unix_nano: end_ns,
        attributes: attributes.into_iter().map(|(key, value)| attribute(key, value)).collect(),
        status: error.map(|message| Status { message, code: StatusCode::Error.into() }),
    }
}

fn attribute(key: &str, value: String) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value)) };
    KeyValue { key: key.to_owned(), value: Some(value) }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use slipway_telemetry::trace::TraceContext;

    use super::*;

    fn span() -> Span {
        Span {
            context: TraceContext { trace_id: [1; 16], span_id: [2; 8], sampled: true },
            parent: Some([3; 8]),
            name: "vmm".to_owned(),
            kind: trace::SpanKind::Internal,
            start_ns: 1 << 56,
            end_ns: u64::MAX,
            attributes: vec![("container.name", "one".to_owned())],
            error: Some("why".to_owned()),
        }
    }

    #[test]
    fn a_span_has_the_bytes_of_the_protocol() {
        let message = message(Span { attributes: Vec::new(), ..span() });
        // Each field has its number and its type before it (Protocol Buffers, *Encoding*).
        let fields: [&[u8]; 8] = [
            &[[0x0a, 16].as_slice(), &[1; 16]].concat(),
            &[[0x12, 8].as_slice(), &[2; 8]].concat(),
            &[[0x22, 8].as_slice(), &[3; 8]].concat(),
            b"\x2a\x03vmm",
            b"\x30\x01",
            b"\x39\0\0\0\0\0\0\0\x01",
            b"\x41\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x7a\x07\x12\x03why\x18\x02",
        ];
        assert_eq!(message.encode_to_vec(), fields.concat());
    }

    #[test]
    fn a_batch_has_the_service_and_its_spans() {
        let root = Span { parent: None, error: None, kind: trace::SpanKind::Server, ..span() };
        let request = request("node", vec![span(), root]);
        let source = &request.resource_spans[0];
        let service = attribute("service.name", "node".to_owned());
        assert_eq!(source.resource.as_ref().unwrap().attributes[0], service);
        let [part, root] = &source.scope_spans[0].spans[..] else { panic!("{source:?}") };
        assert_eq!(part.attributes, [attribute("container.name", "one".to_owned())]);
        assert_eq!((root.parent_span_id.len(), root.status.as_ref()), (0, None));
        assert_eq!((part.kind(), root.kind()), (SpanKind::Internal, SpanKind::Server));
    }
}
