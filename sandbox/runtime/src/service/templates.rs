//! The daemon's gRPC service for templates.

use std::sync::Arc;

use tonic::{Request, Response};

use super::{Reply, to_its_end};
use crate::memory::most_to_ask_for;
use crate::node::Node;
use crate::save::{self, Saves};
use crate::templates::{Interface, Manifest, check_chosen};
use crate::{Error, Result, v1};

/// The MTUs that an interface can have, bytes.
const MTUS: std::ops::RangeInclusive<u32> = 68..=65535;

/// The gRPC service for templates.
pub struct TemplateService(
    /// The node that has the templates.
    pub Arc<Node>,
);

#[tonic::async_trait]
impl v1::templates_server::Templates for TemplateService {
    async fn create(&self, request: Request<v1::CreateTemplateRequest>) -> Reply<v1::Template> {
        // A task of its own: a client that leaves early leaves the template whole.
        let (node, request) = (Arc::clone(&self.0), request.into_inner());
        Ok(Response::new(to_its_end(async move { create(&node, request).await }).await?))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::TemplateList> {
        let all = self.0.templates.list().await;
        let templates = all.iter().filter(|one| one.snapshot.is_none()).map(describe).collect();
        Ok(Response::new(v1::TemplateList { templates }))
    }

    async fn remove(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        // A task of its own: if the client leaves early, what is loaded is forgotten even so. What
        // is made later under the name would not be used otherwise.
        let (node, name) = (Arc::clone(&self.0), request.into_inner().name);
        to_its_end(async move { remove(&node, &name).await }).await?;
        Ok(Response::new(v1::Empty {}))
    }
}

async fn remove(node: &Node, name: &str) -> Result<()> {
    if node.templates.is_other(name, false).await? {
        let what = format!("{name} is a snapshot: `slipway snapshot rm {name}` removes it");
        return Err(Error::Invalid(what));
    }
    node.templates.remove(name).await
}

/// Saves a machine as a template. Returns when that is done, or the machine has ended without it.
async fn create(node: &Arc<Node>, request: v1::CreateTemplateRequest) -> Result<v1::Template> {
    let v1::CreateTemplateRequest { name, machine, mtu } = request;
    check_chosen(&name)?;
    let machine = machine.unwrap_or_default();
    if let Some(why) = why_not_saved(&machine, mtu) {
        return Err(Error::Invalid(why.to_owned()));
    }
    let socket_room = !machine.socket_engine.is_empty();
    let made = save::make(node, Saves { name, mtu, socket_room }, machine).await?;
    Ok(describe(&made))
}

/// Returns why no template is made of a machine whose interface is to have this MTU (0: that of its
/// network), or `None` if one is.
fn why_not_saved(machine: &v1::RunSpec, mtu: u32) -> Option<&'static str> {
    let reasons = [
        (!machine.template.is_empty() || !machine.pod.is_empty(), "a template boots by itself"),
        (
            mtu > 0 && asks_for_network(machine),
            "an interface with an MTU of its own is in no network: leave that out",
        ),
        (mtu != 0 && !MTUS.contains(&mtu), "an MTU is 68 to 65535 bytes"),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// Returns whether a machine's description says anything of a network.
fn asks_for_network(machine: &v1::RunSpec) -> bool {
    let texts = [&machine.network, &machine.network_namespace, &machine.mac, &machine.vf_pool];
    let lists = [&machine.addresses, &machine.publish];
    texts.iter().any(|text| !text.is_empty())
        || lists.iter().any(|list| !list.is_empty())
        || machine.wait_network
}

/// Describes a template.
fn describe(manifest: &Manifest) -> v1::Template {
    let shape = &manifest.shape;
    let interface = shape.interface.as_ref();
    let nic = interface.map(|interface: &Interface| interface.nic.as_str().to_owned());
    v1::Template {
        name: manifest.name.clone(),
        created_ns: manifest.created_ns,
        memory_bytes: shape.memory_bytes,
        max_memory_bytes: most_to_ask_for(shape.memory_bytes, shape.room_bytes)
            .max(shape.memory_bytes),
        bound_memory_bytes: shape.bound().most_limit(),
        touched_bytes: manifest.touched_bytes,
        cpus: shape.cpus,
        max_cpus: shape.max_cpus,
        kernel: shape.kernel.to_string_lossy().into_owned(),
        nic: nic.unwrap_or_default(),
        queues: interface.map_or(0, |interface| interface.queues),
        mtu: interface.map_or(0, |interface| interface.mtu),
        sockets: shape.needs.sockets,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_with_regions_says_the_largest_limit_of_a_container() {
        let mut manifest = crate::templates::manifest::tests::manifest("web");
        assert_eq!(describe(&manifest).bound_memory_bytes, 0);
        manifest.shape.region_bytes = 128 << 20;
        let shown = describe(&manifest);
        assert_eq!((shown.bound_memory_bytes >> 20, shown.max_memory_bytes >> 20), (124, 128));
        // Eight regions are behind the memory with which a fork begins.
        assert_eq!(manifest.shape.memory_file_bytes() >> 20, 128 + 8 * 128);
    }

    #[test]
    fn machines_of_which_no_template_is_made_are_told_apart() {
        let plain = v1::RunSpec { max_memory_bytes: 1 << 30, ..v1::RunSpec::default() };
        let why = |change: fn(&mut v1::RunSpec), mtu| {
            let mut machine = plain.clone();
            change(&mut machine);
            why_not_saved(&machine, mtu).unwrap_or_default()
        };
        assert_eq!([why(|_| (), 0), why(|_| (), 1400)], ["", ""]);
        assert!(why(|one| one.template = "web".to_owned(), 0).contains("by itself"));
        assert_eq!(why(|one| one.bound_memory_bytes = 1, 0), "");
        assert!(why(|one| one.network = "blue".to_owned(), 1400).contains("in no network"));
        assert!(why(|_| (), 67).contains("68 to 65535"));
    }
}
