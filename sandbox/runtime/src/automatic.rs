//! The choice of a template by the node, for a sandbox that names none.
//!
//! A template suits a sandbox if it was made of the same *machine*: the kernel, the memory, the
//! CPUs and everything else that a guest sees of its VM (`Shape`). The name of a template that the
//! node makes has a digest of its machine, so another machine means another template. If the node
//! has the template of a sandbox's machine, the sandbox begins with it. Otherwise the sandbox
//! boots, and when it runs the node makes the template for later sandboxes (the module `warm`).
//!
//! A sandbox leaves the choice to the node in one of three ways ([`choice`]):
//! - it asks for that by the template name [`AUTO`];
//! - several sandboxes start together, if the node's settings allow it. If there are many, they
//!   wait until their template is made ([`missing`]);
//! - a single sandbox starts whose image is started often ([`Frequency`]), if the node's settings
//!   say how often that is.
//!
//! If such a sandbox boots, its record has the reason (`template_why_not`).
//!
//! [`AUTO`]: crate::templates::AUTO

use std::sync::Arc;
use std::time::Duration;

use crate::node::Node;
use crate::record::{Needs, Record};
use crate::sandbox::Sandbox;
use crate::templates::{
    AUTO, Boots, Choice, Frequency, PREFIX, Shape, Template, Threshold, apart, digest, is_automatic,
};
use crate::v1::RunSpec;
use crate::{Config, Error, Result, fork};

/// The number of hexadecimal digits of a machine's digest in the name of its template.
const DIGITS: usize = 12;
/// The reason why a sandbox boots if a template is only for images that are started often and its
/// image is not.
const SELDOM: &str = "its image was not started often enough (templates_after)";

/// Returns how the template of a new sandbox is chosen. The node chooses it for
/// - a sandbox that names [`AUTO`];
/// - several sandboxes that start together, if the settings allow that. They boot if the node
///   shares roots, since a fork shares no root, or if their guests are to report free pages and
///   those of the node's templates do not;
/// - a single sandbox, if the settings say how often its image must be started for that.
///
/// The request decides for a sandbox that names a template, or that is to boot, and for a pod that
/// does not name [`AUTO`]: a pod has no image, and only one that boots has room for more memory.
///
/// # Errors
/// The errors of [`Config::forks_many`] and [`Config::shares_roots`].
pub(crate) fn choice(config: &Config, spec: &RunSpec) -> Result<Choice> {
    let at_once = spec.at_once.max(1);
    if spec.template == AUTO {
        return Ok(Choice::Node { at_once });
    }
    if !spec.template.is_empty() || spec.boots || spec.makes_pod {
        return Ok(Choice::Request);
    }
    if at_once == 1 {
        let may_choose = config.templates_after > 0;
        return Ok(if may_choose { Choice::NodeIfOften } else { Choice::Request });
    }
    let reports = boots_to_report(config, spec.free_page_reporting);
    let may_choose = !reports && config.forks_many()? && !config.shares_roots()?;
    Ok(if may_choose { Choice::Node { at_once } } else { Choice::Request })
}

/// Returns whether a sandbox has to boot because its guest is `asked` to report free pages. Guests
/// of the node's templates report them only if the node's settings say so.
fn boots_to_report(config: &Config, asked: Option<bool>) -> bool {
    asked == Some(true) && !config.free_page_reporting
}

/// Returns the reason why a sandbox cannot begin with a template that the node makes. Returns
/// `None` if it can.
///
/// # Errors
/// The errors of [`Config::shares_roots`].
fn why_boots(config: &Config, record: &Record, choice: Choice) -> Result<Option<&'static str>> {
    if let Some(why) = fork::cannot_fork(record) {
        return Ok(Some(why));
    }
    let is_of_pool = record.network.as_ref().is_some_and(|network| network.pool.is_some());
    let reasons = [
        (
            boots_to_report(config, record.reporting.asked),
            "its guest is to report free pages, and those of the node's templates do not",
        ),
        (is_of_pool, "its interface is a function of a pool (--vf, vf_pool)"),
        (
            choice == Choice::NodeIfOften && config.shares_roots()?,
            "it shares the root of its image (shared_root), and a fork shares none",
        ),
    ];
    Ok(reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why))
}

/// Notes in a sandbox's record the reason why it boots, without a template.
pub(crate) fn boots(sandbox: &Sandbox, why: &str) {
    sandbox.note(|record| why.clone_into(&mut record.template_why_not));
}

