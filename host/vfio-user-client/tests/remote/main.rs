//! [`slipway_vfio_user_client::RemoteFunction`], with Slipway's server and with servers that lie.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed
#![allow(clippy::disallowed_methods, reason = "the tests are their own peers")]

mod common;
mod liar;
mod lies;
mod lost;
mod served;
