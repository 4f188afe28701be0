//! Names: a small server on the gateway's addresses of each network (RFC 1035).
//!
//! `zone` decides about a query from its bytes alone; `server` receives and sends; `upstream` asks
//! the host's own resolvers for other names. Nothing is cached: that is left to the host's
//! resolver.

mod server;
mod upstream;
mod zone;

pub use server::Server;
pub use zone::{Answer, Zone, answer, failure};

/// Longest message that is taken over UDP (RFC 6891, section 6.2.5 has this as the usual one).
const MAX_UDP: usize = 4096;
/// The name of the host for its sandboxes.
pub const HOST: &str = "host.slipway.internal";
/// The domain whose names this server alone answers.
const OURS: &str = "slipway.internal";
