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
    let (mut comparisons, mut last) = (0, None);
    for rule in &profile.syscalls {
        if rule.counts(capabilities)? {
            add(&mut rules, rule, &mut comparisons)?;
            last = last.max(rule.all_names().filter_map(number).max());
        }
    }
    if let Some(last) = last
        && !is_permissive(rules.default)
    {
        rules.above = (last + 1, Action::MISSING);
    }
    check_execve(&rules)?;
    Ok(rules)
}

fn action(name: &str, errno: Option<u32>) -> Result<Action, Error> {
    Ok(match name {
        "SCMP_ACT_ALLOW" => Action::ALLOW,
        "SCMP_ACT_ERRNO" => errno.map_or(Action::REFUSE, Action::errno),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KILL_THREAD,
        "SCMP_ACT_KILL_PROCESS" => Action::KILL_PROCESS,
        "SCMP_ACT_TRAP" => Action::TRAP,
        "SCMP_ACT_LOG" => Action::LOG,
        // Without a tracer the kernel answers so.
        "SCMP_ACT_TRACE" => Action::MISSING,
        "SCMP_ACT_NOTIFY" => return Err(Error::Notify),
        other => return Err(Error::Action(other.chars().take(32).collect())),
    })
}

fn is_permissive(action: Action) -> bool {
    [Action::ALLOW, Action::LOG].contains(&action)
}

/// Adds a rule. `comparisons` counts those of all rules: each is at least one instruction.
fn add(rules: &mut Rules, rule: &Rule, comparisons: &mut usize) -> Result<(), Error> {
    let action = action(&rule.action, rule.errno_ret)?;
    let cases = cases(rule, action)?;
    for number in rule.all_names().filter_map(number) {
        if action == rules.default {
            continue;
        }
        match (rules.calls.get_mut(&number), cases.as_slice()) {
            (Some(Decision::Always(_)), _) => {}
            (_, []) => {
                rules.calls.insert(number, Decision::Always(action));
            }
            (known, cases) => {
                *comparisons += cases.iter().map(|(all, _)| all.len()).sum::<usize>();
                if *comparisons > MOST_INSTRUCTIONS {
                    return Err(Error::TooLarge);
                }
                match known {
                    Some(Decision::Cases(known)) => known.extend_from_slice(cases),
                    _ => {
                        rules.calls.insert(number, Decision::Cases(cases.to_vec()));
                    }
                }
            }
        }
    }
    Ok(())
}

fn check_execve(rules: &Rules) -> Result<(), Error> {
    let always = match rules.calls.get(&(Sysno::execve as u32)) {
        Some(Decision::Always(action)) => *action,
        Some(Decision::Cases(_)) => return Ok(()),
        None => rules.default,
    };
    if is_permissive(always) { Ok(()) } else { Err(Error::Execve) }
}

/// Returns the cases of a rule; none if it has no comparisons. Several comparisons of one argument
/// make each comparison a case of its own, as in runc.
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
