//! Filters of system calls (seccomp(2)): decisions by the numbers of calls and by their arguments,
//! assembled to the classic BPF that Linux loads, for x86-64.
//!
//! [`Rules`] hold a [`Decision`] for each number that has one, and an [`Action`] for all others.
//! [`Rules::assemble`] makes the [`Program`], which [`Program::apply`] gives to the kernel.
//!
//! A program looks a number up by halves (`assemble`). When the kernel takes a filter, it runs the
//! program for each of its few hundred calls to learn which are always allowed; a look at one call
//! after the other takes milliseconds for that, at each start of a process.
//!
//! # Not implemented
//!
//! Programs of 32 bits: their process is killed. Calls of x32 fail with ENOSYS.
//!
//! # Dependencies
//!
//! `libc` alone, since the code is part of small processes that start often. The crate
//! `seccompiler` looks at one call after the other and has one action for all rules.

#![allow(unsafe_code)] // seccomp(2)

mod assemble;
mod program;

use std::collections::BTreeMap;

use libc::{c_int, c_long};

pub use program::Program;

/// The most instructions of a program, `BPF_MAXINSNS` of *linux/bpf_common.h*.
pub const MOST_INSTRUCTIONS: usize = 4096;

/// The largest error, `MAX_ERRNO` of *linux/err.h*.
const MOST_ERRNO: u32 = 4095;

/// The answer to a call: the value that a filter returns to the kernel, `SECCOMP_RET_…` of
/// *linux/seccomp.h*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action(pub u32);

impl Action {
    /// The call is carried out.
    pub const ALLOW: Self = Self(libc::SECCOMP_RET_ALLOW);
    /// The call is carried out and logged.
    pub const LOG: Self = Self(libc::SECCOMP_RET_LOG);
    /// The thread gets SIGSYS.
    pub const TRAP: Self = Self(libc::SECCOMP_RET_TRAP);
    /// The thread is killed.
    pub const KILL_THREAD: Self = Self(libc::SECCOMP_RET_KILL_THREAD);
    /// The process is killed.
    pub const KILL_PROCESS: Self = Self(libc::SECCOMP_RET_KILL_PROCESS);
    /// The call fails with EPERM.
    pub const REFUSE: Self = Self::errno(libc::EPERM as u32);
    /// The call fails as one that the kernel lacks (ENOSYS).
    pub const MISSING: Self = Self::errno(libc::ENOSYS as u32);

    /// Returns the action of a call that fails with `errno`, which is at most 4095: larger values
    /// count as that.
    pub const fn errno(errno: u32) -> Self {
        let errno = if errno > MOST_ERRNO { MOST_ERRNO } else { errno };
        Self(libc::SECCOMP_RET_ERRNO | errno)
    }
}

/// A test of an argument against a value. The argument is on the left of the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// Not equal.
    NotEqual,
    /// Less.
    Less,
    /// Less or equal.
    LessOrEqual,
    /// Equal under the mask.
    Equal,
    /// Greater or equal.
    GreaterOrEqual,
    /// Greater.
    Greater,
}

/// A comparison of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Index of the argument, 0 to 5.
    pub index: u32,
    /// The operator.
    pub op: Operator,
    /// The bits of the argument that [`Operator::Equal`] compares. All bits for other operators.
    pub mask: u64,
    /// The value, without bits outside of the mask.
    pub value: u64,
}

impl Comparison {
    /// Returns a comparison of all 64 bits of an argument.
    pub const fn new(index: u32, op: Operator, value: u64) -> Self {
        Self { index, op, mask: u64::MAX, value }
    }

    /// Returns a comparison that holds if the lower 32 bits are `value`. Flags, modes and requests
    /// have 32 bits for the kernel as well: it ignores the upper half of the register.
    pub const fn word(index: u32, value: c_int) -> Self {
        Self::bits(index, -1, value)
    }

    /// Returns a comparison that holds if the bits of `mask`, of the lower 32, are those of
    /// `value`.
    pub const fn bits(index: u32, mask: c_int, value: c_int) -> Self {
        let (mask, value) = (mask.cast_unsigned() as u64, (value & mask).cast_unsigned() as u64);
        Self { index, op: Operator::Equal, mask, value }
    }
}

/// Comparisons that must all hold, and the action if they do.
pub type Case = (Vec<Comparison>, Action);

/// The answer to calls of one number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Always this.
    Always(Action),
    /// The first case that holds decides, else the default of the rules.
    Cases(Vec<Case>),
}

impl Decision {
    /// Returns the decision to allow a call if one of `comparisons` holds.
    pub fn allow_if(comparisons: impl IntoIterator<Item = Comparison>) -> Self {
        let case = |one| (vec![one], Action::ALLOW);
        Self::Cases(comparisons.into_iter().map(case).collect())
    }
}

/// Returns cases that answer `action` to a call with one of these `bits` set in the lower half of
/// argument `index`, 0 to 5.
pub fn any_bit(index: u32, bits: c_int, action: Action) -> impl Iterator<Item = Case> {
    let set = (0..c_int::BITS).map(|bit| 1 << bit).filter(move |bit| bits & bit != 0);
    set.map(move |bit| (vec![Comparison::bits(index, bit, bit)], action))
}

/// The decisions of a filter.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The action for numbers without a decision, and for calls of which no case holds.
    pub default: Action,
    /// A number, and the action for it and for larger ones without a decision, up to those of x32.
    pub above: (u32, Action),
    /// The decisions by number.
    pub calls: BTreeMap<u32, Decision>,
}

impl Rules {
    /// Returns rules with one action for all calls.
    pub const fn new(default: Action) -> Self {
        Self { default, above: (0, default), calls: BTreeMap::new() }
    }

    /// Sets the decision for calls of these numbers (`libc::SYS_…`), in place of earlier ones.
    /// Numbers of x32 are refused all the same.
    pub fn set<'a>(&mut self, calls: impl IntoIterator<Item = &'a c_long>, decision: &Decision) {
        self.calls.extend(calls.into_iter().map(|call| (*call as u32, decision.clone())));
    }

    /// Returns the program that makes these decisions.
    pub fn assemble(&self) -> Program {
        Program(assemble::assemble(self))
    }
}

#[cfg(test)]
mod tests;
