//! The host's side of the agent's protocol.
//!
//! The guest at the other end may send anything, and its VMM may be compromised. So this module is
//! the trust boundary: replies are decoded on the [guests' thread](crate::guests), and each has a
//! deadline and a largest size. Values that leave this module were checked: known names only,
//! numbers in their ranges, messages that are one printable line.

mod abilities;
mod zygote;

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::{
    CONNECTION_WINDOW, EXIT_STATUS_METADATA, HUGE_PAGE, MOST_HEADERS, MOST_REPLY, PROTOCOL, STAGES,
    v1,
};
use slipway_peer::Bin;
use slipway_peer::tokio::{InTurns, Stream};
use slipway_telemetry::monotonic_ns;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::{Channel, Endpoint, Uri};

use self::abilities::Abilities;
use crate::error::MOST_MESSAGE;
use crate::guests::Guests;
use crate::{Error, Result};

/// The deadline of an ordinary call: one that does not wait for a process of the container.
pub(crate) const CALL: Duration = Duration::from_secs(30);
/// The deadline of a call that brings CPUs online and takes others offline.
const CPUS: Duration = Duration::from_secs(120);
/// The time for a driver to start its interface anew. A guest under emulation takes seconds.
const INTERFACE: Duration = Duration::from_secs(90);

/// HTTP/2 receive window of one stream, in bytes: the most output that the daemon holds while no
/// client takes it. It is small, since h2 gives up a connection on which too many tiny frames wait
/// to be taken.
const STREAM_WINDOW: u32 = 64 << 10;
/// The most commands and traces at once in one sandbox. All data that the daemon may have to hold
/// for them fits into the connection's window, with room for the container's own output and for
/// calls.
const MOST_SESSIONS: usize = 48;
/// The most processes of a container that a guest can name.
const MOST_PROCESSES: usize = 4096;
/// The most connections to ports at once in one sandbox, which count among [`MOST_SESSIONS`]: the
/// others are left for commands and containers.
const MOST_FORWARDS: usize = 16;
/// The most bytes of a container's termination message.
const MOST_TERMINATION: usize = 4096;
const _: () = assert!((MOST_SESSIONS as u32 + 8) * STREAM_WINDOW <= CONNECTION_WINDOW);

/// The client of an agent's calls.
pub(crate) type Client = AgentClient<Channel>;

/// A connection to a sandbox's agent. Clones share the connection.
#[derive(Clone)]
pub struct Agent {
    client: AgentClient<Channel>,
    guests: Guests,
    sessions: Arc<Semaphore>,
    forwards: Arc<Semaphore>,
    abilities: Abilities,
}

/// The agent's answer to the first call.
pub struct Hello {
    /// The guest's stages on the host's clock, each of [`STAGES`] at most once.
    pub stages: Vec<GuestStage>,
    /// When the agent's answer arrived: CLOCK_MONOTONIC of the host, ns.
    pub at_ns: u64,
    abilities: Abilities,
}

/// A stage that the guest went through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestStage {
    /// The stage's name, one of [`STAGES`].
    pub name: &'static str,
    /// The start: CLOCK_MONOTONIC of the host, ns. Not after the reply came.
    pub start_ns: u64,
    /// The end: CLOCK_MONOTONIC of the host, ns. Not after the reply came.
    pub end_ns: u64,
}

impl GuestStage {
    /// Returns the start and the end, neither before `begun`: a guest may tell of any times.
    pub(crate) fn since(&self, begun: u64) -> (u64, u64) {
        (self.start_ns.max(begun), self.end_ns.max(begun))
    }
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The exit status, 0 to 255.
    pub status: u32,
    /// Set if the guest's out-of-memory killer ended the process.
    pub out_of_memory: bool,
    /// The termination message of a container, of at most 4096 bytes of the guest's.
    pub message: String,
}

