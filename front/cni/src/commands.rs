//! The operations of CNI.

use serde_json::Value;
use slipway_plane_api::{attachments, network_v1 as v1};

use crate::configuration::Configuration;
use crate::daemon::{Connection, Daemon, container};
use crate::environment::{Command, Environment};
use crate::failure::{Code, Failure};
use crate::{answer, ipam, note};

/// The network that the daemon makes when it is first needed.
const DEFAULT_NETWORK: &str = "default";

/// The state of a function that ADD can have.
const READY: &str = "ready";

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
        // A plugin that refuses has reserved nothing.
        let output = self.delegate()?;
        let added = self.attach(&connection, output);
        // A daemon that answers too late may still make the attachment with the address, which DEL
        // frees.
        if let Err(failure) = &added
            && !failure.is_unanswered()
            && let Some(kind) = self.ipam
            && !self.is_attached()
        {
            // The runtime calls DEL after a failure as well, but it does not have to.
            let _ = ipam::release(kind, &self.environment.path, self.input);
        }
        added
    }

    /// Returns whether the daemon's ledger has the attachment. If so, what the IPAM plugin has
    /// reserved for it is in use, and not this call's: this is a second ADD of a container, or the
    /// daemon made the attachment and its answer was lost.
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
        let container = Some(container(self.environment, self.configuration));
        let request = v1::DetachRequest { container };
        let connection = self.daemon.connect()?;
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
        let connection =
            self.daemon.connect().map_err(|failure| failure.recoded(Code::Disconnected))?;
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
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::*;

    #[test]
    fn del_leaves_a_note_only_if_no_daemon_serves() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_str().unwrap();
        let variables = [
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_IFNAME", "eth0"),
            ("SLIPWAY_RUN_DIR", place),
            ("SLIPWAY_DATA_DIR", place),
        ];
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
        let environment = Environment::of(variables).unwrap();
        let input = br#"{"cniVersion": "1.1.0", "name": "blue", "type": "slipway-cni"}"#;
        let configuration = Configuration::parse(input, &environment).unwrap();
        let daemon = Daemon::of(&environment, &configuration).unwrap();
        let daemon = daemon.with_patience(Duration::from_millis(100));
        let (environment, configuration) = (&environment, &configuration);
        let operation = Operation { environment, configuration, input, ipam: None, daemon };
        let ledger = operation.daemon.attachments();
        std::fs::create_dir_all(&ledger).unwrap();
        std::fs::write(ledger.join(format!("{}.json", operation.id())), "{}").unwrap();
        let files = || std::fs::read_dir(&ledger).unwrap().count();

        // The kernel accepts the connection, and nobody reads the call.
        let silent = UnixListener::bind(dir.path().join("slipway.sock")).unwrap();
        let failure = operation.del().unwrap_err();
        assert_eq!((failure.code(), failure.lacks_daemon(), files()), (11, false, 1));
        drop(silent);
        operation.del().unwrap();
        assert_eq!(files(), 2);
    }

    #[test]
    fn add_keeps_the_address_if_the_daemon_does_not_answer_in_time() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (place, calls) = (dir.path().to_str().unwrap(), dir.path().join("calls"));
        let plugin = dir.path().join("chooser");
        let script = format!(
            "#!/bin/sh\ncat >/dev/null\necho \"$CNI_COMMAND\" >>{}\n\
             echo '{{\"ips\": [{{\"address\": \"10.1.0.7/24\"}}]}}'\n",
            calls.display()
        );
        std::fs::write(&plugin, script).unwrap();
        std::fs::set_permissions(&plugin, PermissionsExt::from_mode(0o755)).unwrap();
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
        let environment = Environment::of(variables).unwrap();
        let input = br#"{"cniVersion": "1.1.0", "name": "blue", "ipam": {"type": "chooser"}}"#;
        let configuration = Configuration::parse(input, &environment).unwrap();
        let daemon = Daemon::of(&environment, &configuration).unwrap();
        let daemon = daemon.with_patience(Duration::from_millis(100));
        let (environment, configuration) = (&environment, &configuration);
        let ipam = Some("chooser");
        let operation = Operation { environment, configuration, input, ipam, daemon };
        // The kernel accepts the connection, and nobody reads the call.
        let _silent = UnixListener::bind(dir.path().join("slipway.sock")).unwrap();
        assert!(operation.add().unwrap_err().is_unanswered());
        let called = std::fs::read_to_string(&calls).unwrap();
        assert_eq!(called.lines().count(), 1, "the address is not freed: {called}");
    }
}
