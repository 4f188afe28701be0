//! The sandboxes and replicas of a function on the node. A sandbox is a pod, a replica a container
//! of it that sleeps, and an invocation one more process of that container. If invocations are
//! forks of zygotes, a sandbox has one such container with the zygote, and its replicas are places
//! for forks.
//!
//! A pod is found again by its labels: [`LABEL`] names its function, and [`SETTINGS`] tells whether
//! it was made with the same settings.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use futures_util::future::join_all;
use slipway_runtime::SandboxClient;
use slipway_runtime::v1::{self, RunIn, run_in, run_out};
use tonic::Code;

use super::invocation::{Call, Outcome, collect, feed};
use super::scheduler::{ReplicaId, SandboxId};
use super::zygote::{CONTAINER, Zygotes};
use crate::client::{answer, refused};
use crate::manage;
use crate::session::requests;

/// The label of a pod with the name of its function.
pub const LABEL: &str = "slipway.function";
/// The label of a pod with a digest of the settings that it was made with.
const SETTINGS: &str = "slipway.function.settings";
/// The longest time in which the daemon says whether a sandbox runs: an invocation's end waits for
/// it.
const ANSWER: Duration = Duration::from_secs(10);

/// The settings of a function's sandboxes and replicas.
pub struct Plan {
    /// The function's name.
    pub name: String,
    /// A sandbox, without name and labels.
    pub sandbox: v1::RunSpec,
    /// A replica, without name and pod.
    pub replica: v1::RunSpec,
    /// The command of an invocation.
    pub command: Vec<String>,
    /// The longest time of an invocation.
    pub timeout: Duration,
    /// The most bytes of an answer.
    pub largest_answer: usize,
    /// The time in which the command is to stop itself, so that invocations are forks of it.
    pub zygote: Option<Duration>,
}

/// A function's sandboxes and replicas, by the node's daemon.
pub struct Fleet {
    client: SandboxClient,
    plan: Plan,
    /// The value of the label [`SETTINGS`].
    settings: String,
    /// The zygotes, if invocations are forks.
    zygotes: Option<Zygotes>,
}

/// A sandbox of the function that the node has.
struct FoundSandbox {
    pod: v1::Sandbox,
    /// It was made with the same settings.
    fits: bool,
}

impl Fleet {
    /// Makes the fleet of a function. Nothing is started.
    pub fn new(client: SandboxClient, plan: Plan) -> Self {
        let mut hasher = DefaultHasher::new();
        format!("{:?}", plan.sandbox).hash(&mut hasher);
        if plan.zygote.is_some() {
            // Agents of servers without zygotes may be of an earlier version, which has none.
            CONTAINER.hash(&mut hasher);
        }
        let settings = format!("{:016x}", hasher.finish());
        let zygotes = plan.zygote.map(|ready| Zygotes::new(ready, plan.timeout));
        Self { client, plan, settings, zygotes }
    }

    /// Returns the name of a sandbox.
    pub fn sandbox_name(&self, id: SandboxId) -> String {
        format!("{}-{id}", self.plan.name)
    }

    /// Returns the name of a replica, as POD/CONTAINER.
    pub fn replica_name(&self, id: ReplicaId) -> String {
        format!("{}/{}", self.sandbox_name(id.sandbox), container_name(id))
    }

    /// Returns the path of the container with a replica, as POD/CONTAINER.
    fn container(&self, id: ReplicaId) -> String {
        match self.zygotes {
            Some(_) => format!("{}/{CONTAINER}", self.sandbox_name(id.sandbox)),
            None => self.replica_name(id),
        }
    }

    /// Returns what is said of the function's zygotes, and how many forks there were.
    pub fn zygotes(&self) -> (String, u64) {
        let told = self.zygotes.as_ref().map(|zygotes| (zygotes.state(), zygotes.forked()));
        told.unwrap_or_default()
    }

