//! What somebody who starts a guest says of its socket function.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

/// Bytes of a description, at most.
const LARGEST: u64 = 4096;

/// A guest's socket function, as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// The guest's name, for people to read.
    pub name: String,
    /// Whom its programs belong to: functions of one tenant reach each other.
    pub tenant: String,
    /// Addresses that its programs may have, one to four.
    pub addresses: Vec<IpAddr>,
}

impl Function {
    /// As a message carries it: a memfd, and the bytes in it.
    pub(crate) fn to_file(&self) -> std::io::Result<(OwnedFd, u64)> {
        let json = serde_json::to_vec(self)?;
        let mut file: File =
            rustix::fs::memfd_create(c"socket-function", MemfdFlags::CLOEXEC)?.into();
        file.write_all(&json)?;
        Ok((file.into(), json.len() as u64))
    }

    /// What a message carried.
    ///
    /// # Errors
    /// Too long, not all there, or not what this version knows.
    pub fn from_file(file: OwnedFd, bytes: u64) -> std::io::Result<Self> {
        if bytes > LARGEST {
            return Err(Error::new(ErrorKind::InvalidData, "its description is too long"));
        }
        let file = File::from(file);
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        let mut json = Vec::new();
        file.take(bytes).read_to_end(&mut json)?;
        serde_json::from_slice(&json).map_err(|error| Error::new(ErrorKind::InvalidData, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_understood_and_nothing_else() {
        let (name, tenant) = ("web".to_owned(), "network:default".to_owned());
        let addresses = vec!["10.1.2.3".parse().unwrap(), "fd00::2".parse().unwrap()];
        let function = Function { name, tenant, addresses };
        let (file, bytes) = function.to_file().unwrap();
        let again = || file.try_clone().unwrap();
        assert_eq!(Function::from_file(again(), bytes).unwrap(), function);
        for length in [0, bytes - 1, LARGEST + 1] {
            assert!(Function::from_file(again(), length).is_err(), "{length}");
        }
        for json in
            [r#"{"name":"a","tenant":"b"}"#, r#"{"name":"a","tenant":"b","addresses":["x"]}"#]
        {
            let file = rustix::fs::memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&file, json.as_bytes()).unwrap();
            assert!(Function::from_file(file, json.len() as u64).is_err(), "{json}");
        }
    }
}
