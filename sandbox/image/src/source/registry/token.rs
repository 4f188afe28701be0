//! Authorization for a registry that requires it: a token of the service that the registry names
//! (distribution project, *Token Authentication Specification*), or user name and password.

use base64::Engine;
use http_auth::ChallengeParser;
use reqwest::header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Client, StatusCode, Url};
use serde::Deserialize;

use super::Credentials;
use super::http::{self, Failure, FetchForm};

/// The most bytes of a token service's answer. Tokens with many rights have some tens of KiB.
const TOKEN_BYTES: u64 = 1 << 20;

/// The reason why no authorization could be obtained.
pub(super) enum Error {
    /// The registry requires credentials that the user has not, or its token service refuses them.
    Refused,
    Failed(reqwest::Error),
    /// The answer is invalid; the reason.
    Bad(String),
}

/// A registry's challenge in an answer with status 401.
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

/// The answer of a token service.
#[derive(Deserialize)]
struct Answer {
    token: Option<String>,
    access_token: Option<String>,
}

/// A request for authorization: the client, the credentials and the repository.
pub(super) struct TokenRequest<'a> {
    pub http: &'a Client,
    pub credentials: &'a Credentials,
    pub repository: &'a str,
}

impl TokenRequest<'_> {
    /// Returns the authorization that the headers of an answer with status 401 require.
    pub(super) async fn answer(&self, headers: &HeaderMap) -> Result<HeaderValue, Error> {
        match challenge(headers).ok_or(Error::Refused)? {
            Challenge::Basic => self.basic()?.ok_or(Error::Refused),
            Challenge::Bearer { realm, service } => self.token(&realm, service.as_deref()).await,
        }
    }

    fn basic(&self) -> Result<Option<HeaderValue>, Error> {
        let Credentials::Basic { user, password } = self.credentials else { return Ok(None) };
        let text = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
        http::secret(&format!("Basic {text}")).map(Some).map_err(Error::Bad)
    }

    async fn token(&self, realm: &str, service: Option<&str>) -> Result<HeaderValue, Error> {
        // The user's own token was refused, and there is no other.
        if matches!(self.credentials, Credentials::Bearer(_)) {
            return Err(Error::Refused);
        }
        let bad = |what: &str| Error::Bad(format!("its token service {what}"));
        let mut url = Url::parse(realm).map_err(|_| bad("has no address"))?;
        let scope = format!("repository:{}:pull", self.repository);
        url.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = service {
            url.query_pairs_mut().append_pair("service", service);
        }
        let login = self.basic()?;
        let answer = http::get(self.http, url, FetchForm::Whole, login.as_ref()).await;
        let answer = answer.map_err(Error::Failed)?;
        match answer.status() {
            StatusCode::OK => {}
            status if status.is_client_error() => return Err(Error::Refused),
            status => return Err(bad(&format!("answers with HTTP status {}", status.as_u16()))),
        }
        let bytes = http::body(answer, TOKEN_BYTES).await.map_err(|e| match e {
            Failure::TooLong => bad(&format!("sends more than {TOKEN_BYTES} bytes")),
            Failure::Transport(e) => Error::Failed(e),
        })?;
        // Serde's message is left out, since it may contain parts of the token.
        let answer: Answer = serde_json::from_slice(&bytes).map_err(|_| bad("sends no token"))?;
        let token = answer.token.or(answer.access_token).ok_or_else(|| bad("sends no token"))?;
        http::secret(&format!("Bearer {token}")).map_err(Error::Bad)
    }
}

/// Returns the challenge in the headers, preferably the one for a token. Returns `None` if there is
/// none.
fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let mut basic = None;
    for value in headers.get_all(WWW_AUTHENTICATE) {
        let Ok(text) = value.to_str() else { continue };
        for one in ChallengeParser::new(text).filter_map(Result::ok) {
            if one.scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Challenge::Basic);
            }
            let value = |key: &str| {
                let found = one.params.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
                found.map(|(_, value)| value.to_unescaped())
            };
            if one.scheme.eq_ignore_ascii_case("bearer")
                && let Some(realm) = value("realm")
            {
                return Some(Challenge::Bearer { realm, service: value("service") });
            }
        }
    }
    basic
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&'static str]) -> Option<Challenge> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(WWW_AUTHENTICATE, HeaderValue::from_static(value));
        }
        challenge(&headers)
    }

    #[test]
    fn a_token_is_preferred_and_garbage_is_nothing() {
        let bearer = r#"Bearer realm="https://a.example/t",service="r",scope="x""#;
        for values in [&[bearer][..], &["Basic realm=\"x\"", bearer]] {
            let Some(Challenge::Bearer { realm, service }) = of(values) else {
                panic!("{values:?}")
            };
            assert_eq!((realm.as_str(), service.as_deref()), ("https://a.example/t", Some("r")));
        }
        assert!(matches!(of(&["Basic realm=\"x\""]), Some(Challenge::Basic)));
        for nothing in [&[][..], &["Bearer service=\"r\""], &["\"", ",,,"], &["Digest realm=\"x\""]]
        {
            assert!(of(nothing).is_none(), "{nothing:?}");
        }
    }
}
