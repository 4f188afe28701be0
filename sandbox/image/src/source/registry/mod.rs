//! Images in a registry (OCI distribution specification).
//!
//! `reqwest` carries the requests and `http-auth` reads challenges; what a registry's client does beyond
//! that is here, since a registry may be hostile and every answer needs its bounds: a document or an
//! error message is read up to its limit and no further, and within its time (`http`), a token likewise
//! (`token`). A layer is a stream that whoever reads it cuts off.

mod http;
mod token;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use reqwest::header::HeaderValue;
use reqwest::{Response, StatusCode, Url};
use tokio::sync::{Mutex, mpsc};

use super::reason;
use crate::{Digest, Error, Limits, Reference, Result, manifest};
use http::Failure;

/// What docker.io is called by its API.
const DOCKER_HUB: &str = "registry-1.docker.io";

/// How to approach a registry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// Who asks.
    pub credentials: Credentials,
    /// Speak HTTP without TLS. Always done with registries on this machine (see
    /// [`Reference::is_loopback`]); anywhere else whoever is on the way can swap an image that is
    /// not named by digest.
    pub plain_http: bool,
}

/// Who asks for an image.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// Nobody in particular.
    #[default]
    Anonymous,
    /// User name and password, given to the registry or to the token service it names.
    Basic {
        /// The user.
        user: String,
        /// The password or access token.
        password: String,
    },
    /// A token that the registry takes as it is.
    Bearer(String),
}

impl std::fmt::Debug for Credentials {
    /// Without secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { user, .. } => f.debug_struct("Basic").field("user", user).finish(),
            Self::Bearer(_) => f.write_str("Bearer"),
        }
    }
}

impl Access {
    /// What `docker login` has stored for the registry of `reference`, or anonymous access. Reads
    /// `auths` of `config.json` in `$DOCKER_CONFIG` or `~/.docker`; credential helpers are not run.
    pub fn from_docker_config(reference: &Reference) -> Self {
        let dir = std::env::var_os("DOCKER_CONFIG")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".docker")));
        let text = dir.and_then(|dir| std::fs::read_to_string(dir.join("config.json")).ok());
        let credentials = text.and_then(|text| stored_credentials(&text, reference.registry()));
        Self { credentials: credentials.unwrap_or_default(), plain_http: false }
    }
}

/// The entry of docker's config file for `registry`.
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

/// One image's registry.
pub(crate) struct Registry {
    http: reqwest::Client,
    /// Of the image's part of the API, with a slash at its end.
    base: Url,
    reference: Reference,
    credentials: Credentials,
    /// For the registry itself, as far as it has asked for one.
    authorization: Mutex<Option<HeaderValue>>,
    document_time: Duration,
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
            credentials: access.credentials.clone(),
            authorization: Mutex::new(authorization),
            document_time: limits.document_time,
        })
    }

    /// The document with this digest, or else what the reference names; at most `most` bytes, checked.
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
                let answer = self.get(&format!("manifests/{name}"), Some(&accept), WHAT).await?;
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

    /// A blob of at most `size` bytes, not yet checked.
    pub(crate) async fn blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        let what = format!("blob {digest}");
        self.in_time(async {
            let answer = self.get(&format!("blobs/{digest}"), None, &what).await?;
            self.body(answer, size, &what).await
        })
        .await
    }

    /// Sends a blob into `sender` chunk by chunk until it ends or nobody receives it any more.
    pub(crate) async fn feed(
        &self,
        digest: Digest,
        sender: mpsc::Sender<io::Result<Vec<u8>>>,
    ) -> Result<()> {
        let (path, what) = (format!("blobs/{digest}"), format!("layer {digest}"));
        let mut answer = self.in_time(self.get(&path, None, &what)).await?;
        loop {
            let chunk = match answer.chunk().await {
                Ok(None) => return Ok(()),
                Ok(Some(chunk)) => Ok(chunk.to_vec()),
                Err(e) => Err(self.error(e)),
            };
            let failure = chunk.as_ref().err().map(ToString::to_string);
            // A reader that is gone has reported why itself.
            let sent = sender.send(chunk.map_err(|e| io::Error::other(e.to_string()))).await;
            match (sent, failure) {
                (Err(_), _) => return Ok(()),
                (Ok(()), Some(reason)) => return Err(self.failure(reason)),
                (Ok(()), None) => {}
            }
        }
    }

    /// The answer with status 200 to a request for `path`, which the registry may ask to be authorised
    /// for once.
    async fn get(&self, path: &str, accept: Option<&str>, what: &str) -> Result<Response> {
        let url = self.base.join(path).map_err(|e| self.failure(e.to_string()))?;
        let mut used = self.authorization.lock().await.clone();
        let mut asked = false;
        loop {
            let answer = http::get(&self.http, url.clone(), accept, used.as_ref()).await;
            let answer = answer.map_err(|e| self.error(e))?;
            match answer.status() {
                StatusCode::OK => return Ok(answer),
                StatusCode::UNAUTHORIZED if !asked => {
                    asked = true;
                    used = Some(self.authorize(&answer, used.as_ref()).await?);
                }
                status => return Err(self.refusal(status, answer, what).await),
            }
        }
    }

    /// What a registry that answers 401 wants to see. `used` is what it was shown: if another request has
    /// got something newer meanwhile, that is it.
    async fn authorize(
        &self,
        answer: &Response,
        used: Option<&HeaderValue>,
    ) -> Result<HeaderValue> {
        let mut current = self.authorization.lock().await;
        if let Some(newer) = current.as_ref().filter(|newer| Some(*newer) != used) {
            return Ok(newer.clone());
        }
        let asking = token::Asking {
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

    /// The whole body, unless it is longer than `most` bytes.
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

    /// Gives `work` the time that a document has.
    async fn in_time<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match tokio::time::timeout(self.document_time, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.failure("does not answer in time".into())),
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
        // Addresses of redirects may have secrets in them.
        let error = error.without_url();
        if error.is_connect() {
            return self.failure(format!("cannot be reached: {}", root_cause(&error)));
        }
        match error.is_timeout() {
            true => self.failure("does not answer in time".into()),
            false => self.failure(reason(&error)),
        }
    }

    /// Puts the many ways to refuse a request into the few that a user can act on.
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

/// The last error of the chain: "Connection refused" and not what it kept from happening.
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
