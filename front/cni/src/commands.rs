//! The operations of CNI.
//!
//! A new operation is a variant of `Command` (`environment`), an arm in `run`, and a method of
//! `Operation` with a call of the daemon's: `network.proto`, `host/network` (`service`,
//! `networks/attachments.rs`), counted by `operations` for `slipway_cni_operations_total`. It must
//! be safe to repeat, since a runtime calls it again after an error. Tests: below, the fuzz target
//! `cni-operations`, `tests/e2e/76-cni.sh`, and `lab/cni` with kills; `docs/cni.md`, "Operations".

use std::time::Duration;

use serde_json::Value;
use slipway_plane_api::{attachments, network_v1 as v1};

use crate::configuration::Configuration;
use crate::daemon::{Connection, Daemon, container};
use crate::environment::{Command, Environment};
use crate::failure::{Code, Failure, Outcome};
use crate::{answer, ipam, note};

/// The network that the daemon makes when it is first needed.
const DEFAULT_NETWORK: &str = "default";

/// The state of a function that ADD can have.
const READY: &str = "ready";

/// The longest time for the call that undoes an ADD, beside that of the ADD itself: runtimes of
/// Kubernetes wait two minutes for both.
const UNDOING: Duration = Duration::from_secs(20);
/// The next step after an ADD of which nothing is left.
const UNDONE: &str =
    "nothing is left of the call; try again, and read the daemon's log if that does not help";
/// The next step after an ADD that the daemon may have completed or may still complete.
const IN_DOUBT: &str = "the container may have the interface or get it later, and addresses of an \
                        IPAM plugin stay reserved; DEL of the container or GC frees them";

/// An operation with its parameters.
struct Operation<'a> {
    environment: &'a Environment,
    configuration: &'a Configuration,
    /// The configuration as it came.
    input: &'a [u8],
    /// The IPAM plugin.
    ipam: Option<&'a str>,
    daemon: Daemon,
}

/// Carries out an operation. Returns its answer, if it has one.
///
/// # Errors
/// [`Failure`] as CNI defines it for the operation.
pub fn run(
    environment: &Environment,
    configuration: &Configuration,
    input: &[u8],
) -> Result<Option<Value>, Failure> {
    if environment.command == Command::Version {
        return Ok(Some(answer::versions(&configuration.cni_version)));
    }
    let daemon = Daemon::of(environment, configuration)?;
    let ipam = configuration.ipam()?;
    let operation = Operation { environment, configuration, input, ipam, daemon };
    match environment.command {
        Command::Add => operation.add().map(Some),
        Command::Del => operation.del().map(|()| None),
        Command::Check => operation.check().map(|()| None),
        Command::Gc => operation.gc().map(|()| None),
        _ => operation.status().map(|()| None),
    }
}

