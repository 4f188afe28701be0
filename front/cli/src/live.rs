//! `slipway inspect --live`: shows the live objects of the plane and of the socket engine.
//!
//! The daemon sends a message for each object of the plane (`slipway_plane::views`). The socket
//! engine is a process of its own, and is asked for its report. Both are printed as JSON or as
//! tables (`show`).

mod show;

use anyhow::{Context, Result};
use serde::Serialize;
use slipway_plane::views::{EndpointView, LivePart, PlacedSwitch, ReactorView};
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::{Config, SandboxClient};
use slipway_sgiov::{ConnectionReport, GuestReport, ListenerReport};

use crate::args::{InspectArgs, NodeArgs};
use crate::client::{answer, connect, connect_plane, record, refused};

/// The most listeners, and the most connections, of the socket engine that are listed. The rest is
/// counted.
const SOCKETS: usize = 256;

/// The live objects that were found, as `--json` prints them.
#[derive(Default, Serialize)]
struct Live {
    /// The reactors. Empty if the user named sandboxes or endpoints.
    reactors: Vec<ReactorView>,
    /// The endpoints: all, or the named ones.
    endpoints: Vec<EndpointView>,
    /// The switches: all, or those with ports of the named endpoints.
    switches: Vec<PlacedSwitch>,
    /// The objects of the socket engine, or `None` if no socket engine serves.
    sockets: Option<Sockets>,
}

/// The objects of the socket engine.
#[derive(Serialize)]
struct Sockets {
    /// The guests with a socket function: all, or those of the named sandboxes.
    guests: Vec<GuestReport>,
    /// The listeners, at most [`SOCKETS`]. Empty if the user named sandboxes or endpoints.
    listeners: Vec<ListenerReport>,
    /// The connections, at most [`SOCKETS`]. Empty if the user named sandboxes or endpoints.
    connections: Vec<ConnectionReport>,
    /// The number of listeners and connections of the engine's report that are not listed, with the
    /// connections that the report leaves out.
    more: usize,
    /// The number of the whole engine's tickets that no process has used yet.
    tickets: usize,
    /// The number of the whole engine's arenas.
    arenas: usize,
}

/// A name that the user gave, with the ids of its endpoints.
struct NamedEndpoints {
    /// The sandbox's name, or the id of an endpoint of no sandbox.
    name: String,
    /// The ids by which the plane has the endpoints.
    ids: Vec<String>,
}

/// Runs `slipway inspect --live`.
pub async fn inspect(node: &NodeArgs, config: &Config, args: &InspectArgs) -> Result<i32> {
    let mut plane = connect_plane(node, config).await?;
    let mut named = Vec::new();
    if !args.names.is_empty() {
        let mut sandboxes = connect(node, config).await?;
        for name in &args.names {
            named.push(resolve(&mut sandboxes, name).await);
        }
    }
    let mut live = Live::default();
    match named.is_empty() {
        true => gather(&mut plane, Vec::new(), &mut live).await?,
        false => {
            for one in &named {
                let gathered = gather(&mut plane, one.ids.clone(), &mut live).await;
                gathered.with_context(|| format!("\"{}\" has no live objects", one.name))?;
            }
        }
    }
    live.sockets = sockets(config, &named);
    match args.json {
        true => crate::out::json(&live)?,
        false => crate::out::print(format_args!("{}", show::text(&live))),
    }
    Ok(0)
}

/// Finds the endpoints of `name`. For a sandbox, these are the endpoints whose ids begin with the
/// sandbox's id, and the functions of pools in the sandbox's record. Any other name counts as an
/// endpoint's id.
async fn resolve(sandboxes: &mut SandboxClient, name: &str) -> NamedEndpoints {
    let Ok(record) = record(sandboxes, name).await else {
        return NamedEndpoints { name: name.to_owned(), ids: vec![name.to_owned()] };
    };
    let mut ids = vec![record.id];
    let functions = record.plugged.functions.into_iter();
    ids.extend(functions.map(|given| given.id).filter(|id| !id.is_empty()));
    NamedEndpoints { name: record.name, ids }
}

/// Adds the plane's objects of the endpoints `ids` to `live`, or all of its objects if `ids` is
/// empty.
async fn gather(plane: &mut PlaneClient, ids: Vec<String>, live: &mut Live) -> Result<()> {
    let mut parts = answer(plane.inspect_live(v1::InspectLiveRequest { ids }).await)?;
    while let Some(part) = parts.message().await.map_err(refused)? {
        match serde_json::from_str::<LivePart>(&part.json)? {
            LivePart::Reactors(reactors) => live.reactors = reactors,
            LivePart::Endpoint(endpoint) => live.endpoints.push(*endpoint),
            LivePart::Switch(switch) => live.switches.push(switch),
        }
    }
    Ok(())
}

/// Returns the objects of the node's socket engine: all, or only the guests of the named sandboxes.
/// Returns `None` if no engine serves.
fn sockets(config: &Config, named: &[NamedEndpoints]) -> Option<Sockets> {
    let report = slipway_sgiov::report(&config.run_dir.join("socket.sock")).ok()?;
    let mut all = Sockets {
        guests: report.guests,
        listeners: report.listeners,
        connections: report.connections,
        more: 0,
        tickets: report.tickets,
        arenas: report.links,
    };
    if !named.is_empty() {
        let is_of = |guest: &GuestReport| {
            named.iter().any(|one| guest.name == one.name || one.ids.contains(&guest.name))
        };
        all.guests.retain(is_of);
        (all.listeners, all.connections) = (Vec::new(), Vec::new());
        return Some(all);
    }
    let unreported = report.connections_in_all.saturating_sub(all.connections.len());
    all.more = unreported + beyond(&mut all.listeners) + beyond(&mut all.connections);
    Some(all)
}

/// Shortens a list to [`SOCKETS`] entries. Returns the number of entries that were dropped.
fn beyond<T>(list: &mut Vec<T>) -> usize {
    let more = list.len().saturating_sub(SOCKETS);
    list.truncate(SOCKETS);
    more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_shortened_and_counted() {
        let (mut long, mut short) = (vec![0; SOCKETS + 7], vec![0; 3]);
        assert_eq!((beyond(&mut long), beyond(&mut short)), (7, 0));
        assert_eq!((long.len(), short.len()), (SOCKETS, 3));
    }
}
