//! The choice of a template for a sandbox that names none but asks for one ([`AUTO`]).
//!
//! Such a sandbox begins with the template that has its machine, if there is one. Otherwise it
//! boots, and once it runs the node makes that template for those that come later (the module
//! `warm`). The template's name tells its machine, so a machine that differs in anything has
//! another one.
//!
//! [`AUTO`]: crate::templates::AUTO

use std::sync::Arc;

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::templates::{Boots, PREFIX, Shape, Template, apart, digest, is_automatic};
use crate::{Error, Result, fork};

/// The hexadecimal digits of a machine's digest in such a name.
const DIGITS: usize = 12;

/// Returns the template of the machine of a sandbox that leaves the choice to the node and is about
/// to start on a VMM that saves machines. Returns `None` if there is no such template yet, or if
/// the sandbox can be no fork.
///
/// # Errors
/// The errors of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn choose(node: &Node, sandbox: &Sandbox) -> Result<Option<Arc<Template>>> {
    let record = sandbox.record();
    if fork::cannot_fork(&record).is_some() || record.memory.room() > 0 {
        return Ok(None);
    }
    let name = name_of(node, &record).await?;
    match node.templates.get(&name).await {
        Ok(template) => {
            node.automatic.used(&name);
            sandbox.note(|record| record.template = Some(name));
            return Ok(Some(template));
        }
        Err(Error::NoTemplate(_)) => sandbox.want_template(name),
        Err(error @ Error::Template { .. }) => {
            remove(node, &name, &error).await;
            sandbox.want_template(name);
        }
        Err(error) => tracing::warn!(sandbox = sandbox.name, %error, "it boots"),
    }
    Ok(None)
}

/// Has a sandbox boot that cannot have the memory of the template that was chosen for it.
pub(crate) fn decline(sandbox: &Sandbox, error: &Error) {
    tracing::warn!(sandbox = sandbox.name, %error, "it boots, without a template");
    sandbox.note(|record| record.template = None);
}

/// Removes the template of a fork whose machine failed before its container ran, if the node made
/// the template by itself: the next sandbox boots, and has the template made anew.
pub(crate) async fn distrust(node: &Node, sandbox: &Sandbox, template: &Template, error: &Error) {
    let name = &template.manifest.name;
    let machine_failed = matches!(error, Error::VmEnded(_) | Error::Agent(_));
    if !is_automatic(name) || !machine_failed || sandbox.is_stopping() {
        return;
    }
    // Another one may have been made in its place.
    let now = node.templates.get(name).await;
    if now.is_ok_and(|now| now.manifest == template.manifest) {
        remove(node, name, error).await;
    }
}

async fn remove(node: &Node, name: &str, why: &Error) {
    tracing::warn!(template = name, error = %why, "removed, since nothing begins with it");
    match node.templates.remove(name).await {
        Ok(()) | Err(Error::NoTemplate(_)) => {}
        Err(error) => tracing::warn!(template = name, %error, "not removed"),
    }
}

/// Returns the name of the template of the sandbox's machine.
async fn name_of(node: &Node, record: &Record) -> Result<String> {
    let needs = Needs::of_template();
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    let cpu_template = node.config.cpu_template()?;
    let boots = Boots { needs, kernel: &boot.kernel, initramfs: &boot.initramfs, cpu_template };
    let shape = Shape::of(record, &boots);
    // The kernel may be replaced by another one under the same path.
    let kernel = boot.kernel.clone();
    let status =
        apart(move || std::fs::metadata(&kernel).map_err(Error::file("cannot read", kernel)));
    let status = status.await?;
    Ok(name_of_shape(&shape, status.len(), status.modified().ok()))
}

fn name_of_shape(shape: &Shape, kernel: u64, changed: Option<std::time::SystemTime>) -> String {
    let version = crate::VERSION;
    let told = format!("{version} {shape:?} {kernel} {changed:?}");
    format!("{PREFIX}{}", &digest(told.as_bytes())[..DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::templates::manifest::tests::shape;

    #[test]
    fn the_name_tells_the_machine() {
        let name = |change: fn(&mut Shape)| {
            let mut shape = shape();
            change(&mut shape);
            name_of_shape(&shape, 1, None)
        };
        let same = name(|_| ());
        assert_eq!((same.clone(), same.len()), (name(|_| ()), PREFIX.len() + DIGITS));
        let mut others = vec![
            name(|shape| shape.memory_bytes *= 2),
            name(|shape| shape.cpus = 2),
            name(|shape| shape.interface.as_mut().unwrap().mtu = 1450),
            name(|shape| shape.interface = None),
            name(|shape| shape.initramfs = "/j".into()),
            name_of_shape(&shape(), 2, None),
            same,
        ];
        others.sort();
        others.dedup();
        assert_eq!(others.len(), 7, "{others:?}");
        assert!(crate::name::check_template(&others[0]).is_ok());
    }
}
