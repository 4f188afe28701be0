//! A collector of traces, which a daemon in the same directory uses if it was there first.

use std::path::{Path, PathBuf};

use slipway_runtime::traces::otlp::trace_service_server::{TraceService, TraceServiceServer};
use slipway_runtime::traces::otlp::{ExportTraceServiceRequest, ExportTraceServiceResponse, Span};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// Returns the path of the collector's socket for a daemon in `dir`.
pub fn socket(dir: &Path) -> PathBuf {
    dir.join("otlp.sock")
}

struct Spans(mpsc::UnboundedSender<Span>);

#[tonic::async_trait]
impl TraceService for Spans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let sources = request.into_inner().resource_spans.into_iter();
        let scopes = sources.flat_map(|source| source.scope_spans);
        for span in scopes.flat_map(|scope| scope.spans) {
            // The test may have seen enough.
            let _ = self.0.send(span);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Serves a collector for a daemon in `dir`, on the caller's runtime. Returns the spans as they
/// come.
pub fn serve(dir: &Path) -> mpsc::UnboundedReceiver<Span> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let incoming = UnixListenerStream::new(UnixListener::bind(socket(dir)).unwrap());
    let service = TraceServiceServer::new(Spans(sender));
    let router = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(router.serve_with_incoming(incoming));
    receiver
}
