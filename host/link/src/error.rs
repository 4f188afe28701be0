//! The reason why links cannot start.

use std::io::Error;

use crate::settings::SettingsError;

/// The reason why links cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    /// The settings are invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Certificates or key cannot be used.
    #[error(transparent)]
    Identity(#[from] crate::identity::IdentityError),
    /// The listener cannot be opened.
    #[error("listening for other engines: {0}")]
    Listen(Error),
    /// An epoll operation failed.
    #[error(transparent)]
    Io(#[from] Error),
}
