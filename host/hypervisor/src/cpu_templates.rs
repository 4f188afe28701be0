//! The CPU templates that this host can give.

use kvm_ioctls::Kvm;
use slipway_machine::{Host, Template};

/// A template, and the reason for which a host cannot give it, in one line.
pub type OfferedTemplate = (Template, Result<(), String>);

/// Returns each template with whether this host can give it.
///
/// # Errors
/// KVM cannot be asked, in one line.
pub fn cpu_templates() -> Result<Vec<OfferedTemplate>, String> {
    let kvm = Kvm::new().map_err(|error| format!("/dev/kvm: {error}"))?;
    let host = Host::of(&kvm).map_err(|error| error.to_string())?;
    let check = |template| (template, host.check(template).map_err(|error| error.to_string()));
    Ok(Template::ALL.map(check).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kvm_can_give_its_own_processor() {
        match cpu_templates() {
            Ok(all) => assert!(all.contains(&(Template::Host, Ok(())))),
            Err(reason) => {
                println!("SKIPPED: every_kvm_can_give_its_own_processor: needs /dev/kvm ({reason})")
            }
        }
    }
}
