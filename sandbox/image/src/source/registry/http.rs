//! HTTP requests, and answers that are read up to a limit.

use std::fmt;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_RANGE, HeaderValue, RANGE};
use reqwest::{Client, Response, Url};
use serde::Deserialize;

use crate::Digest;

/// Name and version of the client, for the registry's log.
const USER_AGENT: &str = concat!("slipway/", env!("CARGO_PKG_VERSION"));
/// The most bytes of an error's body that are read.
const ERROR_BYTES: u64 = 64 << 10;
/// The timeout for establishing a connection.
const CONNECT: Duration = Duration::from_secs(15);

/// Makes a client for one registry and the hosts that it redirects to. `stall` is the longest time
/// between two reads.
pub(super) fn client(plain: bool, loopback: bool, stall: Duration) -> reqwest::Result<Client> {
    // The TLS library requires that its cryptography is chosen for the whole process. If the
    // program has chosen already, its choice stands.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .read_timeout(stall)
        // Neither a redirect nor a token service may lead credentials and layers out of TLS.
        .https_only(!plain)
        // Without TLS there are no certificates to check. A machine without any CA certificates
        // must still be able to use its own registry.
        .tls_danger_accept_invalid_certs(plain);
    // A proxy of the environment must not see traffic that stays on this machine.
    if loopback { builder.no_proxy().build() } else { builder.build() }
}

/// Makes a header value that no message shows.
pub(super) fn secret(text: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(text);
    let mut value = value.map_err(|_| "the credentials are no text for a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// The part and the form of a resource that a request asks for.
#[derive(Clone, Copy)]
pub(super) enum FetchForm<'a> {
    /// The resource as it is.
    Whole,
    /// The resource in one of these media types, comma-separated.
    Types(&'a str),
    /// The bytes from the first to the second offset, both included.
    Range(u64, u64),
}

/// Sends a request. The body of the answer is not read yet.
pub(super) async fn get(
    client: &Client,
    url: Url,
    ask: FetchForm<'_>,
    authorization: Option<&HeaderValue>,
) -> reqwest::Result<Response> {
    let mut request = client.get(url);
    request = match ask {
        FetchForm::Whole => request,
        FetchForm::Types(types) => request.header(ACCEPT, types),
        FetchForm::Range(first, last) => request.header(RANGE, format!("bytes={first}-{last}")),
    };
    // The client does not send this header along if a redirect leads to another host.
    if let Some(value) = authorization {
        request = request.header(AUTHORIZATION, value.clone());
    }
    request.send().await
}

/// Returns the digest that a registry announces for its manifest. Returns `None` if it announces
/// none.
pub(super) fn announced_digest(answer: &Response) -> Option<Digest> {
    answer.headers().get("docker-content-digest")?.to_str().ok()?.parse().ok()
}

/// The reason why a body could not be read.
pub(super) enum Failure {
    /// The body is longer than its limit.
    TooLong,
    Transport(reqwest::Error),
}

/// Reads the body of an answer, at most `most` bytes. A longer body is not read to its end.
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

/// Returns the offset of the first byte of an answer with status 206 (RFC 9110, *Content-Range*).
/// Returns `None` if the answer does not say it.
pub(super) fn first_byte(answer: &Response) -> Option<u64> {
    let range = answer.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

/// Reads `bytes` bytes of the body of an answer after the first `skipped` ones, or fewer if the
/// body ends before. The rest is not read.
pub(super) async fn part(
    mut answer: Response,
    mut skipped: u64,
    bytes: u64,
) -> reqwest::Result<Vec<u8>> {
    let mut part = Vec::new();
    while (part.len() as u64) < bytes
        && let Some(chunk) = answer.chunk().await?
    {
        let skip = skipped.min(chunk.len() as u64);
        skipped -= skip;
        let chunk = &chunk[skip as usize..];
        let left = (bytes - part.len() as u64).min(chunk.len() as u64);
        part.extend_from_slice(&chunk[..left as usize]);
    }
    Ok(part)
}

/// The errors in the body of an answer (OCI distribution specification, *Error Codes*).
#[derive(Deserialize)]
struct Envelope {
    errors: Vec<RegistryError>,
}

/// One error that a registry reports.
#[derive(Deserialize)]
pub(super) struct RegistryError {
    pub code: String,
    #[serde(default)]
    message: Option<String>,
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{} ({message})", self.code),
            None => f.write_str(&self.code),
        }
    }
}

/// Returns the first error in an answer. Returns `None` if the answer has none in the common form,
/// or is too long.
pub(super) async fn error_in(answer: Response) -> Option<RegistryError> {
    let bytes = body(answer, ERROR_BYTES).await.ok()?;
    let envelope: Envelope = serde_json::from_slice(&bytes).ok()?;
    envelope.errors.into_iter().next()
}
