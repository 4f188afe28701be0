//! The state of the templates that a node makes by itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::Manifest;
use super::image_starts::{Frequency, ImageStarts, Threshold};
use crate::lock::lock;
use crate::{Error, Result, name};

/// The word for the template that the node chooses, and makes if there is none.
pub(crate) const AUTO: &str = "auto";
/// The word of the command line for no template: the sandbox boots.
const NONE: &str = "none";
/// The beginning of the names of templates that the node makes by itself.
pub(crate) const PREFIX: &str = "auto-";
/// The most templates that wait to be made.
const MOST_PENDING: usize = 16;
/// The time after which a template that could not be made is tried again.
const AGAIN: Duration = Duration::from_secs(600);

/// The way in which the template that a sandbox begins with is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// By the request: the sandbox boots, or begins with what it names.
    #[default]
    Request,
    /// By the node, for one of so many sandboxes that were asked for together, at least 1.
    Node {
        /// The number of these sandboxes.
        at_once: u32,
    },
    /// By the node if the sandbox's image is started often; otherwise the sandbox boots.
    NodeIfOften,
}

impl Choice {
    /// Returns the number of sandboxes that were asked for together, if the node chooses their
    /// template however often their image is started; otherwise 0.
    pub(crate) fn at_once(self) -> u32 {
        match self {
            Self::Node { at_once } => at_once,
            Self::Request | Self::NodeIfOften => 0,
        }
    }
}

/// The state of the templates that a node makes by itself.
#[derive(Default)]
pub(crate) struct Automatic {
    /// Held while one is made: each takes a machine's memory and time.
    pub(crate) making: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The names of those that are being made, or wait for it, each with a sender that is dropped
    /// when that ends.
    pending: BTreeMap<String, watch::Sender<()>>,
    /// The times at which sandboxes of this daemon last began with them. A template that is gone
    /// stays here at most until the next one is made.
    used: BTreeMap<String, Instant>,
    /// The times at which they could not be made.
    failed: BTreeMap<String, Instant>,
    /// The recent starts of sandboxes whose template the node chooses if their images are started
    /// often.
    starts: ImageStarts,
}

/// Checks the name of a template or snapshot that a user makes.
///
/// # Errors
/// [`Error::Invalid`]: it cannot be a name, or it is one of the node's, or the word for none.
pub fn check_chosen(name: &str) -> Result<()> {
    name::check_template(name)?;
    let means = match name {
        NONE => "no template",
        AUTO => "templates of the node's own",
        _ if is_automatic(name) => "templates of the node's own",
        _ => return Ok(()),
    };
    Err(Error::Invalid(format!("\"{name}\" stands for {means}: choose another name")))
}

pub(crate) fn is_automatic(name: &str) -> bool {
    name.starts_with(PREFIX)
}

impl Automatic {
    /// Notes that a sandbox begins with the template, or that it was made.
    pub(crate) fn used(&self, name: &str) {
        lock(&self.state).used.insert(name.to_owned(), Instant::now());
    }

    /// Notes a start of an image on the machine of a template. Returns how often that image is
    /// started on that machine.
    pub(crate) fn started(&self, image: &str, name: &str, threshold: Threshold) -> Frequency {
        lock(&self.state).starts.note((image, name), Instant::now(), threshold)
    }

    /// Notes that the template could not be made.
    pub(crate) fn failed(&self, name: &str) {
        lock(&self.state).failed.insert(name.to_owned(), Instant::now());
    }

    /// Notes that a template is to be made. Returns `None` if it is already, could not be made a
    /// while ago, or too many are.
    pub(crate) fn begin(self: &Arc<Self>, name: &str) -> Option<Pending> {
        let mut state = lock(&self.state);
        state.failed.retain(|_, at| at.elapsed() < AGAIN);
        let may = !state.failed.contains_key(name) && !state.pending.contains_key(name);
        if !may || state.pending.len() >= MOST_PENDING {
            return None;
        }
        state.pending.insert(name.to_owned(), watch::Sender::new(()));
        Some(Pending { of: Arc::clone(self), name: name.to_owned() })
    }

    /// Returns once the template is neither being made nor waits for that: at once if it is not
    /// [begun](Self::begin).
    pub(crate) async fn settled(&self, name: &str) {
        let pending = lock(&self.state).pending.get(name).map(watch::Sender::subscribe);
        if let Some(mut pending) = pending {
            // Nothing is ever sent: this ends with the sender.
            let _ = pending.changed().await;
        }
    }

