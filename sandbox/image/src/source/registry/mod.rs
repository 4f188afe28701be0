//! Images in a registry (OCI distribution specification).
//!
//! `reqwest` carries the requests, and `http-auth` parses challenges. The rest of a registry's
//! client is here, since a registry may be hostile and every answer needs bounds. A document or an
//! error message is read up to its limit and within its time (`http`), and so is a token (`token`).
//! A layer is a stream, which its reader cuts off.
//!
//! A new way to log in is a variant of [`Credentials`], which [`Access::from_docker_config`] finds
//! for `slipway image`, `slipway fetch` and the snapshotter alike. It is sent by `authorize` here
//! or `token`, and never to another registry than its own; `Debug` prints no secret. Tests:
//! `src/tests/registry.rs` and `hostile_registry.rs`; `docs/images.md` and `docs/containerd.md`
//! ("logins") say whose logins count.

mod http;
mod origin;
mod pace;
mod token;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use reqwest::header::HeaderValue;
use reqwest::{Response, StatusCode, Url};
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;

use super::reason;
use crate::{Digest, Error, Limits, Reference, Result, manifest};
use http::{Failure, FetchForm};
pub(crate) use origin::Origin;
use pace::Pace;

/// The most bytes before a part of a blob that are read and dropped if the registry sends the whole
/// blob instead.
const MOST_SKIPPED: u64 = 16 << 20;
/// The bytes of a part of a blob that may take as long as a document.
const TIMED: u64 = 64 << 20;

/// The host of docker.io's API.
const DOCKER_HUB: &str = "registry-1.docker.io";

/// The credentials and the transport for a registry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// The credentials of the user.
    pub credentials: Credentials,
    /// Set to use HTTP without TLS. Registries on this machine are always used without TLS (see
    /// [`Reference::is_loopback`]). With other registries, anybody on the network path can then
    /// replace an image that is not named by digest.
    pub plain_http: bool,
}

/// Credentials for a registry.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// No credentials.
    #[default]
    Anonymous,
    /// User name and password, sent to the registry or to the token service that the registry
    /// names.
    Basic {
        /// The user name.
        user: String,
        /// The password or access token.
        password: String,
    },
    /// A token that is sent to the registry unchanged.
    Bearer(String),
}

impl std::fmt::Debug for Credentials {
    /// Prints no secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { user, .. } => f.debug_struct("Basic").field("user", user).finish(),
            Self::Bearer(_) => f.write_str("Bearer"),
        }
    }
}

impl Access {
    /// Returns access with the credentials that `docker login` has stored for the registry of
    /// `reference`, or anonymous access. Reads `auths` of `config.json` in `$DOCKER_CONFIG` or
    /// `~/.docker`; root's home is `/root` if `$HOME` is unset, as in services. Credential helpers
    /// are not run.
    pub fn from_docker_config(reference: &Reference) -> Self {
        let dir = std::env::var_os("DOCKER_CONFIG")
            .map(PathBuf::from)
            .or_else(|| home().map(|home| home.join(".docker")));
        let text = dir.and_then(|dir| std::fs::read_to_string(dir.join("config.json")).ok());
        let credentials = text.and_then(|text| stored_credentials(&text, reference.registry()));
        Self { credentials: credentials.unwrap_or_default(), plain_http: false }
    }
}

fn home() -> Option<PathBuf> {
    let set = std::env::var_os("HOME").map(PathBuf::from);
    set.or_else(|| rustix::process::geteuid().is_root().then(|| "/root".into()))
}

/// Returns the credentials in docker's config file for `registry`. Returns `None` if there are
/// none.
fn stored_credentials(config: &str, registry: &str) -> Option<Credentials> {
    let json: serde_json::Value = serde_json::from_str(config).ok()?;
    let auths = json.get("auths")?.as_object()?;
    let host = |key: &str| {
        let key = key.trim_start_matches("https://").trim_start_matches("http://");
        match key.split('/').next().unwrap_or(key) {
            "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
            host => host.to_owned(),
        }
    };
    let entry = auths.iter().find(|(key, _)| host(key) == registry)?.1;
    if let Some(token) = entry["registrytoken"].as_str() {
        return Some(Credentials::Bearer(token.to_owned()));
    }
    let bytes = base64::engine::general_purpose::STANDARD.decode(entry["auth"].as_str()?).ok()?;
    let (user, password) = std::str::from_utf8(&bytes).ok()?.split_once(':')?;
    Some(Credentials::Basic { user: user.to_owned(), password: password.to_owned() })
}

