//! Programs of classic BPF that make the decisions of [`Rules`] (Linux, *networking/filter*; the
//! kernel's part for system calls is *userspace-api/seccomp_filter*).
//!
//! A program is a binary search for the number of the call. Its leaves are actions, or comparisons
//! of arguments, which are 64 bits wide and are loaded in halves.

use std::mem::offset_of;

use libc::{seccomp_data, sock_filter};

use crate::{Action, Case, Comparison, Decision, Operator, Rules};

/// `AUDIT_ARCH_X86_64` of *linux/audit.h*.
pub(crate) const X86_64: u32 = 0xc000_003e;
/// The first number of a call of x32.
pub(crate) const X32: u32 = 0x4000_0000;

/// Codes of instructions (*linux/bpf_common.h*).
pub(crate) const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
pub(crate) const JUMP: u32 = libc::BPF_JMP | libc::BPF_JA;
pub(crate) const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub(crate) const JUMP_GREATER: u32 = libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K;
pub(crate) const JUMP_GREATER_OR_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
pub(crate) const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
pub(crate) const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Returns the program for `rules`.
pub(crate) fn assemble(rules: &Rules) -> Vec<sock_filter> {
    let mut program = vec![
        plain(LOAD, offset_of!(seccomp_data, arch) as u32),
        test(JUMP_EQUAL, X86_64, 1, 0),
        ret(Action::KILL_PROCESS),
        plain(LOAD, offset_of!(seccomp_data, nr) as u32),
    ];
    program.extend(search(&ranges(rules), rules.default));
    program
}

/// Numbers from `first` to that of the next range, with one decision.
struct Range<'a> {
    first: u32,
    leaf: Leaf<'a>,
}

#[derive(PartialEq)]
enum Leaf<'a> {
    Action(Action),
    Cases(&'a [Case]),
}

fn leaf(decision: &Decision) -> Leaf<'_> {
    match decision {
        Decision::Always(action) => Leaf::Action(*action),
        Decision::Cases(cases) => Leaf::Cases(cases),
    }
}

/// Returns the ranges of numbers, in order. The first begins with 0.
fn ranges<'a>(rules: &'a Rules) -> Vec<Range<'a>> {
    let mut ranges: Vec<Range<'a>> = Vec::new();
    let mut add = |first: u32, leaf: Leaf<'a>| {
        // A range of one action goes on; one with comparisons is copied for each number.
        let goes_on = |last: &Range<'a>| last.leaf == leaf && matches!(leaf, Leaf::Action(_));
        if !ranges.last().is_some_and(goes_on) {
            ranges.push(Range { first, leaf });
        }
    };
    let mut next = 0;
    let end = (X32, Leaf::Action(Action::MISSING));
    for (number, leaf) in
        rules.calls.range(..X32).map(|(number, one)| (*number, leaf(one))).chain([end])
    {
        // Numbers without a decision.
        if next < number.min(rules.above.0) {
            add(next, Leaf::Action(rules.default));
        }
        if next.max(rules.above.0) < number {
            add(next.max(rules.above.0), Leaf::Action(rules.above.1));
        }
        add(number, leaf);
        next = number + 1;
    }
    ranges
}

