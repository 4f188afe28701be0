//! The node's daemon, as the plugin calls it.

use std::path::PathBuf;
use std::time::Duration;

use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::network_v1::networks_client::NetworksClient;
use slipway_plane_api::trace::Caller;
use slipway_plane_api::{VfClient, vf_v1};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::configuration::Configuration;
use crate::environment::Environment;
use crate::failure::{Code, Failure, Outcome};

/// The daemon's run directory, unless the configuration or the environment names another one.
const RUN_DIR: &str = "/run/slipway";
/// The directory of the daemon's state, likewise.
const DATA_DIR: &str = "/var/lib/slipway";
/// The error of a call whose daemon ends before it answers.
const ENDED: &str = "the daemon ended during the call; try again";
/// The longest time until a daemon takes a connection.
const CONNECTING: Duration = Duration::from_secs(10);
/// The longest time for a call.
const PATIENCE: Duration = Duration::from_secs(60);

/// The client of the networks. The runtime's place in its trace goes with each call.
type Client = NetworksClient<InterceptedService<Channel, Caller>>;

/// The daemon, by its directories.
pub struct Daemon {
    run_dir: PathBuf,
    data_dir: PathBuf,
    caller: Caller,
    /// The longest time for a call.
    patience: Duration,
    runtime: tokio::runtime::Runtime,
}

/// A connection to the daemon.
pub struct Connection<'a> {
    client: Client,
    functions: VfClient,
    daemon: &'a Daemon,
    /// The longest time for a call.
    patience: Duration,
}

impl Daemon {
    /// Finds the daemon's directories.
    ///
    /// # Errors
    /// [`Code::Later`]: no descriptors are left.
    pub fn of(environment: &Environment, configuration: &Configuration) -> Result<Self, Failure> {
        let dir = |named: &Option<PathBuf>, from: &Option<std::ffi::OsString>, usual: &str| {
            let from = || from.as_ref().map(PathBuf::from);
            named.clone().or_else(from).unwrap_or_else(|| usual.into())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| {
            Failure::new(Code::Later, format!("cannot call the daemon: {error}"))
        })?;
        Ok(Self {
            run_dir: dir(&configuration.run_dir, &environment.run_dir, RUN_DIR),
            data_dir: dir(&configuration.data_dir, &environment.data_dir, DATA_DIR),
            caller: Caller::of(environment.trace.as_deref()),
            patience: PATIENCE,
            runtime,
        })
    }

