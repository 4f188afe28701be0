//! The sandboxes' interface, as gRPC on the daemon's Unix socket: all that a front end without a
//! daemon of its own needs. The definition with its comments is `proto/sandbox.proto`.
//!
//! Dependencies: `tonic` and `prost` speak gRPC; `slipway-plane-api` connects to the daemon, whose
//! socket both services share, and has the names of pods' functions; `tokio` and `rustix` carry
//! connections in [`forward`]; `rustix` and `thiserror` are for [`copies`].

pub mod capabilities;
pub mod copies;
pub mod forward;
pub mod images;
pub mod stop;

pub use slipway_plane_api::{connect, functions};

/// The messages, the client and the server of the sandbox service.
// Generated; the comments are in the .proto file, and only a stream's first message is large.
#[allow(missing_docs, clippy::large_enum_variant)]
pub mod v1 {
    tonic::include_proto!("slipway.sandbox.v1");
}

/// A client of the sandbox service.
pub type SandboxClient = v1::sandboxes_client::SandboxesClient<tonic::transport::Channel>;

/// A client of the service for templates.
pub type TemplateClient = v1::templates_client::TemplatesClient<tonic::transport::Channel>;

/// A client of the service for snapshots.
pub type SnapshotClient = v1::snapshots_client::SnapshotsClient<tonic::transport::Channel>;