/// Returns code that searches the number, which is loaded, in `ranges`, and returns the action.
fn search(ranges: &[Range<'_>], default: Action) -> Vec<sock_filter> {
    match ranges {
        [] => vec![ret(default)],
        [Range { leaf: Leaf::Action(action), .. }] => vec![ret(*action)],
        [Range { leaf: Leaf::Cases(all), .. }] => cases(all, default),
        _ => {
            let (lower, upper) = ranges.split_at(ranges.len() / 2);
            let first = upper.first().map_or(0, |range| range.first);
            let lower = search(lower, default);
            let mut code = match u8::try_from(lower.len()) {
                Ok(length) => vec![test(JUMP_GREATER_OR_EQUAL, first, length, 0)],
                // A test skips at most 255 instructions, a jump any number.
                Err(_) => {
                    vec![test(JUMP_GREATER_OR_EQUAL, first, 0, 1), plain(JUMP, lower.len() as u32)]
                }
            };
            code.extend(lower);
            code.extend(search(upper, default));
            code
        }
    }
}

/// Returns code that returns the action of the first case that holds.
fn cases(all: &[Case], default: Action) -> Vec<sock_filter> {
    let case = |(all, action): &Case| {
        // From the last comparison to the first: each skips those behind it if it does not hold.
        let mut code = vec![ret(*action)];
        for one in all.iter().rev() {
            let mut front = comparison(*one, code.len());
            front.extend(code);
            code = front;
        }
        code
    };
    all.iter().flat_map(case).chain([ret(default)]).collect()
}

/// Where a test leads: to the next instruction, behind the comparison, or behind the whole case.
#[derive(Clone, Copy)]
enum To {
    Next,
    Holds,
    Fails,
}

/// A test of a half of an argument: its code, and where it leads if it holds and if it does not.
type Test = (u32, To, To);

/// Returns code that goes on behind itself if the comparison holds, and else skips `behind`
/// instructions more: the rest of the case, which has at most six comparisons of six instructions.
fn comparison(one: Comparison, behind: usize) -> Vec<sock_filter> {
    let (upper, lower) = tests(one.op);
    let argument = offset_of!(seccomp_data, args) as u32 + one.index * 8;
    let mut draft = Draft(Vec::with_capacity(6));
    for (half, tests) in [(1, upper.as_slice()), (0, &[lower])] {
        let [value, mask] = [one.value, one.mask].map(|whole| (whole >> (32 * half)) as u32);
        if mask == 0 && one.op == Operator::Equal {
            continue;
        }
        draft.plain(LOAD, argument + half * 4);
        if mask != u32::MAX {
            draft.plain(AND, mask);
        }
        draft.0.extend(tests.iter().map(|(code, holds, fails)| (*code, value, *holds, *fails)));
    }
    draft.resolve(behind)
}

/// Returns the tests of the upper half and of the lower half.
fn tests(op: Operator) -> (Vec<Test>, Test) {
    use To::{Fails, Holds, Next};
    let ordered = |more, less| vec![(JUMP_GREATER, more, Next), (JUMP_EQUAL, Next, less)];
    match op {
        Operator::Equal => (vec![(JUMP_EQUAL, Next, Fails)], (JUMP_EQUAL, Holds, Fails)),
        Operator::NotEqual => (vec![(JUMP_EQUAL, Next, Holds)], (JUMP_EQUAL, Fails, Holds)),
        Operator::Greater => (ordered(Holds, Fails), (JUMP_GREATER, Holds, Fails)),
        Operator::GreaterOrEqual => (ordered(Holds, Fails), (JUMP_GREATER_OR_EQUAL, Holds, Fails)),
        Operator::Less => (ordered(Fails, Holds), (JUMP_GREATER_OR_EQUAL, Fails, Holds)),
        Operator::LessOrEqual => (ordered(Fails, Holds), (JUMP_GREATER, Fails, Holds)),
    }
}

/// Instructions whose jumps lead to places that are not known yet: code, constant, and where it
/// leads.
struct Draft(Vec<(u32, u32, To, To)>);

impl Draft {
    fn plain(&mut self, code: u32, k: u32) {
        self.0.push((code, k, To::Next, To::Next));
    }

    /// Returns the instructions, with `behind` more behind them that a failed test skips.
    fn resolve(self, behind: usize) -> Vec<sock_filter> {
        let instruction = |(left, &(code, k, holds, fails)): (usize, &(u32, u32, To, To))| {
            let skip = |to: To| match to {
                To::Next => 0,
                To::Holds => left as u8,
                To::Fails => (left + behind) as u8,
            };
            test(code, k, skip(holds), skip(fails))
        };
        (0..self.0.len()).rev().zip(&self.0).map(instruction).collect()
    }
}

const fn plain(code: u32, k: u32) -> sock_filter {
    test(code, k, 0, 0)
}

/// Returns an instruction that skips `jt` others if its test holds, else `jf`.
const fn test(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

const fn ret(action: Action) -> sock_filter {
    plain(RETURN, action.0)
}