/// Returns the name of the template of a sandbox's machine if the node does not have it yet.
/// Returns `None` if the node has it, or if the sandbox cannot be a fork.
///
/// # Errors
/// The errors of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn missing(node: &Node, sandbox: &Sandbox) -> Result<Option<String>> {
    let record = sandbox.record();
    if why_boots(&node.config, &record, sandbox.choice())?.is_some() {
        return Ok(None);
    }
    let name = name_of(node, &record).await?;
    let found = node.templates.get(&name).await;
    Ok(matches!(found, Err(Error::NoTemplate(_))).then_some(name))
}

/// Chooses the template of a sandbox that leaves the choice to the node, when it is about to start
/// on a VMM that can save machines. Returns `None` if the sandbox is to boot: the node does not
/// have the template yet, the sandbox cannot be a fork, or its image would have to be started often
/// and was not. The reason is then in the record.
///
/// # Errors
/// The errors of [`Known::files`](crate::boot::Known::files).
pub(crate) async fn choose(node: &Node, sandbox: &Sandbox) -> Result<Option<Arc<Template>>> {
    let (record, choice) = (sandbox.record(), sandbox.choice());
    if let Some(why) = why_boots(&node.config, &record, choice)? {
        boots(sandbox, why);
        return Ok(None);
    }
    let name = name_of(node, &record).await?;
    let frequency = frequency(node, &record, choice, &name);
    if frequency == Frequency::Seldom {
        boots(sandbox, SELDOM);
        return Ok(None);
    }
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
        Err(Error::NoTemplate(_)) => want(sandbox, name, frequency),
        Err(error @ Error::Template { .. }) => {
            remove(node, &name, &error).await;
            want(sandbox, name, frequency);
        }
        Err(error) => {
            tracing::warn!(sandbox = sandbox.name, %error, "it boots");
            boots(sandbox, &error.to_string());
        }
    }
    Ok(None)
}

/// Counts the start of a sandbox, and returns how often its image is started on the machine of the
/// template `name`. Returns [`Frequency::OftenNow`] for a sandbox whose template does not depend on
/// that.
fn frequency(node: &Node, record: &Record, choice: Choice, name: &str) -> Frequency {
    if choice != Choice::NodeIfOften {
        return Frequency::OftenNow;
    }
    let threshold = Threshold {
        starts: node.config.templates_after as usize,
        within: Duration::from_secs(node.config.templates_within_s),
    };
    node.automatic.started(&record.settings.image_digest, name, threshold)
}

/// Has a sandbox boot, since the node does not have its template `name`, and has the template made
/// when the sandbox runs. If the image is not started often any more, the template is not made.
fn want(sandbox: &Sandbox, name: String, frequency: Frequency) {
    if frequency != Frequency::OftenNow {
        return boots(sandbox, SELDOM);
    }
    boots(sandbox, "the node had no template of its machine yet");
    if sandbox.choice() == Choice::NodeIfOften {
        let image = sandbox.look(|record| record.settings.image_digest.clone());
        tracing::info!(image, template = name, "started often: its template is to be made");
    }
    sandbox.want_template(name);
}

/// Has a sandbox boot although a template was chosen for it: its memory cannot be had.
pub(crate) fn decline(sandbox: &Sandbox, error: &Error) {
    tracing::warn!(sandbox = sandbox.name, %error, "it boots, without a template");
    sandbox.note(|record| record.template = None);
    boots(sandbox, &error.to_string());
}

