//! The description of a guest's socket function, by which its start is requested.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};

/// The most bytes of a description.
const LARGEST: u64 = 4096;

/// A guest's socket function, as it is requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// The guest's name, for people to read.
    pub name: String,
    /// The tenant of the guest's programs. Functions of one tenant reach each other.
    pub tenant: String,
    /// One to four addresses that the guest's programs may have.
    pub addresses: Vec<IpAddr>,
    /// The guest's memory, the only one that its VMM may hand over. With `None` it may hand over
    /// any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// A guest's memory: a file in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// The most bytes of the memory that are mapped at a time.
    pub bytes: u64,
    /// The file's `st_dev` of stat(2).
    pub device: u64,
    /// The file's `st_ino` of stat(2).
    pub inode: u64,
}

impl Function {
    /// Encodes the description as messages carry it: a sealed memfd, and the number of bytes in it.
    pub(crate) fn to_file(&self) -> std::io::Result<(OwnedFd, u64)> {
        let json = serde_json::to_vec(self)?;
        Ok((crate::sealed::write("socket-function", &json)?, json.len() as u64))
    }

    /// Decodes a description from a message. Never waits, whatever `file` is.
    ///
    /// # Errors
    /// `file` is no sealed memfd or has fewer than `bytes` bytes, the description is too long, or
    /// this version does not understand it.
    pub fn from_file(file: impl AsFd, bytes: u64) -> std::io::Result<Self> {
        crate::sealed::decode(file, bytes, LARGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_understood_and_nothing_else() {
        let (name, tenant) = ("web".to_owned(), "network:default".to_owned());
        let addresses = vec!["10.1.2.3".parse().unwrap(), "fd00::2".parse().unwrap()];
        let function = Function { name, tenant, addresses, memory: None };
        let (file, bytes) = function.to_file().unwrap();
        assert_eq!(Function::from_file(&file, bytes).unwrap(), function);
        for length in [0, bytes - 1, LARGEST + 1] {
            assert!(Function::from_file(&file, length).is_err(), "{length}");
        }
        for json in
            [r#"{"name":"a","tenant":"b"}"#, r#"{"name":"a","tenant":"b","addresses":["x"]}"#]
        {
            let file = crate::sealed::write("test", json.as_bytes()).unwrap();
            assert!(Function::from_file(file, json.len() as u64).is_err(), "{json}");
        }
    }
}
