//! Gathers views of the plane's live objects.
//!
//! Every object is looked at by its own thread: controllers by requests in their mailboxes,
//! switches by jobs. Nobody waits for a thread that does not answer for longer than [`PATIENCE`],
//! and a request that was not begun by then is taken back, so that nothing gathers in the mailbox
//! of a controller that is not polled. Each object's view is bounded in size, and is sent before
//! many others are made.

use std::sync::Arc;
use std::time::Duration;

use slipway_nvme::{Posted, Request, ThreadView};
use slipway_plane_api::v1;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::door::Door;
use crate::views::{EndpointView, LivePart, PlacedSwitch, ReactorView};
use crate::{Error, Plane};

/// The longest wait for the answers of a batch of endpoints, or of all switches.
const PATIENCE: Duration = Duration::from_secs(1);
/// The number of endpoints that are asked at a time.
const BATCH: usize = 64;
/// The number of parts in flight to a client.
const QUEUE: usize = 4;

/// The parts of a dump, as they come.
pub type Parts = mpsc::Receiver<Result<v1::LivePart, Status>>;

/// The endpoints and ports that are asked for: all, if there are no ids. Those of a sandbox have
/// its id, or begin with its id and a dot.
#[derive(Clone)]
struct LiveFilter(Arc<[String]>);

impl LiveFilter {
    fn is_all(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, id: &str) -> bool {
        let is_of = |one: &String| {
            let rest = id.strip_prefix(one.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.is_all() || self.0.iter().any(is_of)
    }
}

/// Starts to gather views of the endpoints and ports of these ids or, if there are none, of
/// everything.
///
/// # Errors
/// [`Error::Unknown`] if no endpoint has any of the ids.
pub fn start(plane: Plane, ids: Vec<String>) -> Result<Parts, Error> {
    let first = ids.first().cloned().unwrap_or_default();
    let wanted = LiveFilter(ids.into());
    let found = plane.each_endpoint(|id, served| wanted.has(id).then(|| served.inspect()));
    let found: Vec<_> = found.into_iter().flatten().collect();
    if found.is_empty() && !wanted.is_all() {
        return Err(Error::Unknown(first));
    }
    let (sender, parts) = mpsc::channel(QUEUE);
    // The client has hung up if a part cannot be sent; the rest is not gathered then.
    tokio::spawn(gather(plane, wanted, found, sender));
    Ok(parts)
}

/// Sends all parts. Returns `None` if the client hung up before.
async fn gather(
    plane: Plane,
    wanted: LiveFilter,
    mut found: Vec<(EndpointView, Option<Door>)>,
    sender: mpsc::Sender<Result<v1::LivePart, Status>>,
) -> Option<()> {
    if wanted.is_all() {
        send(&sender, LivePart::Reactors(reactors(&plane, &found))).await?;
    }
    while !found.is_empty() {
        let batch = found.drain(..found.len().min(BATCH));
        let asked: Vec<PendingView> =
            batch.map(|(view, door)| PendingView::new(view, door)).collect();
        let until = Instant::now() + PATIENCE;
        // Before the first is sent: a client that does not read, or has left, keeps no request in a
        // mailbox.
        let mut views = Vec::with_capacity(asked.len());
        for one in asked {
            views.push(one.answered(until).await);
        }
        for view in views {
            send(&sender, LivePart::Endpoint(Box::new(view))).await?;
        }
    }
    let (accepts, all) = (wanted.clone(), wanted.is_all());
    let inspect = move || plane.fabric().inspect(move |name| accepts.has(name), PATIENCE);
    let switches = tokio::task::spawn_blocking(inspect).await.ok()?;
    for slipway_fabric::InspectedSwitch { name, reactor, view } in switches {
        if all || view.as_ref().is_none_or(|view| !view.ports.is_empty()) {
            send(&sender, LivePart::Switch(PlacedSwitch { name, reactor, view })).await?;
        }
    }
    Some(())
}

/// Sends a part. Returns `None` if the client hung up.
async fn send(sender: &mpsc::Sender<Result<v1::LivePart, Status>>, part: LivePart) -> Option<()> {
    let json = serde_json::to_string(&part).map_err(|error| Status::internal(error.to_string()));
    sender.send(json.map(|json| v1::LivePart { json })).await.ok()
}

/// Returns what each reactor has, by number. Waits for no thread: all of it is in counters and in
/// the plane's own records.
pub fn list_reactors(plane: &Plane) -> Vec<v1::Reactor> {
    let found = plane.each_endpoint(|_, served| served.inspect());
    let all = reactors(plane, &found).into_iter().map(|one| v1::Reactor {
        busy_ns: one.busy_ns,
        endpoints: one.endpoints as u64,
        lanes: one.lanes as u64,
        switches: one.switches as u64,
    });
    all.collect()
}

fn reactors(plane: &Plane, endpoints: &[(EndpointView, Option<Door>)]) -> Vec<ReactorView> {
    let busy = plane.busy().into_iter().map(|busy| ReactorView {
        busy_ns: u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX),
        ..ReactorView::default()
    });
    let mut reactors: Vec<ReactorView> = busy.collect();
    for (view, _) in endpoints {
        if let Some(own) = view.reactor.and_then(|number| reactors.get_mut(number)) {
            own.endpoints += 1;
        }
        for lane in view.threads.iter().skip(1) {
            if let Some(reactor) = reactors.get_mut(lane.reactor) {
                reactor.lanes += 1;
            }
        }
    }
    for number in plane.fabric().switch_reactors() {
        if let Some(reactor) = reactors.get_mut(number) {
            reactor.switches += 1;
        }
    }
    reactors
}

/// An endpoint whose controller, if it has one, was asked for views of its threads.
struct PendingView {
    view: EndpointView,
    /// The request to each thread, and its answer.
    answers: Vec<(Posted, oneshot::Receiver<ThreadView>)>,
}

impl PendingView {
    fn new(view: EndpointView, door: Option<Door>) -> Self {
        let Some(door) = door else { return Self { view, answers: Vec::new() } };
        let ask = |thread| {
            let (sender, answer) = oneshot::channel();
            // A caller that no longer waits needs no answer.
            let answered = move |view| drop(sender.send(view));
            (door.mailbox.post(Request::Inspect(thread, Box::new(answered))), answer)
        };
        let answers = (0..view.threads.len()).map(ask).collect();
        door.control.poke();
        Self { view, answers }
    }

    /// Waits until `until` for the answers. Returns the view with those that came.
    async fn answered(self, until: Instant) -> EndpointView {
        let Self { mut view, answers } = self;
        for (thread, (posted, answer)) in view.threads.iter_mut().zip(answers) {
            match timeout_at(until, answer).await {
                Ok(Ok(view)) => thread.view = Some(view),
                _ => drop(posted.take_back()),
            }
        }
        view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoints_of_a_sandbox_have_its_id_before_a_dot() {
        let wanted = |ids: &[&str]| LiveFilter(ids.iter().map(|id| (*id).to_owned()).collect());
        let one = wanted(&["0a", "vf-7"]);
        for (id, has) in [("0a", true), ("0a.net", true), ("0ab", false), ("vf-7", true)] {
            assert_eq!(one.has(id), has, "{id}");
        }
        assert!(!one.is_all() && wanted(&[]).is_all() && wanted(&[]).has("anything"));
    }
}
