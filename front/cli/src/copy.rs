//! Parses `--copy`: `HOST:/PATH`.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use slipway_runtime::host_copies::Copies;
use slipway_runtime::v1;

/// The value of one `--copy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyArg {
    host: PathBuf,
    target: String,
}

/// Reads the files of all `--copy` of a run.
pub fn read(args: &[CopyArg]) -> Result<Vec<v1::File>> {
    let mut copies = Copies::default();
    for CopyArg { host, target } in args {
        // The error's text has its cause, which is not to be printed a second time.
        copies.add(host, target).map_err(anyhow::Error::msg)?;
    }
    Ok(copies.into_files())
}

impl FromStr for CopyArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(":/").filter(|(host, _)| !host.is_empty());
        let (host, path) = parts.ok_or_else(|| format!("\"{text}\": expected HOST:/PATH"))?;
        Ok(Self { host: host.into(), target: format!("/{path}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_a_host_and_a_container_path() {
        let copy: CopyArg = "a:b/c.conf:/etc/c.conf".parse().unwrap();
        let expected = CopyArg { host: "a:b/c.conf".into(), target: "/etc/c.conf".into() };
        assert_eq!(copy, expected);
        for text in ["", "/etc/hosts", ":/etc/hosts", "a:b", "a"] {
            assert!(text.parse::<CopyArg>().is_err(), "{text}");
        }
        let missing: CopyArg = "/no/such:/a".parse().unwrap();
        let error = format!("{:#}", read(&[missing]).unwrap_err());
        assert!(error.contains("/no/such") && error.matches("os error").count() == 1, "{error}");
    }
}
