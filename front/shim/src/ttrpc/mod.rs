//! ttrpc: containerd's RPC over Unix sockets, as far as a shim needs it. A call is one request and
//! one response; streams are refused, since no service of task version 2 has any.

pub mod client;
pub mod frame;
pub mod kept;
pub mod server;

/// The messages of ttrpc.
#[allow(missing_docs)] // generated; the comments are in the .proto file
pub mod v1 {
    tonic::include_proto!("slipway.shim.ttrpc");
}

use std::io;

use tonic::Code;

use crate::{names, store};

/// A call that failed: a code of gRPC, and one line for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code, by which containerd tells "not found" from other failures.
    pub code: Code,
    /// The message.
    pub message: String,
}

impl Failure {
    /// Makes a failure.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Makes the answer to a call that is refused since there is no record of `what`.
    pub fn unrecorded(what: &str, error: &io::Error) -> Self {
        let advice = match store::is_full(error) {
            true => format!("; free space in {}", names::SOCKETS),
            false => String::new(),
        };
        let message = format!("slipway: cannot keep a record of {what}: {error}{advice}");
        Self::new(Code::ResourceExhausted, message)
    }

    /// Makes the answer to a request that is not understood.
    pub fn invalid(reason: String) -> Self {
        Self::new(Code::InvalidArgument, reason)
    }

    /// Makes the answer to a request that microVMs do not serve.
    pub fn unimplemented(what: &str) -> Self {
        let message = format!("slipway: {what} is not implemented for microVMs");
        Self::new(Code::Unimplemented, message)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::new(Code::Unknown, message)
    }
}
