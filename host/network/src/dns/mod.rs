//! Names: a small server on the gateway's addresses of each network (RFC 1035).
//!
//! `zone` decides what becomes of a query, on the query's bytes alone; `server` receives and sends;
//! `upstream` asks the host's own resolvers for what is not ours. Nothing is cached: the host's
//! resolver does that, if it is one that does.

mod server;
mod upstream;
mod zone;

pub use server::Server;
pub use zone::{Answer, Zone, answer, failure};

/// Longest message over UDP that is taken (RFC 6891, section 6.2.5 has this as the usual one).
const MAX_UDP: usize = 4096;
/// The name of the host for its sandboxes.
pub const HOST: &str = "host.slipway.internal";
/// What is below it is nobody else's.
const OURS: &str = "slipway.internal";
