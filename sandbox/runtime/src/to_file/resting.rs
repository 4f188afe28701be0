//! A sandbox in its file: the release of its last VMM, its way out, and its end there.

use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

use super::NAME;
use crate::record::SandboxState;
use crate::running::Running;
use crate::sandbox::Sandbox;
use crate::templates::{UNFINISHED, apart};
use crate::{Error, Result};

/// The longest wait for the release of what an ended VMM had on the host.
const RELEASE: Duration = Duration::from_secs(300);
/// The advice for a sandbox in a file whose last VMM is not released.
pub(super) const VMM_LEFT: &str = "a process of its VMM has not ended yet; try again later";

/// Waits until nothing of the VMM of a sandbox in a file is left on the host: for [`RELEASE`] if
/// the VMM `has_ended`, and otherwise not at all. The caller holds locks of the sandbox's, and a
/// process that a device of the host keeps from ending may last for ever. Its sandbox stays in the
/// file, and comes to rest whenever the process ends.
///
/// # Errors
/// [`Error::Stopped`] if the sandbox has ended instead; [`Error::WrongState`] after that time, with
/// the advice that the memory is in the file.
pub(super) async fn rest(sandbox: &Sandbox, has_ended: bool) -> Result<()> {
    let rested = async {
        tokio::select! {
            () = sandbox.comes_to_rest() => Ok(()),
            _ = sandbox.wait_state(|state| !state.is_live()) => Err(Error::Stopped),
        }
    };
    let patience = if has_ended { RELEASE } else { Duration::ZERO };
    if let Ok(rested) = tokio::time::timeout(patience, rested).await {
        return rested;
    }
    // Calls fail at once, and tasks of containers wait for the next guest.
    sandbox.set_agent(None);
    let why = match has_ended {
        true => "its VMM has ended, and not all that it had on the host is released",
        false => "its VMM was killed and has not ended",
    };
    tracing::warn!(sandbox = sandbox.name, "its memory is in a file, but {why}");
    let advice = format!("its memory is in a file, but {why}; `slipway resume` works after that");
    Err(sandbox.wrong_state(&advice))
}

/// Returns whether a sandbox is in a file and can come back: `false` if it is not in one.
///
/// # Errors
/// [`Error::WrongState`] if it is in a file that it cannot come back from now.
pub(super) fn can_come_back(sandbox: &Sandbox) -> Result<bool> {
    match sandbox.is_in_file() {
        _ if sandbox.rests() => Ok(true),
        true if sandbox.is_stopping() => Err(sandbox.wrong_state("it is asked to end")),
        true => Err(sandbox.wrong_state(VMM_LEFT)),
        false => Ok(false),
    }
}

/// Waits until a sandbox has come back from its file. If it ends instead, its record says so on
/// disk, and then its files are removed.
///
/// # Errors
/// The errors of [`Sandbox::returned`].
pub(super) async fn returned(sandbox: &Sandbox) -> Result<Running> {
    let returned = sandbox.returned().await;
    let returned = returned.map(|(vm, agent, carry)| Running::new(vm, agent, carry));
    if returned.is_err() {
        // A daemon that is killed in between leaves a sandbox that ends, not one without its file.
        let noted = sandbox.update(|record| record.state = SandboxState::Stopping).await;
        if let Err(error) = noted.and(clear(sandbox).await) {
            tracing::warn!(sandbox = sandbox.name, %error, "while it ends in a file");
        }
    }
    returned
}

/// Removes the files of a save, complete or not, that the sandbox no longer needs.
///
/// # Errors
/// [`Error::File`].
pub(crate) async fn clear(sandbox: &Sandbox) -> Result<()> {
    let dir = sandbox.store.dir().to_owned();
    apart(move || {
        for name in [NAME.to_owned(), format!("{NAME}{UNFINISHED}")] {
            let path = dir.join(name);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed.map_err(Error::file("cannot remove", path))?,
            }
        }
        Ok(())
    })
    .await
}

/// Returns whether a sandbox has a file of its memory, whole or not. An error of the file system is
/// no reason to take it for lost.
pub(crate) async fn has_file(sandbox: &Sandbox) -> bool {
    let path = sandbox.store.dir().join(NAME);
    let looked = apart(move || Ok(path.try_exists())).await;
    !matches!(looked, Ok(Ok(false)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::record;
    use super::*;
    use crate::adopt::tests::sandbox_of;
    use crate::files::Files;
    use crate::record::Store;

    #[tokio::test]
    async fn a_sandbox_in_a_file_is_paused_and_has_no_agent_until_it_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record();
        (record.run.paused, record.saving.in_file) = (true, true);
        let store = Store::new(dir.path(), &record.id);
        store.create().unwrap();
        let lane = Files::start().unwrap().lane();
        let sandbox = Sandbox::new(record, store, lane);
        let refused = sandbox.agent().err().unwrap().to_string();
        assert!(refused.contains("paused") && refused.contains("slipway resume"), "{refused}");
        fs::create_dir(sandbox.store.dir().join(NAME)).unwrap();
        fs::create_dir(sandbox.store.dir().join(format!("{NAME}{UNFINISHED}"))).unwrap();
        sandbox.come_to_rest();
        sandbox.comes_to_rest().await;
        assert!(sandbox.rests());
        sandbox.give_back(Err(Error::Closed));
        assert!(!sandbox.rests());
        assert!(has_file(&sandbox).await);
        assert!(matches!(returned(&sandbox).await, Err(Error::Closed)));
        assert!(!has_file(&sandbox).await);
        // The next daemon has it end.
        assert_eq!(sandbox.store.load().unwrap().unwrap().state, SandboxState::Stopping);
        let left = fs::read_dir(sandbox.store.dir()).unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["record.json"], "the files of its save are removed");
        sandbox.come_to_rest();
        sandbox.kill();
        assert!(matches!(returned(&sandbox).await, Err(Error::Stopped)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_vmm_that_does_not_end_keeps_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record();
        (record.run.paused, record.saving.in_file) = (true, true);
        let sandbox = sandbox_of(record, dir.path());
        for (has_ended, why) in [(false, "has not ended"), (true, "is released")] {
            let late = rest(&sandbox, has_ended).await.unwrap_err().to_string();
            assert!(late.contains("is paused") && late.contains(why), "{late}");
            assert!(late.contains("slipway resume") && !late.contains('\n'), "{late}");
            assert!(sandbox.is_in_file(), "it has no other memory");
        }
        let refused = can_come_back(&sandbox).unwrap_err().to_string();
        assert!(refused.contains("has not ended yet"), "{refused}");
        sandbox.come_to_rest();
        rest(&sandbox, false).await.unwrap();
        assert!(can_come_back(&sandbox).unwrap());
        sandbox.give_back(Err(Error::Closed));
        sandbox.kill();
        let refused = can_come_back(&sandbox).unwrap_err().to_string();
        assert!(refused.contains("asked to end"), "{refused}");
        let ended = sandbox.update(|record| {
            (record.state, record.saving.in_file) = (SandboxState::Exited, false);
        });
        ended.await.unwrap();
        assert!(matches!(rest(&sandbox, true).await, Err(Error::Stopped)));
        assert!(!can_come_back(&sandbox).unwrap());
    }
}
