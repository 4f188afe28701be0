//! Other settings and certificates for links that run.

use crate::identity::Identity;
use crate::links::LinksError;
use crate::settings::{Settings, SettingsError};

/// What a tenant may have of the links.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Its name.
    pub tenant: String,
    /// See [`Links::set_weight`](crate::Links::set_weight).
    pub weight: f64,
    /// See [`Links::set_rate`](crate::Links::set_rate); none: no limit.
    pub rate: Option<u64>,
}

/// Settings and certificates that were read and checked, so that nothing can go wrong with them any more.
pub struct Renewal {
    pub(crate) settings: Settings,
    pub(crate) identity: Identity,
    pub(crate) shares: Vec<Share>,
}

impl Renewal {
    /// Checks `settings`, which are to come after `current`, and reads certificates and key.
    ///
    /// # Errors
    /// [`LinksError`]: also that something changes that connections were begun with.
    pub fn new(
        settings: Settings,
        current: &Settings,
        shares: Vec<Share>,
    ) -> Result<Self, LinksError> {
        settings.check()?;
        if let Some(what) = fixed(&settings, current) {
            return Err(SettingsError::Fixed(what).into());
        }
        let identity = Identity::load(&settings)?;
        Ok(Self { settings, identity, shares })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// What may not change while links run, and does.
fn fixed(new: &Settings, old: &Settings) -> Option<&'static str> {
    let changes = [
        ("name", new.name != old.name),
        ("listen", new.listen != old.listen),
        ("record", new.record != old.record),
        ("window", new.window != old.window),
        ("fifo", new.fifo != old.fifo),
        ("streams", new.streams != old.streams),
    ];
    changes.into_iter().find_map(|(what, changes)| changes.then_some(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_connections_were_begun_with_stays() {
        let old = Settings::for_tests();
        let refused = |change: fn(&mut Settings)| {
            let mut new = old.clone();
            change(&mut new);
            fixed(&new, &old)
        };
        assert_eq!(refused(|_| {}), None);
        assert_eq!(refused(|new| new.silence_ms = 50), None);
        assert_eq!(refused(|new| new.name = "there".into()), Some("name"));
        assert_eq!(refused(|new| new.window *= 2), Some("window"));
    }
}
