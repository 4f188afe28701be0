//! A plane and a networks' service that accept every call and reply with empty messages. Requests
//! to join a network wait until the gate is open.

use std::convert::Infallible;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::transport::Channel;

/// Serves the plane and the networks on the caller's runtime.
pub async fn serve(socket: &Path, gate: watch::Receiver<bool>) -> Channel {
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let router = tonic::transport::Server::builder()
        .add_service(Plane(gate.clone()))
        .add_service(Networks(gate));
    tokio::spawn(router.serve_with_incoming(incoming));
    slipway_plane_api::connect(socket).await.unwrap()
}

fn agreed() -> Response<Body> {
    // The body is one message without fields; the status is in the headers.
    Response::builder()
        .header("content-type", "application/grpc")
        .header("grpc-status", "0")
        .body(Body::new("\0\0\0\0\0".to_owned()))
        .unwrap()
}

macro_rules! silent {
    ($name:ident, $service:literal) => {
        #[derive(Clone)]
        struct $name(watch::Receiver<bool>);

        impl NamedService for $name {
            const NAME: &'static str = $service;
        }

        impl tower::Service<Request<Body>> for $name {
            type Response = Response<Body>;
            type Error = Infallible;
            type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
                Poll::Ready(Ok(()))
            }

            fn call(&mut self, request: Request<Body>) -> Self::Future {
                let waits = request.uri().path().ends_with("/Join");
                let mut gate = self.0.clone();
                Box::pin(async move {
                    if waits {
                        let _ = gate.wait_for(|open| *open).await;
                    }
                    Ok(agreed())
                })
            }
        }
    };
}

silent!(Plane, "slipway.plane.v1.Plane");
silent!(Networks, "slipway.network.v1.Networks");
