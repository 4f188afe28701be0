//! A switch as a task of a reactor, and the way from other threads to it.
//!
//! Other threads send jobs, which are closures and not an enum of commands: a job looks at the
//! switch and changes it in one step, in which no other job comes between. Callers find a port by
//! its number, check that it still has the name that they mean, change it, and return what it has
//! become, in combinations of their own. [`Owner`] is what a job may do.

use std::sync::Arc;

use slipway_reactor::{Context, Step, Stopped, Task, TaskId};

use crate::inbox::{Inbox, Message};
use crate::running::{Owner, Running};
use crate::waker::Wake;
use crate::{PortIndex, Switch};

/// A handle by which other threads reach a switch. Cheap to clone; harmless after the switch has
/// ended.
#[derive(Clone)]
pub struct Handle {
    inbox: Arc<Inbox>,
    reactor: slipway_reactor::Handle,
    task: TaskId,
}

impl Handle {
    /// Makes the switch's thread run `job` soon. Jobs run in the order in which they were posted,
    /// and must be short and not wait. A job sends any answer itself.
    ///
    /// # Errors
    /// [`Stopped`] if the switch has ended; the job is dropped.
    pub fn run(
        &self,
        job: impl FnOnce(&mut Owner<'_, '_>) + Send + 'static,
    ) -> Result<(), Stopped> {
        self.post(Message::Call(Box::new(job)))
    }

    /// Runs `job` as [`Handle::run`] does, waits for it, and returns its result.
    ///
    /// Deadlocks if called on the switch's own thread.
    ///
    /// # Errors
    /// [`Stopped`] if the switch has ended, or ends before it runs the job.
    pub fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Owner<'_, '_>) -> R + Send + 'static,
    ) -> Result<R, Stopped> {
        let (answer, result) = std::sync::mpsc::sync_channel(1);
        self.run(move |owner| drop(answer.send(job(owner))))?;
        result.recv().map_err(|_| Stopped)
    }

    /// Ends the switch and drops its ports.
    pub fn stop(&self) {
        // If this fails, the switch has ended already.
        let _ = self.post(Message::Stop);
    }

    fn post(&self, message: Message) -> Result<(), Stopped> {
        self.inbox.push(message)?;
        self.reactor.wake(self.task)
    }
}

impl Wake for Handle {
    fn wake(&self, port: PortIndex) {
        // A switch that has ended needs no wake-up.
        let _ = self.post(Message::Wake(port));
    }
}

/// A switch as a task of a reactor.
struct SwitchTask {
    /// The switch until the first step.
    fresh: Option<Switch>,
    running: Option<Running>,
    inbox: Arc<Inbox>,
    reactor: slipway_reactor::Handle,
}

/// Gives `switch` to a reactor, where it stays until [`Handle::stop`] or the reactor's end.
///
/// # Errors
/// [`Stopped`] if the reactor has ended.
pub fn spawn(reactor: &slipway_reactor::Handle, switch: Switch) -> Result<Handle, Stopped> {
    let inbox = Arc::new(Inbox::new());
    let task = SwitchTask {
        fresh: Some(switch),
        running: None,
        inbox: Arc::clone(&inbox),
        reactor: reactor.clone(),
    };
    let task = reactor.add(Box::new(task))?;
    Ok(Handle { inbox, reactor: reactor.clone(), task })
}

impl Task for SwitchTask {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if let Some(running) = &mut self.running {
            // The task slept in a step and now has a thread of its own.
            running.watch_again(context);
            return Ok(());
        }
        let Some(switch) = self.fresh.take() else { return Ok(()) };
        let (inbox, reactor) = (Arc::clone(&self.inbox), self.reactor.clone());
        let handle = Handle { inbox, reactor, task: context.id() };
        let waking = Arc::new(handle);
        self.running = Some(Running::new(switch, waking, context));
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        let Some(running) = &mut self.running else { return Step::Done };
        running.begin_step();
        if self.inbox.has_messages() && !read(self.inbox.take(), running, context) {
            return Step::Done;
        }
        running.step(context)
    }
}

impl Drop for SwitchTask {
    fn drop(&mut self) {
        let messages = self.inbox.close();
        // Drop the ports first: a caller whose wait ends must not find any port left.
        (self.fresh, self.running) = (None, None);
        // Drop the messages outside the lock: a caller whose wait ends may post again.
        drop(messages);
    }
}

/// Handles messages. Returns `false` if the switch is to end.
fn read(messages: Vec<Message>, running: &mut Running, context: &mut Context<'_>) -> bool {
    for message in messages {
        match message {
            Message::Wake(port) => running.wake(port),
            Message::Call(job) => {
                job(&mut Owner::new(running, context));
                running.disown();
            }
            Message::Stop => return false,
        }
    }
    true
}