/// The resources that the guest reports to have used so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuestStats {
    /// Memory and processes.
    pub machine: v1::StatsReply,
    /// The sum over all block devices; `nsid` is 0.
    pub blocks: v1::BlockStats,
}

impl Agent {
    /// Connects to the VMM's socket for the agent's port and waits until the agent answers. There
    /// is no deadline: the caller must limit the time. Descriptors that the VMM sends are closed
    /// through `bin`, the sandbox's own.
    ///
    /// # Errors
    /// [`Error::Agent`] if nothing listens at `socket` or the agent speaks another protocol.
    pub async fn connect(guests: &Guests, socket: &Path, bin: &Bin) -> Result<(Self, Hello)> {
        let (path, bin) = (socket.to_owned(), bin.clone());
        let connector = tower::service_fn(move |_: Uri| {
            let (path, bin) = (path.clone(), bin.clone());
            async move {
                let stream = Stream::connect(path, &bin).await?;
                Ok::<_, std::io::Error>(TokioIo::new(InTurns::new(stream, &bin)))
            }
        });
        // A Unix socket has no authority, but gRPC requires one.
        let address = Endpoint::from_static("http://slipway.invalid")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(MOST_HEADERS);
        let connecting = async move { address.connect_with_connector(connector).await };
        let channel = guests.run(connecting).await.ok_or_else(broken)?;
        let channel = channel
            .map_err(|error| Error::Agent(format!("cannot reach the agent's port: {error}")))?;
        let client = AgentClient::new(channel).max_decoding_message_size(MOST_REPLY);
        let sessions = Arc::new(Semaphore::new(MOST_SESSIONS));
        let forwards = Arc::new(Semaphore::new(MOST_FORWARDS));
        let guests = guests.clone();
        let abilities = Abilities::default();
        let mut agent = Self { client, guests, sessions, forwards, abilities };
        let hello = agent.hello_within(None).await?;
        agent.abilities = hello.abilities;
        Ok((agent, hello))
    }

