//! The place to which requests over HTTP are sent.

use std::str::FromStr;

use hyper::Uri;

/// The place to which requests are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Host and port.
    pub authority: String,
    /// Path and query.
    pub path: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is no URL, as http://127.0.0.1:8080/");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let host = uri.host().filter(|_| uri.scheme_str() == Some("http")).ok_or_else(wrong)?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok(Self { authority: format!("{host}:{}", uri.port_u16().unwrap_or(80)), path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_urls_of_http() {
        for (text, authority, path) in [
            ("http://127.0.0.1:8080/", "127.0.0.1:8080", "/"),
            ("http://127.0.0.1:8080", "127.0.0.1:8080", "/"),
            ("http://[::1]:81/a?b=c", "[::1]:81", "/a?b=c"),
            ("http://host/", "host:80", "/"),
        ] {
            let target = Target { authority: authority.to_owned(), path: path.to_owned() };
            assert_eq!(text.parse(), Ok(target), "{text}");
        }
        for bad in ["", "127.0.0.1:8080", "https://host/", "/path", "http://", "a b"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }
}