    /// Returns the daemon with another longest time for a call.
    #[cfg(test)]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns the directory with the files of attachments.
    pub fn attachments(&self) -> PathBuf {
        self.data_dir.join("networks").join(slipway_plane_api::attachments::DIR)
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Code::Later`] if no daemon serves, or the one that serves takes no connection in time.
    pub fn connect(&self) -> Result<Connection<'_>, Failure> {
        let socket = self.run_dir.join("slipway.sock");
        let limit = self.patience.min(CONNECTING);
        let connected = self.runtime.block_on(async {
            tokio::time::timeout(limit, slipway_plane_api::connect(&socket)).await
        });
        let socket = socket.display();
        let channel = match connected {
            Ok(Ok(channel)) => channel,
            Ok(Err(_)) => {
                let text = format!(
                    "no Slipway daemon serves at {socket}; start it with `systemctl start \
                     slipway` or `slipway daemon`"
                );
                return Err(Failure::new(Code::Later, text).with_outcome(Outcome::Lost));
            }
            Err(_) => {
                let text = format!(
                    "the daemon at {socket} took no connection within {} s; try again, and read \
                     the daemon's log if that does not help",
                    limit.as_secs()
                );
                return Err(Failure::new(Code::Later, text));
            }
        };
        let functions = VfClient::new(channel.clone());
        let client = NetworksClient::with_interceptor(channel, self.caller.clone());
        Ok(Connection { client, functions, daemon: self, patience: self.patience })
    }
}

impl Connection<'_> {
    /// Returns the same connection for calls that take no longer than `limit`.
    pub fn within(&self, limit: Duration) -> Self {
        let (client, functions) = (self.client.clone(), self.functions.clone());
        Self { client, functions, daemon: self.daemon, patience: self.patience.min(limit) }
    }

    /// Makes a call and waits for its answer.
    ///
    /// # Errors
    /// [`Failure`] as of [`failure`].
    pub fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.wait(call(self.client.clone()))
    }

    /// Returns a pool of functions.
    ///
    /// # Errors
    /// [`Failure`] as of [`failure`].
    pub fn pool(&self, name: &str) -> Result<vf_v1::Pool, Failure> {
        let mut functions = self.functions.clone();
        let request = vf_v1::GetPoolRequest { name: name.to_owned() };
        self.wait(async move { functions.get_pool(request).await })
    }

    /// Waits for the answer to a call.
    fn wait<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        let answer = self.daemon.runtime.block_on(async {
            tokio::time::timeout(self.patience, call).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded(format!(
                    "the daemon did not answer within {} s; it may still complete the operation: \
                     try again, and read the daemon's log if that does not help",
                    self.patience.as_secs()
                )))
            })
        });
        answer.map(Response::into_inner).map_err(|status| failure(&status))
    }
}

/// Returns the error for the daemon's refusal.
fn failure(status: &Status) -> Failure {
    use tonic::Code as Grpc;
    let lost = matches!(status.code(), Grpc::Unknown | Grpc::Unavailable | Grpc::Cancelled);
    let code = match status.code() {
        // The daemon ended during the call, among others.
        _ if lost => Code::Later,
        Grpc::InvalidArgument | Grpc::NotFound => Code::Invalid,
        // The daemon is there, and busy.
        Grpc::ResourceExhausted | Grpc::DeadlineExceeded => Code::Later,
        Grpc::FailedPrecondition => Code::Host,
        Grpc::AlreadyExists => Code::Taken,
        _ => Code::Daemon,
    };
    let outcome = match status.code() {
        _ if lost => Outcome::Lost,
        Grpc::InvalidArgument
        | Grpc::NotFound
        | Grpc::ResourceExhausted
        | Grpc::FailedPrecondition
        | Grpc::AlreadyExists => Outcome::Refused,
        // Also of a connection that broke: both ends have errors of HTTP/2 with the code Internal.
        _ => Outcome::Unknown,
    };
    let failure = match status.message() {
        "" | "transport error" => Failure::new(code, ENDED),
        message if lost => Failure::new(code, format!("{ENDED} ({message})")),
        message => Failure::new(code, message),
    };
    failure.with_outcome(outcome)
}

/// Returns the attachment that an operation is about, as the daemon knows it.
pub fn container(
    environment: &Environment,
    configuration: &Configuration,
) -> v1::ContainerInterface {
    v1::ContainerInterface {
        configuration: configuration.name.clone(),
        container_id: environment.container.clone(),
        interface: environment.interface.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_codes_of_cni() {
        for (status, code, outcome) in [
            (Status::not_found("x"), 7, Outcome::Refused),
            (Status::resource_exhausted("the network is full; wait"), 11, Outcome::Refused),
            (Status::failed_precondition("x"), 100, Outcome::Refused),
            (Status::already_exists("x"), 101, Outcome::Refused),
            (Status::internal("x"), 102, Outcome::Unknown),
            (Status::deadline_exceeded("x"), 11, Outcome::Unknown),
            (Status::unavailable(""), 11, Outcome::Lost),
            (Status::unknown("transport error"), 11, Outcome::Lost),
        ] {
            let failure = failure(&status);
            assert_eq!((failure.code(), failure.outcome()), (code, outcome));
            assert!(!failure.message().is_empty());
            assert_eq!(failure.lacks_daemon(), outcome == Outcome::Lost);
        }
    }
}
