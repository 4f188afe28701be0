//! The templates of a pool, by their names.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use slipway_numa::NumaNode;
use slipway_pool_spec::TemplateName;
use slipway_ram::{LateMemory, Template};

use crate::make::held;
use crate::spares::{Spare, Spares};

/// Figures of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateStats {
    /// The name.
    pub name: TemplateName,
    /// The size in bytes of the memory of each fork.
    pub bytes: u64,
    /// The bytes of it that are not zeros: the memory that the template takes.
    pub held: u64,
    /// Bytes that are copied ahead for each new fork.
    pub ahead: u64,
    /// The number of forks that have memory of it.
    pub forks: u64,
}

/// A name that a template has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is a template {0} already: remove it, or choose another name")]
pub struct NameTaken(pub TemplateName);

/// A template that forks may be made of.
#[derive(Clone)]
pub(crate) struct Named {
    pub(crate) template: Arc<Template>,
    /// The bytes that are copied ahead for each new fork.
    pub(crate) ahead: Arc<[Range<u64>]>,
}

/// Memory that is to be made ready.
pub(crate) struct SpareWork {
    pub(crate) name: TemplateName,
    pub(crate) named: Named,
    /// The NUMA node that the last fork's launcher named.
    pub(crate) near: Option<NumaNode>,
}

/// All templates of a pool, with the memory that is ready for their forks.
#[derive(Default)]
pub(crate) struct Templates {
    state: Mutex<State>,
    /// Tells the thread that makes memory ready that there may be work, or that the pool has ended.
    work: Condvar,
}

/// A template, and the memory that is ready for its forks.
struct Entry {
    named: Named,
    spares: Spares,
}

#[derive(Default)]
struct State {
    named: BTreeMap<TemplateName, Entry>,
    ended: bool,
    /// Templates of forks that a predecessor made, so that forks of one template map it once.
    left: Vec<Weak<Template>>,
}

impl Templates {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed in single calls: a panic leaves it consistent.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn add(&self, name: TemplateName, template: Template) -> Result<(), NameTaken> {
        let mut state = self.lock();
        if state.named.contains_key(&name) {
            return Err(NameTaken(name));
        }
        let named = Named { template: Arc::new(template), ahead: Arc::default() };
        state.named.insert(name, Entry { named, spares: Spares::default() });
        Ok(())
    }

    /// Removes a template, and the memory that is ready for its forks. Its forks keep it.
    pub(crate) fn remove(&self, name: &TemplateName) -> bool {
        let removed = self.lock().named.remove(name);
        // Giving its pages to the kernel takes a while: without the lock.
        removed.is_some()
    }

    pub(crate) fn get(&self, name: &TemplateName) -> Option<Named> {
        self.lock().named.get(name).map(|entry| entry.named.clone())
    }

    /// Has so many memories ready for forks of a template while it is in use, at most
    /// [`MOST`](crate::spares::MOST). Returns `false` if there is no such template.
    pub(crate) fn keep_ready(&self, name: &TemplateName, count: usize) -> bool {
        let mut state = self.lock();
        let Some(entry) = state.named.get_mut(name) else { return false };
        let surplus = entry.spares.set_wanted(count);
        drop(state);
        self.work.notify_all();
        drop(surplus);
        true
    }

    /// Takes memory that is ready for a fork of `template`, whose launcher names this NUMA node or
    /// none. Has memory made for the forks to come, whether or not any was ready for this one.
    pub(crate) fn take_spare(
        &self,
        name: &TemplateName,
        template: &Arc<Template>,
        near: Option<NumaNode>,
    ) -> Option<Arc<LateMemory>> {
        let mut state = self.lock();
        let entry = state.named.get_mut(name);
        let entry = entry.filter(|one| Arc::ptr_eq(&one.named.template, template))?;
        let (spare, stale) = entry.spares.take(near, Instant::now());
        drop(state);
        self.work.notify_all();
        drop(stale);
        spare.map(|one| one.memory)
    }

