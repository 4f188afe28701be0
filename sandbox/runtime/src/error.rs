//! Errors of operations on sandboxes: one clear line each, with the next step where there is one.
//!
//! A new error is a variant of `Error` whose text says what is wrong and, after a semicolon, the
//! next step; text of a guest or a VMM is cut and made printable (`slipway_printable::line`).
//! `code` gives it the gRPC code, by which callers decide: the list of codes of each call is in
//! `sandbox.proto`. The CLI prints the text as it is and ends with status 1, or 125 where a
//! container's status is that of the command (`failure` of `front/cli/src/lib.rs`).
//! `front/shim` passes on the text. `tests/e2e/50-bad-input.sh` holds lines that users see.

use std::path::PathBuf;

use slipway_hypervisor::VmExit;
use tonic::{Code, Status};

/// The most characters that are kept of a message from a guest or a VMM.
pub(crate) const MOST_MESSAGE: usize = 512;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an operation on a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A settings file is invalid.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason why the file is invalid.
        reason: String,
    },
    /// The binary of a static program, a guest's or a VMM, was not found.
    #[error("{name} not found in {}; build it with `make build`",
        places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoProgram {
        /// The program's name.
        name: String,
        /// The paths that were tried.
        places: Vec<PathBuf>,
    },
    /// The sandbox's root cannot be shared, with the reason.
    #[error("its root cannot be shared: {0}")]
    SharedRoot(String),
    /// The sandbox's guest cannot report free pages, with the reason.
    #[error("its free pages cannot be given back: {0}")]
    FreePageReporting(String),
    /// No template has this name.
    #[error(
        "there is no template or snapshot \"{0}\"; `slipway template ls` and `slipway snapshot ls` \
         list them"
    )]
    NoTemplate(String),
    /// Another template has this name.
    #[error("there is a template or snapshot \"{0}\" already: choose another name, or remove it")]
    TemplateTaken(String),
    /// A template cannot be used for a sandbox, with the reason.
    #[error("the template \"{name}\" cannot be used: {why}")]
    Template {
        /// The template's name.
        name: String,
        /// The reason.
        why: String,
    },
    /// An argument of the caller's is invalid.
    #[error("{0}")]
    Invalid(String),
    /// Another sandbox has this name.
    #[error(
        "the name \"{name}\" is taken by sandbox {id}{}",
        if *.runs {
            format!(", which runs; `slipway rm --force {name}` ends and removes it")
        } else {
            format!("; `slipway rm {name}` removes it")
        }
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The id of the sandbox that has the name.
        id: String,
        /// That sandbox has not ended.
        runs: bool,
    },
    /// No sandbox has this name or id.
    #[error("there is no sandbox \"{0}\"; `slipway ps` lists them")]
    NoSandbox(String),
    /// Several sandboxes' ids begin with the given text.
    #[error("\"{0}\" is the beginning of several sandboxes' ids; give more of it")]
    Ambiguous(String),
    /// The image is not in the cache.
    #[error("the image \"{0}\" is not in the cache; `slipway image pull {0}` fetches it")]
    NoImage(String),
    /// The sandbox's state does not allow the operation.
    #[error("sandbox {name} is {state}: {advice}")]
    WrongState {
        /// The sandbox's name.
        name: String,
        /// The sandbox's state.
        state: String,
        /// The next step for the user.
        advice: String,
    },
    /// A sandbox's CPUs are not as many as was asked for, or its guest does not use them all.
    #[error(
        "sandbox {name} has {cpus} CPU{} now: {reason}",
        if *.cpus == 1 { "" } else { "s" }
    )]
    Cpus {
        /// The sandbox's name.
        name: String,
        /// The number of CPUs that its VMM has.
        cpus: u32,
        /// The step that failed.
        reason: String,
    },
    /// A sandbox's memory is not as large as was asked for.
    #[error("sandbox {name} has {} MiB of memory now: {reason}", .bytes >> 20)]
    Memory {
        /// The sandbox's name.
        name: String,
        /// The size of its memory in bytes.
        bytes: u64,
        /// The reason.
        reason: String,
    },
    /// All user ids for VMMs are in use.
    #[error("{0} sandboxes run already, the most that vmm_uid_count in the configuration allows")]
    Full(u32),
    /// The node keeps as many sandboxes as its limit allows.
    #[error("{0} sandboxes are kept, the most that there may be; `slipway rm` removes ended ones")]
    TooMany(usize),
    /// A sandbox's record would be larger than this limit, in bytes.
    #[error(
        "what is asked for takes more than {0} bytes to record; give it a shorter command line or \
         environment"
    )]
    TooLarge(usize),
    /// A sandbox has as many clients or sessions of one kind as its limit allows.
    #[error("sandbox {name} has {most} {what}, the most that there may be; end one of them first")]
    Busy {
        /// The sandbox's name.
        name: String,
        /// The kind of client or session, in the plural.
        what: &'static str,
        /// The limit.
        most: usize,
    },
    /// An operation on one of the daemon's own files failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The operation that failed ("cannot create", …).
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A control group cannot be made or changed.
    #[error(transparent)]
    Cgroup(slipway_cgroup::Error),
    /// A VMM's threads cannot run on the CPUs that its sandbox keeps to.
    #[error("its VMM cannot run on the CPUs {list}: {source}")]
    Placement {
        /// The list of CPUs.
        list: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A helper program failed.
    #[error("{program}: {reason}")]
    Tool {
        /// The program's name.
        program: String,
        /// The program's message, or the reason why it did not run.
        reason: String,
    },
    /// An error of the image cache.
    #[error(transparent)]
    Image(#[from] slipway_image::Error),
    /// An error of making the guest's initramfs.
    #[error(transparent)]
    Initramfs(#[from] slipway_initramfs::Error),
    /// An error of the hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] slipway_hypervisor::Error),
    /// The plane refused a request; its message.
    #[error("the plane: {0}")]
    Plane(String),
    /// The networks' service refused a request; its status.
    #[error("{}", .0.message())]
    Network(Box<Status>),
    /// The socket engine does not serve the sandbox.
    #[error("sockets by {}: {reason}", engine.display())]
    Sockets {
        /// The path of the engine's socket.
        engine: PathBuf,
        /// The cause.
        reason: String,
    },
    /// A preload library was not found.
    #[error("{name} not found in {}; build it with `make build`",
        places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoLibrary {
        /// The library's name.
        name: String,
        /// The paths that were tried.
        places: Vec<PathBuf>,
    },
    /// A call of the agent failed other than by a refusal, or the agent's answer is invalid.
    #[error("{0}")]
    Agent(String),
    /// The agent refused a request, so its guest runs; the agent's message.
    #[error("{0}")]
    Refused(String),
    /// The container's program cannot be executed.
    #[error("{reason}")]
    Exec {
        /// The exit status that a shell would use: 127 for not found, 126 for not executable.
        status: u32,
        /// The agent's message.
        reason: String,
    },
    /// The microVM ended unexpectedly; its last words.
    #[error("the microVM ended unexpectedly: {0}")]
    VmEnded(String),
    /// The daemon is ending.
    #[error("the node's daemon is ending; try again")]
    Closed,
    /// The sandbox was stopped or removed while it started.
    #[error("stopped before its container ran")]
    Stopped,
}

impl Error {
    /// Makes an error of the unexpected end of a microVM. The VMM's last output is untrusted, so it
    /// is cut and made printable.
    pub(crate) fn vm_ended(exit: &VmExit) -> Self {
        Self::VmEnded(slipway_printable::line(&exit.to_string(), MOST_MESSAGE))
    }

    /// Makes an error of a failed call of the agent, with its `reason`. The codes of refusals are
    /// those that the agent sends and a client never makes itself of a connection that broke
    /// (tonic, gRPC's *statuscodes*).
    pub(crate) fn of_agent(code: Code, reason: String) -> Self {
        match code {
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition => Self::Refused(reason),
            _ => Self::Agent(reason),
        }
    }

    /// Returns a closure for `map_err` that adds `what` and `path` to a failed file operation.
    pub(crate) fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// Makes an error of the plane's refusal.
    pub(crate) fn plane(status: Status) -> Self {
        Self::Plane(status.message().to_owned())
    }

    /// Converts the plane's answer to a request that removes something: it may be gone already.
    pub(crate) fn unless_gone<T>(answer: Result<T, Status>) -> Result<()> {
        match answer {
            Err(status) if status.code() != Code::NotFound => Err(Self::plane(status)),
            _ => Ok(()),
        }
    }

    /// Returns the status of a call that fails with this error.
    pub(crate) fn status(&self) -> Status {
        Status::new(self.code(), self.to_string())
    }

    fn code(&self) -> Code {
        match self {
            Self::Config { .. } | Self::Invalid(_) => Code::InvalidArgument,
            Self::NameTaken { .. } | Self::TemplateTaken(_) => Code::AlreadyExists,
            Self::NoSandbox(_) | Self::Ambiguous(_) | Self::NoImage(_) => Code::NotFound,
            Self::NoTemplate(_) => Code::NotFound,
            Self::Exec { .. } | Self::WrongState { .. } => Code::FailedPrecondition,
            Self::Template { .. } => Code::FailedPrecondition,
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
        error.status()
    }
}