    /// Asks for the stages that the guest has completed.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub async fn hello(&self) -> Result<Hello> {
        self.hello_within(Some(CALL)).await
    }

    async fn hello_within(&self, limit: Option<Duration>) -> Result<Hello> {
        let hello = |mut client: AgentClient<Channel>| async move {
            client.hello(v1::HelloRequest { protocol: PROTOCOL }).await
        };
        let reply = self.call_within(limit, hello).await?;
        if reply.protocol != PROTOCOL {
            return Err(Error::Agent(format!(
                "the agent speaks protocol {}, this daemon {PROTOCOL}",
                reply.protocol
            )));
        }
        let at_ns = monotonic_ns();
        let abilities = Abilities::of(&reply);
        Ok(Hello { stages: stages(&reply.stages, reply.boottime_ns, at_ns), at_ns, abilities })
    }

    /// Makes one call, with a deadline of 30 seconds.
    ///
    /// # Errors
    /// [`Error::Refused`] with the agent's message, [`Error::Exec`] if a program could not be
    /// executed, or [`Error::Agent`] if the agent did not answer, or its guest failed.
    pub async fn call<T, F>(
        &self,
        call: impl FnOnce(AgentClient<Channel>) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send + 'static,
    {
        self.call_within(Some(CALL), call).await
    }

    /// Makes one call. Without a `limit` the call lasts as long as the connection, so the caller
    /// must have another reason to end it.
    ///
    /// # Errors
    /// The errors of [`Agent::call`].
    pub async fn call_within<T, F>(
        &self,
        limit: Option<Duration>,
        call: impl FnOnce(AgentClient<Channel>) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send + 'static,
    {
        let client = self.client.clone();
        let called = self.run(limit, async move { call(client).await.map_err(refused) });
        called.await.map(tonic::Response::into_inner)
    }

    /// Runs `task`, which receives from the agent, on the guests' thread.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        limit: Option<Duration>,
        task: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let run = self.guests.run(task);
        let Some(limit) = limit else { return run.await.ok_or_else(broken)? };
        match tokio::time::timeout(limit, run).await {
            Ok(outcome) => outcome.ok_or_else(broken)?,
            Err(_) => Err(Error::Agent(format!(
                "the sandbox's agent did not answer within {} s",
                limit.as_secs()
            ))),
        }
    }

    /// Opens a stream of replies of at most `most` bytes each, within `limit`.
    pub(crate) async fn open<T, F>(
        &self,
        (most, limit): (usize, Duration),
        open: impl FnOnce(AgentClient<Channel>) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let client = self.client.clone().max_decoding_message_size(most);
        self.run(Some(limit), open(client)).await
    }

    /// Returns the thread that receives from the agent.
    pub(crate) fn guests(&self) -> &Guests {
        &self.guests
    }

    /// Returns a permit for one more command or trace, to be held while it runs. `name` is the
    /// sandbox's, for the error.
    ///
    /// # Errors
    /// [`Error::Busy`] if the sandbox has as many as it may have.
    pub fn session(&self, name: &str) -> Result<OwnedSemaphorePermit> {
        let session = Arc::clone(&self.sessions).try_acquire_owned();
        session.map_err(|_| Error::Busy {
            name: name.to_owned(),
            what: "commands and traces",
            most: MOST_SESSIONS,
        })
    }

    /// Returns permits for one more connection to a port, to be held while it lasts. `name` is the
    /// sandbox's, for the error.
    ///
    /// # Errors
    /// [`Error::Busy`] if the sandbox has as many as it may have.
    pub(crate) fn forward(&self, name: &str) -> Result<[OwnedSemaphorePermit; 2]> {
        let forward = Arc::clone(&self.forwards).try_acquire_owned();
        let forward = forward.map_err(|_| Error::Busy {
            name: name.to_owned(),
            what: "connections to its ports",
            most: MOST_FORWARDS,
        })?;
        Ok([forward, self.session(name)?])
    }

    /// Waits for the end of a process, without a deadline: for ever if the guest never answers.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub async fn wait(&self, process: Option<v1::ProcessRef>) -> Result<Ended> {
        let request = v1::WaitRequest { process };
        let waited =
            self.call_within(None, |mut client| async move { client.wait(request).await }).await?;
        let v1::WaitReply { exit_status, out_of_memory, termination_message } = waited;
        let message = termination(&termination_message);
        Ok(Ended { status: exit_status.min(255), out_of_memory, message })
    }

    /// Checks that the agent can create a container: its process, and its huge pages.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub(crate) fn check_container(&self, request: &v1::CreateContainerRequest) -> Result<()> {
        self.check_process(request.process.as_ref())?;
        match request.resources.is_some_and(|limits| limits.huge_page_bytes >= HUGE_PAGE) {
            true => self.check_huge_pages(),
            false => Ok(()),
        }
    }

    /// Checks that the agent has the guest make huge pages: earlier agents ignore limits of these
    /// and directories of them.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub(crate) fn check_huge_pages(&self) -> Result<()> {
        if self.abilities.makes_huge_pages {
            return Ok(());
        }
        let old = "the sandbox's agent is of an earlier version, which makes no huge pages: start \
                   the sandbox anew, without a template of that version";
        Err(Error::Agent(old.to_owned()))
    }

    /// Checks that the agent can start a process: earlier agents ignore its ambient capabilities,
    /// and it would run without them.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub(crate) fn check_process(&self, process: Option<&v1::ProcessSpec>) -> Result<()> {
        abilities::check_ambient(self.abilities.gives_ambient, process)
    }

    /// Returns whether the agent makes directories that containers share by name. Earlier agents
    /// ignore these, and containers would run without them.
    pub(crate) fn makes_empty_dirs(&self) -> bool {
        self.abilities.makes_empty_dirs
    }

    /// Returns whether the agent makes directories of a container's own for files. Earlier agents
    /// ignore these, and put the files into the container's root.
    pub(crate) fn makes_file_dirs(&self) -> bool {
        self.abilities.makes_file_dirs
    }

    /// Has the guest use CPUs 0 to `cpus` - 1, and no others.
    ///
    /// # Errors
    /// [`Error::Agent`], also if the agent is of an earlier version.
    pub async fn set_cpus(&self, cpus: u32) -> Result<()> {
        let request = v1::SetCpusRequest { cpus };
        let set = move |mut client: AgentClient<Channel>| async move {
            client.set_cpus(request).await.map_err(|status| {
                let old = "the sandbox's agent is of an earlier version, which cannot change CPUs";
                let is_old = status.code() == tonic::Code::Unimplemented;
                if is_old { tonic::Status::unimplemented(old) } else { status }
            })
        };
        // The agent waits for each CPU by itself.
        self.call_within(Some(CPUS), set).await.map(drop)
    }

    /// Has the driver of the interface with this MAC address start its device anew.
    ///
    /// # Errors
    /// [`Error::Agent`], also if the agent is of an earlier version.
    pub async fn restart_interface(&self, mac: String) -> Result<()> {
        let request = v1::RestartInterfaceRequest { mac };
        let restart = move |mut client: AgentClient<Channel>| async move {
            client.restart_interface(request).await
        };
        self.call_within(Some(INTERFACE), restart).await.map(drop)
    }

    /// Asks the guest for the resources that it has used, or that one of its containers has used.
    /// The empty name stands for the guest.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub async fn stats(&self, container: &str) -> Result<GuestStats> {
        let request = v1::StatsRequest { container_id: container.to_owned() };
        let stats = |mut client: AgentClient<Channel>| async move { client.stats(request).await };
        let mut machine = self.call(stats).await?;
        let blocks = std::mem::take(&mut machine.blocks);
        Ok(GuestStats { machine, blocks: blocks.iter().fold(v1::BlockStats::default(), sum) })
    }

    /// Asks the guest for the processes of one of its containers, at most `MOST_PROCESSES`.
    /// Returns `None` if the agent is of an earlier version.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub async fn processes(&self, container: &str) -> Result<Option<Vec<u32>>> {
        let request = v1::ProcessesRequest { container_id: container.to_owned() };
        let list = |mut client: AgentClient<Channel>| async move {
            match client.processes(request).await {
                Err(status) if status.code() == tonic::Code::Unimplemented => {
                    Ok(tonic::Response::new(None))
                }
                listed => listed.map(|reply| reply.map(|reply| Some(reply.pids))),
            }
        };
        let listed = self.call(list).await?;
        let is_process = |pid: &u32| i32::try_from(*pid).is_ok_and(|pid| pid > 0);
        Ok(listed.map(|pids| pids.into_iter().filter(is_process).take(MOST_PROCESSES).collect()))
    }
}

