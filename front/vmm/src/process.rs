//! The process: one loop serves the control socket, the guest's ports and the machine's end.
//!
//! [`run`] makes the machine ([`configure`], [`Process::new`]) and serves it ([`Process::serve`]):
//! it waits for the descriptors of [`Process::wait`], each with a [`Token`], and has the owner of
//! each do its part: the control socket's commands ([`Process::carry_out`]), the board's news
//! ([`Process::look_at_board`]), functions, ports, memory. `saved` has the commands that save the
//! machine, and lets it go on from a saved state.

mod saved;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::PollFlags;
use serde_json::{Value, json};
use slipway_vmm::board::{Board, End};
use slipway_vmm::state::Saved;
use slipway_vmm::{Ahead, Config, EmptyVm, Machine, Running, Start, plug};

use crate::args::Args;
use crate::control::{Control, Incoming};
use crate::cpus::HotCpus;
use crate::filter::{self, Role};
use crate::functions::{self, Functions};
use crate::memory::{self, HotMemory};
use crate::ports::{self, Ports};
use crate::qmp::{self, Command, Request};
use crate::save::Saves;
use crate::statistics;
use crate::watch::Watch;

/// Exit statuses; the help text lists them.
mod status {
    pub const POWER_OFF: u8 = 0;
    pub const RESET: u8 = 3;
    pub const PANIC: u8 = 4;
}

/// The most requests to stop the guest that wait until its CPUs have left it.
const MAX_STOPPING: usize = 16;

/// The descriptors that the loop waits for.
#[derive(Clone, Copy)]
enum Token {
    /// The guest panicked, the machine ended, or all CPUs have stopped.
    Board,
    /// A client of the control socket waits.
    ControlListener,
    /// The client of the control socket has sent something, or takes bytes again.
    Control,
    /// Something has happened to a function.
    Function(functions::Token),
    /// Something has happened to the guest's ports.
    Port(ports::Token),
    /// The guest plugs or unplugs memory.
    Memory(memory::Token),
    /// The machine was saved, or goes on afterwards.
    Saves,
}

/// Makes the machine and serves it until its end. Returns the exit status.
///
/// # Errors
/// The reason for which it could not be made or cannot continue, in one line.
pub fn run(args: Args) -> Result<u8, String> {
    let mut process = Process::new(args)?;
    let outcome = process.serve();
    // Only the paths are cleaned up. Ending the CPUs' threads one by one would wait for one whose
    // function's server does not answer; the end of the process does not.
    drop(std::mem::take(&mut process.sockets));
    std::mem::forget(process);
    outcome
}

/// Makes pages that the guest will touch soon, on a thread that ends when they are made.
fn make_ahead(ahead: Ahead) -> Result<(), String> {
    let run = move || {
        filter::apply(Role::Memory).expect("the kernel takes a filter that it took before");
        ahead.make();
    };
    let builder = std::thread::Builder::new().name("memory".into());
    builder.spawn(run).map(drop).map_err(|error| format!("starting a thread: {error}"))
}

/// Returns the configuration of the machine that the command line describes, and that goes on from
/// `saved` if that is there. Takes the files for it out of `args`.
fn configure(args: &mut Args, saved: Option<&Arc<Saved>>) -> Result<Config, String> {
    let missing = "the command line is incomplete";
    let stdout = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3);
    let vm = match args.vm.take() {
        Some(vm) => vm,
        None => EmptyVm::new(args.kvm.take().ok_or(missing)?)?,
    };
    let start = match saved {
        Some(saved) => Start::Saved(Arc::clone(saved)),
        None => Start::Kernel {
            kernel: args.kernel.take().ok_or(missing)?,
            initramfs: args.initramfs.take(),
            command_line: std::mem::take(&mut args.command_line),
        },
    };
    Ok(Config {
        cpus: args.cpus,
        max_cpus: args.max_cpus,
        slots: args.slots,
        template: args.template,
        vm,
        memory: args.memory.take().ok_or(missing)?,
        lease: args.lease.take(),
        shared: args.pmem.take(),
        hot_memory: std::mem::take(&mut args.hot_memory),
        free_page_reporting: args.free_page_reporting,
        start,
        console: stdout.map_err(|errno| format!("standard output: {errno}"))?,
    })
}

/// The machine, what serves it, and the client of the control socket.
struct Process {
    running: Running,
    functions: Functions,
    hot_cpus: HotCpus,
    ports: Ports,
    memory: HotMemory,
    control: Option<Control>,
    /// Removes the paths of sockets at the end.
    sockets: Vec<crate::args::Socket>,
    statistics: bool,
    /// Requests to stop the guest that are answered when all CPUs have left it.
    stopping: Vec<Value>,
    /// The event GUEST_PANICKED was sent.
    panic_told: bool,
    saves: Saves,
}

