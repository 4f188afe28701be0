//! A VF's record in the ledger.

use serde::{Deserialize, Serialize};

use crate::Owner;

/// The longest encoded record and the longest reason, in bytes.
const MOST: usize = 4096;
const REASON: usize = 1024;

/// The record of a VF that is not ready. A VF without a record is ready, or was never opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The standing.
    #[serde(flatten)]
    pub standing: Standing,
    /// The time of the last change, CLOCK_REALTIME, ns since the epoch.
    pub since_ns: u64,
}

/// The standing of a VF between two processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "standing", rename_all = "kebab-case")]
pub enum Standing {
    /// The owner has it, or was about to get it.
    Taken {
        /// The owner.
        owner: Owner,
    },
    /// It came back from an owner and is not reset yet.
    Returning,
    /// It left the pool for a reason.
    Failed {
        /// The reason.
        reason: String,
    },
    /// It was closed by request.
    Drained,
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut record = self.clone();
        if let Standing::Failed { reason } = &mut record.standing {
            let end = (0..=REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
            reason.truncate(end.unwrap_or(0));
        }
        serde_json::to_vec(&record).expect("a record has no map with keys that are not strings")
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MOST {
            return Err(format!("{} bytes are too many", bytes.len()));
        }
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_ledger() {
        let owner = Owner::new("sandbox", "4f1c").unwrap();
        let reason = "é".repeat(4000);
        let standings = [
            Standing::Taken { owner },
            Standing::Returning,
            Standing::Drained,
            Standing::Failed { reason },
        ];
        for standing in standings {
            let record = Record { standing, since_ns: 17 };
            let back = Record::decode(&record.encode()).unwrap();
            match (&back.standing, &record.standing) {
                (Standing::Failed { reason: cut }, Standing::Failed { reason }) => {
                    assert!(reason.starts_with(cut.as_str()) && cut.len() == REASON);
                }
                _ => assert_eq!(back, record),
            }
        }
        assert!(Record::decode(b"{}").is_err());
        assert!(Record::decode(&[b' '; MOST + 1]).is_err());
        assert!(
            Record::decode(br#"{"standing":"taken","owner":{"kind":"","id":"x"},"since_ns":1}"#)
                .is_err()
        );
    }
}
