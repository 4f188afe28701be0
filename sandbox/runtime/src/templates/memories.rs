//! The memories that the pool has of templates. Templates can have the same one: copies of a
//! snapshot that was moved.

use std::collections::BTreeMap;

use slipway_hypervisor::TemplateName;

/// The most letters of a name that the pool has for a memory: those of a digest.
const LONGEST_NAME: usize = 64;

/// Returns the name that the pool has for a memory: `prefix` and its digest, cut to
/// [`LONGEST_NAME`] letters. Returns `None` if that is no name.
pub(super) fn memory_name(prefix: &str, digest: &str) -> Option<TemplateName> {
    let room = LONGEST_NAME.saturating_sub(prefix.len());
    TemplateName::new(&format!("{prefix}{digest:.room$}"))
}

/// The memories by their names, each with the number of templates that have it.
#[derive(Default)]
pub(super) struct Memories(BTreeMap<String, usize>);

impl Memories {
    /// Returns whether a template has this memory.
    pub(super) fn has(&self, memory: &str) -> bool {
        self.0.contains_key(memory)
    }

    /// Notes that one more template has this memory.
    pub(super) fn add(&mut self, memory: String) {
        *self.0.entry(memory).or_default() += 1;
    }

    /// Notes that one template less has this memory. Returns `true` if none has it any more.
    pub(super) fn remove(&mut self, memory: &str) -> bool {
        if let Some(count) = self.0.get_mut(memory).filter(|count| **count > 1) {
            *count -= 1;
            return false;
        }
        self.0.remove(memory);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_goes_with_the_last_template_that_has_it() {
        let mut memories = Memories::default();
        memories.add("a".to_owned());
        memories.add("a".to_owned());
        memories.add("b".to_owned());
        assert!(!memories.remove("a") && memories.has("a"));
        assert!(memories.remove("a") && !memories.has("a"));
        assert!(memories.has("b"));
    }

    /// The bytes of a sandbox that a VMM has saved may be those of a template of the node.
    #[test]
    fn the_memory_of_a_sandboxs_own_save_is_no_other_ones() {
        let digest = "0a".repeat(32);
        let name = |prefix: &str| memory_name(prefix, &digest).unwrap();
        assert_eq!(name("").as_str(), digest);
        let own = name("0123456789ab-");
        assert_eq!(own.as_str(), format!("0123456789ab-{}", &digest[..51]));
        assert!(own != name("0123456789ac-") && own != name(""));
        assert!(memory_name("", "").is_none() && memory_name("a b-", &digest).is_none());
    }
}
