//! The memories that the pool has of templates. Templates can have the same one: copies of a
//! snapshot that was moved.

use std::collections::BTreeMap;

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
}
