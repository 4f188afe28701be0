//! What can go wrong with a sandbox: one clear line each, with the next step where there is one.

use std::path::PathBuf;

use slipway_hypervisor::VmExit;
use tonic::{Code, Status};

/// Most characters that are kept of what a guest or a VMM says.
pub(crate) const MOST_MESSAGE: usize = 512;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A settings file does not hold.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// The binary of a program that runs in guests is nowhere.
    #[error("{name} not found in {}; build it with `make build`",
        places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoGuestProgram {
        /// Its name.
        name: String,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// Something that the caller said makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// Another sandbox has this name.
    #[error("the name \"{name}\" is taken by sandbox {id}; `slipway rm {name}` removes it")]
    NameTaken {
        /// The name.
        name: String,
        /// Who has it.
        id: String,
    },
    /// No sandbox has this name or id.
    #[error("there is no sandbox \"{0}\"; `slipway ps` lists them")]
    NoSandbox(String),
    /// Several sandboxes' ids begin so.
    #[error("\"{0}\" is the beginning of several sandboxes' ids; give more of it")]
    Ambiguous(String),
    /// The image is not in the cache.
    #[error("the image \"{0}\" is not in the cache; `slipway image pull {0}` fetches it")]
    NoImage(String),
    /// The sandbox is not in a state for this.
    #[error("sandbox {name} is {state}: {advice}")]
    WrongState {
        /// The sandbox.
        name: String,
        /// Its state.
        state: String,
        /// What to do instead.
        advice: String,
    },
    /// All user ids for VMMs are in use.
    #[error("{0} sandboxes run already, the most that vmm_uid_count in the configuration allows")]
    Full(u32),
    /// The node keeps as many sandboxes as it may.
    #[error("{0} sandboxes are kept, the most that there may be; `slipway rm` removes ended ones")]
    TooMany(usize),
    /// A sandbox's record would be larger than this, in bytes.
    #[error(
        "what is asked for takes more than {0} bytes to record; give it a shorter command line or environment"
    )]
    TooLarge(usize),
    /// A sandbox has as many of something as it may have.
    #[error("sandbox {name} has {most} {what}, the most that there may be; end one of them first")]
    Busy {
        /// The sandbox.
        name: String,
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
    /// An operation on a file of ours failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was tried ("cannot create", …).
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A helper program failed.
    #[error("{program}: {reason}")]
    Tool {
        /// Its name.
        program: String,
        /// What it said, or why it did not run.
        reason: String,
    },
    /// The image cache.
    #[error(transparent)]
    Image(#[from] slipway_image::Error),
    /// The guest's initramfs.
    #[error(transparent)]
    Initramfs(#[from] slipway_initramfs::Error),
    /// The hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] slipway_hypervisor::Error),
    /// The plane refused.
    #[error("the plane: {0}")]
    Plane(String),
    /// The networks refused.
    #[error("{}", .0.message())]
    Network(Box<Status>),
    /// The socket engine did not serve the sandbox.
    #[error("sockets by {}: {reason}", engine.display())]
    Sockets {
        /// Its socket.
        engine: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A preload library is nowhere.
    #[error("{name} not found in {}; build it with `make build`",
        places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoLibrary {
        /// Its name.
        name: String,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// The agent did not answer as it should.
    #[error("{0}")]
    Agent(String),
    /// The container's program cannot be run.
    #[error("{reason}")]
    Exec {
        /// As a shell has it: 127 not found, 126 not executable.
        status: u32,
        /// The agent's words.
        reason: String,
    },
    /// The microVM ended by itself.
    #[error("the microVM ended unexpectedly: {0}")]
    VmEnded(String),
    /// The daemon ends.
    #[error("the node's daemon is ending; try again")]
    Closed,
    /// Stopped or removed while it started.
    #[error("stopped before its container ran")]
    Stopped,
}

impl Error {
    /// A microVM ended by itself. What it printed last is its own word.
    pub(crate) fn vm_ended(exit: &VmExit) -> Self {
        Self::VmEnded(slipway_printable::line(&exit.to_string(), MOST_MESSAGE))
    }

    /// A failed file operation; for `map_err`.
    pub(crate) fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    fn code(&self) -> Code {
        match self {
            Self::Config { .. } | Self::Invalid(_) => Code::InvalidArgument,
            Self::NameTaken { .. } => Code::AlreadyExists,
            Self::NoSandbox(_) | Self::Ambiguous(_) | Self::NoImage(_) => Code::NotFound,
            Self::Exec { .. } | Self::WrongState { .. } => Code::FailedPrecondition,
            Self::TooLarge(_) => Code::InvalidArgument,
            Self::Full(_) | Self::TooMany(_) | Self::Busy { .. } => Code::ResourceExhausted,
            Self::Network(status) => status.code(),
            Self::Closed => Code::Unavailable,
            Self::Sockets { .. } => Code::FailedPrecondition,
            _ => Code::Internal,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