    /// Waits for memory that is to be made ready, of which there are at most `limit` bytes. Gives
    /// the kernel what is ready for forks of templates that are not in use any more. Returns `None`
    /// when the pool has ended.
    pub(crate) fn next_spare(&self, limit: u64) -> Option<SpareWork> {
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            let now = Instant::now();
            let unused = state.take_unused(now);
            if !unused.is_empty() {
                // Giving pages to the kernel takes a while: without the lock.
                drop(state);
                drop(unused);
                state = self.lock();
                continue;
            }
            if let Some(work) = state.next_spare(limit, now) {
                return Some(work);
            }
            state = match state.unused_in(now) {
                Some(rest) => {
                    let waited = self.work.wait_timeout(state, rest);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
                None => {
                    let waited = self.work.wait(state);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner())
                }
            };
        }
    }

    /// Returns whether memory that is being made ready is still wanted.
    pub(crate) fn wants_spare(&self, work: &SpareWork) -> bool {
        self.lock().wanting(work).is_some()
    }

    /// Keeps memory ready, if it is still wanted.
    pub(crate) fn put_spare(&self, work: &SpareWork, memory: Arc<LateMemory>) {
        let spare = Spare { bytes: held(&memory), memory };
        if let Some(spares) = self.lock().wanting(work) {
            spares.put(spare);
        }
    }

    /// Gives the kernel what is ready for forks of a template, and has nothing made until its next
    /// fork: the host has too little memory.
    pub(crate) fn give_up_spares(&self, work: &SpareWork) {
        let given = self.lock().wanting(work).map(Spares::take_all);
        drop(given);
    }

    /// Returns all memory that is ready.
    pub(crate) fn spares(&self) -> Vec<Arc<LateMemory>> {
        self.lock().ready().map(|one| Arc::clone(&one.memory)).collect()
    }

    /// Returns the number of memories that are ready, and the bytes of their pages.
    pub(crate) fn count_spares(&self) -> (u64, u64) {
        let state = self.lock();
        (state.ready().count() as u64, state.ready().map(|one| one.bytes).sum())
    }

    /// Gives all memory that is ready to the kernel, and has none made any more.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let all: Vec<_> =
            state.named.values_mut().flat_map(|entry| entry.spares.take_all()).collect();
        drop(state);
        self.work.notify_all();
        drop(all);
    }

    /// Has these bytes of a template copied ahead for each new fork, in their order. Memory that is
    /// ready stays so: the rest is copied when it is given. Returns `false` if there is no such
    /// template.
    pub(crate) fn copy_ahead(&self, name: &TemplateName, ranges: &[Range<u64>]) -> bool {
        let mut state = self.lock();
        let Some(Entry { named, .. }) = state.named.get_mut(name) else { return false };
        let len = named.template.len() as u64;
        let unit = Template::GRANULE as u64;
        let whole = |range: &Range<u64>| {
            let end = range.end.min(len).next_multiple_of(unit);
            range.start / unit * unit..end
        };
        let within = ranges.iter().map(whole);
        named.ahead = within.filter(|range| !range.is_empty()).collect();
        drop(state);
        self.work.notify_all();
        true
    }

    /// Returns the figures of all templates, of which these forks have memory.
    pub(crate) fn stats(&self, forks: &[Arc<Template>]) -> Vec<TemplateStats> {
        let state = self.lock();
        let stats = |(name, Entry { named, .. }): (&TemplateName, &Entry)| TemplateStats {
            name: *name,
            bytes: named.template.len() as u64,
            held: named.template.held() as u64,
            ahead: named.ahead_bytes(),
            forks: forks.iter().filter(|one| Arc::ptr_eq(one, &named.template)).count() as u64,
        };
        state.named.iter().map(stats).collect()
    }

    /// Takes the template of a fork that a predecessor left.
    ///
    /// # Errors
    /// As for [`Template::new`].
    pub(crate) fn of_predecessor(&self, file: OwnedFd) -> std::io::Result<Arc<Template>> {
        let number = |file: &dyn std::os::fd::AsFd| -> std::io::Result<_> {
            let status = rustix::fs::fstat(file.as_fd())?;
            Ok((status.st_dev, status.st_ino))
        };
        let wanted = number(&file)?;
        let mut state = self.lock();
        state.left.retain(|one| one.strong_count() > 0);
        // The descriptors came from the keeper, so equal numbers are the same file.
        let mut known = state.left.iter().filter_map(Weak::upgrade);
        if let Some(one) = known.find(|one| number(&one.file()).ok() == Some(wanted)) {
            return Ok(one);
        }
        let template = Arc::new(Template::new(file)?);
        state.left.push(Arc::downgrade(&template));
        Ok(template)
    }
}

