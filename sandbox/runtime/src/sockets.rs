//! A sandbox's socket function: the node's socket engine serves it, the VMM passes it to the guest,
//! and the agent runs an engine on it for the container's programs.
//!
//! The engine serves the function as long as the VMM is connected, whatever happens to the daemon.
//!
//! No template has such a function: each fork is given one of its own once its guest goes on, as a
//! pod is for a container that asks later (`pod_functions::socket_function`).
//!
//! Not implemented: recovery of a sandbox whose engine died. The next engine knows nothing of the
//! function, so the sandbox must be started anew to have its sockets back.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::SocketType;
use slipway_agent_protocol::v1::{self as agent_v1, agent_client::AgentClient};
use slipway_plane_api::v1 as plane_v1;
use slipway_sgiov::{Function, Memory};

use crate::agent::Agent;
use crate::node::Node;
use crate::record::Record;
use crate::{Error, Result};

/// The name of the stage on the timeline.
pub const STAGE: &str = "sockets";
/// The most connections that wait to be accepted. A VMM makes one.
const BACKLOG: i32 = 4;
/// The deadline of the agent's call; the agent itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(90);

/// Checks that an engine serves at `engine`.
///
/// # Errors
/// [`Error::Sockets`] if no engine serves there.
pub async fn check(engine: &Path) -> Result<()> {
    let socket = engine.to_owned();
    let served = tokio::task::spawn_blocking(move || slipway_sgiov::is_served(&socket)).await;
    if served.unwrap_or(false) {
        return Ok(());
    }
    Err(failed(engine, "no engine serves there; `slipway socket engine` runs one"))
}

fn failed(engine: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Sockets { engine: engine.to_owned(), reason: reason.to_string() }
}

/// A function that the engine serves. Until the VMM connects to it, the function ends when this is
/// dropped.
pub struct ServedFunction {
    /// The socket to which the VMM connects.
    pub socket: PathBuf,
    _connection: OwnedFd,
}

/// Returns the socket of the function that the sandbox begins with. Returns `None` if the sandbox
/// has no socket engine or no network, or is a fork, which is given its function later.
pub fn socket(node: &Node, record: &Record) -> Option<PathBuf> {
    let served = record.begins_with_sockets() && record.network.is_some();
    served.then(|| path(node, &record.id))
}

/// Returns the path of the socket of a sandbox's function.
pub(crate) fn path(node: &Node, sandbox_id: &str) -> PathBuf {
    node.run_dir(sandbox_id).join("sockets.sock")
}

/// Makes the engine serve the function that the sandbox begins with. When this returns, its socket
/// accepts the VMM. Returns `None` if the sandbox begins with none ([`socket`]).
///
/// # Errors
/// [`Error::Sockets`], [`Error::File`].
pub async fn serve(
    node: &Node,
    record: &Record,
    uid: u32,
    memory: &plane_v1::ClientMemory,
) -> Result<Option<ServedFunction>> {
    let parts = (&record.sockets, place(record), socket(node, record));
    let (Some(engine), Some(place), Some(socket)) = parts else { return Ok(None) };
    let function = function(engine, &record.name, &place, memory)?;
    serve_at(engine, socket, uid, function, None).await.map(Some)
}

/// The network of a sandbox's sockets, which is one of Slipway's, and the addresses there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetworkAddresses {
    /// The network's name.
    pub network: String,
    /// The sandbox's addresses, at most four.
    pub addresses: Vec<String>,
}

/// Returns the place of a sandbox that asks for sockets by itself: in the network that it names.
/// Returns `None` if it has no network.
pub(crate) fn place(record: &Record) -> Option<NetworkAddresses> {
    let network = record.network.as_ref()?;
    Some(NetworkAddresses { network: network.name.clone(), addresses: network.addresses() })
}

/// Describes the function of a guest to the engine that is to serve it.
///
/// # Errors
/// [`Error::Sockets`] if an address is none.
pub(crate) fn function(
    engine: &Path,
    name: &str,
    place: &NetworkAddresses,
    memory: &plane_v1::ClientMemory,
) -> Result<Function> {
    let addresses = place.addresses.iter().map(|one| one.parse()).collect::<Result<Vec<_>, _>>();
    let addresses = addresses.map_err(|error| failed(engine, error))?;
    let tenant = format!("network:{}", place.network);
    let plane_v1::ClientMemory { limit_bytes: bytes, device, inode, .. } = *memory;
    let memory = Some(Memory { bytes, device, inode });
    Ok(Function { name: name.to_owned(), tenant, addresses, memory })
}