fn sum(all: v1::BlockStats, one: &v1::BlockStats) -> v1::BlockStats {
    v1::BlockStats {
        nsid: 0,
        reads: all.reads.saturating_add(one.reads),
        read_bytes: all.read_bytes.saturating_add(one.read_bytes),
        writes: all.writes.saturating_add(one.writes),
        written_bytes: all.written_bytes.saturating_add(one.written_bytes),
    }
}

/// Returns the known ones of the stages in a reply, each at most once, on the host's clock.
/// `boottime_ns` is the guest's clock when it replied, `at_ns` the host's when the reply came: no
/// stage that the guest tells of ends later.
pub(crate) fn stages(told: &[v1::GuestStage], boottime_ns: u64, at_ns: u64) -> Vec<GuestStage> {
    // The error of this conversion is the reply's travel time: well under a millisecond when the
    // guest is awake.
    let guest_zero = at_ns.saturating_sub(boottime_ns);
    let host = |ns: u64| guest_zero.saturating_add(ns).min(at_ns);
    let known = STAGES.iter().filter_map(|name| {
        let stage = told.iter().find(|stage| stage.name == *name)?;
        Some(GuestStage { name, start_ns: host(stage.start_ns), end_ns: host(stage.end_ns) })
    });
    known.collect()
}

