//! The plane's interface, as gRPC on the daemon's Unix socket: the only part of the plane that
//! `sandbox/` and `front/` see. The definition with its comments is `proto/plane.proto`.
//!
//! Dependencies: `tonic` and `prost` speak gRPC, `hyper-util` and `tower` carry it over a Unix
//! socket, `tokio` with `tokio-stream` runs it, `rustix` takes device numbers apart.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::server::Router;
use tonic::transport::{Channel, Endpoint as Address, Uri};

pub mod attachments;
pub mod device;
pub mod functions;
pub mod histogram;
pub mod trace;

/// Messages, client and server of the plane's service.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod v1 {
    tonic::include_proto!("slipway.plane.v1");
}

/// Messages, client and server of the networks' service; `proto/network.proto`.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod network_v1 {
    tonic::include_proto!("slipway.network.v1");
}

/// Messages, client and server of the service of virtual functions; `proto/vf.proto`.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod vf_v1 {
    tonic::include_proto!("slipway.vf.v1");
}

/// The HTTP/2 receive window of a stream of the daemon, in bytes. Input that its process does not
/// read fills the window of its own stream only, and leaves the connection to the calls beside it
/// (RFC 9113, section 5.2).
pub const STREAM_WINDOW: u32 = 256 << 10;
/// The HTTP/2 receive window of a connection of the daemon, in bytes: that of 64 streams.
pub const CONNECTION_WINDOW: u32 = 64 * STREAM_WINDOW;

/// A client of the plane.
pub type PlaneClient = v1::plane_client::PlaneClient<Channel>;

/// A client of the networks.
pub type NetworkClient = network_v1::networks_client::NetworksClient<Channel>;

/// A client of the virtual functions.
pub type VfClient = vf_v1::virtual_functions_client::VirtualFunctionsClient<Channel>;

/// The time between two attempts to connect to a daemon whose queue of connections is full.
const AGAIN: Duration = Duration::from_millis(20);
/// The longest time that a connection waits for room in the daemon's queue. Programs give up their
/// first connection sooner, and say why; a channel that connects again has no deadline but this.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Opens a gRPC channel to the daemon's socket. Waits while the daemon's queue of connections is
/// full, for at most 60 s: the daemon serves then, or was stopped. A channel whose connection broke
/// connects again with its next call, and waits as long for that.
///
/// # Errors
/// Nothing answers at `socket`.
pub async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = PathBuf::from(socket);
    // A Unix socket has no authority, but gRPC needs one.
    let address = Address::from_static("http://slipway.invalid");
    address
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { stream(&path).await.map(TokioIo::new) }
        }))
        .await
}

/// Connects to the socket at `path` once its listener's queue has room.
///
/// # Errors
/// The errors of connect(2); `TimedOut` if the queue has no room for [`LONGEST_WAIT`].
async fn stream(path: &Path) -> io::Result<UnixStream> {
    let waited = tokio::time::timeout(LONGEST_WAIT, stream_with_room(path)).await;
    waited.map_err(|_| {
        let seconds = LONGEST_WAIT.as_secs();
        let text = format!("its queue of connections was full for {seconds} s; is it stopped?");
        io::Error::new(io::ErrorKind::TimedOut, text)
    })?
}

/// Connects to the socket at `path` once its listener's queue has room, for which it waits without
/// a bound.
async fn stream_with_room(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            // EAGAIN: the queue is full (unix(7)).
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            connected => return connected,
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Opens a gRPC channel over a stream that is connected already. It lasts as long as the stream.
///
/// # Errors
/// The stream is closed.
pub async fn over<S>(stream: S) -> Result<Channel, tonic::transport::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let mut once = Some(stream);
    let address = Address::from_static("http://slipway.invalid");
    address
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let stream = once.take().map(TokioIo::new);
            async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe)) }
        }))
        .await
}

/// Serves `router` within this process, and opens a gRPC channel to it.
///
/// # Errors
/// The connection within this process fails.
pub async fn within(router: Router) -> Result<Channel, tonic::transport::Error> {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let incoming = tokio_stream::once(Ok::<_, io::Error>(theirs));
    tokio::spawn(router.serve_with_incoming(incoming));
    over(ours).await
}

/// Checks an id or a name that a request gives to an endpoint, a disk, a switch or a port: 1 to 64
/// ASCII letters, digits, `-`, `_` and `.`.
///
/// # Errors
/// A message that names the id and the rule.
pub fn check_id(id: &str) -> Result<(), String> {
    let fits = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if fits && (1..=64).contains(&id.len()) {
        return Ok(());
    }
    Err(format!("\"{id}\" is no id: 1 to 64 letters, digits, '-', '_' or '.'"))
}

#[cfg(test)]
mod id_tests {
    use super::check_id;

    #[test]
    fn ids_that_would_leave_a_directory_are_refused() {
        for bad in ["", "a/b", "ä", &"x".repeat(65)] {
            assert!(check_id(bad).is_err(), "{bad:?}");
        }
    }
}

#[cfg(test)]
mod connection_tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// The clock stands still but for what is waited for.
    #[tokio::test(start_paused = true)]
    async fn a_queue_that_stays_full_is_waited_for_until_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // A queue has room for one connection more than its backlog.
        rustix::net::listen(&listener, 0).unwrap();
        let first = stream(&path).await.unwrap();
        let begin = tokio::time::Instant::now();
        let late = stream(&path).await.unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");
        assert!(begin.elapsed() >= LONGEST_WAIT);
        assert!(connect(&path).await.is_err());
        drop((first, listener));
    }
}