/// Makes the engine serve a function at `socket` for the VMM of user `uid`. A socket that an
/// earlier attempt left there is removed. `memory` is the file of the guest's memory, if the VMM's
/// own descriptor only names it. When this returns, the socket accepts the VMM.
///
/// # Errors
/// [`Error::Sockets`], [`Error::File`].
pub(crate) async fn serve_at(
    engine: &Path,
    socket: PathBuf,
    uid: u32,
    function: Function,
    memory: Option<OwnedFd>,
) -> Result<ServedFunction> {
    let (at, path) = (engine.to_owned(), socket.clone());
    // The call waits for the engine, so it runs on a thread of its own.
    let asked = tokio::task::spawn_blocking(move || {
        let _ = std::fs::remove_file(&path);
        let listener = listen(&path, uid).map_err(Error::file("cannot listen at", &path))?;
        let memory = memory.as_ref().map(AsFd::as_fd);
        slipway_sgiov::serve_function(&at, listener.as_fd(), &function, memory)
            .map_err(|error| failed(&at, refusal(&error)))
    });
    let connection = asked.await.unwrap_or_else(|error| Err(failed(engine, error)))?;
    Ok(ServedFunction { socket, _connection: connection })
}

/// Makes a socket to which only the VMM's user may connect.
pub(crate) fn listen(path: &Path, uid: u32) -> std::io::Result<OwnedFd> {
    slipway_private::listen(path, SocketType::STREAM, Some(uid), BACKLOG)
}

fn refusal(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ECONNREFUSED) => {
            "it has no administrator's socket; is it of this version?".into()
        }
        Some(libc::EACCES) => "it is another user's, who alone may ask it for functions".into(),
        Some(libc::EOPNOTSUPP) => "this engine serves no functions; is it of this version?".into(),
        Some(_) => format!("the engine refuses the function ({error}); its log says why"),
        None => format!("the engine does not answer: {error}"),
    }
}

/// Makes the agent run the guest's engine. When this returns, programs can attach to the engine.
///
/// # Errors
/// [`Error::Agent`].
pub async fn start(agent: &Agent) -> Result<()> {
    let start = |mut client: AgentClient<_>| async move {
        client.start_sockets(agent_v1::StartSocketsRequest {}).await
    };
    agent.call_within(Some(PATIENCE), start).await.map(drop)
}

/// Returns the better explanation of a failed start. When an engine ends, the VMM of its function
/// is not told, so the engine is checked here.
pub async fn blame(record: &Record, error: Error) -> Error {
    let Some(engine) = &record.sockets else { return error };
    let of_guest = matches!(error, Error::VmEnded(_) | Error::Agent(_) | Error::Refused(_));
    if of_guest && check(engine).await.is_err() {
        let reason = format!("the engine ended while the sandbox started ({error})");
        return failed(engine, reason);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn where_no_engine_serves_the_next_step_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let engine = dir.path().join("engine.sock");
        let said = check(&engine).await.unwrap_err().to_string();
        assert!(said.contains("engine.sock") && said.contains("slipway socket engine"), "{said}");
        let record = Record {
            sockets: Some(engine),
            ..crate::adopt::tests::record_of(crate::record::SandboxState::Starting)
        };
        let ended = || Error::VmEnded("x".to_owned());
        assert!(matches!(blame(&record, ended()).await, Error::Sockets { .. }));
        assert!(matches!(blame(&record, Error::Stopped).await, Error::Stopped));
        let without = Record { sockets: None, ..record };
        assert!(matches!(blame(&without, ended()).await, Error::VmEnded(_)));
    }

    #[test]
    fn the_socket_is_the_vmms() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Only root can give the file to another user.
        let uid = rustix::process::geteuid().as_raw();
        let uid = if uid == 0 { 7 } else { uid };
        let _listener = listen(&path, uid).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o777), (uid, 0o600));
    }
}
