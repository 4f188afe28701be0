//! Reasons why a call fails, by the codes that containerd tells apart.

use tonic::{Code, Status};

/// The most characters of foreign text in a message.
const MOST: usize = 300;

/// The reason why a call fails, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such snapshot.
    NotFound(String),
    /// There is one already.
    Exists(String),
    /// The snapshot's state does not allow it.
    Precondition(String),
    /// The request makes no sense.
    Invalid(String),
    /// It could not be done now.
    Unavailable(String),
    /// A system call or the ledger failed.
    Failed(String),
}

/// Result with this crate's [`Refusal`].
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    fn parts(&self) -> (Code, String) {
        match self {
            Self::NotFound(what) => (Code::NotFound, format!("{what} does not exist")),
            Self::Exists(what) => (Code::AlreadyExists, format!("{what} exists already")),
            Self::Precondition(why) => (Code::FailedPrecondition, why.clone()),
            Self::Invalid(why) => (Code::InvalidArgument, why.clone()),
            Self::Unavailable(why) => (Code::Unavailable, why.clone()),
            Self::Failed(why) => (Code::Internal, why.clone()),
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.parts().1)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let (code, message) = refusal.parts();
        Self::new(code, message)
    }
}

/// Makes foreign text safe for a message: one line, of bounded length, without control characters.
pub fn shown(text: &str) -> String {
    slipway_printable::line(text, MOST)
}
