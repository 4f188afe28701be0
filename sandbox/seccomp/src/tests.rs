//! Programs run by an interpreter, against the decisions of their profiles.

use serde_json::{Value, json};

use super::*;
use crate::{Error, MOST_INSTRUCTIONS, Profile};

const ALLOW: Action = Action(0x7fff_0000);
const EPERM: Action = Action(0x0005_0001);
const X86: u32 = 0x4000_0003;

fn profile(profile: Value) -> Profile {
    serde_json::from_value(profile).unwrap()
}

fn rules_of(json: Value) -> Rules {
    Rules::of(&profile(json), &[]).unwrap()
}

fn fails(json: Value) -> Error {
    profile(json).compile(&[]).unwrap_err()
}

/// Runs a program on a call, as the kernel does. Panics where the kernel would refuse the program.
fn run(program: &[Instruction], architecture: u32, number: u32, args: &[u64; 6]) -> Action {
    let load = |offset: u32| match offset {
        NUMBER => number,
        ARCHITECTURE => architecture,
        offset => halves(args[((offset - ARGUMENTS) / 8) as usize])[(offset / 4 % 2) as usize],
    };
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let Instruction { code, jt, jf, k } = program[at];
        at += 1;
        let holds = match code {
            RETURN => return Action(k),
            LOAD => {
                accumulator = load(k);
                continue;
            }
            AND => {
                accumulator &= k;
                continue;
            }
            JUMP => {
                at += k as usize;
                continue;
            }
            JUMP_EQUAL => accumulator == k,
            JUMP_GREATER => accumulator > k,
            JUMP_GREATER_OR_EQUAL => accumulator >= k,
            code => panic!("{code:#x} is no code"),
        };
        at += usize::from(if holds { jt } else { jf });
    }
}

/// Pseudo-random numbers (xorshift), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Values whose halves are alike, so that comparisons of both halves decide.
    fn value(&mut self) -> u64 {
        let half = [0, 1, 2, 0x8000_0000, 0xffff_fffe, 0xffff_ffff];
        self.pick(&half) << 32 | self.pick(&half)
    }

    fn arg(&mut self) -> Value {
        let ops = ["NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"];
        json!({
            "index": self.below(6),
            "value": self.value(),
            "valueTwo": self.value(),
            "op": format!("SCMP_CMP_{}", self.pick(&ops)),
        })
    }

    fn rule(&mut self, names: &[&str]) -> Value {
        let names: Vec<_> = (0..1 + self.below(12)).map(|_| self.pick(names)).collect();
        let args: Vec<_> = (0..self.below(4)).map(|_| self.arg()).collect();
        let actions = ["ALLOW", "ERRNO", "KILL", "KILL_PROCESS", "TRAP", "LOG", "TRACE"];
        json!({
            "names": names,
            "action": format!("SCMP_ACT_{}", self.pick(&actions)),
            "errnoRet": self.below(5000),
            "args": args,
        })
    }
}

#[test]
fn programs_decide_as_their_profiles() {
    let names: Vec<&str> =
        syscalls::x86_64::Sysno::iter().map(|one| one.name()).filter(|n| *n != "execve").collect();
    let mut random = Random(0x5eed);
    for round in 0..300 {
        let mut rules: Vec<_> = (0..random.below(60)).map(|_| random.rule(&names)).collect();
        rules.push(json!({"names": ["execve"], "action": "SCMP_ACT_ALLOW"}));
        let default = random.pick(&["SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_KILL"]);
        let json = json!({"defaultAction": default, "defaultErrnoRet": 13, "syscalls": rules});
        let rules = rules_of(json);
        let program = assemble(&rules);
        assert!(round > 0 || program.len() < MOST_INSTRUCTIONS);
        for number in 0..rules.last + 3 {
            for _ in 0..8 {
                let args = std::array::from_fn(|_| random.value());
                let decided = run(&program, X86_64, number, &args);
                assert_eq!(decided, rules.evaluate(number, &args), "{round}: {number} {args:x?}");
            }
        }
    }
}

