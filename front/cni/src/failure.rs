//! Errors as CNI defines them: a code, one line that says what is wrong, and the next step.
//!
//! A new code of this plugin is a variant of `Code` from 105 on, with a word in `docs/cni.md`,
//! "Operations". `daemon` makes codes of the daemon's gRPC codes, so an error that the daemon finds
//! has one there. `Outcome` decides what ADD undoes (`Operation::undo`). Tests: those of `daemon`
//! and `commands`, and `tests/e2e/76-cni.sh`.

use serde_json::{Value, json};

/// The codes of the CNI specification, section *Error*, and those of this plugin from 100 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The version of CNI is not spoken here.
    Version = 1,
    /// A field of the configuration has a value that is not supported.
    Field = 2,
    /// The container is unknown.
    Unknown = 3,
    /// A necessary variable of the environment is missing or invalid.
    Environment = 4,
    /// The configuration cannot be read.
    Input = 5,
    /// The configuration cannot be decoded.
    Undecodable = 6,
    /// The configuration is invalid.
    Invalid = 7,
    /// The operation may succeed later.
    Later = 11,
    /// The network cannot be used.
    Unavailable = 50,
    /// The network cannot be used, and containers in it may have lost their connections.
    Disconnected = 51,
    /// The host cannot do it.
    Host = 100,
    /// The attachment or an address is taken.
    Taken = 101,
    /// The daemon failed.
    Daemon = 102,
    /// The IPAM plugin cannot be run, or its answer makes no sense.
    Ipam = 103,
    /// The attachment is not as it was made.
    Changed = 104,
}

/// The outcome of the call of the daemon that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call was refused or not made. Nothing was done.
    Refused,
    /// The daemon may have completed the call, or may still do so.
    Unknown,
    /// No daemon serves, or it ended during the call.
    Lost,
}

/// An error, as the runtime gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    code: u32,
    message: String,
    details: String,
    outcome: Outcome,
}

impl Failure {
    /// Makes an error from a text that says what is wrong and, after a semicolon, the next step.
    pub fn new(code: Code, text: impl AsRef<str>) -> Self {
        Self::with_code(code as u32, text.as_ref())
    }

    /// Makes an error with a code of another plugin's.
    pub fn with_code(code: u32, text: &str) -> Self {
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (message, details) = text.split_once("; ").unwrap_or((text, ""));
        let (message, details) = (one_line(message), one_line(details));
        Self { code, message, details, outcome: Outcome::Refused }
    }

    /// Returns the code.
    pub fn code(&self) -> u32 {
        self.code
    }

    /// Returns the error under another code.
    pub fn recoded(self, code: Code) -> Self {
        Self { code: code as u32, ..self }
    }

    /// Returns the error as one of a call with this outcome.
    pub fn with_outcome(self, outcome: Outcome) -> Self {
        Self { outcome, ..self }
    }

    /// Returns the error with another next step.
    pub fn with_next_step(self, step: &str) -> Self {
        Self { details: step.to_owned(), ..self }
    }

    /// Returns the outcome of the call.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns whether no daemon serves, or it ended during the call. A daemon that refuses, or
    /// answers too late, is there.
    pub fn lacks_daemon(&self) -> bool {
        self.outcome == Outcome::Lost
    }

    /// Returns the line that says what is wrong.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the JSON object that CNI defines, for a version of CNI.
    pub fn to_json(&self, version: &str) -> Value {
        json!({
            "cniVersion": version,
            "code": self.code,
            "msg": self.message,
            "details": self.details,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_and_its_next_step() {
        let failure = Failure::new(Code::Later, "no daemon\nserves; start\tit; or not");
        assert_eq!(
            failure.to_json("0.4.0"),
            json!({
                "cniVersion": "0.4.0", "code": 11, "msg": "no daemon serves",
                "details": "start it; or not",
            })
        );
    }
}
