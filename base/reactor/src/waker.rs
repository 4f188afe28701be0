//! Wakers of tasks, for code that knows no reactor.

use std::sync::Arc;
use std::task::{Wake, Waker};

use crate::{Handle, TaskId};

/// A task of a reactor, to be woken.
struct TaskWaker {
    handle: Handle,
    task: TaskId,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A reactor that has ended has no task to wake.
        let _ = self.handle.wake(self.task);
    }
}

impl Handle {
    /// Returns a waker that has the reactor poll a task, as [`Handle::wake`] does. Harmless after
    /// the task or the reactor has ended.
    pub fn waker(&self, task: TaskId) -> Waker {
        Waker::from(Arc::new(TaskWaker { handle: self.clone(), task }))
    }
}