impl Process {
    fn new(mut args: Args) -> Result<Self, String> {
        let saved = args.restore.take().map(|state| Saved::read(&state.into())).transpose()?;
        let saved = saved.map(Arc::new);
        let machine = Machine::new(configure(&mut args, saved.as_ref())?)?;
        let mut sockets = Vec::new();
        let mut listener = |socket: crate::args::Socket| {
            let listener = socket.listener.try_clone().map_err(|error| error.to_string());
            sockets.push(socket);
            listener
        };
        let control = args.control.map(&mut listener).transpose()?.map(Control::new);
        let agent = args.agent.map(listener).transpose()?;
        let ports = Ports::new(&machine, agent, args.free_page_reporting)?;
        let mut memory = HotMemory::new(&machine)?;
        let (functions, hot_cpus) = match &saved {
            Some(saved) => saved::restore(&machine, &ports, &mut memory, args.functions, saved)?,
            None => (Functions::new(&machine, args.functions)?, HotCpus::default()),
        };
        machine.ahead().map(make_ahead).transpose()?;
        let running = machine.start(|| {
            // Without its filter a CPU must not run.
            filter::apply(Role::Cpu).expect("the kernel takes a filter that it took before");
        })?;
        filter::apply(Role::Events)?;
        if !args.paused {
            running.cpus.resume();
        }
        Ok(Self {
            running,
            functions,
            hot_cpus,
            ports,
            memory,
            control,
            sockets,
            statistics: args.statistics,
            stopping: Vec::new(),
            panic_told: false,
            saves: Saves::new()?,
        })
    }

    fn board(&self) -> &Board {
        &self.running.board
    }

    fn serve(&mut self) -> Result<u8, String> {
        loop {
            let ready = self.wait().map_err(|errno| format!("poll: {errno}"))?;
            for token in ready {
                match token {
                    Token::Board => {
                        if let Some(end) = self.look_at_board() {
                            return self.finish(end);
                        }
                    }
                    Token::ControlListener => self.control.iter_mut().for_each(Control::accept),
                    Token::Control => {
                        self.control.iter_mut().for_each(Control::flush);
                        let commands = self.control.as_mut().map(Control::receive);
                        for incoming in commands.unwrap_or_default() {
                            if self.execute(incoming) {
                                return Ok(status::POWER_OFF);
                            }
                        }
                    }
                    Token::Port(token) => self.ports.serve(token),
                    Token::Memory(token) => self.memory.serve(token),
                    Token::Saves => self.finish_save(),
                    Token::Function(token) => {
                        for line in self.functions.serve(token) {
                            self.tell(&line);
                        }
                    }
                }
            }
            for line in self.memory.events() {
                self.tell(&line);
            }
        }
    }

    fn wait(&self) -> rustix::io::Result<Vec<Token>> {
        let mut watch = Watch::new();
        watch.read(self.board().changed(), Token::Board);
        if let Some(control) = &self.control {
            watch.read(control.listener().as_fd(), Token::ControlListener);
            if let Some(client) = control.client() {
                let mut flags = PollFlags::IN;
                flags.set(PollFlags::OUT, client.has_unsent());
                watch.add(client.as_fd(), flags, Token::Control);
            }
        }
        let frozen = self.saves.freezes();
        watch.read(self.saves.finished(), Token::Saves);
        self.functions.watch(&mut watch, !frozen, Token::Function);
        if !frozen {
            self.ports.watch(&mut watch, Token::Port);
            self.memory.watch(&mut watch, Token::Memory);
        }
        Ok(watch.wait(self.memory.due())?.into_iter().map(|(token, _)| token).collect())
    }

    /// Reports what has happened to the guest. Returns the cause if the machine has ended.
    fn look_at_board(&mut self) -> Option<End> {
        self.board().clear_changed();
        if self.board().has_panicked() && !self.panic_told {
            self.panic_told = true;
            self.tell(&qmp::event("GUEST_PANICKED", json!({ "action": "run" })));
        }
        if !self.stopping.is_empty() && self.running.cpus.are_parked() {
            for id in std::mem::take(&mut self.stopping) {
                self.answer(&id, Ok(json!({})));
            }
            self.tell(&qmp::event("STOP", json!({})));
        }
        self.look_at_slots();
        self.board().ended()
    }

    /// Follows what the guest has ejected.
    fn look_at_slots(&mut self) {
        for device in plug::slots(self.board().ejected(plug::Kind::Function)) {
            self.functions.ejected(device);
        }
        for cpu in plug::slots(self.board().ejected(plug::Kind::Cpu)) {
            if let Some(line) = self.hot_cpus.ejected(&self.running.cpus, cpu) {
                self.tell(&line);
            }
        }
    }

    fn tell(&mut self, line: &[u8]) {
        self.control.iter_mut().for_each(|control| control.send(line));
    }

    fn answer(&mut self, id: &Value, outcome: Result<Value, String>) {
        self.tell(&qmp::answer(id, outcome));
    }

    fn has_device(&self, name: &str) -> bool {
        self.functions.has(name) || self.hot_cpus.has(name)
    }

