//! Memory of forks that is ready before a launcher asks for it: a file with its table of states,
//! into which what forks of its template need is copied already. The next fork is given it in place
//! of memory that is made then.
//!
//! It is made for templates with which a fork began lately, and of which the pool was told what
//! forks need. Nobody but this process has it, and it was nobody's before. The keeper learns of it
//! when it is given, as of any other memory, so that it ends with this process, however that ends.
//!
//! Here is the account of it, by template; `templates` has one for each, and `prepare` makes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_numa::NumaNode;
use slipway_ram::LateMemory;

/// The most memories that are kept ready for forks of one template.
pub(crate) const MOST: usize = 64;
/// The time after the last fork of a template for which memory is kept ready.
const LATELY: Duration = Duration::from_secs(600);

/// Memory that is ready for a fork.
pub(crate) struct Spare {
    pub(crate) memory: Arc<LateMemory>,
    /// The bytes of the pages that its file has.
    pub(crate) bytes: u64,
}

/// The memories that are ready for forks of one template, and what is known of the forks.
#[derive(Default)]
pub(crate) struct Spares {
    /// The number of memories that are to be ready.
    wanted: usize,
    ready: Vec<Spare>,
    /// The last request for memory of a fork, if there was any.
    used: Option<Use>,
}

/// A request for memory of a fork.
#[derive(Clone, Copy)]
struct Use {
    at: Instant,
    /// The NUMA node that it named, on which the memories that are ready have their pages.
    near: Option<NumaNode>,
}

impl Spares {
    /// Sets the number of memories that are to be ready. Returns those that are too many.
    pub(crate) fn set_wanted(&mut self, count: usize) -> Vec<Spare> {
        self.wanted = count.min(MOST);
        self.ready.split_off(self.wanted.min(self.ready.len()))
    }

    /// Takes memory for a fork whose launcher names this NUMA node, or none. Returns memory that is
    /// ready for other nodes, too, which is of no use any more.
    pub(crate) fn take(
        &mut self,
        near: Option<NumaNode>,
        now: Instant,
    ) -> (Option<Spare>, Vec<Spare>) {
        let fits = self.near() == near;
        let stale = if fits { Vec::new() } else { std::mem::take(&mut self.ready) };
        self.used = Some(Use { at: now, near });
        (self.ready.pop(), stale)
    }

    /// Keeps memory ready, which is [wanted](Spares::wants).
    pub(crate) fn put(&mut self, spare: Spare) {
        self.ready.push(spare);
    }

    /// Takes all memory if no fork began lately.
    pub(crate) fn take_unused(&mut self, now: Instant) -> Vec<Spare> {
        match self.is_used(now) {
            true => Vec::new(),
            false => std::mem::take(&mut self.ready),
        }
    }

    /// Takes all memory, and has none made until the next fork.
    pub(crate) fn take_all(&mut self) -> Vec<Spare> {
        self.used = None;
        std::mem::take(&mut self.ready)
    }

    /// Returns whether memory is to be made for forks of launchers that name this NUMA node, or
    /// none.
    pub(crate) fn wants(&self, near: Option<NumaNode>, now: Instant) -> bool {
        self.ready.len() < self.wanted && self.is_used(now) && self.near() == near
    }

    /// Returns the time until [`Spares::take_unused`] takes what is ready, or `None` if nothing is.
    pub(crate) fn unused_in(&self, now: Instant) -> Option<Duration> {
        let age = |one: Use| now.saturating_duration_since(one.at);
        let rest = self.used.map_or(Duration::ZERO, |one| LATELY.saturating_sub(age(one)));
        (!self.ready.is_empty()).then_some(rest)
    }

    /// Returns the NUMA node that the last fork's launcher named.
    pub(crate) fn near(&self) -> Option<NumaNode> {
        self.used.and_then(|one| one.near)
    }

    /// Returns the memories that are ready.
    pub(crate) fn ready(&self) -> &[Spare] {
        &self.ready
    }

    fn is_used(&self, now: Instant) -> bool {
        self.used.is_some_and(|one| now.saturating_duration_since(one.at) < LATELY)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};
    use slipway_ram::Template;

    use super::*;

    const PAGE: usize = Template::GRANULE;

    fn spare() -> Spare {
        let file = memfd_create("saved", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&file, &[1; PAGE], 0).unwrap();
        let template = Arc::new(Template::copy_of(file.as_fd()).unwrap());
        let file = memfd_create("fork", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        Spare { memory: Arc::new(LateMemory::fork(file, &template).unwrap()), bytes: 0 }
    }

    #[test]
    fn memory_is_wanted_for_a_while_after_a_fork() {
        let (mut spares, begin) = (Spares::default(), Instant::now());
        assert!(spares.take(None, begin).0.is_none() && !spares.wants(None, begin));
        assert!(spares.set_wanted(2).is_empty() && spares.wants(None, begin));
        spares.put(spare());
        assert!(spares.wants(None, begin));
        spares.put(spare());
        assert!(!spares.wants(None, begin), "two are ready");
        let late = begin + LATELY / 2;
        assert_eq!(spares.unused_in(late), Some(LATELY / 2));
        assert!(spares.take_unused(late).is_empty());
        assert!(spares.take(None, late).0.is_some() && spares.wants(None, late));
        assert!(spares.take_unused(begin + LATELY).is_empty(), "a fork began since");
        let end = late + LATELY;
        assert!(!spares.wants(None, end));
        assert_eq!(spares.take_unused(end).len(), 1);
        assert_eq!(spares.unused_in(end), None);
    }

    #[test]
    fn memory_on_another_node_is_not_given() {
        let (mut spares, now) = (Spares::default(), Instant::now());
        let node = NumaNode::new(1);
        spares.set_wanted(1);
        assert!(spares.take(None, now).0.is_none());
        spares.put(spare());
        let (given, stale) = spares.take(node, now);
        assert!(given.is_none() && stale.len() == 1);
        assert!(spares.wants(node, now) && !spares.wants(None, now));
        spares.put(spare());
        assert!(spares.take(node, now).0.is_some());
    }

    #[test]
    fn memory_that_is_too_much_goes_back() {
        let (mut spares, now) = (Spares::default(), Instant::now());
        spares.set_wanted(usize::MAX);
        spares.take(None, now);
        for _ in 0..MOST {
            assert!(spares.wants(None, now));
            spares.put(spare());
        }
        assert!(!spares.wants(None, now));
        assert_eq!(spares.set_wanted(3).len(), MOST - 3);
        assert_eq!(spares.take_all().len(), 3);
        assert!(!spares.wants(None, now), "not before the next fork");
    }
}
