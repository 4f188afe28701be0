//! The tasks that give back what ended containers of a pod had: one at a time of each kind.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use crate::guests::Guests;

/// The order of a pod's tasks that give back memory, regions or CPUs: one is at work, and at most
/// one more waits to look again. However often containers end, a guest that gives nothing back
/// makes the daemon hold two tasks.
#[derive(Debug)]
pub(crate) struct Returns {
    waiting: Arc<Semaphore>,
    at_work: Arc<Mutex<()>>,
}

impl Default for Returns {
    fn default() -> Self {
        Self { waiting: Arc::new(Semaphore::new(1)), at_work: Arc::default() }
    }
}

impl Returns {
    /// Runs `work` on the guests' thread once no other task is at work. Drops it if another task
    /// waits already: that one has not looked at the pod yet, and so sees what the caller has set
    /// free. `work` looks at the pod, too, when it begins.
    pub fn spawn(&self, guests: &Guests, work: impl Future<Output = ()> + Send + 'static) {
        let Some(waiting) = self.wait() else { return };
        guests.spawn(async move {
            let _turn = waiting.begin().await;
            work.await;
        });
    }

    /// Takes the place of the task that waits. Returns `None` if another task has it.
    fn wait(&self) -> Option<Waiting> {
        let place = Arc::clone(&self.waiting).try_acquire_owned().ok()?;
        Some(Waiting { place, at_work: Arc::clone(&self.at_work) })
    }
}

/// The place of the task that waits.
#[derive(Debug)]
struct Waiting {
    place: OwnedSemaphorePermit,
    at_work: Arc<Mutex<()>>,
}

impl Waiting {
    /// Waits until no other task is at work. Returns the turn to work, to be held until that is
    /// done. The caller looks at the pod only then: from then on another task may wait.
    async fn begin(self) -> OwnedMutexGuard<()> {
        let turn = self.at_work.lock_owned().await;
        drop(self.place);
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_task_is_at_work_and_one_waits() {
        let returns = Returns::default();
        let turn = returns.wait().unwrap().begin().await;
        let next = returns.wait().unwrap();
        assert!(returns.wait().is_none(), "the next task looks later");
        let next = tokio::spawn(next.begin());
        tokio::task::yield_now().await;
        assert!(!next.is_finished() && returns.wait().is_none(), "one is still at work");
        drop(turn);
        let turn = next.await.unwrap();
        drop(returns.wait().unwrap());
        drop(turn);
        drop(returns.wait().unwrap().begin().await);
    }
}
