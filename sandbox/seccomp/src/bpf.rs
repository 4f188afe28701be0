//! Programs of classic BPF that make the decisions of [`Rules`] (Linux, *networking/filter*; the
//! kernel's part for system calls is *userspace-api/seccomp_filter*).
//!
//! A program is a binary search for the number of the call. Its leaves are actions, or comparisons
//! of arguments, which are 64 bits wide and are loaded in halves.

use crate::Operator;
use crate::rules::{Action, Case, Comparison, Decision, Rules};

/// Offsets in the kernel's `seccomp_data`, bytes.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// `AUDIT_ARCH_X86_64` of *linux/audit.h*.
const X86_64: u32 = 0xc000_003e;
/// The first number of a call of x32.
const X32: u32 = 0x4000_0000;

/// Codes of instructions (*linux/bpf_common.h*).
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;

/// An instruction, the kernel's `sock_filter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// The operation.
    pub code: u16,
    /// Instructions to skip if its test holds.
    pub jt: u8,
    /// Instructions to skip if its test does not hold.
    pub jf: u8,
    /// A constant.
    pub k: u32,
}

impl Instruction {
    const fn new(code: u16, k: u32) -> Self {
        Self { code, jt: 0, jf: 0, k }
    }

    const fn test(code: u16, k: u32, jt: u8, jf: u8) -> Self {
        Self { code, jt, jf, k }
    }

    /// Returns its 8 bytes, little-endian.
    pub fn bytes(&self) -> [u8; 8] {
        let ([c0, c1], [k0, k1, k2, k3]) = (self.code.to_le_bytes(), self.k.to_le_bytes());
        [c0, c1, self.jt, self.jf, k0, k1, k2, k3]
    }
}

/// Returns the program for `rules`.
pub fn assemble(rules: &Rules) -> Vec<Instruction> {
    let mut program = vec![
        Instruction::new(LOAD, ARCHITECTURE),
        Instruction::test(JUMP_EQUAL, X86_64, 1, 0),
        ret(Action::KILL),
        Instruction::new(LOAD, NUMBER),
        Instruction::test(JUMP_GREATER_OR_EQUAL, X32, 0, 1),
        ret(Action::MISSING),
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
    for (number, decision) in &rules.calls {
        if *number > next {
            add(next, Leaf::Action(rules.default));
        }
        add(
            *number,
            match decision {
                Decision::Always(action) => Leaf::Action(*action),
                Decision::Cases(cases) => Leaf::Cases(cases),
            },
        );
        next = number + 1;
    }
    if next <= rules.last {
        add(next, Leaf::Action(rules.default));
    }
    add(next.max(rules.last + 1), Leaf::Action(rules.above));
    ranges
}

/// Returns code that searches the number, which is loaded, in `ranges`, and returns the action.
fn search(ranges: &[Range<'_>], default: Action) -> Vec<Instruction> {
    match ranges {
        [] => vec![ret(default)],
        [Range { leaf: Leaf::Action(action), .. }] => vec![ret(*action)],
        [Range { leaf: Leaf::Cases(all), .. }] => cases(all, default),
        _ => {
            let (lower, upper) = ranges.split_at(ranges.len() / 2);
            let first = upper.first().map_or(0, |range| range.first);
            let lower = search(lower, default);
            let mut code = match u8::try_from(lower.len()) {
                Ok(length) => vec![Instruction::test(JUMP_GREATER_OR_EQUAL, first, length, 0)],
                // A test skips at most 255 instructions, a jump any number.
                Err(_) => vec![
                    Instruction::test(JUMP_GREATER_OR_EQUAL, first, 0, 1),
                    Instruction::new(JUMP, lower.len() as u32),
                ],
            };
            code.extend(lower);
            code.extend(search(upper, default));
            code
        }
    }
}

/// Returns code that returns the action of the first case that holds.
fn cases(all: &[Case], default: Action) -> Vec<Instruction> {
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
type Test = (u16, To, To);

/// Returns code that goes on behind itself if the comparison holds, and else skips `behind`
/// instructions more: the rest of the case, which has at most six comparisons of six instructions.
fn comparison(one: Comparison, behind: usize) -> Vec<Instruction> {
    let (upper, lower) = tests(one.op);
    let mut draft = Draft(Vec::with_capacity(6));
    for (half, tests) in [(1, upper.as_slice()), (0, &[lower])] {
        draft.plain(LOAD, ARGUMENTS + one.index * 8 + half * 4);
        let [value, mask] = [one.value, one.mask].map(|whole| halves(whole)[half as usize]);
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
        Operator::Equal | Operator::MaskedEqual => {
            (vec![(JUMP_EQUAL, Next, Fails)], (JUMP_EQUAL, Holds, Fails))
        }
        Operator::NotEqual => (vec![(JUMP_EQUAL, Next, Holds)], (JUMP_EQUAL, Fails, Holds)),
        Operator::Greater => (ordered(Holds, Fails), (JUMP_GREATER, Holds, Fails)),
        Operator::GreaterOrEqual => (ordered(Holds, Fails), (JUMP_GREATER_OR_EQUAL, Holds, Fails)),
        Operator::Less => (ordered(Fails, Holds), (JUMP_GREATER_OR_EQUAL, Fails, Holds)),
        Operator::LessOrEqual => (ordered(Fails, Holds), (JUMP_GREATER, Fails, Holds)),
    }
}

/// Instructions whose jumps lead to places that are not known yet: code, constant, and where it
/// leads.
struct Draft(Vec<(u16, u32, To, To)>);

impl Draft {
    fn plain(&mut self, code: u16, k: u32) {
        self.0.push((code, k, To::Next, To::Next));
    }

    /// Returns the instructions, with `behind` more behind them that a failed test skips.
    fn resolve(self, behind: usize) -> Vec<Instruction> {
        let instruction = |(left, &(code, k, holds, fails)): (usize, &(u16, u32, To, To))| {
            let skip = |to: To| match to {
                To::Next => 0,
                To::Holds => left as u8,
                To::Fails => (left + behind) as u8,
            };
            Instruction { code, jt: skip(holds), jf: skip(fails), k }
        };
        (0..self.0.len()).rev().zip(&self.0).map(instruction).collect()
    }
}

/// Returns the lower and the upper half.
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

fn ret(action: Action) -> Instruction {
    Instruction::new(RETURN, action.0)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
