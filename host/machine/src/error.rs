//! The reasons for which a host cannot give a template.

use crate::Template;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason for which a host cannot give a template, in one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// KVM refused to tell what it offers.
    #[error("KVM refused to tell {what}: {source}")]
    Kvm {
        /// The subject of the request.
        what: &'static str,
        /// KVM's error.
        source: std::io::Error,
    },
    /// KVM does not offer all features of the template.
    #[error(
        "this host cannot give the CPU template {template}: its KVM does not offer {missing}; \
         `slipway doctor` lists the templates that it can give"
    )]
    Lacks {
        /// The template.
        template: Template,
        /// The names of the features, with commas between them.
        missing: String,
    },
    /// The template is not for such a processor.
    #[error("this host cannot give the CPU template {template}: {reason}")]
    Processor {
        /// The template.
        template: Template,
        /// The reason, as a clause.
        reason: String,
    },
    /// KVM takes no list of leaves of this length.
    #[error("the CPU features: {0} leaves are more than KVM takes")]
    TooMany(usize),
}

impl Error {
    /// Makes the error of a request that KVM refused.
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, source: std::io::Error::from_raw_os_error(error.errno()) }
    }
}