impl Named {
    /// Returns the number of bytes that are copied ahead for each new fork.
    fn ahead_bytes(&self) -> u64 {
        self.ahead.iter().map(|range| range.end - range.start).sum()
    }
}

impl State {
    /// Returns all memory that is ready.
    fn ready(&self) -> impl Iterator<Item = &Spare> {
        self.named.values().flat_map(|entry| entry.spares.ready())
    }

    /// Takes what is ready for forks of templates that are not in use any more.
    fn take_unused(&mut self, now: Instant) -> Vec<Spare> {
        self.named.values_mut().flat_map(|entry| entry.spares.take_unused(now)).collect()
    }

    /// Returns the time until the first of the templates is not in use any more, or `None` if
    /// nothing is ready.
    fn unused_in(&self, now: Instant) -> Option<Duration> {
        self.named.values().filter_map(|entry| entry.spares.unused_in(now)).min()
    }

    /// Returns the memory that is to be made ready next: of a template for which fewest are. What
    /// is ready has at most `limit` bytes, and costs what is copied ahead for each fork.
    fn next_spare(&self, limit: u64, now: Instant) -> Option<SpareWork> {
        let held: u64 = self.ready().map(|one| one.bytes).sum();
        let is_wanted = |Entry { named, spares }: &Entry| {
            let bytes = named.ahead_bytes();
            let fits = held.saturating_add(bytes) <= limit;
            bytes > 0 && fits && spares.wants(spares.near(), now)
        };
        let wanted = self.named.iter().filter(|(_, entry)| is_wanted(entry));
        let (name, entry) = wanted.min_by_key(|(_, entry)| entry.spares.ready().len())?;
        Some(SpareWork { name: *name, named: entry.named.clone(), near: entry.spares.near() })
    }

