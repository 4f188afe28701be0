//! A filter of system calls as a program of the kernel (seccomp(2)).
//!
//! The program looks a call up by halves. When it takes a filter, the kernel runs it for each of
//! its few hundred calls to learn which are always allowed; a look at one call after the other
//! takes milliseconds for that, at each start of a VMM.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;

use libc::{seccomp_data, sock_filter};

/// `AUDIT_ARCH_X86_64` of *linux/audit.h*.
const ARCHITECTURE: u32 = 0xc000_003e;
/// The most calls that are looked at one after the other.
const FEW: usize = 2;
/// The largest distance of a conditional jump.
const FAR: usize = u8::MAX as usize;

const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;
const REFUSED: u32 = fails_with(libc::EPERM);

/// The treatment of a system call. Flags, modes and requests are compared by their lower 32 bits,
/// which is all that the kernel uses of them. What is not allowed fails with EPERM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The call is allowed.
    Allow,
    /// The call fails with this errno.
    Fail(i32),
    /// The call is allowed if this argument, 0 to 5, is one of these values, at most 200.
    OneOf(usize, Vec<u32>),
    /// The call is allowed if the bits of this mask have this value in this argument, 0 to 5.
    Bits(usize, u32, u32),
    /// The call is allowed if an argument, 0 to 5, has this value, and if another one, of which all
    /// 64 bits are compared, is at most this one.
    Bounded { mode: (usize, u32), most: (usize, u32) },
}

/// The rules by the numbers of calls. Calls without a rule fail with EPERM.
pub type Rules = BTreeMap<u32, Rule>;

/// Applies a filter to the calling thread for good.
///
/// # Errors
/// The kernel refuses.
pub fn apply(rules: &Rules) -> io::Result<()> {
    let instructions = program(rules);
    rustix::thread::set_no_new_privs(true)?;
    let program = libc::sock_fprog {
        len: u16::try_from(instructions.len()).map_err(io::Error::other)?,
        // The kernel copies the program and does not write to it.
        filter: instructions.as_ptr().cast_mut(),
    };
    // SAFETY: `program` describes the whole vector, which the kernel only reads.
    let applied = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if applied < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn program(rules: &Rules) -> Vec<sock_filter> {
    let rules: Vec<_> = rules.iter().map(|(number, rule)| (*number, rule)).collect();
    let mut all = vec![
        load(offset_of!(seccomp_data, arch)),
        jump(libc::BPF_JEQ, ARCHITECTURE, 1, 0),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        load(offset_of!(seccomp_data, nr)),
    ];
    all.extend(look_up(&rules));
    all
}

/// Returns the instructions that find the rule of the number that is loaded. `rules` ascend.
fn look_up(rules: &[(u32, &Rule)]) -> Vec<sock_filter> {
    if rules.len() <= FEW {
        let one = |(number, rule): &(u32, &Rule)| {
            let rule = judge(rule);
            [vec![jump(libc::BPF_JEQ, *number, 0, rule.len())], rule].concat()
        };
        return rules.iter().flat_map(one).chain([answer(REFUSED)]).collect();
    }
    let (below, above) = rules.split_at(rules.len() / 2);
    let first = above.first().map_or(u32::MAX, |(number, _)| *number);
    let (below, above) = (look_up(below), look_up(above));
    let branch = match below.len() {
        len @ ..=FAR => vec![jump(libc::BPF_JGE, first, len, 0)],
        len => {
            let over = instruction(libc::BPF_JMP | libc::BPF_JA, len as u32);
            vec![jump(libc::BPF_JGE, first, 0, 1), over]
        }
    };
    [branch, below, above].concat()
}

/// Returns the instructions that end the program for a call with this rule.
fn judge(rule: &Rule) -> Vec<sock_filter> {
    match rule {
        Rule::Allow => vec![answer(ALLOWED)],
        Rule::Fail(errno) => vec![answer(fails_with(*errno))],
        Rule::OneOf(argument, values) => {
            // Each jump leads over those behind it and over the refusal.
            let tests = values.iter().zip((1..=values.len()).rev());
            let tests = tests.map(|(value, over)| jump(libc::BPF_JEQ, *value, over, 0));
            let ends = [answer(REFUSED), answer(ALLOWED)];
            [load(place(*argument))].into_iter().chain(tests).chain(ends).collect()
        }
        Rule::Bits(argument, mask, value) => vec![
            load(place(*argument)),
            instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, *mask),
            jump(libc::BPF_JEQ, *value, 1, 0),
            answer(REFUSED),
            answer(ALLOWED),
        ],
        Rule::Bounded { mode: (argument, value), most: (bounded, most) } => vec![
            load(place(*argument)),
            jump(libc::BPF_JEQ, *value, 0, 4),
            load(place(*bounded) + size_of::<u32>()),
            jump(libc::BPF_JEQ, 0, 0, 2),
            load(place(*bounded)),
            jump(libc::BPF_JGT, *most, 0, 1),
            answer(REFUSED),
            answer(ALLOWED),
        ],
    }
}

/// Returns the offset of an argument's lower 32 bits, which come first.
const fn place(argument: usize) -> usize {
    offset_of!(seccomp_data, args) + argument * size_of::<u64>()
}