/// The client of one image's registry.
pub(crate) struct Registry {
    http: reqwest::Client,
    /// The URL of the image's part of the API, with a slash at its end.
    base: Url,
    reference: Reference,
    /// As in [`Access`].
    plain_http: bool,
    credentials: Credentials,
    /// The authorization for the registry itself, once the registry has requested one.
    authorization: Mutex<Option<HeaderValue>>,
    document_time: Duration,
    /// That of a layer, from its beginning.
    pace: Pace,
}

impl Registry {
    pub(crate) fn new(reference: &Reference, access: &Access, limits: &Limits) -> Result<Self> {
        let plain = access.plain_http || reference.is_loopback();
        let failed = |reason: String| Error::Registry {
            registry: reference.registry().to_owned(),
            reason: format!("cannot set up a client ({reason})"),
        };
        let http = http::client(plain, reference.is_loopback(), limits.stall_time);
        let host = match reference.registry() {
            "docker.io" => DOCKER_HUB,
            host => host,
        };
        let scheme = if plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{}/", reference.repository());
        let authorization = match &access.credentials {
            Credentials::Bearer(token) => {
                Some(http::secret(&format!("Bearer {token}")).map_err(failed)?)
            }
            _ => None,
        };
        Ok(Self {
            http: http.map_err(|e| failed(reason(&e)))?,
            base: Url::parse(&base).map_err(|e| failed(e.to_string()))?,
            reference: reference.clone(),
            plain_http: access.plain_http,
            credentials: access.credentials.clone(),
            authorization: Mutex::new(authorization),
            document_time: limits.document_time,
            pace: Pace::new(limits),
        })
    }

    /// Returns the image's repository.
    pub(crate) fn origin(&self) -> Origin {
        Origin { reference: self.reference.clone(), plain_http: self.plain_http }
    }

    /// Makes the error of a registry that has not answered within the caller's time.
    pub(crate) fn late(&self) -> Error {
        self.failure("does not answer in time".into())
    }

    /// Returns the document with this digest, or without a digest the one that the reference names.
    /// It has at most `most` bytes, and its digest is checked.
    pub(crate) async fn manifest(&self, digest: Option<&Digest>, most: u64) -> Result<Vec<u8>> {
        const WHAT: &str = "the image's manifest";
        let wanted = digest.or(self.reference.digest()).copied();
        let name = match wanted {
            Some(digest) => digest.to_string(),
            None => self.reference.tag().unwrap_or("latest").to_owned(),
        };
        let accept = manifest::accepted().join(", ");
        let (bytes, announced) = self
            .in_time(async {
                let path = format!("manifests/{name}");
                let answer = self.get(&path, FetchForm::Types(&accept), WHAT).await?;
                let announced = http::announced_digest(&answer);
                Ok((self.body(answer, most, WHAT).await?, announced))
            })
            .await?;
        let actual = Digest::of(&bytes);
        let expected = wanted.or(announced).unwrap_or(actual);
        match actual == expected {
            true => Ok(bytes),
            false => Err(Error::DigestMismatch { what: WHAT.to_owned(), expected, actual }),
        }
    }

