//! Profiles as programs, run by an interpreter.

use serde_json::{Value, json};

use super::*;

const ALLOW: Action = Action::ALLOW;
const EPERM: Action = Action::REFUSE;
/// The first number of a call of x32.
const X32: u32 = 0x4000_0000;

fn profile(profile: Value) -> Profile {
    serde_json::from_value(profile).unwrap()
}

fn rules_of(json: Value) -> Rules {
    resolve(&profile(json), &[]).unwrap()
}

fn fails(json: Value) -> Error {
    profile(json).compile(&[]).unwrap_err()
}

/// Returns the action of a profile's program for a call.
fn decided(json: Value, number: u32, args: &[u64; 6]) -> Action {
    /// `AUDIT_ARCH_X86_64` of *linux/audit.h*.
    const X86_64: u32 = 0xc000_003e;
    rules_of(json).assemble().run(X86_64, number, args).0
}

#[test]
fn each_operator_compares_as_its_name_says() {
    // The value, and for which of the arguments 4, 5, 6 and 2^32 + 5 the comparison holds.
    let operators = [
        ("NE", [true, false, true, true]),
        ("LT", [true, false, false, false]),
        ("LE", [true, true, false, false]),
        ("EQ", [false, true, false, false]),
        ("GE", [false, true, true, true]),
        ("GT", [false, false, true, true]),
        // Under the mask 5.
        ("MASKED_EQ", [true, false, true, false]),
    ];
    for (operator, expected) in operators {
        let arg = json!({"index": 1, "value": 5, "valueTwo": 6,
            "op": format!("SCMP_CMP_{operator}")});
        let rule = json!({"names": ["socket"], "action": "SCMP_ACT_LOG", "args": [arg]});
        let json = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
        let held = [4, 5, 6, (1 << 32) + 5]
            .map(|arg| decided(json.clone(), 41, &[0, arg, 0, 0, 0, 0]) == Action::LOG);
        assert_eq!(held, expected, "{operator}");
    }
}

#[test]
fn a_rule_without_arguments_counts_whatever_others_say() {
    let rule =
        |action: &str, args: Value| json!({"names": ["socket"], "action": action, "args": args});
    let inet = json!([{"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}]);
    let decides = |rules: Value| {
        let json = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules});
        decided(json, 41, &[2; 6])
    };
    let (log, killed) = (Action::LOG, Action::KILL_PROCESS);
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
        decided(json, 135, &[first, second, 0, 0, 0, 0])
    };
    for value in [0, 8] {
        assert_eq!(decides(json!([arg(0, 0), arg(0, 8)]), value, 0), EPERM);
    }
    assert_eq!(decides(json!([arg(0, 0), arg(0, 8)]), 4, 0), ALLOW);
    assert_eq!(decides(json!([arg(0, 0), arg(1, 8)]), 0, 8), EPERM);
    assert_eq!(decides(json!([arg(0, 0), arg(1, 8)]), 0, 7), ALLOW);
}

#[test]
fn newer_calls_are_refused() {
    let allowed = json!({"names": ["read", "execve", "no_such_call"], "action": "SCMP_ACT_ALLOW"});
    let json = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [allowed],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"]});
    let decides = |number| decided(json.clone(), number, &[0; 6]);
    assert_eq!(decides(0), ALLOW);
    assert_eq!(decides(1), EPERM);
    assert_eq!(decides(59), ALLOW);
    for newer in [60, 500, X32 - 1, X32, u32::MAX] {
        assert_eq!(decides(newer), Action::MISSING, "{newer:#x}");
    }
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
        let rules = resolve(&profile(rule(includes, excludes)), &capabilities).unwrap();
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