    /// Makes a sandbox, and returns when it runs.
    ///
    /// # Errors
    /// If it does not run. As far as possible nothing is left of it.
    pub async fn make_sandbox(&self, id: SandboxId) -> Result<()> {
        let name = self.sandbox_name(id);
        let labels = [(LABEL, &self.plan.name), (SETTINGS, &self.settings)];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.clone()));
        let sandbox = self.plan.sandbox.clone();
        let spec = v1::RunSpec { name: name.clone(), labels: labels.into(), ..sandbox };
        self.start(spec, &name).await?;
        let zygote = self.make_zygote(id).await;
        if zygote.is_err()
            && let Err(left) = self.remove(&name).await
        {
            tracing::warn!(error = format!("{left:#}"), name, "left by a start that failed");
        }
        zygote
    }

    /// Makes the container with a sandbox's zygote, and returns when the zygote is ready, or cannot
    /// be forked. Does nothing if invocations are no forks.
    async fn make_zygote(&self, id: SandboxId) -> Result<()> {
        let Some(zygotes) = &self.zygotes else { return Ok(()) };
        let (pod, container) = (self.sandbox_name(id), CONTAINER.to_owned());
        let path = format!("{pod}/{container}");
        let spec = v1::RunSpec { name: container, pod, ..self.plan.replica.clone() };
        self.start(spec, &path).await?;
        zygotes.prepare(self.client.clone(), path, self.plan.command.clone()).await
    }

    /// Makes a replica, and returns when it runs.
    ///
    /// # Errors
    /// If it does not run. As far as possible nothing is left of it.
    pub async fn make_replica(&self, id: ReplicaId) -> Result<()> {
        if self.zygotes.is_some() {
            // It is a place for forks, whose container is there.
            return Ok(());
        }
        let (name, pod) = (container_name(id), self.sandbox_name(id.sandbox));
        let spec = v1::RunSpec { name, pod, ..self.plan.replica.clone() };
        self.start(spec, &self.replica_name(id)).await
    }

    async fn start(&self, spec: v1::RunSpec, name: &str) -> Result<()> {
        let mut client = self.client.clone();
        // The stream of requests is open until the start has ended.
        let (_open, stream) = requests(run_in::Kind::Run(spec));
        let mut replies = answer(client.run(stream).await)?;
        let mut created = false;
        let error = loop {
            match replies.message().await.map(|message| message.and_then(|one| one.kind)) {
                Ok(Some(run_out::Kind::Created(_))) => created = true,
                Ok(Some(run_out::Kind::Started(_))) => return Ok(()),
                Ok(Some(run_out::Kind::Exit(exit))) => break anyhow!("{}", why(&exit)),
                Ok(Some(_)) => {}
                Ok(None) => break anyhow!("the daemon closed the session"),
                Err(status) => break refused(status),
            }
        };
        // A sandbox of this name that this call did not make may be somebody else's.
        if created && let Err(left) = self.remove(name).await {
            tracing::warn!(error = format!("{left:#}"), name, "left by a start that failed");
        }
        Err(error)
    }

    /// Removes a replica, whatever it does.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn remove_replica(&self, id: ReplicaId) -> Result<()> {
        match self.zygotes {
            // All that came of its forks has ended with these.
            Some(_) => Ok(()),
            None => self.remove(&self.replica_name(id)).await,
        }
    }

    /// Removes a sandbox, or a replica as POD/CONTAINER, whatever it does. The guest has given back
    /// the memory of a replica's own when this returns, if it gives it back soon: until then the
    /// replica counts as one that is being removed, so its sandbox is passed over.
    ///
    /// # Errors
    /// The daemon's. One that does not exist is no error.
    pub async fn remove(&self, name: &str) -> Result<()> {
        let mut client = self.client.clone();
        let request =
            v1::RemoveRequest { name: name.to_owned(), force: true, returns_memory: true };
        match client.remove(request).await {
            Err(status) if status.code() != Code::NotFound => Err(refused(status)),
            _ => Ok(()),
        }
    }

    /// Returns whether a sandbox in which an invocation was lost can have more of them. The
    /// container of a zygote is not made again.
    pub async fn is_usable(&self, id: SandboxId) -> bool {
        self.zygotes.is_none() && self.runs(id).await
    }

    /// Returns whether a sandbox runs. It counts as one that does if the daemon does not answer
    /// within [`ANSWER`].
    async fn runs(&self, id: SandboxId) -> bool {
        let (name, mut client) = (self.sandbox_name(id), self.client.clone());
        match tokio::time::timeout(ANSWER, manage::list(&mut client)).await {
            Ok(Ok(all)) => all.iter().any(|one| one.name == name && one.state == "running"),
            Ok(Err(_)) | Err(_) => true,
        }
    }

    /// Returns the sandboxes of this function that the node has.
    ///
    /// # Errors
    /// The daemon's: some of the sandboxes are not known then.
    async fn sandboxes(&self) -> Result<Vec<FoundSandbox>> {
        let mut client = self.client.clone();
        let mut found = Vec::new();
        for pod in manage::list(&mut client).await?.into_iter().filter(|one| one.pod) {
            let record = match client.inspect(manage::named(&pod.id)).await {
                Ok(reply) => reply.into_inner().json,
                // It has gone meanwhile.
                Err(status) if status.code() == Code::NotFound => continue,
                Err(status) => return Err(refused(status)),
            };
            if let Some(fits) = self.fits(&record)? {
                found.push(FoundSandbox { pod, fits });
            }
        }
        Ok(found)
    }

    /// Returns whether the sandbox of a record was made with the same settings, or `None` if it is
    /// none of this function's. Reads the labels only: the daemon may be of a later version, with
    /// other fields.
    ///
    /// # Errors
    /// The record is no JSON.
    fn fits(&self, record: &str) -> Result<Option<bool>> {
        let record: serde_json::Value = serde_json::from_str(record)?;
        let label = |name: &str| record["labels"][name].as_str();
        let own = label(LABEL) == Some(self.plan.name.as_str());
        Ok(own.then(|| label(SETTINGS) == Some(self.settings.as_str())))
    }

    /// Takes over the sandboxes that a server of this function left: at most `most` that run and
    /// were made with the same settings. Their replicas are removed, since invocations may still
    /// run in them, and so are all other sandboxes of the function. One that is not removed is left
    /// until the server ends, and a line is logged.
    ///
    /// # Errors
    /// The daemon's when it is asked for the sandboxes.
    pub async fn adopt(&self, most: usize) -> Result<Vec<SandboxId>> {
        let mut usable = Vec::new();
        let mut removed = Vec::new();
        for FoundSandbox { pod, fits } in self.sandboxes().await? {
            let is_usable = fits && pod.state == "running" && usable.len() < most;
            match self.id_of(&pod.name).filter(|_| is_usable) {
                Some(id) => usable.push((id, pod)),
                None => removed.push(pod.name),
            }
        }
        // At once: a zygote that does not stop itself is waited for.
        let begun = join_all(usable.iter().map(|(id, pod)| self.begin_anew(*id, pod))).await;
        let mut kept = Vec::new();
        for ((id, pod), begun) in usable.into_iter().zip(begun) {
            match begun {
                Ok(()) => kept.push(id),
                Err(_) => removed.push(pod.name),
            }
        }
        if let Err(error) = self.remove_each(&removed).await {
            let error = slipway_printable::line(&format!("{error:#}"), slipway_printable::MESSAGE);
            tracing::warn!(error, "an earlier server's sandbox is left until this one ends");
        }
        Ok(kept)
    }

    /// Returns the number in a sandbox's name, or `None` if the name is none of this function's.
    fn id_of(&self, name: &str) -> Option<SandboxId> {
        let id = name.strip_prefix(self.plan.name.as_str())?.strip_prefix('-')?.parse().ok()?;
        (self.sandbox_name(id) == name).then_some(id)
    }

    /// Gives a sandbox the containers with which it begins.
    async fn begin_anew(&self, id: SandboxId, pod: &v1::Sandbox) -> Result<()> {
        self.clear(pod).await?;
        self.make_zygote(id).await
    }

    /// Removes all containers of a sandbox.
    async fn clear(&self, pod: &v1::Sandbox) -> Result<()> {
        let names = pod.containers.iter().map(|one| format!("{}/{}", pod.name, one.name));
        self.remove_each(&names.collect::<Vec<_>>()).await
    }

    /// Removes sandboxes or replicas, each of them also if another one is not removed.
    ///
    /// # Errors
    /// The first one's of the daemon.
    async fn remove_each(&self, names: &[String]) -> Result<()> {
        let removals = names.iter().map(|name| async move {
            self.remove(name).await.with_context(|| format!("cannot remove {name}"))
        });
        join_all(removals).await.into_iter().collect()
    }

    /// Removes all sandboxes of the function.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn remove_all(&self) -> Result<()> {
        let names = self.sandboxes().await?.into_iter().map(|found| found.pod.name);
        self.remove_each(&names.collect::<Vec<_>>()).await
    }

    /// Runs the command for an invocation in a replica.
    pub async fn invoke(&self, id: ReplicaId, call: Call) -> Outcome {
        // Variables of a single invocation are not in the environment of a zygote.
        let (env, zygote) = match &self.zygotes {
            Some(zygotes) => (Vec::new(), Some(zygotes.ask(call.env))),
            None => (call.env, None),
        };
        let spec = v1::ExecSpec {
            name: self.container(id),
            command: self.plan.command.clone(),
            env,
            zygote,
            stdin: true,
            ..v1::ExecSpec::default()
        };
        let note = |started: &v1::Started| {
            if let Some(zygotes) = &self.zygotes {
                zygotes.note(started);
            }
        };
        let (sender, stream) = requests(run_in::Kind::Exec(spec));
        let mut client = self.client.clone();
        let carried = async {
            let replies = match client.exec(stream).await {
                Ok(replies) => replies.into_inner(),
                Err(status) => return Outcome::Lost(refused(status)),
            };
            tokio::select! {
                outcome = collect(replies, self.plan.largest_answer, note) => outcome,
                outcome = feed(&sender, &call.body) => outcome,
            }
        };
        match tokio::time::timeout(self.plan.timeout, carried).await {
            Ok(outcome) => outcome,
            Err(_) => {
                // Of no use if the queue is full. In either case the replica is not used again, and
                // a fork is killed by its agent.
                let kill = run_in::Kind::Signal(libc::SIGKILL as u32);
                let _ = sender.try_send(RunIn { kind: Some(kill) });
                Outcome::Late
            }
        }
    }
}

