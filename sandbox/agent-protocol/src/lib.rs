//! The protocol between the host and `slipway-agent`, PID 1 of a sandbox: gRPC over one
//! virtio-serial port. The definition with its comments is `proto/agent.proto`.
//!
//! This crate runs on both sides, so it uses nothing of Slipway's own.

/// The version of this protocol. An agent runs as long as its sandbox, whatever daemon comes after
/// the one that started it: a daemon of another version ends such a sandbox instead of adopting it.
pub const PROTOCOL: u32 = 3;

/// Name of the virtio-serial port: `/dev/virtio-ports/slipway.agent` in the guest.
pub const PORT_NAME: &str = "slipway.agent";

/// Metadata of an error status whose reason is the program itself: the exit status that the
/// command line is to end with, 127 (not found) or 126 (found, cannot be executed), in decimal.
pub const EXIT_STATUS_METADATA: &str = "slipway-exit-status";

/// HTTP/2 receive windows of the agent, in bytes. A process that does not read its input fills the
/// window of its own stream only: the connection's is as large as 64 of them, so that the calls
/// which would end such a process always get through (RFC 9113, section 5.2).
pub const STREAM_WINDOW: u32 = 256 << 10;
/// See [`STREAM_WINDOW`].
pub const CONNECTION_WINDOW: u32 = 64 * STREAM_WINDOW;

/// Most bytes of a reply that is not a message of a stream. A host takes no longer one: the call fails.
pub const MOST_REPLY: usize = 64 << 10;
/// Most bytes of a message of the Stdio stream: a piece of 64 KiB and what is around it.
pub const MOST_OUTPUT: usize = (64 << 10) + 64;
/// Most bytes of a message of the Trace stream.
pub const MOST_REPORT: usize = 256 << 10;
/// Most bytes of the headers of a reply, the message of an error among them (RFC 9113, section 10.5.1).
pub const MOST_HEADERS: u32 = 8 << 10;

/// The guest stages that a host records, each once.
pub const STAGES: [&str; 4] = ["kernel", "vf-driver", "agent", "network"];

/// Messages, client and server of the agent service.
#[allow(missing_docs, clippy::unwrap_used)] // generated; the comments are in the .proto file
pub mod v1 {
    tonic::include_proto!("slipway.agent.v1");
}
