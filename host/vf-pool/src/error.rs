//! Errors of the pool.

use crate::Owner;
use crate::ledger::LedgerError;
use crate::table::Counts;

/// The reason why the pool refuses a request. Nothing is held then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No VF is ready.
    #[error("pool {pool} has no VF ready: of {} {}", counts.all(), counts.unready())]
    Empty {
        /// The pool's name.
        pool: String,
        /// The number of VFs in each state.
        counts: Counts,
    },
    /// The VF that was asked for by its number is not ready.
    #[error("VF {vf} of pool {pool} is not ready: it is {state}")]
    Unready {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The VF's state in a word or two.
        state: &'static str,
    },
    /// The owner has a VF of the pool already.
    #[error("{owner} has VF {vf} of pool {pool} already; it is to be returned first")]
    Held {
        /// The pool's name.
        pool: String,
        /// The owner.
        owner: Owner,
        /// The VF.
        vf: u32,
    },
    /// The pool has no VF of this number.
    #[error("pool {pool} has no VF {vf}; it has {count}, from 0")]
    NoVf {
        /// The pool's name.
        pool: String,
        /// The number asked for.
        vf: u32,
        /// The number of VFs.
        count: usize,
    },
    /// The pool has no devset of this number.
    #[error("pool {pool} has no devset {set}; it has {count}, from 0")]
    NoSet {
        /// The pool's name.
        pool: String,
        /// The number asked for.
        set: u32,
        /// The number of devsets.
        count: usize,
    },
    /// Nobody has the VF.
    #[error("VF {vf} of pool {pool} is not taken: it is {state}")]
    NotTaken {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The VF's state in a word.
        state: &'static str,
    },
    /// Another owner has the VF.
    #[error("VF {vf} of pool {pool} is in use by {owner}")]
    Taken {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The owner that has it.
        owner: Owner,
    },
    /// The owner has no VF of the pool.
    #[error("{owner} has no VF of pool {pool}")]
    NoLease {
        /// The pool's name.
        pool: String,
        /// The owner.
        owner: Owner,
    },
    /// A VF of the set is taken or in an operation, so that the set cannot be reset.
    #[error("devset {set} of pool {pool} cannot be reset: VF {vf} is {state}")]
    SetInUse {
        /// The pool's name.
        pool: String,
        /// The set.
        set: u32,
        /// A VF of the set that is in the way.
        vf: u32,
        /// The state of that VF in a word.
        state: &'static str,
    },
    /// The VF is being handed over to the owner, or taken over from an earlier process.
    #[error("VF {vf} of pool {pool} is being handed over to {owner}; try again")]
    Adopting {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The owner.
        owner: Owner,
    },
    /// The VF was returned in the owner's name while it was handed over.
    #[error("VF {vf} of pool {pool} was returned for {owner} before {owner} got it")]
    Withdrawn {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The owner.
        owner: Owner,
    },
    /// The VF could not be handed over. It is being reset.
    #[error("VF {vf} of pool {pool} cannot be used ({reason}) and is being reset; try again")]
    Unfit {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The device's reason.
        reason: String,
    },
    /// The VF does not let another client of its owner in.
    #[error("VF {vf} of pool {pool} does not let its client in: {reason}")]
    Shut {
        /// The pool's name.
        pool: String,
        /// The VF.
        vf: u32,
        /// The device's reason.
        reason: String,
    },
    /// The ledger could not be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The pool's threads could not be started.
    #[error("pool {pool}: no thread for resets: {source}")]
    Threads {
        /// The pool's name.
        pool: String,
        /// The error of the system call.
        source: std::io::Error,
    },
}
