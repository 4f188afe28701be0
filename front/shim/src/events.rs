//! Events for containerd, over its ttrpc socket, in the order in which they happened.
//!
//! While containerd restarts, events wait; a queue that is full drops the newest ones. Events that
//! wait when the shim's process is killed are in its [`store`](crate::store), and the next process
//! sends them. An event that containerd was just taking is sent again.
//!
//! A new event is a variant of `Event` with its topic in `parts`, and a message with containerd's
//! own numbers in `proto/containerd.proto`. The task sends it once what it tells has happened and
//! is recorded (`task`, `service`), and after the events that came before it. Tests: `src/tests`
//! (`pods`, `running`, `sandbox`), which read topics; `docs/containerd.md` if it differs from
//! runc's.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prost::Message;
use tokio::sync::{mpsc, watch};

use crate::containerd as cd;
use crate::process::timestamp;
use crate::store::Store;
use crate::ttrpc::client::Client;

/// The most events that wait.
const QUEUE: usize = 1024;
/// The time between two attempts to reach containerd.
const AGAIN: Duration = Duration::from_millis(500);
/// The longest time that containerd may take to accept an event.
const ANSWER: Duration = Duration::from_secs(10);
/// The kind of the files with events that wait.
const RECORDS: &str = "event-";

/// An event of a task, for containerd.
pub enum Event {
    /// The task was created.
    Create(cd::TaskCreate),
    /// The task's first process runs.
    Start(cd::TaskStart),
    /// The guest's kernel ended a process of the task for want of memory.
    OutOfMemory(cd::TaskOom),
    /// The task's processes were stopped where they are.
    Paused(cd::TaskPaused),
    /// The task's processes go on after a pause.
    Resumed(cd::TaskResumed),
    /// The task was saved in a directory.
    Checkpointed(cd::TaskCheckpointed),
    /// A process of the task has ended.
    Exit(cd::TaskExit),
    /// The task was deleted. As with runc, the deletion of a further process is no event.
    Delete(cd::TaskDelete),
    /// A further process was added to the task, and does not run yet.
    ExecAdded(cd::TaskExecAdded),
    /// A further process of the task runs.
    ExecStarted(cd::TaskExecStarted),
}

impl Event {
    /// Returns the topic, the name of the message, and its bytes.
    fn parts(&self) -> (&'static str, &'static str, Vec<u8>) {
        match self {
            Self::Create(event) => ("/tasks/create", "TaskCreate", event.encode_to_vec()),
            Self::Start(event) => ("/tasks/start", "TaskStart", event.encode_to_vec()),
            Self::OutOfMemory(event) => ("/tasks/oom", "TaskOOM", event.encode_to_vec()),
            Self::Paused(event) => ("/tasks/paused", "TaskPaused", event.encode_to_vec()),
            Self::Resumed(event) => ("/tasks/resumed", "TaskResumed", event.encode_to_vec()),
            Self::Checkpointed(event) => {
                ("/tasks/checkpointed", "TaskCheckpointed", event.encode_to_vec())
            }
            Self::Exit(event) => ("/tasks/exit", "TaskExit", event.encode_to_vec()),
            Self::Delete(event) => ("/tasks/delete", "TaskDelete", event.encode_to_vec()),
            Self::ExecAdded(event) => ("/tasks/exec-added", "TaskExecAdded", event.encode_to_vec()),
            Self::ExecStarted(event) => {
                ("/tasks/exec-started", "TaskExecStarted", event.encode_to_vec())
            }
        }
    }

    fn envelope(&self, namespace: &str) -> cd::Envelope {
        let (topic, name, value) = self.parts();
        let type_url = format!("containerd.events.{name}");
        cd::Envelope {
            timestamp: Some(timestamp()),
            namespace: namespace.to_owned(),
            topic: topic.to_owned(),
            event: Some(cd::Any { type_url, value }),
        }
    }
}

/// The sending end of the queue of events.
pub struct Events {
    namespace: String,
    queue: mpsc::Sender<Waiting>,
    store: Store,
    /// The number of the next event.
    next: AtomicU64,
    /// The number of events that were queued and not yet sent.
    waiting: watch::Sender<usize>,
}

/// An event that waits, and its file in the store.
struct Waiting {
    file: String,
    envelope: cd::Envelope,
}

impl Events {
    /// Makes a queue whose events go to containerd's socket `to`. Without one they go nowhere.
    pub fn new(namespace: &str, to: Option<PathBuf>) -> Self {
        Self::kept(namespace, to, Store::default())
    }

    /// Makes a queue, as [`new`](Self::new) does, whose events wait in `store` too. Events that are
    /// there already come first.
    pub fn kept(namespace: &str, to: Option<PathBuf>, store: Store) -> Self {
        let (queue, events) = mpsc::channel(QUEUE);
        let waiting = watch::Sender::new(0);
        let left = store.names(RECORDS);
        let numbers = left.iter().filter_map(|file| file[RECORDS.len()..].parse::<u64>().ok());
        let next = AtomicU64::new(numbers.max().map_or(0, |last| last + 1));
        tokio::spawn(send_all(to, events, store.clone(), waiting.clone()));
        let events = Self { namespace: namespace.to_owned(), queue, store, next, waiting };
        for file in left {
            let bytes = events.store.get(&file).unwrap_or_default();
            match cd::Envelope::decode(bytes.as_slice()) {
                Ok(envelope) => events.queue(Waiting { file, envelope }),
                Err(_) => events.store.remove(&file),
            }
        }
        events
    }

