//! The owners of an area's larger regions.

use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::Shape;
use super::index::Region;

/// The classes of regions beyond a stream's own page: their order, and their largest number.
const CLASSES: [(u32, u32); 4] = [(2, 4096), (4, 8192), (7, 2048), (10, 512)];

/// The allocator of the regions of the area that one side writes. Each region has a bit in private
/// memory of that side, which its forked processes share. There is no lock: a process that is
/// killed leaves bits set and nothing else.
#[derive(Clone, Copy)]
pub struct Regions<'a> {
    bits: &'a [AtomicU64],
    shape: Shape,
}

/// Returns the number of regions of each class in an arena of this shape: the largest number or, in
/// a small arena, for each class from the largest on as many as fit half of the remaining room, and
/// for the smallest class all of it.
fn counts(shape: Shape) -> [u32; CLASSES.len()] {
    let mut room = shape.pages.saturating_sub(shape.streams);
    let all = CLASSES.map(|(_, count)| count);
    if room >= CLASSES.iter().map(|(order, count)| count << order).sum() {
        return all;
    }
    let mut counts = [0; CLASSES.len()];
    for (class, (order, most)) in CLASSES.iter().enumerate().rev() {
        let share = if class == 0 { room } else { room / 2 };
        counts[class] = (share >> order).min(*most);
        room -= counts[class] << order;
    }
    counts
}

impl<'a> Regions<'a> {
    /// The number of words that [`Regions::new`] needs.
    pub const WORDS: usize = (4096 + 8192 + 2048 + 512) / 64;

    /// Returns an allocator over `bits`, which are zeros in the beginning.
    ///
    /// # Panics
    /// If there are fewer than [`Regions::WORDS`] words: a programmer's error.
    #[inline]
    pub fn new(bits: &'a [AtomicU64], shape: Shape) -> Self {
        assert!(bits.len() >= Self::WORDS, "too few bits for the regions of an area");
        Self { bits, shape }
    }

    /// Returns the shape of an arena with all regions for `streams` streams.
    pub fn shape(streams: u32) -> Shape {
        let pages = CLASSES.iter().map(|(order, count)| count << order).sum::<u32>();
        Shape { streams, pages: streams + pages }
    }

    /// Returns the page that belongs to `stream`.
    #[inline]
    pub fn own(stream: u32) -> Region {
        Region { page: stream, order: 0 }
    }

    /// Takes a region of the smallest class with at least `bytes` bytes, or of the largest class,
    /// or of the next smaller class that has one left. Returns `None` if no larger region than
    /// `than` is left.
    pub fn take(&self, bytes: usize, than: Option<Region>) -> Option<Region> {
        let least = than.map_or(0, |region| region.order + 1);
        let fitting = |order: u32| Region { page: 0, order }.len() >= bytes;
        let last =
            CLASSES.iter().position(|(order, _)| fitting(*order)).unwrap_or(CLASSES.len() - 1);
        let mut classes = (0..=last).rev().filter(|class| CLASSES[*class].0 >= least);
        classes.find_map(|class| self.take_of(class))
    }

    /// Releases a region. A stream's own page stays its own.
    pub fn give(&self, region: Region) {
        let Some(class) = CLASSES.iter().position(|(order, _)| *order == region.order) else {
            return;
        };
        let (first_page, first_bit) = self.begin(class);
        let Some(offset) = region.page.checked_sub(first_page) else { return };
        let number = offset >> region.order;
        if number < counts(self.shape)[class] {
            let bit = (first_bit + number) as usize;
            self.bits[bit / 64].fetch_and(!(1 << (bit % 64)), Ordering::Relaxed);
        }
    }

    /// Takes a released region again, if it is unused. Only for the single taker of these regions.
    pub fn take_back(&self, region: Region) -> bool {
        let Some(class) = CLASSES.iter().position(|(order, _)| *order == region.order) else {
            return false;
        };
        let (first_page, first_bit) = self.begin(class);
        let number = region.page.checked_sub(first_page).map(|offset| offset >> region.order);
        let Some(number) = number.filter(|number| *number < counts(self.shape)[class]) else {
            return false;
        };
        let bit = first_bit + number;
        self.set(bit as usize / 64, bit % 64)
    }

    /// Returns the first page and the first bit of a class. The largest regions come first, so that
    /// all are aligned to their length behind the streams' own pages.
    fn begin(&self, class: usize) -> (u32, u32) {
        let counts = counts(self.shape);
        let larger = class + 1..CLASSES.len();
        let pages = larger.clone().map(|class| counts[class] << CLASSES[class].0).sum::<u32>();
        (self.shape.streams + pages, CLASSES[larger].iter().map(|(_, count)| count).sum())
    }

    fn take_of(&self, class: usize) -> Option<Region> {
        let (order, most) = CLASSES[class];
        let (first_page, first_bit) = self.begin(class);
        let held = counts(self.shape)[class];
        let words = first_bit as usize / 64..(first_bit + most) as usize / 64;
        words.into_iter().find_map(|word| {
            let free = self.bits[word].load(Ordering::Relaxed).trailing_ones();
            let number = word as u32 * 64 + free - first_bit;
            (free < 64 && number < held && self.set(word, free))
                .then(|| Region { page: first_page + (number << order), order })
        })
    }

    /// Sets the bit. Returns `false` if another thread has set it meanwhile.
    fn set(&self, word: usize, bit: u32) -> bool {
        self.bits[word].fetch_or(1 << bit, Ordering::Relaxed) & 1 << bit == 0
    }
}
