//! The machine's own functions: the console, which goes to standard output, the agent's port, which
//! goes to a socket, random numbers, shared pages, free pages.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::PollFlags;
use slipway_virtio_balloon::Balloon;
use slipway_virtio_console::Console;
use slipway_virtio_pmem::Pmem;
use slipway_virtio_rng::Rng;
use slipway_vmm::Machine;
use slipway_vmm::local::Local;
use slipway_vmm::output::Output;
use slipway_vmm::own::{self, AGENT_PORT, CONSOLE_PORT};
use slipway_vmm::state::OwnState;

use crate::stream::{Client, Ended};
use crate::watch::Watch;

/// The most bytes that wait for the agent's client: when it does not read, the guest waits.
const MAX_UNSENT: usize = 64 << 10;
/// Bytes that are moved at once.
const CHUNK: usize = 4096;

/// An event of the ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The guest has sent something, or has room.
    Console,
    /// The guest wants random numbers.
    Rng,
    /// The guest asks for its writes to shared pages to last.
    Pmem,
    /// The guest reports free pages.
    Balloon,
    /// A client of the agent's socket waits.
    AgentListener,
    /// The client of the agent's socket has sent something, or takes bytes again.
    Agent,
}

/// The ports of a guest.
pub struct Ports {
    console: Local<Console>,
    rng: Local<Rng>,
    pmem: Option<Local<Pmem>>,
    balloon: Option<Local<Balloon>>,
    output: Arc<Output>,
    listener: Option<OwnedFd>,
    agent: Option<Agent>,
}

struct Agent {
    client: Client,
    /// Bytes that the guest has had no room for.
    unread: Vec<u8>,
}