#[test]
fn jumps_over_more_than_255_instructions_arrive() {
    let names: Vec<&str> = syscalls::x86_64::Sysno::iter().map(|one| one.name()).collect();
    let rule = |(at, name): (usize, &&str)| {
        let arg = json!({"index": at % 6, "value": at as u64 + (7 << 32), "op": "SCMP_CMP_EQ"});
        let errno =
            json!({"names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": at, "args": [arg]});
        errno
    };
    let all: Vec<_> = names.iter().enumerate().skip(1).map(rule).collect();
    let rules = rules_of(json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": all}));
    let program = assemble(&rules);
    assert!(program.len() > 2000, "{}", program.len());
    assert!(program.iter().any(|one| one.code == JUMP && one.k > 255));
    for (at, name) in names.iter().enumerate().skip(1) {
        let number = name.parse::<syscalls::x86_64::Sysno>().unwrap() as u32;
        let held = [at as u64 + (7 << 32); 6];
        assert_eq!(run(&program, X86_64, number, &held), Action(0x0005_0000 | at as u32));
        assert_eq!(run(&program, X86_64, number, &[at as u64; 6]), ALLOW);
    }
}

#[test]
fn a_rule_without_arguments_counts_whatever_others_say() {
    let rule =
        |action: &str, args: Value| json!({"names": ["socket"], "action": action, "args": args});
    let inet = json!([{"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}]);
    let decides = |rules: Value| {
        let json = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules});
        run(&assemble(&rules_of(json)), X86_64, 41, &[2; 6])
    };
    let (log, killed) = (Action(0x7ffc_0000), Action::KILL);
    assert_eq!(decides(json!([rule("SCMP_ACT_LOG", inet.clone())])), log);
    let both = [rule("SCMP_ACT_LOG", inet.clone()), rule("SCMP_ACT_KILL_PROCESS", json!(null))];
    assert_eq!(decides(json!(both)), killed);
    let [conditional, always] = both;
    assert_eq!(decides(json!([always, conditional])), killed);
    // A rule with the default action is no rule.
    assert_eq!(
        decides(json!([rule("SCMP_ACT_ALLOW", json!([])), rule("SCMP_ACT_LOG", inet)])),
        log
    );
}

#[test]
fn comparisons_of_one_argument_are_alternatives() {
    let arg = |index: u32, value: u64| json!({"index": index, "value": value, "op": "SCMP_CMP_EQ"});
    let decides = |args: Value, first: u64, second: u64| {
        let rule = json!({"names": ["personality"], "action": "SCMP_ACT_ERRNO", "args": args});
        let json = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
        run(&assemble(&rules_of(json)), X86_64, 135, &[first, second, 0, 0, 0, 0])
    };
    for value in [0, 8] {
        assert_eq!(decides(json!([arg(0, 0), arg(0, 8)]), value, 0), EPERM);
    }
    assert_eq!(decides(json!([arg(0, 0), arg(0, 8)]), 4, 0), ALLOW);
    assert_eq!(decides(json!([arg(0, 0), arg(1, 8)]), 0, 8), EPERM);
    assert_eq!(decides(json!([arg(0, 0), arg(1, 8)]), 0, 7), ALLOW);
}

#[test]
fn other_architectures_and_newer_calls_are_refused() {
    let allowed = json!({"names": ["read", "execve", "no_such_call"], "action": "SCMP_ACT_ALLOW"});
    let json = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [allowed],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"]});
    let program = assemble(&rules_of(json));
    let decides = |architecture, number| run(&program, architecture, number, &[0; 6]);
    assert_eq!(decides(X86_64, 0), ALLOW);
    assert_eq!(decides(X86_64, 1), EPERM);
    assert_eq!(decides(X86_64, 59), ALLOW);
    for newer in [60, 500, X32 - 1, X32, u32::MAX] {
        assert_eq!(decides(X86_64, newer), Action::MISSING, "{newer:#x}");
    }
    assert_eq!(decides(X86, 0), Action::KILL);
}

#[test]
fn conditions_of_dockers_profiles_count() {
    let rule = |includes: Value, excludes: Value| {
        json!({"defaultAction": "SCMP_ACT_ERRNO", "archMap": [{"architecture": "SCMP_ARCH_X86_64"}],
            "syscalls": [
                {"name": "execve", "names": null, "action": "SCMP_ACT_ALLOW", "args": null,
                 "includes": null},
                {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "comment": "", "includes": includes,
                 "excludes": excludes}]})
    };
    let allows = |includes: Value, excludes: Value, capabilities: &[&str]| {
        let capabilities: Vec<_> = capabilities.iter().map(|one| (*one).to_owned()).collect();
        let rules = Rules::of(&profile(rule(includes, excludes)), &capabilities).unwrap();
        rules.calls.contains_key(&321)
    };
    let caps = || json!({"caps": ["CAP_BPF"]});
    assert!(!allows(caps(), json!({}), &[]) && allows(caps(), json!({}), &["CAP_BPF"]));
    assert!(allows(json!({}), caps(), &[]) && !allows(json!({}), caps(), &["CAP_BPF"]));
    let arches = |name: &str| json!({"arches": [name], "caps": null});
    assert!(allows(arches("amd64"), json!({}), &[]) && !allows(arches("arm64"), json!({}), &[]));
    assert!(!allows(json!({}), arches("x86_64"), &[]) && allows(json!({}), arches("s390"), &[]));
    let kernel = |version: &str| json!({"minKernel": version});
    assert!(allows(kernel("4.8"), json!({}), &[]) && !allows(json!({}), kernel("4.8"), &[]));
    for version in ["6.9", "5.11", "new", "5"] {
        assert_eq!(fails(rule(kernel(version), json!({}))), Error::Kernel(version.to_owned()));
    }
}

#[test]
fn what_cannot_be_compiled_is_named() {
    let rule = |action: &str, args: Value| {
        json!({"defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["read", "execve"], "action": action, "args": args}]})
    };
    assert_eq!(fails(json!({})), Error::Action(String::new()));
    assert_eq!(fails(rule("SCMP_ACT_NO", json!([]))), Error::Action("SCMP_ACT_NO".to_owned()));
    assert_eq!(fails(rule("SCMP_ACT_NOTIFY", json!([]))), Error::Notify);
    assert_eq!(fails(rule("SCMP_ACT_ERRNO", json!([]))), Error::Execve);
    assert_eq!(fails(json!({"defaultAction": "SCMP_ACT_ERRNO"})), Error::Execve);
    let arg = json!({"index": 6, "value": 0, "op": "SCMP_CMP_EQ"});
    let refused = Error::Argument(6, "read".to_owned());
    assert_eq!(fails(rule("SCMP_ACT_LOG", json!([arg]))), refused);
    assert!(
        serde_json::from_value::<Profile>(json!({"syscalls": [{"args": [{"index": 0}]}]})).is_err()
    );
    let arg = json!({"index": 0, "value": 1, "op": "SCMP_CMP_EQ"});
    assert_eq!(fails(rule("SCMP_ACT_LOG", json!(vec![arg.clone(); 3000]))), Error::TooLarge);
    // Few comparisons, and more instructions than a program can have.
    assert_eq!(fails(rule("SCMP_ACT_LOG", json!(vec![arg; 1000]))), Error::TooLarge);
}
