//! The choice of a template for a sandbox that names none but asks for one ([`AUTO`]).
//!
//! Such a sandbox begins with the template that has its machine, if there is one. Otherwise it
//! boots, and once it runs the node makes that template for those that come later (the module
//! `warm`). The template's name tells its machine, so a machine that differs in anything has
//! another one. Sandboxes that start together ask for one without naming it, if the node's settings
//! say so ([`is_asked`]), and many of them wait until it is made ([`missing`]).
//!
//! [`AUTO`]: crate::templates::AUTO

use std::sync::Arc;

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::templates::{AUTO, Boots, PREFIX, Shape, Template, apart, digest, is_automatic};
use crate::v1::RunSpec;
use crate::{Config, Error, Result, fork};

/// The hexadecimal digits of a machine's digest in such a name.
const DIGITS: usize = 12;

/// Returns whether the node is to choose the template of a new sandbox. On a node that shares roots
/// a sandbox has to ask for that by name, since a fork shares no root.
///
/// # Errors
/// The errors of [`Config::forks_many`] and [`Config::shares_roots`].
pub(crate) fn is_asked(config: &Config, spec: &RunSpec) -> Result<bool> {
    if spec.template == AUTO {
        return Ok(true);
    }
    let is_one_of_many = spec.at_once > 1 && spec.template.is_empty() && !spec.makes_pod;
    let reports = boots_to_report(config, spec.free_page_reporting);
    Ok(is_one_of_many && !reports && config.forks_many()? && !config.shares_roots()?)
}

/// Returns whether the guest of a sandbox is `asked` to report free pages, and those of the
/// templates that the node makes are not: they do as the node's settings say.
fn boots_to_report(config: &Config, asked: Option<bool>) -> bool {
    asked == Some(true) && !config.free_page_reporting
}

/// Returns whether a sandbox can begin with a template that the node makes.
fn may_fork(config: &Config, record: &Record) -> bool {
    fork::cannot_fork(record).is_none()
        && record.memory.room() == 0
        && !boots_to_report(config, record.reporting.asked)
}

/// Returns the name of the template with which a sandbox could begin and which is not there yet.
/// Returns `None` if the node has it, or if the sandbox can be no fork.
///
/// # Errors
/// The errors of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn missing(node: &Node, sandbox: &Sandbox) -> Result<Option<String>> {
    let record = sandbox.record();
    if !may_fork(&node.config, &record) {
        return Ok(None);
    }
    let name = name_of(node, &record).await?;
    let found = node.templates.get(&name).await;
    Ok(matches!(found, Err(Error::NoTemplate(_))).then_some(name))
}

/// Returns the template of the machine of a sandbox that leaves the choice to the node and is about
/// to start on a VMM that saves machines. Returns `None` if there is no such template yet, or if
/// the sandbox can be no fork.
///
/// # Errors
/// The errors of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn choose(node: &Node, sandbox: &Sandbox) -> Result<Option<Arc<Template>>> {
    let record = sandbox.record();
    if !may_fork(&node.config, &record) {
        return Ok(None);
    }
    let name = name_of(node, &record).await?;
    let found = match node.templates.get(&name).await {
        // The name is a part of a digest: another machine that somebody asked for may have it.
        Ok(template) => fork::check(node, &record, &template.manifest).await.map(|()| template),
        missing => missing,
    };
    match found {
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
    let needs = Needs::of_template(record.sockets.is_some());
    let boot = node.boot.files(record.kernel.as_deref(), needs).await?;
    let cpu_template = node.config.cpu_template()?;
    let boots = Boots { needs, kernel: &boot.kernel, initramfs: &boot.initramfs, cpu_template };
    let mut shape = Shape::of(record, &boots);
    // The template's guest is asked to report by the settings that the node has then. Its kernel
    // may be unable to, for which the template is not made again and again.
    shape.needs.reporting = node.config.free_page_reporting;
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
    fn sandboxes_that_start_together_ask_for_a_template_if_the_settings_say_so() {
        let on = Config::default();
        let off = Config { templates: "off".to_owned(), ..Config::default() };
        let spec = |template: &str, at_once, makes_pod| RunSpec {
            template: template.to_owned(),
            at_once,
            makes_pod,
            ..RunSpec::default()
        };
        for (asked, by_on, by_off) in [
            (spec("", 0, false), false, false),
            (spec("", 1, false), false, false),
            (spec("", 2, false), true, false),
            (spec("", 2, true), false, false),
            (spec("web", 2, false), false, false),
            (spec(AUTO, 0, false), true, true),
            (spec(AUTO, 0, true), true, true),
        ] {
            let told = (is_asked(&on, &asked).unwrap(), is_asked(&off, &asked).unwrap());
            assert_eq!(told, (by_on, by_off), "{asked:?}");
        }
        let shared = Config { shared_root: "on".to_owned(), ..Config::default() };
        assert!(!is_asked(&shared, &spec("", 2, false)).unwrap());
        let reports = RunSpec { free_page_reporting: Some(true), ..spec("", 2, false) };
        assert!(!is_asked(&on, &reports).unwrap());
        let all = Config { free_page_reporting: true, ..Config::default() };
        assert!(is_asked(&all, &reports).unwrap(), "and so do its templates");
        let wrong = Config { templates: "yes".to_owned(), ..Config::default() };
        assert!(is_asked(&wrong, &spec("", 2, false)).is_err());
    }

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
            name(|shape| shape.needs.reporting = true),
            name(|shape| shape.initramfs = "/j".into()),
            name_of_shape(&shape(), 2, None),
            same,
        ];
        others.sort();
        others.dedup();
        assert_eq!(others.len(), 8, "{others:?}");
        assert!(crate::name::check_template(&others[0]).is_ok());
    }
}
