//! OCI hooks: programs of the host that a runtime runs at points of a container's life. Those that
//! run in the host's namespaces are the shim's to [`run`](crate::hooks); the others would need the
//! container's, which are its guest's.

use super::oci::{Hook, Oci};

/// The points before the container's start, in order.
pub const BEFORE_START: [&str; 2] = ["prestart", "createRuntime"];
/// The point after its start.
pub const STARTED: &str = "poststart";
/// The point after its end.
pub const ENDED: &str = "poststop";
/// The points whose hooks run in the host's namespaces.
pub const HOSTS: [&str; 4] = [BEFORE_START[0], BEFORE_START[1], STARTED, ENDED];

/// Checks the hooks of a container with a sandbox of its own.
///
/// # Errors
/// One line that names a hook that cannot run.
pub fn check(oci: &Oci) -> Result<(), String> {
    for (point, hooks) in named(oci) {
        if !HOSTS.contains(&point) {
            return Err(format!(
                "{point} hooks run in a container's namespaces, which a microVM keeps from the \
                 host's programs: leave them out, or use createRuntime"
            ));
        }
        if let Some(hook) = hooks.iter().find(|hook| !hook.path.starts_with('/')) {
            return Err(format!("the {point} hook {:?} is no absolute path", hook.path));
        }
    }
    Ok(())
}

/// Refuses the hooks of a pod and of its containers.
///
/// # Errors
/// One line: there are some.
pub fn refuse(oci: &Oci) -> Result<(), String> {
    match named(oci).next() {
        Some((point, _)) => Err(format!(
            "{point} hooks are not supported in a pod, whose containers are one microVM: leave \
             them out"
        )),
        None => Ok(()),
    }
}

/// Returns the hooks of a point.
pub fn at<'a>(oci: &'a Oci, point: &str) -> &'a [Hook] {
    oci.hooks.get(point).and_then(|hooks| hooks.as_deref()).unwrap_or_default()
}

/// Returns the points that have hooks.
fn named(oci: &Oci) -> impl Iterator<Item = (&str, &[Hook])> {
    let all = oci.hooks.iter().map(|(point, hooks)| (point.as_str(), hooks.as_deref()));
    all.filter_map(|(point, hooks)| Some((point, hooks.filter(|hooks| !hooks.is_empty())?)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn oci(hooks: Value) -> Oci {
        serde_json::from_value(json!({ "hooks": hooks })).unwrap()
    }

    #[test]
    fn hooks_of_the_host_are_taken_and_others_are_named() {
        let nerdctl = json!([{
            "path": "/usr/local/bin/nerdctl",
            "args": ["nerdctl", "internal", "oci-hook", "createRuntime"],
            "env": ["PATH=/bin"]
        }]);
        let both = oci(json!({"createRuntime": nerdctl, "poststop": nerdctl, "prestart": null}));
        assert_eq!(check(&both), Ok(()));
        assert_eq!(at(&both, "createRuntime")[0].args[1], "internal");
        assert!(at(&both, "prestart").is_empty() && at(&both, STARTED).is_empty());
        assert!(refuse(&both).unwrap_err().starts_with("createRuntime hooks"));
        let none = oci(json!({"createContainer": [], "startContainer": null}));
        assert_eq!((check(&none), refuse(&none)), (Ok(()), Ok(())));
        for point in ["createContainer", "startContainer", "other"] {
            let refused = check(&oci(json!({point: [{"path": "/bin/x"}]}))).unwrap_err();
            assert!(refused.starts_with(point) && !refused.contains('\n'), "{refused}");
        }
        let relative = check(&oci(json!({"poststart": [{"path": "x"}]}))).unwrap_err();
        assert!(relative.contains("\"x\""), "{relative}");
    }
}
