//! Memory that begins as a template: its making, and the pages of the template that it has used.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::outside::Ordering;
use super::{LateMemory, granules_of, states};
use crate::{Lasting, Template};

impl LateMemory {
    /// Takes a new file of the size of `template`, which has no pages and which nobody else maps
    /// yet: memory whose user begins with the template's bytes. Each page is copied when somebody
    /// needs it as memory of its own. A page that the template lacks is the kernel's page of zeros.
    ///
    /// Where the template has bytes, the user's process must have its mapping registered for
    /// missing pages as well as for those that are there (userfaultfd(2)), before it touches any:
    /// the kernel fills a page that is missing with zeros otherwise.
    ///
    /// # Errors
    /// `InvalidInput` for another size; those of [`Mapping::file`](crate::Mapping::file) and of
    /// making a memfd.
    pub fn fork(file: OwnedFd, template: &Arc<Template>) -> io::Result<Self> {
        let granules = granules_of(&file, Template::GRANULE)?;
        if granules * Template::GRANULE != template.len() {
            let text = "memory of another size than its template";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let table = Lasting::new("slipway-granules", granules)?;
        let memory = Self::with_table(file, table, granules, Some(Arc::clone(template)))?;
        // A new table has all granules absent, which is right for holes: making memory takes no
        // longer the more of it is a hole.
        for data in template.data() {
            let granules = data.start / Template::GRANULE..data.end / Template::GRANULE;
            for state in &memory.states()[granules] {
                state.store(states::SHARED, Ordering::Release);
            }
        }
        Ok(memory)
    }

    /// Returns the template with whose bytes the memory begins, or `None` if it begins as zeros.
    pub fn template(&self) -> Option<&Arc<Template>> {
        self.template.as_ref()
    }

    /// Returns whether the table has a hole where the template has bytes, which the user would find
    /// to be zeros.
    pub(super) fn lacks_bytes(&self) -> bool {
        let data = self.template.iter().flat_map(|template| template.data());
        let mut states = data.flat_map(|data| &self.states()[self.touched(data.start, data.len())]);
        states.any(|state| state.load(Ordering::Acquire) == states::ABSENT)
    }

    /// Returns whether the memory's bytes of `offset..offset + len` are those in the file: all
    /// granules were taken, or are holes of the template. A page that is missing there is one of
    /// zeros. Memory without a template has not taken granules that are absent.
    ///
    /// # Panics
    /// If the end of the range overflows.
    pub fn is_taken(&self, offset: usize, len: usize) -> bool {
        let own = if self.template.is_some() { states::is_own } else { states::is_clean };
        self.states()[self.touched(offset, len)].iter().all(own)
    }

    /// Returns the bytes of the template that were copied by now, since somebody touched them or a
    /// byte near: ascending ranges of whole granules, none next to another. Memory without a
    /// template has none.
    pub fn copied(&self) -> Vec<Range<u64>> {
        let mut all: Vec<Range<u64>> = Vec::new();
        let data = self.template.iter().flat_map(|template| template.data());
        let unit = self.granule();
        for granule in data.flat_map(|data| data.start / unit..data.end / unit) {
            if !states::is_clean(&self.states()[granule]) {
                continue;
            }
            let (start, end) = ((granule * unit) as u64, ((granule + 1) * unit) as u64);
            match all.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => all.push(start..end),
            }
        }
        all
    }

    /// Copies the present bytes of the memory, whose user does not run, for a template: those of a
    /// granule that nobody was given are the bytes with which its user would begin, never those of
    /// an earlier one.
    ///
    /// # Errors
    /// As for [`Template::copy_of`].
    pub(crate) fn freeze(&self) -> io::Result<Template> {
        let unit = self.granule();
        let parts = self.states().iter().enumerate().map(|(granule, state)| {
            let from = match (state.load(Ordering::Acquire), &self.template) {
                (states::CLEAN, _) | (states::ABSENT, Some(_)) => Some(self.file.as_fd()),
                (_, None) => None,
                (_, Some(template)) => Some(template.file()),
            };
            (granule * unit..(granule + 1) * unit, from)
        });
        Template::of_parts(self.len(), parts)
    }
}
