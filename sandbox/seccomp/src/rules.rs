//! A profile resolved: the decision for each number of a system call.

use std::collections::BTreeMap;

use syscalls::x86_64::Sysno;

use crate::profile::{Arg, Profile, Rule};
use crate::{Error, MOST_INSTRUCTIONS, Operator};

/// Actions of a filter, `SECCOMP_RET_…` of *linux/seccomp.h*.
const KILL_PROCESS: u32 = 0x8000_0000;
const KILL_THREAD: u32 = 0x0000_0000;
const TRAP: u32 = 0x0003_0000;
const ERRNO: u32 = 0x0005_0000;
const LOG: u32 = 0x7ffc_0000;
const ALLOW: u32 = 0x7fff_0000;
/// The largest error, `MAX_ERRNO` of *linux/err.h*.
const MOST_ERRNO: u32 = 4095;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// The answer to a call: the value that a filter returns to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action(pub u32);

impl Action {
    /// The process is killed.
    pub const KILL: Action = Action(KILL_PROCESS);
    /// The call fails as one that the kernel lacks.
    pub const MISSING: Action = Action(ERRNO | ENOSYS);

    fn parse(name: &str, errno: Option<u32>) -> Result<Action, Error> {
        Ok(Action(match name {
            "SCMP_ACT_ALLOW" => ALLOW,
            "SCMP_ACT_ERRNO" => ERRNO | errno.unwrap_or(EPERM).min(MOST_ERRNO),
            "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => KILL_THREAD,
            "SCMP_ACT_KILL_PROCESS" => KILL_PROCESS,
            "SCMP_ACT_TRAP" => TRAP,
            "SCMP_ACT_LOG" => LOG,
            // Without a tracer the kernel answers so.
            "SCMP_ACT_TRACE" => ERRNO | ENOSYS,
            "SCMP_ACT_NOTIFY" => return Err(Error::Notify),
            other => return Err(Error::Action(other.chars().take(32).collect())),
        }))
    }

    fn is_permissive(self) -> bool {
        [ALLOW, LOG].contains(&self.0)
    }
}

/// Comparisons that must all hold, and the action if they do.
pub type Case = (Vec<Comparison>, Action);

/// A comparison of an argument, with its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Index of the argument, 0 to 5.
    pub index: u32,
    /// The operator.
    pub op: Operator,
    /// The mask of [`Operator::MaskedEqual`], else all bits.
    pub mask: u64,
    /// The value.
    pub value: u64,
}

/// The answer to calls of one number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Always this.
    Always(Action),
    /// The first case that holds decides, else the default.
    Cases(Vec<Case>),
}

/// The decisions of a profile.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The action for numbers without a decision.
    pub default: Action,
    /// The action for numbers above `last`.
    pub above: Action,
    /// The highest number that the profile names.
    pub last: u32,
    /// The decisions by number.
    pub calls: BTreeMap<u32, Decision>,
}

impl Rules {
    /// Resolves a profile for a process with these capabilities.
    ///
    /// # Errors
    /// The errors of [`Profile::compile`].
    pub fn of(profile: &Profile, capabilities: &[String]) -> Result<Rules, Error> {
        let default = Action::parse(&profile.default_action, profile.default_errno_ret)?;
        let mut rules = Rules { default, above: default, last: 0, calls: BTreeMap::new() };
        let mut comparisons = 0;
        for rule in &profile.syscalls {
            if rule.counts(capabilities)? {
                rules.add(rule, &mut comparisons)?;
            }
        }
        if !default.is_permissive() && rules.last > 0 {
            rules.above = Action::MISSING;
        }
        rules.check_execve()?;
        Ok(rules)
    }

    /// Adds a rule. `comparisons` counts those of all rules: each is at least one instruction.
    fn add(&mut self, rule: &Rule, comparisons: &mut usize) -> Result<(), Error> {
        let action = Action::parse(&rule.action, rule.errno_ret)?;
        let cases = cases(rule, action)?;
        for number in rule.all_names().filter_map(number) {
            self.last = self.last.max(number);
            if action == self.default {
                continue;
            }
            match (self.calls.get_mut(&number), cases.as_slice()) {
                (Some(Decision::Always(_)), _) => {}
                (_, []) => {
                    self.calls.insert(number, Decision::Always(action));
                }
                (known, cases) => {
                    *comparisons += cases.iter().map(|(all, _)| all.len()).sum::<usize>();
                    if *comparisons > MOST_INSTRUCTIONS {
                        return Err(Error::TooLarge);
                    }
                    match known {
                        Some(Decision::Cases(known)) => known.extend_from_slice(cases),
                        _ => {
                            self.calls.insert(number, Decision::Cases(cases.to_vec()));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn check_execve(&self) -> Result<(), Error> {
        let always = match self.calls.get(&(Sysno::execve as u32)) {
            Some(Decision::Always(action)) => *action,
            Some(Decision::Cases(_)) => return Ok(()),
            None => self.default,
        };
        if always.is_permissive() { Ok(()) } else { Err(Error::Execve) }
    }

    /// Returns the action for a call with a number below those of x32. Tests compare the program
    /// with it.
    #[cfg(test)]
    pub fn evaluate(&self, number: u32, args: &[u64; 6]) -> Action {
        match self.calls.get(&number) {
            _ if number > self.last => self.above,
            None => self.default,
            Some(Decision::Always(action)) => *action,
            Some(Decision::Cases(cases)) => {
                let held = cases.iter().find(|(all, _)| all.iter().all(|one| one.holds(args)));
                held.map_or(self.default, |(_, action)| *action)
            }
        }
    }
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
    let all = rule.args.iter().map(Comparison::of);
    Ok(match compared.iter().max() {
        None | Some(0) => Vec::new(),
        Some(1) => vec![(all.collect(), action)],
        Some(_) => all.map(|one| (vec![one], action)).collect(),
    })
}

impl Comparison {
    fn of(arg: &Arg) -> Comparison {
        let (mask, value) = match arg.op {
            Operator::MaskedEqual => (arg.value, arg.value_two & arg.value),
            _ => (u64::MAX, arg.value),
        };
        Comparison { index: arg.index, op: arg.op, mask, value }
    }

    #[cfg(test)]
    fn holds(self, args: &[u64; 6]) -> bool {
        let arg = args[self.index as usize];
        match self.op {
            Operator::NotEqual => arg != self.value,
            Operator::Less => arg < self.value,
            Operator::LessOrEqual => arg <= self.value,
            Operator::Equal => arg == self.value,
            Operator::GreaterOrEqual => arg >= self.value,
            Operator::Greater => arg > self.value,
            Operator::MaskedEqual => arg & self.mask == self.value,
        }
    }
}

fn number(name: &str) -> Option<u32> {
    name.parse::<Sysno>().ok().map(|number| number as u32)
}
