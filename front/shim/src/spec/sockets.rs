//! Sandboxes that begin with sockets of the node's socket engine for all of their containers. A
//! container of Kubernetes' asks for them by a mount (`mounts`).

use std::path::Path;

use slipway_sandbox_api::v1;

use super::flags::flag;
use super::oci::Oci;

/// The annotation that asks for a socket function: "true" or "false".
const SOCKETS: &str = "dev.slipway.sockets";

/// Returns whether a sandbox is to have a function of the node's socket engine. `restores` says
/// that it begins with a checkpoint.
///
/// # Errors
/// One line: the annotation is neither "true" nor "false", or the sandbox can have no function.
pub fn wants_sockets(oci: &Oci, restores: bool) -> Result<bool, String> {
    match flag(&oci.annotations, SOCKETS)? {
        Some(true) if restores => Err(format!(
            "a container that begins with a checkpoint has no socket function: leave out the \
             annotation {SOCKETS}"
        )),
        wanted => Ok(wanted.unwrap_or(false)),
    }
}

/// Gives a sandbox a function of the socket engine that serves at `engine`.
///
/// # Errors
/// One line: its interface is not in one of Slipway's networks.
pub fn add_sockets(run: &mut v1::RunSpec, engine: &Path) -> Result<(), String> {
    let namespace = &run.network_namespace;
    if !namespace.is_empty() {
        return Err(format!(
            "the annotation {SOCKETS} does not go with the network namespace {namespace}: sockets \
             have addresses of one of Slipway's networks, which dev.slipway.network names"
        ));
    }
    run.socket_engine = engine.to_string_lossy().into_owned();
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wanted(annotations: serde_json::Value, restores: bool) -> Result<bool, String> {
        let config = json!({"process": {"args": ["/pause"]}, "annotations": annotations});
        wants_sockets(&serde_json::from_value(config).unwrap(), restores)
    }

    #[test]
    fn a_sandbox_has_a_socket_function_if_its_annotation_says_so() {
        assert_eq!(wanted(json!({ SOCKETS: "true" }), false), Ok(true));
        assert_eq!(wanted(json!({ SOCKETS: "false" }), true), Ok(false));
        assert_eq!(wanted(json!({}), true), Ok(false));
        for (value, restores, why) in
            [("yes", false, "neither true nor false"), ("true", true, "begins with a checkpoint")]
        {
            let refused = wanted(json!({ SOCKETS: value }), restores).unwrap_err();
            assert!(refused.contains(why) && refused.contains(SOCKETS), "{refused}");
        }
        let mut run = v1::RunSpec::default();
        add_sockets(&mut run, Path::new("/run/e.sock")).unwrap();
        assert_eq!(run.socket_engine, "/run/e.sock");
        run.network_namespace = "/run/netns/cni-1".into();
        let refused = add_sockets(&mut run, Path::new("/run/e.sock")).unwrap_err();
        assert!(refused.contains("the network namespace /run/netns/cni-1"), "{refused}");
    }
}