const fn fails_with(errno: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno.cast_unsigned()
}

/// Loads 32 bits of `seccomp_data`.
fn load(offset: usize) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32)
}

fn answer(answer: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, answer)
}

fn instruction(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Leads over `yes` instructions if `test` holds for the loaded value and `k`, else over `no`.
///
/// # Panics
/// If a distance is larger than [`FAR`]: a programmer's error, since rules are constants.
fn jump(test: u32, k: u32, yes: usize, no: usize) -> sock_filter {
    assert!(yes <= FAR && no <= FAR, "a rule of too many values");
    let code = (libc::BPF_JMP | test | libc::BPF_K) as u16;
    sock_filter { code, jt: yes as u8, jf: no as u8, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel does. Returns its answer, and the number of instructions.
    fn run(program: &[sock_filter], call: &seccomp_data) -> (u32, usize) {
        let bytes = [
            call.nr.to_ne_bytes().to_vec(),
            call.arch.to_ne_bytes().to_vec(),
            call.instruction_pointer.to_ne_bytes().to_vec(),
            call.args.iter().flat_map(|word| word.to_ne_bytes()).collect(),
        ];
        let bytes = bytes.concat();
        let (mut at, mut loaded, mut steps) = (0, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            (at, steps) = (at + 1, steps + 1);
            match u32::from(code) {
                0x20 => loaded = u32::from_ne_bytes(bytes[k as usize..][..4].try_into().unwrap()),
                0x54 => loaded &= k,
                0x05 => at += k as usize,
                0x15 => at += usize::from(if loaded == k { jt } else { jf }),
                0x35 => at += usize::from(if loaded >= k { jt } else { jf }),
                0x25 => at += usize::from(if loaded > k { jt } else { jf }),
                0x06 => return (k, steps),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    fn call(nr: u32, args: [u64; 6]) -> seccomp_data {
        seccomp_data { nr: nr as i32, arch: ARCHITECTURE, instruction_pointer: 0, args }
    }

    /// Rules for every third call, of each kind in turn, and many enough for long jumps.
    fn rules() -> Rules {
        let rule = |number: u32| match number % 5 {
            0 => Rule::Allow,
            1 => Rule::Fail(libc::ENOSYS),
            2 => Rule::OneOf(1, (0..40).map(|value| number * 100 + value).collect()),
            3 => Rule::Bits(5, 0xf0, 0x30),
            _ => Rule::Bounded { mode: (1, 3), most: (5, 40) },
        };
        (0..120).map(|number| number * 3).map(|number| (number, rule(number))).collect()
    }

    #[test]
    fn each_call_gets_the_answer_of_its_rule() {
        let (rules, unknown) = (rules(), u64::MAX << 32);
        let program = program(&rules);
        for number in (0..400).chain([0x4000_0000, u32::MAX]) {
            let answer_to = |second: u64, sixth: u64| {
                run(&program, &call(number, [7, second, 0, 0, 0, sixth])).0
            };
            let first = u64::from(number.wrapping_mul(100));
            let expected = |allowed| if allowed { ALLOWED } else { REFUSED };
            match rules.get(&number) {
                None => assert_eq!(answer_to(first, 0x30), REFUSED, "{number}"),
                Some(Rule::Allow) => assert_eq!(answer_to(9, 9), ALLOWED),
                Some(Rule::Fail(errno)) => assert_eq!(answer_to(9, 9), fails_with(*errno)),
                Some(Rule::OneOf(..)) => {
                    for (value, allowed) in [(0, true), (39, true), (40, false)] {
                        assert_eq!(answer_to(first + value, 0), expected(allowed), "{number}");
                    }
                    assert_eq!(answer_to(unknown | first, 0), ALLOWED, "the upper half is unused");
                }
                Some(Rule::Bits(..)) => {
                    for (value, allowed) in [(0x30, true), (0x13f, true), (0x20, false)] {
                        assert_eq!(answer_to(0, value), expected(allowed), "{number}");
                    }
                }
                Some(Rule::Bounded { .. }) => {
                    for (len, allowed) in [(0, true), (40, true), (41, false), (1 << 32, false)] {
                        assert_eq!(answer_to(3, len), expected(allowed), "{number}");
                        assert_eq!(answer_to(2, len), REFUSED, "{number}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_call_of_another_architecture_ends_the_process() {
        let other = seccomp_data { arch: 0x4000_0003, ..call(0, [0; 6]) };
        assert_eq!(run(&program(&rules()), &other).0, libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn no_call_is_looked_at_one_after_the_other() {
        let program = program(&rules());
        let steps = (0..400).map(|number| run(&program, &call(number, [0; 6])).1);
        // Four at the start, two for each of seven halves, the last few, and an argument's.
        assert!(steps.max().unwrap() <= 4 + 14 + 3 + 44);
        let plain = (0..400).filter(|number| number % 15 == 0);
        let steps = plain.map(|number| run(&program, &call(number, [0; 6])).1);
        assert!(steps.max().unwrap() <= 4 + 14 + 3);
    }
}
