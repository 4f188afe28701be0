//! Images in a registry (OCI distribution specification), through `oci-client`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use futures_util::{Stream, StreamExt};
use oci_client::Reference as OciReference;
use oci_client::client::{ClientConfig, ClientProtocol, SizedStream};
use oci_client::errors::{DigestError, OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use tokio::sync::mpsc;

use super::{pump, reason};
use crate::{Digest, Error, Reference, Result, manifest};

/// Name and version in the registry's log.
const USER_AGENT: &str = concat!("slipway/", env!("CARGO_PKG_VERSION"));

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
    client: oci_client::Client,
    auth: RegistryAuth,
    reference: Reference,
}

impl Registry {
    pub(crate) fn new(reference: &Reference, access: &Access) -> Result<Self> {
        // The TLS library wants its cryptography chosen for the whole process. If the program has
        // done so already, its choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let plain = access.plain_http || reference.is_loopback();
        let mut config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(Duration::from_secs(15)),
            // Between two reads, not for the whole blob.
            read_timeout: Some(Duration::from_secs(60)),
            user_agent: USER_AGENT,
            platform_resolver: None,
            // Without TLS there are no certificates to check, and a machine without any must
            // still be able to use a registry of its own.
            accept_invalid_certificates: plain,
            ..ClientConfig::default()
        };
        if reference.is_loopback() {
            // A proxy of the environment must not see what stays on this machine: a proxy that is
            // set here replaces it, and then is not used for any host.
            config.http_proxy = Some("http://localhost".into());
            config.no_proxy = Some("*,0.0.0.0/0,::/0".into());
        }
        let client = oci_client::Client::try_from(config).map_err(|e| Error::Registry {
            registry: reference.registry().to_owned(),
            reason: format!("cannot set up a client ({})", reason(&e)),
        })?;
        let auth = match &access.credentials {
            Credentials::Anonymous => RegistryAuth::Anonymous,
            Credentials::Basic { user, password } => {
                RegistryAuth::Basic(user.clone(), password.clone())
            }
            Credentials::Bearer(token) => RegistryAuth::Bearer(token.clone()),
        };
        Ok(Self { client, auth, reference: reference.clone() })
    }

    fn target(&self, digest: Option<&Digest>) -> OciReference {
        let registry = self.reference.registry().to_owned();
        let repository = self.reference.repository().to_owned();
        match (digest.or(self.reference.digest()), self.reference.tag()) {
            (Some(digest), _) => {
                OciReference::with_digest(registry, repository, digest.to_string())
            }
            (None, tag) => {
                OciReference::with_tag(registry, repository, tag.unwrap_or("latest").to_owned())
            }
        }
    }

    /// The document with this digest, or else what the reference names; checked.
    pub(crate) async fn manifest(&self, digest: Option<&Digest>) -> Result<Vec<u8>> {
        let target = self.target(digest);
        let accepted = manifest::accepted();
        let answer = self.client.pull_manifest_raw(&target, &self.auth, &accepted).await;
        let (bytes, announced) = answer.map_err(|e| self.error(e, "the image's manifest"))?;
        let actual = Digest::of(&bytes);
        let expected = match digest.or(self.reference.digest()) {
            Some(digest) => *digest,
            None => announced.parse().unwrap_or(actual),
        };
        match actual == expected {
            true => Ok(bytes.to_vec()),
            false => {
                Err(Error::DigestMismatch { what: "the image's manifest".into(), expected, actual })
            }
        }
    }

    /// A blob of at most `size` bytes, not yet checked.
    pub(crate) async fn blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        let what = format!("blob {digest}");
        let name = digest.to_string();
        let stream = self.client.pull_blob_stream(&self.target(None), name.as_str()).await;
        let mut stream = unchecked(stream.map_err(|e| self.error(e, &what))?);
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|e| self.failure(reason(&e)))?;
            if (bytes.len() + chunk.len()) as u64 > size {
                let actual = (bytes.len() + chunk.len()) as u64;
                return Err(Error::SizeMismatch { what, expected: size, actual });
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Sends a blob into `sender` chunk by chunk.
    pub(crate) async fn feed(
        &self,
        digest: Digest,
        sender: mpsc::Sender<io::Result<Vec<u8>>>,
    ) -> Result<()> {
        let name = digest.to_string();
        let stream = self.client.pull_blob_stream(&self.target(None), name.as_str()).await;
        let stream = stream.map_err(|e| self.error(e, &format!("layer {digest}")))?;
        pump(unchecked(stream), sender).await.map_err(|reason| self.failure(reason))
    }

    fn failure(&self, reason: String) -> Error {
        Error::Registry { registry: self.reference.registry().to_owned(), reason }
    }

    /// Puts the client's many errors into the few that a user can act on.
    fn error(&self, error: OciDistributionError, what: &str) -> Error {
        use OciDistributionError as E;
        let not_found = || Error::NotFound(self.reference.familiar());
        let refused = || Error::Unauthorized {
            registry: self.reference.registry().to_owned(),
            reference: self.reference.familiar(),
        };
        match &error {
            E::ImageManifestNotFoundError(_) | E::ServerError { code: 404, .. } => not_found(),
            E::ServerError { code: 401 | 403, .. }
            | E::UnauthorizedError { .. }
            | E::AuthenticationFailure(_) => refused(),
            E::ServerError { code: 429, .. } => {
                self.failure("too many requests; wait or log in (docker login)".into())
            }
            E::ServerError { code, .. } => self.failure(format!("answers with HTTP status {code}")),
            E::RegistryError { envelope, .. } => match envelope.errors.first().map(|e| &e.code) {
                Some(
                    OciErrorCode::ManifestUnknown
                    | OciErrorCode::NameUnknown
                    | OciErrorCode::NotFound,
                ) => not_found(),
                Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => refused(),
                _ => self.failure(format!("refuses {what}: {envelope}")),
            },
            E::DigestError(DigestError::VerificationError { expected, actual }) => {
                match (expected.parse(), actual.parse()) {
                    (Ok(expected), Ok(actual)) => {
                        Error::DigestMismatch { what: what.to_owned(), expected, actual }
                    }
                    _ => self.failure(error.to_string()),
                }
            }
            E::RequestError(e) if e.is_connect() => {
                self.failure(format!("cannot be reached: {}", root_cause(e)))
            }
            E::RequestError(e) if e.is_timeout() => self.failure("does not answer in time".into()),
            _ => self.failure(reason(&error)),
        }
    }
}

/// The chunks of a blob. The client's stream compares digests at its end; whoever reads the blob
/// does so as well, and can also tell a blob that is too short from one that is wrong.
fn unchecked(stream: SizedStream) -> impl Stream<Item = io::Result<Vec<u8>>> + Unpin {
    let wrong_digest = |e: &io::Error| e.get_ref().is_some_and(|e| e.is::<DigestError>());
    stream
        .take_while(move |chunk| std::future::ready(!chunk.as_ref().is_err_and(wrong_digest)))
        .map(|chunk| chunk.map(|bytes| bytes.to_vec()))
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
