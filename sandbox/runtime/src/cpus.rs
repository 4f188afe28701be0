//! The CPUs of a running sandbox: `slipway update --cpus`.
//!
//! A sandbox begins with some CPUs, which stay, and can be given others up to the number that its
//! machine was made for. The steps are the same for more and for fewer, and each is done only for
//! CPUs that need it: the VMM gets more CPU time, adds CPUs, the agent brings CPUs online and takes
//! the others offline, the VMM removes those from the last one on, and gets less CPU time.
//!
//! After an error, the number of CPUs is the one that the VMM lists, but no more than it was given.
//! The number is read again when a daemon adopts a sandbox, since the one before may have ended
//! between two steps; more CPU time that it gave is taken back then, and guest and VMM get the
//! recorded CPUs ([`settle`]). A VMM that does not answer has the CPU time that it had before. The
//! software emulation of QEMU takes no CPU back: there, CPUs that are taken away stay in the VMM,
//! offline.

use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{Accel, CpuSlot, Vm};

use crate::agent::Agent;
use crate::cgroup;
use crate::config::MOST_CPUS;
use crate::node::Node;
use crate::record::Record;
use crate::sandbox::Sandbox;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The time in which a guest gives back the CPUs that its kernel has taken offline, together.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time in which the guest of an adopted sandbox follows: the daemon serves nobody before.
const SETTLE: Duration = Duration::from_secs(5);
/// The time between two looks at the VMM's list.
const LOOK: Duration = Duration::from_millis(20);

impl Node {
    /// Changes the number of CPUs of a running sandbox. The change goes on to its end if the caller
    /// stops waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the sandbox cannot have so many; [`Error::WrongState`] if its
    /// container does not run or its CPUs are being changed; [`Error::Cpus`] if the VMM or the
    /// guest failed.
    pub async fn set_cpus(&self, sandbox: &Arc<Sandbox>, wanted: u32) -> Result<()> {
        let change = Change::of(sandbox, wanted)?;
        let turn = sandbox.change_size()?;
        let changed = self.guests.spawn(async move {
            let _turn = turn;
            change.run(wanted).await?;
            let choose = |record: &mut Record| {
                record.cpus.chosen = if wanted == record.cpus.boot { 0 } else { wanted };
            };
            change.sandbox.update(choose).await
        });
        changed.await.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}

/// Changes the number of CPUs of a running sandbox. The caller has the turn to change its size, and
/// does not stop waiting.
///
/// # Errors
/// The errors of [`Node::set_cpus`].
pub(crate) async fn change_to(sandbox: &Arc<Sandbox>, wanted: u32) -> Result<()> {
    Change::of(sandbox, wanted)?.run(wanted).await
}

/// Checks the numbers of CPUs of a new sandbox. Returns the number of CPUs that it begins with, and
/// the most that it can have; `most` is 0 if it can have no others.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn of_new(cpus: u32, most: u32) -> Result<(u32, u32)> {
    let most = if most == 0 { cpus } else { most };
    if cpus.max(most) > MOST_CPUS {
        let many = cpus.max(most);
        return Err(Error::Invalid(format!(
            "{many} CPUs are too many for a sandbox: at most {MOST_CPUS}"
        )));
    }
    if most < cpus {
        return Err(Error::Invalid(format!(
            "--max-cpus {most} is less than the {cpus} CPUs that the sandbox begins with"
        )));
    }
    Ok((cpus, most))
}

/// Returns the most CPUs that a new sandbox can have: for a pod that boots, and names no most, what
/// the node's settings give to pods. A machine that begins with a template has its CPUs, and one
/// that is to be saved as a template those that it was asked for with.
pub(crate) fn most_of_new(record: &Record, spec: &RunSpec, setting: u32) -> u32 {
    let boots = spec.template.is_empty() && !record.saving.is_for_template();
    match record.pod && boots && spec.max_cpus == 0 {
        true => record.cpus.max.max(setting),
        false => record.cpus.max,
    }
}

fn check(record: &Record, wanted: u32) -> Result<()> {
    let Record { name, cpus, .. } = record;
    let (least, most) = (cpus.boot.max(1), cpus.max);
    if wanted < least {
        return Err(Error::Invalid(format!(
            "{} too few for sandbox {name}: the {least} that it began with cannot be taken away",
            if wanted == 1 { "1 CPU is".to_owned() } else { format!("{wanted} CPUs are") }
        )));
    }
    if wanted > most {
        return Err(Error::Invalid(format!(
            "{wanted} CPUs are too many for sandbox {name}: at most {most}; \
             `slipway run --max-cpus` makes one that can have more"
        )));
    }
    Ok(())
}