impl Operation<'_> {
    /// Runs the IPAM plugin, if there is one. Returns its output.
    fn delegate(&self) -> Result<Option<Vec<u8>>, Failure> {
        let path = &self.environment.path;
        self.ipam.map(|kind| ipam::run(kind, path, self.input)).transpose()
    }

    fn add(&self) -> Result<Value, Failure> {
        // Before the IPAM plugin gives out an address: without a daemon there is no use for one.
        let connection = self.daemon.connect()?;
        let is_second = self.is_attached();
        // A plugin that refuses has reserved nothing.
        let output = self.delegate()?;
        let added = self.attach(&connection, output);
        added.map_err(|failure| self.undo(&connection, failure, is_second))
    }

    /// Undoes an ADD that failed: has the daemon remove the attachment, if it may have made one,
    /// and the IPAM plugin free the addresses once no attachment uses them for sure. A runtime may
    /// call DEL after a failed ADD, but need not. A second ADD of a container undoes nothing: the
    /// attachment and the addresses are the first one's. Returns `failure` with its next step.
    fn undo(&self, connection: &Connection<'_>, failure: Failure, is_second: bool) -> Failure {
        let outcome = failure.outcome();
        let is_undone = match outcome {
            Outcome::Refused => !self.is_attached(),
            Outcome::Unknown | Outcome::Lost if is_second => return failure,
            Outcome::Unknown => self.detach_by(&connection.within(UNDOING)).is_ok(),
            Outcome::Lost => self.detach_by_next(),
        };
        if is_undone && let Some(kind) = self.ipam {
            let _ = ipam::release(kind, &self.environment.path, self.input);
        }
        match outcome {
            Outcome::Refused => failure,
            _ => failure.with_next_step(if is_undone { UNDONE } else { IN_DOUBT }),
        }
    }

    /// Undoes a call of Attach whose connection broke, by a new connection to the daemon. Returns
    /// whether the attachment is gone for sure. If no daemon serves, it is gone if the ledger lacks
    /// it: the next daemon makes every attachment of the ledger, and only DEL removes one.
    fn detach_by_next(&self) -> bool {
        match self.daemon.connect() {
            Ok(connection) => self.detach_by(&connection.within(UNDOING)).is_ok(),
            Err(failure) => failure.lacks_daemon() && !self.is_attached(),
        }
    }

    /// Returns whether the daemon's ledger has the attachment. If so, what the IPAM plugin has
    /// reserved for it is in use.
    fn is_attached(&self) -> bool {
        note::is_attached(&self.daemon.attachments(), &self.id())
    }

    /// Returns the name of the attachment's files.
    fn id(&self) -> String {
        let Environment { container, interface, .. } = self.environment;
        attachments::id(&self.configuration.name, container, interface)
    }

    /// Has the daemon make the attachment, with the addresses in the IPAM plugin's `output`.
    fn attach(
        &self,
        connection: &Connection<'_>,
        output: Option<Vec<u8>>,
    ) -> Result<Value, Failure> {
        let Self { environment, configuration, .. } = self;
        let chosen = match (self.ipam, output) {
            (Some(kind), Some(output)) => Some(ipam::parse(kind, &output)?),
            _ => None,
        };
        let addresses = chosen.as_ref().map(|chosen| chosen.addresses.clone());
        let request = v1::AttachRequest {
            container: Some(container(environment, configuration)),
            namespace: environment.namespace.clone(),
            network: configuration.network.clone(),
            name: environment.name.clone(),
            mac: configuration.runtime_config.mac.clone().unwrap_or_default(),
            addresses: addresses.unwrap_or_else(|| configuration.addresses()),
            publish: configuration.publish()?,
            routes: chosen.as_ref().map(|chosen| chosen.routes.clone()),
            function: configuration.function,
            pool: configuration.pool.clone(),
            rates: configuration.rates()?,
            vlan: configuration.vlan,
            no_spoof_check: !configuration.checks_addresses()?,
        };
        let made = connection.call(|mut client| async move { client.attach(request).await })?;
        let dns = chosen.and_then(|chosen| chosen.dns);
        Ok(answer::added(&configuration.cni_version, environment, &made, dns.as_ref()))
    }

    fn del(&self) -> Result<(), Failure> {
        // The IPAM plugin frees the address only after the interface is gone.
        self.detach()?;
        self.delegate().map(drop)
    }

    /// Has the daemon remove the attachment. Leaves a note for the next daemon if none serves, and
    /// succeeds then: without a daemon nothing carries the interface's frames.
    ///
    /// # Errors
    /// [`Code::Later`] if a daemon serves and does not answer in time, or no note can be left;
    /// otherwise the daemon's error. The interface may be there, so its address is not free.
    fn detach(&self) -> Result<(), Failure> {
        let Err(first) = self.detach_now() else { return Ok(()) };
        if !first.lacks_daemon() {
            return Err(first);
        }
        let dir = self.daemon.attachments();
        let left = note::leave(&dir, &self.id()).map_err(|error| {
            let dir = dir.display();
            Failure::new(
                Code::Later,
                format!("no daemon serves, and no note can be left for it in {dir}: {error}"),
            )
        })?;
        if left {
            // A daemon that came up meanwhile may have looked for notes before.
            match self.detach_now() {
                Err(failure) if !failure.lacks_daemon() => return Err(failure),
                _ => {}
            }
        }
        Ok(())
    }

    fn detach_now(&self) -> Result<(), Failure> {
        self.detach_by(&self.daemon.connect()?)
    }

    /// Has the daemon remove the attachment; that there is none is no error. The daemon completes
    /// other operations on it first, such as an ADD that was too late for its caller.
    fn detach_by(&self, connection: &Connection<'_>) -> Result<(), Failure> {
        let container = Some(container(self.environment, self.configuration));
        let request = v1::DetachRequest { container };
        connection.call(|mut client| async move { client.detach(request).await }).map(drop)
    }

    fn check(&self) -> Result<(), Failure> {
        let request = v1::CheckAttachmentRequest {
            container: Some(container(self.environment, self.configuration)),
            namespace: self.environment.namespace.clone(),
        };
        let connection = self.daemon.connect()?;
        let checked =
            connection.call(|mut client| async move { client.check_attachment(request).await });
        checked.map_err(|failure| match failure.code() {
            // The daemon knows no such attachment.
            code if code == Code::Invalid as u32 => failure.recoded(Code::Unknown),
            code if code == Code::Host as u32 => failure.recoded(Code::Changed),
            _ => failure,
        })?;
        self.delegate().map(drop)
    }

    fn gc(&self) -> Result<(), Failure> {
        // The reference library leaves an empty list out.
        let valid = self.configuration.valid.iter().flatten();
        let valid = valid.map(|one| v1::ContainerInterface {
            configuration: String::new(),
            container_id: one.container.clone(),
            interface: one.interface.clone(),
        });
        let request = v1::CollectAttachmentsRequest {
            configuration: self.configuration.name.clone(),
            valid: valid.collect(),
        };
        let connection = self.daemon.connect()?;
        connection.call(|mut client| async move { client.collect_attachments(request).await })?;
        self.delegate().map(drop)
    }

    fn status(&self) -> Result<(), Failure> {
        // While no daemon serves, nothing carries the frames of containers.
        let connection = self.daemon.connect().map_err(|failure| {
            let is_lost = failure.lacks_daemon();
            failure.recoded(if is_lost { Code::Disconnected } else { Code::Unavailable })
        })?;
        let name = self.configuration.network.clone();
        if name != DEFAULT_NETWORK {
            let request = v1::GetNetworkRequest { name };
            let found =
                connection.call(|mut client| async move { client.get_network(request).await });
            found.map_err(|failure| failure.recoded(Code::Unavailable))?;
        }
        self.pool_status(&connection)?;
        self.delegate().map(drop)
    }

    /// Checks that ADD can have a function of the pool, if the configuration names one.
    fn pool_status(&self, connection: &Connection<'_>) -> Result<(), Failure> {
        let name = &self.configuration.pool;
        if name.is_empty() {
            return Ok(());
        }
        let unavailable = |failure: Failure| failure.recoded(Code::Unavailable);
        let pool = connection.pool(name).map_err(unavailable)?;
        if pool.vfs.iter().any(|vf| vf.state == READY) {
            return Ok(());
        }
        let text = format!(
            "pool {name} has no function ready; DEL gives one back, `slipway vf inspect {name}` \
             lists its functions"
        );
        Err(Failure::new(Code::Unavailable, text))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;

    use tokio::net::UnixSocket;

    use super::*;

    /// Less than any daemon needs for an answer that never comes.
    const SHORT: Duration = Duration::from_millis(100);
    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(100);

    /// A directory for the daemon's socket and ledger, and for an IPAM plugin that notes its calls.
    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let plugin = dir.path().join("fixed");
            let script = r#"#!/bin/sh
cat >/dev/null
echo "${CNI_COMMAND:-same}" >>"$(dirname "$0")/calls"
echo '{"ips": [{"address": "10.77.0.120/24"}]}'
"#;
            std::fs::write(&plugin, script).unwrap();
            std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
            let folder = Self(dir);
            std::fs::create_dir_all(folder.ledger()).unwrap();
            folder
        }

        fn ledger(&self) -> PathBuf {
            self.0.path().join("networks").join(attachments::DIR)
        }

        /// Returns the attachment's file in the ledger.
        fn file(&self) -> PathBuf {
            self.ledger().join("blue,c1,eth0.json")
        }

        fn files(&self) -> usize {
            std::fs::read_dir(self.ledger()).unwrap().count()
        }

        /// Returns the commands of the IPAM plugin's calls since the last look. `same` is that of
        /// the plugin's own environment.
        fn calls(&self) -> String {
            let calls = self.0.path().join("calls");
            let words = std::fs::read_to_string(&calls).unwrap_or_default();
            let _ = std::fs::remove_file(calls);
            words.split_whitespace().collect::<Vec<_>>().join(" ")
        }

        /// Accepts connections as a daemon does, and reads none.
        fn listen(&self) -> UnixListener {
            let socket = self.0.path().join("slipway.sock");
            let _ = std::fs::remove_file(&socket);
            UnixListener::bind(socket).unwrap()
        }

        /// Listens as a daemon that takes no connections, with a full queue of them.
        fn listen_full(&self) -> (tokio::net::UnixListener, UnixStream) {
            let path = self.0.path().join("slipway.sock");
            let _ = std::fs::remove_file(&path);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap();
            let _inside = runtime.enter();
            let socket = UnixSocket::new_stream().unwrap();
            socket.bind(&path).unwrap();
            let listener = socket.listen(0).unwrap();
            (listener, UnixStream::connect(path).unwrap())
        }

        /// Reads a call about the container, and ends as a daemon that is killed: it has written
        /// the `file` before, if there is one.
        fn die_in_a_call(&self, file: Option<PathBuf>) -> std::thread::JoinHandle<()> {
            let listener = self.listen();
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
                while !all.windows(4).any(|part| part == b"eth0") {
                    let count = stream.read(&mut buffer).unwrap();
                    assert_ne!(count, 0, "the plugin hung up");
                    all.extend_from_slice(&buffer[..count]);
                }
                if let Some(file) = file {
                    std::fs::write(file, "{}").unwrap();
                }
                // Before the plugin learns of the end: it finds no daemon then.
                drop(listener);
            })
        }

        fn operate<T>(
            &self,
            patience: Duration,
            operate: impl FnOnce(&Operation<'_>) -> Result<T, Failure>,
        ) -> Result<T, Failure> {
            let place = self.0.path().to_str().unwrap();
            let variables = [
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "c1"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_NETNS", "/run/netns/c1"),
                ("CNI_PATH", place),
                ("SLIPWAY_RUN_DIR", place),
                ("SLIPWAY_DATA_DIR", place),
            ];
            let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
            let environment = &Environment::of(variables).unwrap();
            let input = br#"{"cniVersion": "1.1.0", "name": "blue", "type": "slipway-cni",
                "ipam": {"type": "fixed"}}"#;
            let configuration = &Configuration::parse(input, environment).unwrap();
            let daemon = Daemon::of(environment, configuration).unwrap().with_patience(patience);
            let ipam = configuration.ipam().unwrap();
            operate(&Operation { environment, configuration, input, ipam, daemon })
        }

        /// Has an ADD fail. Returns its code and the first word of its next step.
        fn fail(&self, patience: Duration) -> (u32, String) {
            let failure = self.operate(patience, |operation| operation.add()).unwrap_err();
            let answer = failure.to_json("1.1.0");
            (failure.code(), first(answer["details"].as_str().unwrap()))
        }
    }

    #[test]
    fn del_leaves_a_note_only_if_no_daemon_serves() {
        let folder = Folder::new();
        std::fs::write(folder.file(), "{}").unwrap();
        // The kernel accepts the connection, and nobody reads the call.
        let silent = folder.listen();
        let failure = folder.operate(SHORT, |operation| operation.del()).unwrap_err();
        assert_eq!((failure.code(), failure.lacks_daemon(), folder.files()), (11, false, 1));
        assert_eq!(folder.calls(), "");
        drop(silent);
        folder.operate(SHORT, |operation| operation.del()).unwrap();
        assert_eq!((folder.files(), folder.calls().as_str()), (2, "same"));
    }

    /// A daemon with a full queue of connections serves, and its work may take longer than an
    /// operation waits.
    #[test]
    fn a_daemon_that_takes_no_connection_is_there() {
        let folder = Folder::new();
        std::fs::write(folder.file(), "{}").unwrap();
        let full = folder.listen_full();
        let failure = folder.operate(SHORT, |operation| operation.del()).unwrap_err();
        assert_eq!((failure.code(), failure.lacks_daemon(), folder.files()), (11, false, 1));
        assert_eq!(folder.fail(SHORT), (11, "try".to_owned()));
        let failure = folder.operate(SHORT, |operation| operation.status()).unwrap_err();
        assert_eq!((failure.code(), folder.calls().as_str()), (50, ""));
        drop(full);
        let failure = folder.operate(SHORT, |operation| operation.status()).unwrap_err();
        assert_eq!(failure.code(), 51);
        folder.operate(SHORT, |operation| operation.del()).unwrap();
        assert_eq!((folder.files(), folder.calls().as_str()), (2, "same"));
    }

    #[test]
    fn an_add_without_an_answer_keeps_its_addresses_until_del() {
        let folder = Folder::new();
        let silent = folder.listen();
        assert_eq!(folder.fail(SHORT), (11, first(IN_DOUBT)));
        assert_eq!(folder.calls(), "same");
        drop(silent);
        folder.operate(SHORT, |operation| operation.del()).unwrap();
        assert_eq!((folder.files(), folder.calls().as_str()), (0, "same"));
    }

    #[test]
    fn a_daemon_that_ends_in_an_add_leaves_what_its_ledger_has() {
        let folder = Folder::new();
        let daemon = folder.die_in_a_call(None);
        assert_eq!(folder.fail(LONG), (11, first(UNDONE)));
        daemon.join().unwrap();
        assert_eq!(folder.calls(), "same DEL");
        let daemon = folder.die_in_a_call(Some(folder.file()));
        assert_eq!(folder.fail(LONG), (11, first(IN_DOUBT)));
        daemon.join().unwrap();
        assert_eq!(folder.calls(), "same");
        // The attachment is that of the first ADD.
        let daemon = folder.die_in_a_call(None);
        assert_eq!(folder.fail(LONG), (11, "try".to_owned()));
        daemon.join().unwrap();
        assert_eq!((folder.calls().as_str(), folder.files()), ("same", 1));
        folder.operate(LONG, |operation| operation.del()).unwrap();
        assert_eq!((folder.calls().as_str(), folder.files()), ("same", 2));
    }

    fn first(step: &str) -> String {
        step.split(' ').next().unwrap_or_default().to_owned()
    }
}