    /// Returns those of the node's own templates that are too many, if at most `most` are kept.
    /// Forgets the uses of others than these. `all` are the templates of the node, and no other
    /// one is being made meanwhile.
    pub(crate) fn surplus(&self, all: &[Manifest], most: usize) -> Vec<String> {
        let mut state = lock(&self.state);
        state.used.retain(|name, _| all.iter().any(|one| one.name == *name));
        let mut own: Vec<_> = all.iter().filter(|one| is_automatic(&one.name)).collect();
        // Templates that no sandbox of this daemon began with come first, by their age.
        own.sort_by_key(|one| (state.used.get(&one.name).copied(), one.created_ns));
        let count = own.len().saturating_sub(most);
        own.into_iter().take(count).map(|one| one.name.clone()).collect()
    }
}

/// A template that is being made, or waits for it.
pub(crate) struct Pending {
    of: Arc<Automatic>,
    /// The template's name.
    pub(crate) name: String,
}

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.of.state).pending.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::super::manifest::tests::manifest;
    use super::*;

    #[test]
    fn names_of_the_nodes_own_templates_cannot_be_chosen() {
        assert!(check_chosen("web").is_ok() && check_chosen("automatic").is_ok());
        for name in [AUTO, "auto-0123456789ab"] {
            assert!(check_chosen(name).unwrap_err().to_string().contains("of the node's own"));
        }
        let error = check_chosen("none").unwrap_err().to_string();
        assert_eq!(error, "\"none\" stands for no template: choose another name");
        let error = check_chosen("../x").unwrap_err().to_string();
        assert!(error.contains("no name for a template"), "{error}");
    }

    #[test]
    fn one_template_too_many_is_the_one_that_was_not_used_for_the_longest_time() {
        let automatic = Automatic::default();
        let own = |at: u64| {
            let mut own = manifest(&format!("{PREFIX}{at}"));
            own.created_ns = at;
            own
        };
        let mut all: Vec<_> = (1..=2).map(own).collect();
        all.push(manifest("web"));
        assert!(automatic.surplus(&all, 2).is_empty(), "those of users do not count");
        all.push(own(3));
        assert_eq!(automatic.surplus(&all, 2), ["auto-1"], "the oldest, of those that nobody used");
        automatic.used("auto-1");
        assert_eq!(automatic.surplus(&all, 2), ["auto-2"]);
        assert_eq!(automatic.surplus(&all, 0).len(), 3);
    }

    #[test]
    fn templates_that_are_gone_are_forgotten_when_another_one_is_made() {
        let automatic = Automatic::default();
        for n in 0..99 {
            let name = format!("{PREFIX}{n}");
            automatic.used(&name);
            assert!(automatic.surplus(&[manifest(&name)], 1).is_empty());
        }
        let state = lock(&automatic.state);
        assert_eq!(state.used.keys().collect::<Vec<_>>(), ["auto-98"]);
    }

    #[test]
    fn a_template_is_made_once_at_a_time_and_not_at_once_after_a_failure() {
        let automatic = Arc::new(Automatic::default());
        let first = automatic.begin("auto-a").unwrap();
        assert!(automatic.begin("auto-a").is_none());
        drop(first);
        assert!(automatic.begin("auto-a").is_some(), "the first has ended");
        automatic.failed("auto-a");
        assert!(automatic.begin("auto-a").is_none());
        let begun = (0..99).filter_map(|n| automatic.begin(&format!("auto-c{n}")));
        assert_eq!(begun.collect::<Vec<_>>().len(), MOST_PENDING);
    }

    #[tokio::test]
    async fn those_that_wait_for_a_template_go_on_when_it_is_made_or_cannot_be() {
        let automatic = Arc::new(Automatic::default());
        automatic.settled("auto-a").await;
        let making = automatic.begin("auto-a").unwrap();
        let (one, two) = (automatic.settled("auto-a"), automatic.settled("auto-a"));
        let wait = async { tokio::join!(one, two) };
        tokio::pin!(wait);
        let soon = Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, &mut wait).await.is_err(), "it is being made");
        drop(making);
        wait.await;
    }
}
