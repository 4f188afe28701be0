//! Settings of a reactor.

use std::sync::Arc;
use std::time::Duration;

/// Settings of a reactor.
#[derive(Clone)]
pub struct Settings {
    /// The thread's name; Linux shows the first 15 bytes.
    pub name: String,
    /// CPU that the thread is pinned to, if any.
    pub cpu: Option<usize>,
    /// Longest time for which the thread polls for events after the last work before it sleeps; the
    /// shortest is an eighth of it. In between the time follows how long the thread slept until
    /// work came. With zero the thread sleeps at once, and so it does on a machine with one CPU. A
    /// longer time lowers latency (an idle CPU is slow to wake) and burns more CPU.
    pub poll_budget: Duration,
    /// Says that in each step the tasks look for all their work by themselves, so that descriptors
    /// only wake them from sleep. While a task is ready, the reactor then checks for kernel events
    /// every 200 µs instead of every 20 µs: a check is a system call.
    pub self_polling: bool,
    /// Makes the reactor end with its last task instead of waiting for more.
    pub exit_when_empty: bool,
    /// Called with the reason for every task that was dropped because it panicked or could not
    /// start, and once for all tasks if the kernel does not let the thread wait for events.
    pub on_panic: Arc<dyn Fn(&str) + Send + Sync>,
    /// Called, on another thread, for every task that slept in a step and was left behind with a
    /// thread of its own.
    pub on_stall: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "reactor".into(),
            cpu: None,
            poll_budget: Duration::from_micros(200),
            self_polling: false,
            exit_when_empty: false,
            on_panic: Arc::new(|what| eprintln!("reactor: a task was dropped: {what}")),
            on_stall: Arc::new(|what| eprintln!("reactor: {what}")),
        }
    }
}
