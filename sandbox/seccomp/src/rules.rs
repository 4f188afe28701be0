//! A profile resolved: the decision for each number of a system call.

use slipway_syscall_filter::Operator::Equal;
use slipway_syscall_filter::{Action, Case, Comparison, Decision, MOST_INSTRUCTIONS, Rules};
use syscalls::x86_64::Sysno;

use crate::Error;
use crate::profile::{Arg, Operator, Profile, Rule};

/// Resolves a profile for a process with these capabilities.
///
/// # Errors
/// The errors of [`Profile::compile`].
pub fn resolve(profile: &Profile, capabilities: &[String]) -> Result<Rules, Error> {
    let mut rules = Rules::new(action(&profile.default_action, profile.default_errno_ret)?);
    let (mut comparisons, mut largest) = (0, None);
    for rule in &profile.syscalls {
        if rule.counts(capabilities)? {
            add_rule(&mut rules, rule, &mut comparisons)?;
            largest = largest.max(rule.all_names().filter_map(number).max());
        }
    }
    // As in runc, calls newer than the profile are missing, so that programs try older ones.
    if let Some(largest) = largest
        && !is_permissive(rules.default)
    {
        rules.above = (largest + 1, Action::MISSING);
    }
    check_execve(&rules)?;
    Ok(rules)
}

/// Returns the action that a profile calls `name`. `errno` is the profile's error number for it.
///
/// # Errors
/// [`Error::Notify`] and [`Error::Action`].
fn action(name: &str, errno: Option<u32>) -> Result<Action, Error> {
    Ok(match name {
        "SCMP_ACT_ALLOW" => Action::ALLOW,
        "SCMP_ACT_ERRNO" => errno.map_or(Action::REFUSE, Action::errno),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KILL_THREAD,
        "SCMP_ACT_KILL_PROCESS" => Action::KILL_PROCESS,
        "SCMP_ACT_TRAP" => Action::TRAP,
        "SCMP_ACT_LOG" => Action::LOG,
        // A tracer would decide on the call. Without one, as here, the kernel fails it (ENOSYS).
        "SCMP_ACT_TRACE" => Action::MISSING,
        "SCMP_ACT_NOTIFY" => return Err(Error::Notify),
        other => return Err(Error::Action(other.chars().take(32).collect())),
    })
}

fn is_permissive(action: Action) -> bool {
    [Action::ALLOW, Action::LOG].contains(&action)
}

/// Adds a rule to the decisions of all calls that it names. `comparisons` counts the comparisons
/// of all rules, each of which takes at least one instruction.
///
/// # Errors
/// The errors of [`action`] and [`cases`], and [`Error::TooLarge`].
fn add_rule(rules: &mut Rules, rule: &Rule, comparisons: &mut usize) -> Result<(), Error> {
    let action = action(&rule.action, rule.errno_ret)?;
    let cases = cases(rule, action)?;
    // A rule with the default action changes nothing, whatever it compares.
    if action == rules.default {
        return Ok(());
    }
    let per_call: usize = cases.iter().map(|(all, _)| all.len()).sum();
    for number in rule.all_names().filter_map(number) {
        // Such a decision is of an earlier rule without comparisons, which no later rule changes.
        if matches!(rules.calls.get(&number), Some(Decision::Always(_))) {
            continue;
        }
        *comparisons += per_call;
        if *comparisons > MOST_INSTRUCTIONS {
            return Err(Error::TooLarge);
        }
        add_cases(rules, number, &cases, action);
    }
    Ok(())
}

/// Adds a rule's cases behind those that the call `number` has. A rule without cases has no
/// comparisons: its action replaces what the call has.
fn add_cases(rules: &mut Rules, number: u32, cases: &[Case], action: Action) {
    if cases.is_empty() {
        rules.calls.insert(number, Decision::Always(action));
    } else if let Some(Decision::Cases(earlier)) = rules.calls.get_mut(&number) {
        earlier.extend_from_slice(cases);
    } else {
        rules.calls.insert(number, Decision::Cases(cases.to_vec()));
    }
}

/// Checks that the filter lets a process execute its program.
///
/// # Errors
/// [`Error::Execve`].
fn check_execve(rules: &Rules) -> Result<(), Error> {
    let always = match rules.calls.get(&(Sysno::execve as u32)) {
        Some(Decision::Always(action)) => *action,
        Some(Decision::Cases(_)) => return Ok(()),
        None => rules.default,
    };
    if is_permissive(always) { Ok(()) } else { Err(Error::Execve) }
}

/// Returns the cases of a rule, empty if it has no comparisons. Several comparisons of one argument
/// make each comparison a case of its own, as in runc.
///
/// # Errors
/// [`Error::Argument`].
fn cases(rule: &Rule, action: Action) -> Result<Vec<Case>, Error> {
    let mut compared = [0; 6];
    for arg in &rule.args {
        let Some(count) = compared.get_mut(arg.index as usize) else {
            let name = rule.all_names().next().unwrap_or_default().chars().take(32).collect();
            return Err(Error::Argument(arg.index, name));
        };
        *count += 1;
    }
    let all = rule.args.iter().map(comparison);
    Ok(match compared.iter().max() {
        None | Some(0) => Vec::new(),
        Some(1) => vec![(all.collect(), action)],
        Some(_) => all.map(|one| (vec![one], action)).collect(),
    })
}

fn comparison(arg: &Arg) -> Comparison {
    match arg.op {
        Operator::Compare(op) => Comparison::new(arg.index, op, arg.value),
        Operator::MaskedEqual => {
            let (mask, value) = (arg.value, arg.value_two & arg.value);
            Comparison { mask, value, ..Comparison::new(arg.index, Equal, 0) }
        }
    }
}

fn number(name: &str) -> Option<u32> {
    name.parse::<Sysno>().ok().map(|number| number as u32)
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
