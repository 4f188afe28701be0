//! The protocol between the host and `slipway-agent`, PID 1 of a sandbox: gRPC over one
//! virtio-serial port. The definition with its comments is `proto/agent.proto`.
//!
//! This crate is used on both sides, so it depends on no other crate of Slipway.

pub mod limits;
pub mod sysctl;

/// The version of this protocol. An agent runs as long as its sandbox, also under daemons that come
/// after the one that started it. A daemon with another version ends such a sandbox instead of
/// adopting it.
pub const PROTOCOL: u32 = 3;

/// The name of the virtio-serial port: `/dev/virtio-ports/slipway.agent` in the guest.
pub const PORT_NAME: &str = "slipway.agent";

/// The metadata key of an error status that is due to the program itself. The value is the exit
/// status for the command line, in decimal: 127 (not found) or 126 (found, but not executable).
pub const EXIT_STATUS_METADATA: &str = "slipway-exit-status";

/// The HTTP/2 receive window of one stream of the agent, in bytes. A process that does not read its
/// input fills only the window of its own stream. The connection's window is as large as 64 of
/// them, so that calls that end such a process always get through (RFC 9113, section 5.2).
pub const STREAM_WINDOW: u32 = 256 << 10;
/// The HTTP/2 receive window of the agent's connection, in bytes; see [`STREAM_WINDOW`].
pub const CONNECTION_WINDOW: u32 = 64 * STREAM_WINDOW;

/// The size in bytes of the huge pages that containers can have.
pub const HUGE_PAGE: u64 = 2 << 20;

/// The most bytes of a reply that is not a message of a stream. If a reply is longer, the host's
/// call fails.
pub const MOST_REPLY: usize = 64 << 10;
/// The most bytes of a message of the Stdio stream: a piece of 64 KiB and its framing.
pub const MOST_OUTPUT: usize = (64 << 10) + 64;
/// The most bytes of a message of the Trace stream.
pub const MOST_REPORT: usize = 256 << 10;
/// The most bytes of the headers of a reply, including an error's message (RFC 9113, section
/// 10.5.1).
pub const MOST_HEADERS: u32 = 8 << 10;

/// The guest stages that a host records, each once.
pub const STAGES: [&str; 4] = ["kernel", "vf-driver", "agent", "network"];

/// The messages, the client and the server of the agent service.
#[allow(missing_docs, clippy::unwrap_used)] // generated; the comments are in the .proto file
pub mod v1 {
    tonic::include_proto!("slipway.agent.v1");
}
