//! The templates of a pool, by their names.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use slipway_pool_spec::TemplateName;
use slipway_ram::Template;

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

/// All templates of a pool.
#[derive(Default)]
pub(crate) struct Templates(Mutex<State>);

#[derive(Default)]
struct State {
    named: BTreeMap<TemplateName, Named>,
    /// Templates of forks that a predecessor made, so that forks of one template map it once.
    left: Vec<Weak<Template>>,
}

impl Templates {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn add(&self, name: TemplateName, template: Template) -> Result<(), NameTaken> {
        let mut state = self.lock();
        if state.named.contains_key(&name) {
            return Err(NameTaken(name));
        }
        let template = Arc::new(template);
        state.named.insert(name, Named { template, ahead: Arc::default() });
        Ok(())
    }

    /// Removes a template. Its forks keep it.
    pub(crate) fn remove(&self, name: &TemplateName) -> bool {
        let removed = self.lock().named.remove(name);
        // Giving its pages to the kernel takes a while: without the lock.
        removed.is_some()
    }

    pub(crate) fn get(&self, name: &TemplateName) -> Option<Named> {
        self.lock().named.get(name).cloned()
    }

    /// Has these bytes of a template copied ahead for each new fork, in their order. Returns
    /// `false` if there is no such template.
    pub(crate) fn copy_ahead(&self, name: &TemplateName, ranges: &[Range<u64>]) -> bool {
        let mut state = self.lock();
        let Some(named) = state.named.get_mut(name) else { return false };
        let len = named.template.len() as u64;
        let unit = Template::GRANULE as u64;
        let whole = |range: &Range<u64>| {
            let end = range.end.min(len).next_multiple_of(unit);
            range.start / unit * unit..end
        };
        let within = ranges.iter().map(whole);
        named.ahead = within.filter(|range| !range.is_empty()).collect();
        true
    }

    /// Returns the figures of all templates, of which these forks have memory.
    pub(crate) fn stats(&self, forks: &[Arc<Template>]) -> Vec<TemplateStats> {
        let state = self.lock();
        let stats = |(name, Named { template, ahead }): (&TemplateName, &Named)| TemplateStats {
            name: *name,
            bytes: template.len() as u64,
            held: template.held() as u64,
            ahead: ahead.iter().map(|range| range.end - range.start).sum(),
            forks: forks.iter().filter(|one| Arc::ptr_eq(one, template)).count() as u64,
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