fn container_name(id: ReplicaId) -> String {
    format!("r{}", id.number)
}

/// Returns why a start failed.
fn why(exit: &v1::Exit) -> String {
    match exit.reason.as_str() {
        "" => format!("it ended with status {}", exit.status),
        reason => reason.to_owned(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;
    use tokio::net::UnixStream;

    use super::*;

    /// Makes the fleet of a function `f` whose daemon has the other end of `stream`.
    pub async fn fleet(stream: UnixStream) -> Fleet {
        let plan = Plan {
            name: "f".to_owned(),
            sandbox: v1::RunSpec::default(),
            replica: v1::RunSpec::default(),
            command: Vec::new(),
            timeout: Duration::from_secs(1),
            largest_answer: 1,
            zygote: None,
        };
        let channel = slipway_plane_api::over(stream).await.unwrap();
        Fleet::new(SandboxClient::new(channel), plan)
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_does_not_answer_holds_no_invocation() {
        let (stream, _silent) = UnixStream::pair().unwrap();
        let fleet = fleet(stream).await;
        let begun = tokio::time::Instant::now();
        assert!(fleet.runs(1).await);
        assert!(begun.elapsed() >= ANSWER);
    }

    #[tokio::test]
    async fn a_sandbox_is_found_again_by_its_labels() {
        let (stream, _silent) = UnixStream::pair().unwrap();
        let fleet = fleet(stream).await;
        let fits = |labels: serde_json::Value| {
            fleet.fits(&json!({ "name": "f-1", "labels": labels }).to_string()).unwrap()
        };
        assert_eq!(fits(json!({ LABEL: "f", SETTINGS: fleet.settings })), Some(true));
        assert_eq!(fits(json!({ LABEL: "f", SETTINGS: "other" })), Some(false));
        assert_eq!(fits(json!({ LABEL: "f" })), Some(false));
        assert_eq!(fits(json!({ LABEL: "g", SETTINGS: fleet.settings })), None);
        assert_eq!(fits(json!({})), None);
        assert_eq!(fleet.fits("{}").unwrap(), None);
        assert!(fleet.fits("").is_err());
    }
}