/// Returns the error for a task on the guests' thread that panicked.
fn broken() -> Error {
    Error::Agent("the sandbox's agent cannot be understood".to_owned())
}

/// Returns a container's termination message as text of at most [`MOST_TERMINATION`] bytes. It has
/// no control characters but those between words and lines, so that it takes at most twice as many
/// bytes in a record.
fn termination(message: &[u8]) -> String {
    let message = &message[..message.len().min(MOST_TERMINATION)];
    let is_shown = |letter: char| !letter.is_control() || ['\n', '\t', '\r'].contains(&letter);
    let shown = |letter| if is_shown(letter) { letter } else { char::REPLACEMENT_CHARACTER };
    let mut text: String = String::from_utf8_lossy(message).chars().map(shown).collect();
    text.truncate(text.floor_char_boundary(MOST_TERMINATION));
    text
}

/// Converts the agent's status to an error. A status that carries exit status 126 or 127 is about a
/// program that could not be executed.
pub fn refused(status: tonic::Status) -> Error {
    let reason = slipway_printable::line(status.message(), MOST_MESSAGE);
    let exit = status.metadata().get(EXIT_STATUS_METADATA);
    match exit.and_then(|value| value.to_str().ok()?.parse().ok()) {
        Some(status @ (126 | 127)) => Error::Exec { status, reason },
        _ => Error::of_agent(status.code(), reason),
    }
}

/// Returns a reference to the process that Exec named `exec_id` in container `id`, or to the
/// container's first process if `exec_id` is empty.
pub fn process(id: &str, exec_id: &str) -> Option<v1::ProcessRef> {
    Some(v1::ProcessRef { container_id: id.to_owned(), exec_id: exec_id.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str) -> v1::GuestStage {
        v1::GuestStage { name: name.to_owned(), start_ns: 1, end_ns: u64::MAX }
    }

    #[test]
    fn a_termination_message_takes_a_bounded_part_of_a_record() {
        assert_eq!(termination("no disk: \"é\"\n".as_bytes()), "no disk: \"é\"\n");
        for byte in [0, 1, b'"', b'\n', 0x7f, 0x80, 0xff] {
            let text = termination(&[byte; 2 * MOST_TERMINATION]);
            assert!(text.len() <= MOST_TERMINATION, "{byte}: {}", text.len());
            let json = serde_json::to_string(&text).unwrap();
            assert!(json.len() <= 2 * MOST_TERMINATION + 2, "{byte}: {}", json.len());
        }
    }

    #[test]
    fn known_stages_count_once() {
        let mut told = vec![stage(""); 1000];
        told.extend(["kernel", "kernel", "container", "network", "vmm"].map(stage));
        let found = stages(&told, 5, 100);
        let kernel = GuestStage { name: "kernel", start_ns: 96, end_ns: 100 };
        assert_eq!(found, [kernel, GuestStage { name: "network", ..kernel }]);
    }

    #[test]
    fn a_guests_numbers_and_words_are_bounded() {
        let most = v1::BlockStats { reads: u64::MAX, ..Default::default() };
        assert_eq!(sum(most, &most).reads, u64::MAX);
        let status = tonic::Status::unknown(format!("\x1b[31m{}", "x".repeat(8000)));
        let said = refused(status).to_string();
        assert!(said.starts_with("\\u001b[31mx") && said.len() < 600, "{said}");
        let mut status = tonic::Status::unknown("gone");
        for (exit, is_the_programs) in [("127", true), ("0", false), ("4294967295", false)] {
            status.metadata_mut().insert(EXIT_STATUS_METADATA, exit.parse().unwrap());
            assert_eq!(matches!(refused(status.clone()), Error::Exec { .. }), is_the_programs);
        }
    }
}