/// Removes an automatic template after a fork of it has failed before its container ran. The next
/// sandbox then boots and has the template made anew. Other templates and other errors change
/// nothing.
pub(crate) async fn distrust(node: &Node, sandbox: &Sandbox, template: &Template, error: &Error) {
    let name = &template.manifest.name;
    let machine_failed = matches!(error, Error::VmEnded(_) | Error::Agent(_) | Error::Refused(_));
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

/// Returns the name of the template of a sandbox's machine.
async fn name_of(node: &Node, record: &Record) -> Result<String> {
    let memory = record.hot_bytes() > 0;
    let needs = Needs { memory, ..Needs::of_template(record.may_have_sockets()) };
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
    use crate::record::{BoundMemory, FunctionPool, MemoryBounds, Network, SandboxState};
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
        let (by_request, one, two) =
            (Choice::Request, Choice::Node { at_once: 1 }, Choice::Node { at_once: 2 });
        for (asked, by_on, by_off) in [
            (spec("", 0, false), by_request, by_request),
            (spec("", 1, false), by_request, by_request),
            (spec("", 2, false), two, by_request),
            (RunSpec { boots: true, ..spec("", 2, false) }, by_request, by_request),
            (spec("", 2, true), by_request, by_request),
            (spec("web", 2, false), by_request, by_request),
            (spec(AUTO, 0, false), one, one),
            (spec(AUTO, 2, true), two, two),
        ] {
            let told = (choice(&on, &asked).unwrap(), choice(&off, &asked).unwrap());
            assert_eq!(told, (by_on, by_off), "{asked:?}");
        }
        let shared = Config { shared_root: "on".to_owned(), ..Config::default() };
        assert_eq!(choice(&shared, &spec("", 2, false)).unwrap(), by_request);
        let reports = RunSpec { free_page_reporting: Some(true), ..spec("", 2, false) };
        assert_eq!(choice(&on, &reports).unwrap(), by_request);
        let all = Config { free_page_reporting: true, ..Config::default() };
        assert_eq!(choice(&all, &reports).unwrap(), two, "and so do its templates");
        let wrong = Config { templates: "yes".to_owned(), ..Config::default() };
        assert!(choice(&wrong, &spec("", 2, false)).is_err());
        assert_eq!((two.at_once(), Choice::NodeIfOften.at_once()), (2, 0));
    }

    #[test]
    fn a_single_sandbox_leaves_the_choice_to_a_node_that_looks_how_often_images_are_started() {
        let config = Config { templates_after: 3, ..Config::default() };
        let single = RunSpec::default();
        assert_eq!(choice(&config, &single).unwrap(), Choice::NodeIfOften);
        let off = Config { templates: "off".to_owned(), ..config.clone() };
        assert_eq!(choice(&off, &single).unwrap(), Choice::NodeIfOften, "it is for many at once");
        for asked in [
            RunSpec { boots: true, ..single.clone() },
            RunSpec { makes_pod: true, ..single.clone() },
            RunSpec { template: "web".to_owned(), ..single },
        ] {
            assert_eq!(choice(&config, &asked).unwrap(), Choice::Request, "{asked:?}");
        }
    }

    #[test]
    fn a_sandbox_that_can_be_no_fork_boots_and_the_reason_is_told() {
        let config = Config { templates_after: 3, ..Config::default() };
        let chosen = |choice, config: &Config, change: fn(&mut Record)| {
            let mut record = crate::adopt::tests::record_of(SandboxState::Starting);
            change(&mut record);
            why_boots(config, &record, choice).unwrap().unwrap_or_default()
        };
        let why =
            |config: &Config, change: fn(&mut Record)| chosen(Choice::NodeIfOften, config, change);
        assert_eq!(why(&config, |_| ()), "");
        let grows = |record: &mut Record| record.memory = MemoryBounds::new(1, 2);
        assert_eq!(why(&config, grows), "", "its template has the room");
        let binds = |record: &mut Record| record.bound = BoundMemory::of_regions(128 << 20);
        assert_eq!(why(&config, binds), "", "its template has the regions");
        let reports = |record: &mut Record| record.reporting.asked = Some(true);
        assert!(why(&config, reports).contains("free pages"));
        // Also of sandboxes that start together: `run --count` takes functions as one run does.
        let of_pool = |record: &mut Record| {
            let (name, owner) = ("nics".to_owned(), String::new());
            let pool = Some(FunctionPool { name, needed: false, owner, taken: None });
            record.network = Some(Network { pool, ..Network::default() });
        };
        for choice in [Choice::NodeIfOften, Choice::Node { at_once: 2 }] {
            assert!(chosen(choice, &config, of_pool).contains("vf_pool"), "{choice:?}");
        }
        let shares = Config { shared_root: "on".to_owned(), ..config };
        assert!(why(&shares, |_| ()).contains("shared_root"));
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
            name(|shape| shape.room_bytes = 128 << 20),
            name(|shape| shape.region_bytes = 128 << 20),
            name(|shape| shape.region_bytes = 256 << 20),
            name(|shape| shape.cpus = 2),
            name(|shape| shape.interface.as_mut().unwrap().mtu = 1450),
            name(|shape| shape.interface = None),
            name(|shape| shape.needs.reporting = true),
            name(|shape| shape.needs.sockets = !shape.needs.sockets),
            name(|shape| shape.initramfs = "/j".into()),
            name_of_shape(&shape(), 2, None),
            same,
        ];
        others.sort();
        others.dedup();
        assert_eq!(others.len(), 12, "{others:?}");
        assert!(crate::name::check_template(&others[0]).is_ok());
    }
}
