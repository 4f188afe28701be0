//! Profiles of system calls, as the OCI runtime specification and docker write them, compiled to
//! the filters that Linux loads (seccomp(2)): classic BPF for x86-64.
//!
//! A [`Profile`] is read from JSON. [`Profile::compile`] resolves it to a decision for each number
//! of a system call (`rules`), which [`slipway_syscall_filter`] turns into a program.
//!
//! # What a profile means
//!
//! The meaning is libseccomp's, by which runc loads profiles. A rule without arguments counts for
//! all calls of its names, whatever other rules say; of several, the first. Among rules with
//! arguments, the first that holds decides. Several comparisons of one argument are alternatives;
//! comparisons of different arguments must all hold. Names that Linux does not have on x86-64 are
//! left out. As in runc, a call whose number is above all that the profile names fails with ENOSYS
//! unless the default allows it: a program that knows newer calls than the profile then uses older
//! ones.
//!
//! # Not implemented
//!
//! Programs of 32 bits: they are killed, whatever architectures a profile lists. Calls of x32 fail
//! with ENOSYS. `SCMP_ACT_NOTIFY` is refused, since no listener could be reached. `SCMP_ACT_TRACE`
//! is ENOSYS, its meaning without a tracer. Flags are ignored.
//!
//! # Dependencies
//!
//! `serde` reads profiles, `syscalls` has the numbers of system calls, `thiserror` writes errors.

mod profile;
mod rules;

pub use profile::{Arg, Filter, MinKernel, Operator, Profile, Rule};
use slipway_syscall_filter::MOST_INSTRUCTIONS;

/// The reason why a profile cannot be compiled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// An action is unknown.
    #[error("the seccomp profile has an unknown action {0:?}")]
    Action(String),
    /// The profile notifies a listener.
    #[error(
        "the seccomp profile notifies a listener, which a microVM cannot reach: leave \
         SCMP_ACT_NOTIFY out"
    )]
    Notify,
    /// An argument has an index above 5.
    #[error("the seccomp profile compares argument {0} of {1}: a system call has arguments 0 to 5")]
    Argument(u32, String),
    /// A rule is for a kernel that guests may not have.
    #[error(
        "a rule of the seccomp profile needs Linux {0}, which guests may not have: leave minKernel \
         out"
    )]
    Kernel(String),
    /// No program could be executed.
    #[error("the seccomp profile refuses execve, so no program can start under it")]
    Execve,
    /// The program has too many instructions.
    #[error("the seccomp profile is too large: more than {MOST_INSTRUCTIONS} instructions")]
    TooLarge,
}

impl Profile {
    /// Compiles the profile for a process that can have `capabilities`, such as "CAP_CHOWN", on
    /// which rules of docker's profiles depend. Returns the program: 8 bytes for each instruction,
    /// as the kernel's `sock_filter`, little-endian.
    ///
    /// # Errors
    /// [`Error`].
    pub fn compile(&self, capabilities: &[String]) -> Result<Vec<u8>, Error> {
        let program = rules::resolve(self, capabilities)?.assemble();
        if program.instructions().len() > MOST_INSTRUCTIONS {
            return Err(Error::TooLarge);
        }
        Ok(program.bytes())
    }
}