    /// Returns containerd's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Queues an event.
    pub fn publish(&self, event: &Event) {
        let envelope = event.envelope(&self.namespace);
        // The names are in the order of the numbers.
        let file = format!("{RECORDS}{:020}", self.next.fetch_add(1, Ordering::Relaxed));
        self.store.put(&file, &envelope.encode_to_vec());
        self.queue(Waiting { file, envelope });
    }

    fn queue(&self, event: Waiting) {
        self.waiting.send_modify(|count| *count += 1);
        if let Err(full) = self.queue.try_send(event) {
            self.store.remove(&full.into_inner().file);
            self.waiting.send_modify(|count| *count -= 1);
            crate::log::warn("an event was dropped: containerd takes none");
        }
    }

    /// Waits until all events were sent, for at most `patience`.
    pub async fn drain(&self, patience: Duration) {
        let mut waiting = self.waiting.subscribe();
        let _ = tokio::time::timeout(patience, waiting.wait_for(|count| *count == 0)).await;
    }
}

/// Returns the path of containerd's ttrpc socket as the environment gives it.
pub fn socket_from_environment() -> Option<PathBuf> {
    let address = std::env::var("TTRPC_ADDRESS").ok().filter(|address| !address.is_empty())?;
    Some(address.strip_prefix("unix://").unwrap_or(&address).into())
}

async fn send_all(
    to: Option<PathBuf>,
    mut events: mpsc::Receiver<Waiting>,
    store: Store,
    waiting: watch::Sender<usize>,
) {
    let mut client = None;
    while let Some(Waiting { file, envelope }) = events.recv().await {
        if let Some(to) = &to {
            send(to, &mut client, envelope).await;
        }
        store.remove(&file);
        waiting.send_modify(|count| *count -= 1);
    }
}

/// Sends one event, and tries again until containerd takes or refuses it.
async fn send(to: &Path, client: &mut Option<Client>, envelope: cd::Envelope) {
    let request = cd::ForwardRequest { envelope: Some(envelope) }.encode_to_vec();
    loop {
        let mut connected = match client.take() {
            Some(connected) => connected,
            None => match Client::connect(to).await {
                Ok(connected) => connected,
                Err(_) => {
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            },
        };
        const SERVICE: &str = "containerd.services.events.ttrpc.v1.Events";
        let sent = connected.call(SERVICE, "Forward", request.clone());
        match tokio::time::timeout(ANSWER, sent).await {
            Ok(Ok(_)) => {
                *client = Some(connected);
                return;
            }
            // containerd refuses it, and would again.
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::Other => {
                crate::log::warn(&format!("containerd refused an event: {error}"));
                *client = Some(connected);
                return;
            }
            // An old connection broke, or containerd is not well.
            Ok(Err(_)) | Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::ttrpc::{Failure, server};

    #[derive(Default)]
    struct Seen(Mutex<Vec<String>>);

    impl server::Handler for Seen {
        async fn call(
            self: Arc<Self>,
            _: String,
            _: String,
            payload: Vec<u8>,
        ) -> Result<Vec<u8>, Failure> {
            let request = cd::ForwardRequest::decode(payload.as_slice()).unwrap();
            let envelope = request.envelope.unwrap();
            assert_eq!(envelope.namespace, "ns");
            self.0.lock().unwrap().push(envelope.topic);
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_checkpoint_is_told_of_by_containerds_names() {
        let checkpoint = "/c".to_owned();
        let event = cd::TaskCheckpointed { container_id: "one".to_owned(), checkpoint };
        let envelope = Event::Checkpointed(event.clone()).envelope("ns");
        assert_eq!(envelope.topic, "/tasks/checkpointed");
        let told = envelope.event.unwrap();
        assert_eq!(told.type_url, "containerd.events.TaskCheckpointed");
        assert_eq!(cd::TaskCheckpointed::decode(told.value.as_slice()).unwrap(), event);
    }

    #[tokio::test]
    async fn events_wait_for_containerd_and_keep_their_order_also_in_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("events.sock");
        let store = Store::make(&dir.path().join("state")).unwrap();
        // A process that is killed before containerd listens.
        let killed = Events::kept("ns", Some(dir.path().join("nowhere")), store.clone());
        killed.publish(&Event::Create(cd::TaskCreate::default()));
        killed.publish(&Event::Start(cd::TaskStart::default()));
        store.put("event-x", b"\xff");
        let events = Events::kept("ns", Some(socket.clone()), store.clone());
        events.publish(&Event::Exit(cd::TaskExit::default()));
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let seen = Arc::new(Seen::default());
        let handler = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(server::serve(stream, Arc::clone(&handler)));
            }
        });
        events.drain(Duration::from_secs(60)).await;
        assert_eq!(*seen.0.lock().unwrap(), ["/tasks/create", "/tasks/start", "/tasks/exit"]);
        assert!(store.names("event-").is_empty(), "{:?}", store.names(""));
    }
}
