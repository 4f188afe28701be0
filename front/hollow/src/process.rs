//! The process: its main thread serves the control socket, another one is the guest's agent.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result, anyhow};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use serde_json::json;
use slipway_telemetry::monotonic_ns;
use slipway_vmm_process::control::Control;
use slipway_vmm_process::qmp::{self, Command};

use crate::args::Args;
use crate::functions::Functions;
use crate::service;

/// Connects the functions, and serves the control socket until the VM ends.
///
/// # Errors
/// The reason why a function cannot be connected or driven.
pub fn run(args: Args) -> Result<()> {
    let Args { memory, control, agent, functions } = args;
    let functions = Functions::connect(functions, &memory)?;
    let (begin, begun) = channel();
    let (end, ended) = channel();
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let told = rustix::event::eventfd(0, flags).context("an eventfd")?;
    let tells = told.try_clone()?;
    let guest = move || {
        let outcome = be_guest(functions, agent, &begun);
        // An error: the process ends already.
        let _ = end.send(outcome);
        let _ = rustix::io::write(&tells, &1u64.to_ne_bytes());
    };
    std::thread::Builder::new().name("guest".into()).spawn(guest).context("a thread")?;
    Machine { control: Control::new(control), begin: Some(begin), told }.serve(&ended)
}

/// Waits until the machine is told to run, then is its guest: has drivers in place, and serves as
/// the agent. Returns when the host has asked it to power off.
fn be_guest(functions: Functions, agent: OwnedFd, begun: &Receiver<()>) -> Result<()> {
    // An error: the machine ends before it was told to run.
    if begun.recv().is_err() {
        return Ok(());
    }
    let (mut functions, start_ns) = (functions, monotonic_ns());
    for (number, disks) in &mut functions.disks {
        disks.bring_up().with_context(|| format!("the controller of function {number}"))?;
    }
    service::serve(functions, agent, (start_ns, monotonic_ns()))
}

/// The machine as its control socket shows it.
struct Machine {
    control: Control,
    /// Tells the guest to run; `None` once it does.
    begin: Option<Sender<()>>,
    /// Counts the guest's end.
    told: OwnedFd,
}

impl Machine {
    /// Serves the control socket until the guest or the client ends the machine.
    fn serve(&mut self, ended: &Receiver<Result<()>>) -> Result<()> {
        loop {
            let [connects, speaks, is_over] = self.wait()?;
            if is_over {
                let outcome = ended.recv().map_err(|_| anyhow!("the guest's thread panicked"));
                outcome.flatten()?;
                let data = json!({ "guest": true, "reason": "guest-shutdown" });
                self.control.send(&qmp::event("SHUTDOWN", data));
                return Ok(());
            }
            if connects {
                self.control.accept();
            }
            if speaks {
                self.control.flush();
                for incoming in self.control.receive() {
                    if self.execute(incoming.request) {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Waits for a client, for what the client sends or takes, and for the guest's end.
    fn wait(&self) -> Result<[bool; 3]> {
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.control.listener().as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.told.as_fd(), PollFlags::IN),
        ];
        if let Some(client) = self.control.client() {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, client.has_unsent());
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), flags));
        }
        rustix::io::retry_on_intr(|| poll(&mut fds, None)).context("poll")?;
        let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        Ok([ready(0), ready(2), ready(1)])
    }

    /// Carries out a command. Returns whether the process is to end.
    fn execute(&mut self, request: qmp::Request) -> bool {
        let outcome = match request.command {
            Ok(Command::Capabilities) => Ok(json!({})),
            Ok(Command::Status) => Ok(qmp::status(self.begin.is_none())),
            Ok(Command::Kvm) => Ok(json!({ "enabled": false, "present": false })),
            Ok(Command::Continue) => {
                if let Some(begin) = self.begin.take() {
                    // An error: the guest's thread has ended, which `serve` notices.
                    let _ = begin.send(());
                }
                Ok(json!({}))
            }
            Ok(Command::Quit) => {
                self.control.send(&qmp::answer(&request.id, Ok(json!({}))));
                self.control.send(&qmp::quit());
                return true;
            }
            Ok(_) => Err("a hollow machine cannot do that".to_owned()),
            Err(reason) => Err(reason),
        };
        self.control.send(&qmp::answer(&request.id, outcome));
        false
    }
}