impl Ports {
    /// Adds the functions to the machine. The agent's port leads to clients of `listener`, one
    /// after the other. `reports` says whether the guest can report free pages.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn new(
        machine: &Machine,
        listener: Option<OwnedFd>,
        reports: bool,
    ) -> Result<Self, String> {
        let console = own::console(&machine.chassis)?;
        console.serve(|console| console.set_host_open(CONSOLE_PORT, true));
        let rng = own::rng(&machine.chassis)?;
        let pmem = own::pmem(&machine.chassis)?;
        let balloon = reports.then(|| own::balloon(&machine.chassis)).transpose()?;
        let output = Arc::clone(&machine.output);
        Ok(Self { console, rng, pmem, balloon, output, listener, agent: None })
    }

    /// Moves what the guest has printed so far, and returns the state of the functions for a
    /// successor. The guest is stopped. They do not touch its memory until they are served again.
    pub fn save(&mut self) -> OwnState {
        self.serve(Token::Console);
        let (console, rng) = (self.console.save(), self.rng.save());
        let pmem = self.pmem.as_ref().map(Local::save);
        let balloon = self.balloon.as_ref().map(Local::save);
        OwnState { console, rng, pmem, memory: Vec::new(), balloon }
    }

    /// Has the functions served after [`Ports::save`], whatever has come meanwhile.
    pub fn go_on(&self) {
        self.console.announce();
        self.rng.announce();
        self.pmem.iter().for_each(Local::announce);
        self.balloon.iter().for_each(Local::announce);
    }

    /// Lets the functions go on where those of a saved machine were. The host's end of the agent's
    /// port is closed.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn restore(&self, machine: &Machine, saved: &OwnState) -> Result<(), String> {
        let bus = &machine.chassis.pci;
        own::restore_console(&self.console, bus, &saved.console)?;
        self.rng.restore(bus, &saved.rng)?;
        let (pmem, balloon) = (self.pmem.iter(), self.balloon.iter());
        if (pmem.len(), balloon.len()) != (saved.pmem.iter().len(), saved.balloon.iter().len()) {
            let what = "--pmem and --free-page-reporting have to be as it had them";
            return Err(format!("the saved state: {what}"));
        }
        pmem.zip(&saved.pmem).try_for_each(|(pmem, saved)| pmem.restore(bus, saved))?;
        let mut balloon = balloon.zip(&saved.balloon);
        Ok(balloon.try_for_each(|(balloon, saved)| balloon.restore(bus, saved))?)
    }

    /// Adds to `watch` what the ports wait for.
    pub fn watch<'a, T: Copy>(&'a self, watch: &mut Watch<'a, T>, token: impl Fn(Token) -> T) {
        watch.read(self.console.notified(), token(Token::Console));
        watch.read(self.rng.notified(), token(Token::Rng));
        self.pmem.iter().for_each(|pmem| watch.read(pmem.notified(), token(Token::Pmem)));
        self.balloon.iter().for_each(|one| watch.read(one.notified(), token(Token::Balloon)));
        match (&self.agent, &self.listener) {
            (Some(agent), _) => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, agent.unread.is_empty());
                flags.set(PollFlags::OUT, agent.client.has_unsent());
                watch.add(agent.client.as_fd(), flags, token(Token::Agent));
            }
            (None, Some(listener)) => watch.read(listener.as_fd(), token(Token::AgentListener)),
            (None, None) => {}
        }
    }

    /// Serves an event.
    pub fn serve(&mut self, token: Token) {
        match token {
            Token::Rng => return self.rng.serve(|_| ()),
            Token::Pmem => return self.pmem.iter().for_each(|pmem| pmem.serve(|_| ())),
            Token::Balloon => return self.balloon.iter().for_each(Local::step),
            Token::AgentListener => {
                let listener = self.listener.as_ref();
                let client = listener.and_then(|listener| Client::accept(listener, MAX_UNSENT));
                self.agent = client.map(|client| Agent { client, unread: Vec::new() });
                let open = self.agent.is_some();
                self.console.serve(|console| console.set_host_open(AGENT_PORT, open));
            }
            Token::Console | Token::Agent => {}
        }
        let (agent, output) = (&mut self.agent, &self.output);
        let (ended, more) = self.console.serve(|console| {
            let more = move_console(console, output);
            let ended = agent.as_mut().is_some_and(|agent| agent.pump(console).is_err());
            if ended {
                console.set_host_open(AGENT_PORT, false);
            }
            (ended, more)
        });
        if more {
            self.console.announce();
        }
        if ended {
            self.agent = None;
        }
    }
}

/// Moves what the guest has printed. Bytes that the output does not take are lost: Linux waits in
/// its kernel until a console's bytes are read. Returns whether there may be more.
fn move_console(console: &mut Console, output: &Output) -> bool {
    let mut bytes = [0; CHUNK];
    // As much as the queue can hold, and not what the guest adds meanwhile.
    for _ in 0..slipway_virtio_console::QUEUE_SIZE {
        let len = console.port_read(CONSOLE_PORT, &mut bytes);
        if len == 0 {
            return false;
        }
        output.write_or_drop(&bytes[..len]);
    }
    true
}

impl Agent {
    /// Moves bytes both ways, as far as both sides take them.
    fn pump(&mut self, console: &mut Console) -> Result<(), Ended> {
        self.client.flush()?;
        let mut bytes = [0; CHUNK];
        while self.client.room() >= CHUNK {
            let len = console.port_read(AGENT_PORT, &mut bytes);
            if len == 0 {
                break;
            }
            self.client.send(&bytes[..len])?;
        }
        loop {
            let taken = console.port_write(AGENT_PORT, &self.unread);
            self.unread.drain(..taken);
            if !self.unread.is_empty() {
                // Bytes of a client that has gone do not wait for the guest: the next client would
                // wait with them.
                return if self.client.is_hung_up() { Err(Ended) } else { Ok(()) };
            }
            // Descriptors that come along are closed: the port carries bytes.
            match self.client.receive(&mut bytes)? {
                Some(received) => self.unread.extend(&bytes[..received.bytes]),
                None => return Ok(()),
            }
        }
    }
}
