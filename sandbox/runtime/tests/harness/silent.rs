//! A plane and a networks' service that accept every call and reply with empty messages.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::task::{Context, Poll};

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::transport::Channel;

/// Serves the plane and the networks on the caller's runtime.
pub async fn serve(socket: &Path) -> Channel {
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let router = tonic::transport::Server::builder().add_service(Plane).add_service(Networks);
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
        struct $name;

        impl NamedService for $name {
            const NAME: &'static str = $service;
        }

        impl tower::Service<Request<Body>> for $name {
            type Response = Response<Body>;
            type Error = Infallible;
            type Future = Ready<Result<Response<Body>, Infallible>>;

            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
                Poll::Ready(Ok(()))
            }

            fn call(&mut self, _: Request<Body>) -> Self::Future {
                ready(Ok(agreed()))
            }
        }
    };
}

silent!(Plane, "slipway.plane.v1.Plane");
silent!(Networks, "slipway.network.v1.Networks");