    /// Returns a blob of at most `size` bytes, whose digest is not checked yet.
    pub(crate) async fn blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        let what = format!("blob {digest}");
        self.in_time(async {
            let answer = self.get(&format!("blobs/{digest}"), FetchForm::Whole, &what).await?;
            self.body(answer, size, &what).await
        })
        .await
    }

    /// Returns the `bytes` bytes from offset `from` on of a blob, which is not checked. No more of
    /// the blob is ever in memory.
    ///
    /// # Errors
    /// [`Error::Registry`] if the answer is not this part of the blob. A registry may answer with
    /// the whole blob, which does if the part is in its first 16 MiB.
    pub(crate) async fn blob_range(
        &self,
        digest: &Digest,
        from: u64,
        bytes: u64,
    ) -> Result<Vec<u8>> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let last = from.saturating_add(bytes - 1);
        let what = format!("bytes {from} to {last} of layer {digest}");
        let steps = u32::try_from(bytes / TIMED).unwrap_or(u32::MAX);
        let time = self.document_time.saturating_mul(steps.saturating_add(1));
        let part = self.within(time, async {
            let path = format!("blobs/{digest}");
            let answer = self.get(&path, FetchForm::Range(from, last), &what).await?;
            let is_part = answer.status() == StatusCode::PARTIAL_CONTENT;
            let skipped = if is_part { 0 } else { from };
            if is_part && http::first_byte(&answer) != Some(from) {
                return Err(self.failure(format!("sends another part than {what}")));
            }
            if skipped > MOST_SKIPPED {
                return Err(self.failure(format!("sends a whole layer instead of {what}")));
            }
            http::part(answer, skipped, bytes).await.map_err(|e| self.error(e))
        });
        let part = part.await?;
        match part.len() as u64 == bytes {
            true => Ok(part),
            false => Err(self.failure(format!("sends {} bytes as {what}", part.len()))),
        }
    }

    /// Sends a blob to `sender` chunk by chunk, until the blob ends or the receiver is dropped.
    pub(crate) async fn feed(
        &self,
        digest: Digest,
        sender: mpsc::Sender<io::Result<Vec<u8>>>,
    ) -> Result<()> {
        let (path, what) = (format!("blobs/{digest}"), format!("layer {digest}"));
        let mut answer = self.in_time(self.get(&path, FetchForm::Whole, &what)).await?;
        let mut pace = self.pace.clone();
        loop {
            let begun = Instant::now();
            let chunk = match answer.chunk().await {
                Ok(None) => return Ok(()),
                Ok(Some(chunk)) => match pace.goes_on(chunk.len(), begun.elapsed()) {
                    true => Ok(chunk.to_vec()),
                    false => Err(self.failure(format!("sends {what} too slowly ({pace})"))),
                },
                Err(e) => Err(self.error(e)),
            };
            let failure = chunk.as_ref().err().map(ToString::to_string);
            // A reader that is gone has reported its own error.
            let sent = sender.send(chunk.map_err(|e| io::Error::other(e.to_string()))).await;
            match (sent, failure) {
                (Err(_), _) => return Ok(()),
                (Ok(()), Some(reason)) => return Err(self.failure(reason)),
                (Ok(()), None) => {}
            }
        }
    }

    /// Requests `path` and returns the answer with status 200, or 206 if a range is asked for.
    /// Authorizes the request once if the registry requires it.
    async fn get(&self, path: &str, ask: FetchForm<'_>, what: &str) -> Result<Response> {
        let url = self.base.join(path).map_err(|e| self.failure(e.to_string()))?;
        let mut used = self.authorization.lock().await.clone();
        let mut asked = false;
        loop {
            let answer = http::get(&self.http, url.clone(), ask, used.as_ref()).await;
            let answer = answer.map_err(|e| self.error(e))?;
            match answer.status() {
                StatusCode::OK => return Ok(answer),
                StatusCode::PARTIAL_CONTENT if matches!(ask, FetchForm::Range(..)) => {
                    return Ok(answer);
                }
                StatusCode::UNAUTHORIZED if !asked => {
                    asked = true;
                    used = Some(self.authorize(&answer, used.as_ref()).await?);
                }
                status => return Err(self.refusal(status, answer, what).await),
            }
        }
    }

    /// Returns the authorization that a registry that answered 401 requires. `used` is the one that
    /// was sent: if another request has obtained a newer one meanwhile, that one is returned.
    async fn authorize(
        &self,
        answer: &Response,
        used: Option<&HeaderValue>,
    ) -> Result<HeaderValue> {
        let mut current = self.authorization.lock().await;
        if let Some(newer) = current.as_ref().filter(|newer| Some(*newer) != used) {
            return Ok(newer.clone());
        }
        let asking = token::TokenRequest {
            http: &self.http,
            credentials: &self.credentials,
            repository: self.reference.repository(),
        };
        let made = asking.answer(answer.headers()).await.map_err(|e| match e {
            token::Error::Refused => self.refused(),
            token::Error::Failed(failure) => self.error(failure),
            token::Error::Bad(reason) => self.failure(reason),
        })?;
        *current = Some(made.clone());
        Ok(made)
    }

    /// Reads the whole body. Returns an error if it is longer than `most` bytes.
    async fn body(&self, answer: Response, most: u64, what: &str) -> Result<Vec<u8>> {
        match http::body(answer, most).await {
            Ok(bytes) => Ok(bytes),
            Err(Failure::TooLong) => {
                let reason = format!("the registry sends more than the {most} bytes it may have");
                Err(Error::too_large(what, reason))
            }
            Err(Failure::Transport(e)) => Err(self.error(e)),
        }
    }

    /// Runs `work` within the time limit of a document.
    async fn in_time<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.within(self.document_time, work).await
    }

    /// Runs `work` for at most `time`.
    async fn within<T>(&self, time: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        match tokio::time::timeout(time, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.late()),
        }
    }

    fn failure(&self, reason: String) -> Error {
        Error::Registry { registry: self.reference.registry().to_owned(), reason }
    }

    fn refused(&self) -> Error {
        Error::Unauthorized {
            registry: self.reference.registry().to_owned(),
            reference: self.reference.familiar(),
        }
    }

    fn error(&self, error: reqwest::Error) -> Error {
        // URLs of redirects may contain secrets.
        let error = error.without_url();
        if error.is_connect() {
            return self.failure(format!("cannot be reached: {}", root_cause(&error)));
        }
        match error.is_timeout() {
            true => self.failure("does not answer in time".into()),
            false => self.failure(reason(&error)),
        }
    }

    /// Maps the many ways to refuse a request to the few errors that a user can act on.
    async fn refusal(&self, status: StatusCode, answer: Response, what: &str) -> Error {
        let told = http::error_in(answer).await;
        let code = told.as_ref().map(|told| told.code.as_str()).unwrap_or_default();
        match (status.as_u16(), code) {
            (_, "MANIFEST_UNKNOWN" | "NAME_UNKNOWN" | "NOT_FOUND") => {
                Error::NotFound(self.reference.familiar())
            }
            (_, "UNAUTHORIZED" | "DENIED") | (401 | 403, _) => self.refused(),
            (404, "") => Error::NotFound(self.reference.familiar()),
            (429, _) => self.failure("too many requests; wait or log in (docker login)".into()),
            (status, _) => match told {
                Some(told) => self.failure(format!("refuses {what}: {told}")),
                None => self.failure(format!("answers with HTTP status {status}")),
            },
        }
    }
}

/// Returns the message of the last error of the chain, such as "Connection refused".
fn root_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root_cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"auths":{
        "https://index.docker.io/v1/":{"auth":"dXNlcjpwYTpzcw=="},
        "localhost:5000":{"auth":"!"},
        "r.example.org":{"registrytoken":"t0"}}}"#;

    #[test]
    fn docker_login() {
        let basic = Credentials::Basic { user: "user".into(), password: "pa:ss".into() };
        assert_eq!(stored_credentials(CONFIG, "docker.io"), Some(basic));
        let bearer = Credentials::Bearer("t0".into());
        assert_eq!(stored_credentials(CONFIG, "r.example.org"), Some(bearer));
        assert_eq!(stored_credentials(CONFIG, "localhost:5000"), None);
        assert_eq!(stored_credentials(CONFIG, "elsewhere"), None);
        assert_eq!(stored_credentials("garbage", "docker.io"), None);
    }

    #[test]
    fn secrets_are_not_printed() {
        let basic = Credentials::Basic { user: "u".into(), password: "hidden".into() };
        let bearer = Credentials::Bearer("hidden".into());
        assert!(!format!("{basic:?}{bearer:?}").contains("hidden"));
    }
}