/// Records the number of CPUs that the VMM of an adopted sandbox lists, if that is less than the
/// recorded one, and limits its CPU time to theirs. The next update of the record saves the number.
///
/// # Errors
/// [`Error::Hypervisor`] if the VMM does not answer, errors of control groups.
pub(crate) async fn recount(sandbox: &Sandbox, vm: &dyn Vm) -> Result<()> {
    if sandbox.look(|record| !record.cpus.can_grow()) {
        return Ok(());
    }
    if takes_back(vm) {
        let cpus = vm.cpus().await?;
        // The VMM's list alone never raises the number: the next change would trust it.
        sandbox.note(|record| record.cpus.count = count(record, &cpus).min(record.cpus.count));
    }
    limit(sandbox, sandbox.look(|record| record.cpus.count)).await
}

/// Gives the guest and the VMM of an adopted sandbox the recorded number of CPUs. The daemon before
/// may have ended when the guest had CPUs online that are not recorded, or recorded ones offline.
/// CPUs that do not follow within [`SETTLE`] stay as they are, with a line in the daemon's log.
pub(crate) async fn settle(sandbox: &Arc<Sandbox>, vm: &Arc<dyn Vm>, agent: &Agent) {
    if sandbox.look(|record| !record.cpus.can_grow()) {
        return;
    }
    let cpus = sandbox.look(|record| record.cpus.count);
    let (sandbox, agent, vm) = (Arc::clone(sandbox), agent.clone(), Arc::clone(vm));
    let change = Change { sandbox, agent, vm };
    let error = match tokio::time::timeout(SETTLE, change.change(cpus, cpus)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(late) => late.to_string(),
    };
    let sandbox = &change.sandbox.name;
    tracing::warn!(sandbox, %error, "its guest may have other CPUs than are recorded");
    // A CPU that the daemon before took away may have gone from the VMM meanwhile.
    if let Err(error) = recount(&change.sandbox, &*change.vm).await {
        tracing::warn!(sandbox, %error, "its CPUs are not counted again");
    }
}

/// Limits the CPU time of a sandbox's VMM to that of so many CPUs.
///
/// # Errors
/// [`Error::Cgroup`].
pub(crate) async fn limit(sandbox: &Sandbox, cpus: u32) -> Result<()> {
    let mut group = sandbox.look(cgroup::of);
    sandbox.lane.run(move || group.limit_cpus(cgroup::cpu_time(cpus))).await.map_err(Error::Cgroup)
}

/// Returns whether the VMM can remove a CPU.
fn takes_back(vm: &dyn Vm) -> bool {
    vm.accel() != Accel::Tcg
}

/// Returns the number of CPUs that the VMM lists as there. A VMM that its guest took over may list
/// anything, so the number is within the sandbox's own range.
fn count(record: &Record, cpus: &[CpuSlot]) -> u32 {
    let there = cpus.iter().filter(|one| one.present && one.cpu < record.cpus.max).count() as u32;
    there.max(record.cpus.boot)
}

/// Returns the name by which the VMM knows a CPU that was added.
fn name(cpu: u32) -> String {
    format!("cpu-{cpu}")
}

struct Change {
    sandbox: Arc<Sandbox>,
    agent: Agent,
    vm: Arc<dyn Vm>,
}

impl Change {
    /// Checks a change to `wanted` CPUs.
    fn of(sandbox: &Arc<Sandbox>, wanted: u32) -> Result<Self> {
        let agent = sandbox.agent()?;
        sandbox.look(|record| check(record, wanted))?;
        Ok(Self { sandbox: Arc::clone(sandbox), agent, vm: sandbox.live_vm()? })
    }

    async fn run(&self, wanted: u32) -> Result<()> {
        // The VMM's list alone never raises the limit.
        let before = self.sandbox.look(|record| record.cpus.count);
        let most = wanted.max(before);
        let changed = self.change(wanted, most).await;
        let used = if changed.is_ok() { wanted } else { most };
        let settled = self.note_online(used).await;
        if settled.is_err()
            && let Err(error) = limit(&self.sandbox, before).await
        {
            let sandbox = &self.sandbox.name;
            tracing::warn!(sandbox, %error, "its CPU time is not limited again");
        }
        match (changed, settled) {
            (Ok(()), settled) => settled.map(drop),
            (Err(error), Err(_)) => Err(error),
            (Err(error), Ok(cpus)) => Err(Error::Cpus {
                name: self.sandbox.name.clone(),
                cpus,
                reason: error.to_string(),
            }),
        }
    }