    /// Carries out a command and answers it. Returns whether the process is to end.
    fn execute(&mut self, incoming: Incoming) -> bool {
        let Incoming { request: Request { id, command }, files } = incoming;
        // Closing what this process's own launcher sent does not wait.
        let files = files.into_iter().map(slipway_peer::Foreign::into_owned).collect();
        let quits = matches!(command, Ok(Command::Quit));
        let outcome = command.and_then(|command| {
            self.permits(&command)?;
            self.carry_out(command, &id, files)
        });
        match outcome {
            Ok(None) => {}
            Ok(Some(value)) => self.answer(&id, Ok(value)),
            Err(reason) => self.answer(&id, Err(reason)),
        }
        quits
    }

    /// Carries out a command with identifier `id`. Returns the answer, or `None` if the command was
    /// answered, or will be when a thread or the guest has done its part.
    fn carry_out(
        &mut self,
        command: Command,
        id: &Value,
        mut files: Vec<OwnedFd>,
    ) -> Result<Option<Value>, String> {
        match command {
            Command::Capabilities => return Ok(self.greet(id)),
            Command::Status => return Ok(Some(qmp::status(self.running.cpus.is_running()))),
            Command::Kvm => return Ok(Some(json!({ "enabled": true, "present": true }))),
            Command::Statistics => {
                return Ok(Some(statistics::collect(&self.running, self.memory.plugged())));
            }
            Command::Functions => return Ok(Some(self.functions.list())),
            Command::Memory => return Ok(Some(self.memory.list())),
            Command::Cpus => return Ok(Some(self.hot_cpus.list(self.board()))),
            Command::CopyAhead => return self.copy_ahead(id, files).map(|()| None),
            Command::Save { rest } => return self.save(id, files, rest).map(|()| None),
            Command::Continue if self.saves.freezes() => {
                return self.saves.start(id.clone(), self.functions.named()).map(|()| None);
            }
            Command::Continue => return Ok(self.resume(id)),
            Command::Stop => return self.stop(id).map(|()| None),
            Command::PowerDown => self.board().press_power_button(),
            Command::RequestMemory { device, bytes } => self.memory.request(device, bytes)?,
            Command::Plug { name } | Command::PlugCpu { name, .. } if self.has_device(&name) => {
                return Err(format!("there is a device {name:?} already"));
            }
            Command::PlugCpu { name, cpu } => {
                self.hot_cpus.plug(&self.running.cpus, &self.running.board, name, cpu)?;
            }
            Command::Plug { name } => {
                return self.functions.plug(name, files.pop(), id.clone()).map(|()| None);
            }
            Command::Unplug { name } if self.hot_cpus.has(&name) => {
                self.hot_cpus.unplug(&self.running.board, &name)?;
            }
            Command::Unplug { name } => self.functions.unplug(&name)?,
            Command::Reconnect { function } => {
                return self.functions.reconnect(function, files.pop(), id.clone()).map(|()| None);
            }
            Command::Quit => {
                self.answer(id, Ok(json!({})));
                self.tell(&qmp::quit());
                return Ok(None);
            }
        }
        Ok(Some(json!({})))
    }

    /// Answers a client's first command, and tells the client what an earlier one may have missed.
    /// Returns `None`, as [`carry_out`](Self::carry_out) does for a command that was answered.
    fn greet(&mut self, id: &Value) -> Option<Value> {
        // An earlier client's copy is nobody's, unless it is being saved.
        if !self.saves.freezes() {
            self.saves.forget();
        }
        self.answer(id, Ok(json!({})));
        for line in self.functions.lost_events() {
            self.tell(&line);
        }
        None
    }

    /// Has all CPUs run. Returns the answer, or `None` if it was sent, with the event behind it.
    fn resume(&mut self, id: &Value) -> Option<Value> {
        let was_running = self.running.cpus.is_running();
        self.running.cpus.resume();
        self.saves.forget();
        for id in std::mem::take(&mut self.stopping) {
            self.answer(&id, Err("the machine was told to run meanwhile".into()));
        }
        if !was_running {
            self.answer(id, Ok(json!({})));
            self.tell(&qmp::event("RESUME", json!({})));
        }
        was_running.then(|| json!({}))
    }

    /// Asks all CPUs to leave the guest. The board tells when they have, and then the request with
    /// identifier `id` is answered.
    ///
    /// # Errors
    /// Too many requests wait already.
    fn stop(&mut self, id: &Value) -> Result<(), String> {
        if self.stopping.len() >= MAX_STOPPING {
            return Err("too many requests to stop wait for a CPU".into());
        }
        self.stopping.push(id.clone());
        self.running.cpus.pause();
        if self.running.cpus.are_parked() {
            self.board().tell();
        }
        Ok(())
    }

    /// Tells the client, and returns the exit status.
    fn finish(&mut self, end: End) -> Result<u8, String> {
        if let Some(line) = qmp::shutdown(&end) {
            self.tell(&line);
        }
        if self.statistics {
            eprintln!("{}", statistics::collect(&self.running, self.memory.plugged()));
        }
        match end {
            End::PowerOff => Ok(status::POWER_OFF),
            End::Reset => Ok(status::RESET),
            End::Panic => Ok(status::PANIC),
            End::Failed(reason) => Err(reason),
        }
    }
}
