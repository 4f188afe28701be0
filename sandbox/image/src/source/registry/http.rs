//! Requests and answers, each read up to a limit.

use std::fmt;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Client, Response, Url};
use serde::Deserialize;

use crate::Digest;

/// Name and version in the registry's log.
const USER_AGENT: &str = concat!("slipway/", env!("CARGO_PKG_VERSION"));
/// Longest body of an error that is looked at, bytes.
const ERROR_BYTES: u64 = 64 << 10;
/// For the connection itself.
const CONNECT: Duration = Duration::from_secs(15);

/// A client for one registry and where it redirects to. `stall` is the longest time between two reads.
pub(super) fn client(plain: bool, loopback: bool, stall: Duration) -> reqwest::Result<Client> {
    // The TLS library wants its cryptography chosen for the whole process. If the program has done so
    // already, its choice stands.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .read_timeout(stall)
        // Neither a redirect nor a token service may lead credentials and layers out of TLS.
        .https_only(!plain)
        // Without TLS there are no certificates to check, and a machine without any must still be able
        // to use a registry of its own.
        .tls_danger_accept_invalid_certs(plain);
    // A proxy of the environment must not see what stays on this machine.
    if loopback { builder.no_proxy().build() } else { builder.build() }
}

/// The value of a header that no message shows.
pub(super) fn secret(text: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(text);
    let mut value = value.map_err(|_| "the credentials are no text for a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// Sends a request. The body of the answer is not read yet.
pub(super) async fn get(
    client: &Client,
    url: Url,
    accept: Option<&str>,
    authorization: Option<&HeaderValue>,
) -> reqwest::Result<Response> {
    let mut request = client.get(url);
    if let Some(accept) = accept {
        request = request.header(ACCEPT, accept);
    }
    // Not sent along where a redirect leads to another host.
    if let Some(value) = authorization {
        request = request.header(AUTHORIZATION, value.clone());
    }
    request.send().await
}

/// The digest that a registry says its manifest has.
pub(super) fn announced_digest(answer: &Response) -> Option<Digest> {
    answer.headers().get("docker-content-digest")?.to_str().ok()?.parse().ok()
}

/// Why a body could not be had.
pub(super) enum Failure {
    /// It is longer than it may be.
    TooLong,
    Transport(reqwest::Error),
}

/// The body of an answer, at most `most` bytes. A longer one is not read to its end.
pub(super) async fn body(mut answer: Response, most: u64) -> Result<Vec<u8>, Failure> {
    if answer.content_length().is_some_and(|len| len > most) {
        return Err(Failure::TooLong);
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(Failure::Transport)? {
        if (bytes.len() + chunk.len()) as u64 > most {
            return Err(Failure::TooLong);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// The errors in the body of an answer (OCI distribution specification, *Error Codes*).
#[derive(Deserialize)]
struct Envelope {
    errors: Vec<Told>,
}

/// One of them.
#[derive(Deserialize)]
pub(super) struct Told {
    pub code: String,
    #[serde(default)]
    message: Option<String>,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{} ({message})", self.code),
            None => f.write_str(&self.code),
        }
    }
}

/// The first error that an answer tells. Returns `None` if it tells none in the common form, or too much.
pub(super) async fn error_in(answer: Response) -> Option<Told> {
    let bytes = body(answer, ERROR_BYTES).await.ok()?;
    let envelope: Envelope = serde_json::from_slice(&bytes).ok()?;
    envelope.errors.into_iter().next()
}