    /// Returns the memories of a template for which one more is being made, if that is still
    /// wanted.
    fn wanting(&mut self, work: &SpareWork) -> Option<&mut Spares> {
        let entry = self.named.get_mut(&work.name).filter(|_| !self.ended)?;
        let is_same = Arc::ptr_eq(&entry.named.template, &work.named.template);
        let spares = &mut entry.spares;
        (is_same && spares.wants(work.near, Instant::now())).then_some(spares)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const PAGE: u64 = Template::GRANULE as u64;

    fn template(pages: u64) -> Template {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create(c"saved", flags).unwrap();
        rustix::fs::ftruncate(&file, pages * PAGE).unwrap();
        rustix::io::pwrite(&file, &[1], 0).unwrap();
        Template::copy_of(file.as_fd()).unwrap()
    }

    #[test]
    fn a_template_has_a_name_until_it_is_removed() {
        let (all, name) = (Templates::default(), TemplateName::new("web").unwrap());
        assert!(all.get(&name).is_none() && !all.copy_ahead(&name, &[]) && !all.remove(&name));
        all.add(name, template(4)).unwrap();
        assert_eq!(all.add(name, template(1)), Err(NameTaken(name)));
        let (start, huge) = (PAGE, u64::MAX);
        assert!(all.copy_ahead(&name, &[start + 1..2 * PAGE - 1, 3 * PAGE..huge, 5 * PAGE..huge]));
        let named = all.get(&name).unwrap();
        let stats = TemplateStats { name, bytes: 4 * PAGE, held: PAGE, ahead: 2 * PAGE, forks: 1 };
        assert_eq!(all.stats(&[named.template]), [stats]);
        assert!(all.remove(&name) && all.stats(&[]).is_empty());
    }

    fn name(text: &str) -> TemplateName {
        TemplateName::new(text).unwrap()
    }

    /// Notes that a fork of a template begins. Returns the memory that was ready for it.
    fn fork(all: &Templates, name: TemplateName) -> Option<Arc<LateMemory>> {
        let template = all.get(&name).unwrap().template;
        all.take_spare(&name, &template, None)
    }

    /// Returns the memory that is to be made ready next.
    fn next(all: &Templates, limit: u64) -> Option<SpareWork> {
        all.lock().next_spare(limit, Instant::now())
    }

    /// Makes memory ready.
    fn make_ready(all: &Templates, work: &SpareWork) {
        let file = rustix::fs::memfd_create(c"fork", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, work.named.template.len() as u64).unwrap();
        let memory = LateMemory::fork(file, &work.named.template).unwrap();
        memory.take(0, PAGE as usize).unwrap();
        all.put_spare(work, Arc::new(memory));
    }

    #[test]
    fn memory_is_ready_for_templates_that_are_in_use() {
        let (all, web, db) = (Templates::default(), name("web"), name("db"));
        assert!(!all.keep_ready(&web, 1));
        for one in [web, db] {
            all.add(one, template(1)).unwrap();
            assert!(all.keep_ready(&one, 2));
        }
        assert!(next(&all, PAGE).is_none(), "no fork began");
        assert!(fork(&all, web).is_none() && next(&all, PAGE).is_none(), "nothing is learnt");
        assert!(all.copy_ahead(&web, std::slice::from_ref(&(0..PAGE))));
        assert!(next(&all, PAGE - 1).is_none(), "it is too much");
        let first = next(&all, PAGE).unwrap();
        assert_eq!((first.name, first.near), (web, None));
        make_ready(&all, &first);
        assert_eq!(all.count_spares(), (1, PAGE));
        assert!(next(&all, 2 * PAGE - 1).is_none(), "with what is ready it is too much");
        // The template for which less is ready comes first.
        assert!(all.copy_ahead(&db, std::slice::from_ref(&(0..PAGE))) && fork(&all, db).is_none());
        assert_eq!(next(&all, 2 * PAGE).unwrap().name, db);
        let given = fork(&all, web).unwrap();
        assert_eq!(given.copied(), std::slice::from_ref(&(0..PAGE)));
        assert_eq!(all.count_spares(), (0, 0));
    }

    #[test]
    fn what_is_ready_goes_with_its_template() {
        let (all, web) = (Templates::default(), name("web"));
        let add = || {
            all.add(web, template(1)).unwrap();
            assert!(all.keep_ready(&web, 2));
            assert!(all.copy_ahead(&web, std::slice::from_ref(&(0..PAGE))));
            assert!(fork(&all, web).is_none());
            next(&all, u64::MAX).unwrap()
        };
        let work = add();
        make_ready(&all, &work);
        let weak = Arc::downgrade(&all.spares()[0]);
        assert!(all.wants_spare(&work) && all.remove(&web));
        assert_eq!((all.count_spares(), weak.strong_count()), ((0, 0), 0));
        // Another template of the name is not given what was begun before.
        add();
        assert!(!all.wants_spare(&work));
        make_ready(&all, &work);
        assert_eq!(all.count_spares(), (0, 0));
    }

    #[test]
    fn nothing_is_ready_once_the_pool_has_ended_or_the_host_has_no_memory() {
        let (all, web) = (Templates::default(), name("web"));
        all.add(web, template(1)).unwrap();
        assert!(all.keep_ready(&web, 2));
        assert!(all.copy_ahead(&web, std::slice::from_ref(&(0..PAGE))));
        let ends: [fn(&Templates, &SpareWork); 2] = [Templates::give_up_spares, |all, _| all.end()];
        for end in ends {
            assert!(fork(&all, web).is_none());
            let work = next(&all, u64::MAX).unwrap();
            make_ready(&all, &work);
            assert_eq!(all.count_spares(), (1, PAGE));
            end(&all, &work);
            make_ready(&all, &work);
            assert_eq!(all.count_spares(), (0, 0));
        }
        assert!(all.next_spare(u64::MAX).is_none());
    }

    #[test]
    fn forks_of_a_predecessor_share_their_template() {
        let all = Templates::default();
        let (one, two) = (template(1), template(1));
        let again = |one: &Template| one.file().try_clone_to_owned().unwrap();
        let first = all.of_predecessor(again(&one)).unwrap();
        assert!(Arc::ptr_eq(&first, &all.of_predecessor(again(&one)).unwrap()));
        assert!(!Arc::ptr_eq(&first, &all.of_predecessor(again(&two)).unwrap()));
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let other = rustix::fs::memfd_create(c"other", flags).unwrap();
        assert!(all.of_predecessor(other).is_err());
    }
}