    async fn change(&self, wanted: u32, most: u32) -> Result<()> {
        let mut cpus = self.vm.cpus().await?;
        let room = self.sandbox.look(|record| record.cpus.max);
        cpus.retain(|one| one.cpu < room);
        limit(&self.sandbox, most).await?;
        for cpu in cpus.iter().filter(|one| !one.present && one.cpu < wanted) {
            self.vm.plug_cpu(&name(cpu.cpu), cpu.cpu).await?;
        }
        self.agent.set_cpus(wanted).await?;
        let leave = cpus.iter().rev().filter(|one| one.present && one.cpu >= wanted);
        let leave: Vec<u32> = leave.map(|one| one.cpu).collect();
        if leave.is_empty() || !takes_back(&*self.vm) {
            return Ok(());
        }
        let gone = async {
            for cpu in leave {
                self.unplug(cpu).await?;
            }
            Ok(())
        };
        tokio::time::timeout(PATIENCE, gone).await.unwrap_or_else(|_| {
            let within = PATIENCE.as_secs();
            Err(Error::Agent(format!("the guest has not given back its CPUs within {within} s")))
        })
    }

    /// Has the VMM remove a CPU, and waits until it lists the CPU no more.
    async fn unplug(&self, cpu: u32) -> Result<()> {
        self.vm.unplug(&name(cpu)).await?;
        let is_it = |one: &CpuSlot| one.present && one.cpu == cpu;
        while self.vm.cpus().await?.iter().any(is_it) {
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Records the CPUs that the VMM has and the guest uses, at most `used`, and limits the VMM's
    /// CPU time to theirs. Returns their number.
    async fn note_online(&self, used: u32) -> Result<u32> {
        let listed = self.vm.cpus().await?;
        let cpus = self.sandbox.look(|record| count(record, &listed)).min(used);
        limit(&self.sandbox, cpus).await?;
        self.sandbox.update(|record| record.cpus.count = cpus).await?;
        Ok(cpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Cpus, SandboxState};

    fn record(boot: u32, max: u32) -> Record {
        let record = crate::adopt::tests::record_of(SandboxState::Running);
        Record { cpus: Cpus { boot, max, ..record.cpus }, ..record }
    }

    #[test]
    fn a_new_sandbox_has_room_for_the_cpus_it_begins_with() {
        assert_eq!(of_new(2, 0).unwrap(), (2, 2));
        assert_eq!(of_new(1, 64).unwrap(), (1, 64));
        for (cpus, most, said) in
            [(65, 0, "65 CPUs"), (1, 65, "65 CPUs"), (4, 2, "--max-cpus 2 is less than the 4")]
        {
            let refused = of_new(cpus, most).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_pod_that_boots_has_the_room_of_the_settings() {
        let pod = |max_cpus| Record { pod: true, ..record(2, max_cpus) };
        let asked = |max_cpus| RunSpec { max_cpus, ..RunSpec::default() };
        assert_eq!(most_of_new(&pod(2), &asked(0), 4), 4);
        assert_eq!(most_of_new(&pod(2), &asked(0), 0), 2);
        assert_eq!(most_of_new(&pod(2), &asked(0), 1), 2, "it begins with more");
        assert_eq!(most_of_new(&pod(3), &asked(3), 4), 3, "it names the most");
        assert_eq!(most_of_new(&record(2, 2), &asked(0), 4), 2, "it is no pod");
        let fork = RunSpec { template: "auto".to_owned(), ..asked(0) };
        assert_eq!(most_of_new(&pod(2), &fork, 4), 2);
        let mut saved = pod(2);
        saved.saving.as_template = Some("web".to_owned());
        assert_eq!(most_of_new(&saved, &asked(0), 4), 2);
    }

    #[test]
    fn a_number_out_of_range_is_refused_with_the_range() {
        check(&record(2, 4), 2).unwrap();
        check(&record(2, 4), 4).unwrap();
        for (wanted, said) in [
            (0, "0 CPUs are too few for sandbox one: the 2 that"),
            (1, "1 CPU is too few"),
            (5, "at most 4; `slipway run --max-cpus`"),
        ] {
            let refused = check(&record(2, 4), wanted).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_vmms_list_counts_within_the_sandboxs_range() {
        let cpus = |there: &[bool]| -> Vec<CpuSlot> {
            let slot = |(cpu, &present): (usize, &bool)| CpuSlot { cpu: cpu as u32, present };
            there.iter().enumerate().map(slot).collect()
        };
        assert_eq!(count(&record(1, 3), &cpus(&[true, true, false])), 2);
        assert_eq!(count(&record(2, 3), &cpus(&[false; 3])), 2);
        assert_eq!(count(&record(1, 3), &cpus(&[true; 200])), 3);
    }
}
