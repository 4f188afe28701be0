//! New settings and certificates for running links.

use crate::error::LinksError;
use crate::identity::Identity;
use crate::settings::{Settings, SettingsError};

/// A tenant's weight and limit in the links.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The tenant's name.
    pub tenant: String,
    /// The weight, as for [`Links::set_weight`](crate::Links::set_weight).
    pub weight: f64,
    /// The limit, as for [`Links::set_rate`](crate::Links::set_rate); `None` for no limit.
    pub rate: Option<u64>,
}

/// Settings and certificates that were read and checked, so that applying them cannot fail.
pub struct Renewal {
    pub(crate) settings: Settings,
    pub(crate) identity: Identity,
    pub(crate) shares: Vec<Share>,
}

impl Renewal {
    /// Checks `settings`, which will replace `current`, and reads certificates and key.
    ///
    /// # Errors
    /// [`LinksError`]; [`SettingsError::Fixed`] if a setting changes that existing connections
    /// depend on.
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

    /// Returns the new settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// Returns the name of a setting that changes although it may not while links run.
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
