//! The CPUs that a guest sees, as far as a machine that goes on from a saved state must show it the
//! same.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use slipway_machine::{Leaf, Template, processor, speculation};

use super::differs;
use crate::Result;

/// The processor that a machine's guest sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shown {
    /// The name of the CPU template.
    pub template: String,
    /// The host's processor: vendor, family, model, stepping. With a template other than that of
    /// the host, the host's processor may be another one, and this has the template's name.
    pub processor: String,
    /// The flaws of speculative execution that the guest was told of, and the ways around them.
    pub speculation: String,
    /// SHA-256 of the features of CPU 0 (CPUID), in hexadecimal.
    pub features: String,
}

impl Shown {
    /// Returns what CPUs are shown that have these features, and this value of
    /// `IA32_ARCH_CAPABILITIES`.
    pub fn new(template: Template, leaves: &[Leaf], arch_capabilities: u64) -> Self {
        let processor = match template {
            Template::Host => processor(),
            Template::Level(level) => level.as_str().to_owned(),
        };
        let speculation = speculation(leaves, arch_capabilities);
        let template = template.to_string();
        Self { template, processor, speculation, features: digest(leaves) }
    }

    /// Checks that these CPUs can go on from those that were saved.
    ///
    /// # Errors
    /// [`crate::Error::State`] with what differs.
    pub fn check(&self, saved: &Self) -> Result<()> {
        differs("--cpu-template", &saved.template, &self.template)?;
        differs("the processor", &saved.processor, &self.processor)?;
        let what = "what the guest knows of speculative execution (processor, microcode)";
        differs(what, &saved.speculation, &self.speculation)?;
        differs("the features of the CPUs (digest)", &saved.features, &self.features)
    }
}

fn digest(leaves: &[Leaf]) -> String {
    let mut sum = Sha256::new();
    for leaf in leaves {
        let words = [leaf.function, leaf.index, leaf.is_indexed.into()];
        let values = [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx];
        words.iter().chain(&values).for_each(|word| sum.update(word.to_le_bytes()));
    }
    hex::encode(sum.finalize())
}

#[cfg(test)]
mod tests {
    use slipway_machine::Level;

    use super::*;

    fn shown(template: Template, leaf: u32) -> Shown {
        Shown::new(template, &[Leaf { eax: leaf, ..Leaf::default() }], 0)
    }

    #[test]
    fn with_a_level_the_hosts_processor_does_not_matter() {
        let (host, level) = (shown(Template::Host, 1), shown(Template::Level(Level::V2), 1));
        assert!(host.processor.contains(" family "), "{}", host.processor);
        assert_eq!(level.processor, "x86-64-v2");
        let elsewhere = Shown { processor: "another".into(), ..host.clone() };
        assert!(host.check(&elsewhere).is_err());
        level.check(&level.clone()).unwrap();
    }

    #[test]
    fn what_differs_is_said() {
        let level = shown(Template::Level(Level::V2), 1);
        let refused = |saved: &Shown| level.check(saved).unwrap_err().to_string();
        let text = refused(&shown(Template::Level(Level::V3), 1));
        assert!(text.contains("saved with x86-64-v3, and this machine has x86-64-v2"), "{text}");
        let text = refused(&Shown { speculation: "1".into(), ..level.clone() });
        assert!(text.contains("speculative execution"), "{text}");
        assert!(refused(&shown(Template::Level(Level::V2), 2)).contains("features of the CPUs"));
    }
}
