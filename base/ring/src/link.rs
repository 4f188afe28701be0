//! A link: the memory of two rings.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use slipway_ram::{Lasting, Span};

use crate::layout::{self, MAGIC, RINGS as PAGE, VERSION};
use crate::ring::{Consumer, Producer, Ring};

/// The shape of a link, which both rings have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The number of slots of a ring: a power of two, 16 to 32,768.
    pub slots: u32,
    /// The number of bytes that a slot holds: a multiple of 64, 64 to 65,536.
    pub payload: u32,
}

impl Default for Geometry {
    /// Returns 512 slots of 2,048 bytes: about 2 MiB.
    fn default() -> Self {
        Self { slots: 512, payload: 2048 }
    }
}

impl Geometry {
    /// Returns whether a link may have this shape.
    pub fn is_possible(&self) -> bool {
        self.slots.is_power_of_two()
            && (16..=32_768).contains(&self.slots)
            && self.payload.is_multiple_of(64)
            && (64..=65_536).contains(&self.payload)
    }

    pub(crate) fn stride(&self) -> usize {
        layout::stride(self)
    }

    /// Returns the size of a ring in bytes, up to the place where the next may begin.
    fn ring(&self) -> usize {
        layout::ring_size(self)
    }
}

/// A link's memory.
#[derive(Clone)]
pub struct Link {
    words: Lasting,
    whole: Span,
    geometry: Geometry,
}

impl Link {
    /// Makes a new link in memory of its own.
    ///
    /// # Errors
    /// `InvalidInput` if no link may have this geometry; the system's error if there is no memory.
    pub fn new(geometry: Geometry) -> std::io::Result<Self> {
        if !geometry.is_possible() {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let words = Lasting::new("slipway-link", PAGE + 2 * geometry.ring())?;
        let header = [MAGIC, VERSION, geometry.slots.into(), geometry.payload.into()];
        for (word, value) in words.words().iter().zip(header) {
            word.store(value, Ordering::Relaxed);
        }
        Self::of(words, geometry)
    }

    /// Opens a link that another process made.
    ///
    /// # Errors
    /// `InvalidData` if the file is no link, or is of another version.
    pub fn open(file: OwnedFd) -> std::io::Result<Self> {
        let words = Lasting::of(file)?;
        let word = |at: usize| words.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        let number = |at: usize| u32::try_from(word(at)).unwrap_or(0);
        let geometry = Geometry { slots: number(2), payload: number(3) };
        let known = word(0) == MAGIC && word(1) == VERSION && geometry.is_possible();
        if !known || words.len() < PAGE + 2 * geometry.ring() {
            let text = "a file that is no link of packet rings, or of another version";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        Self::of(words, geometry)
    }

    fn of(words: Lasting, geometry: Geometry) -> std::io::Result<Self> {
        let file = words.file().ok_or(std::io::ErrorKind::InvalidInput)?;
        let whole = Span::file(file, 0, PAGE + 2 * geometry.ring())?;
        Ok(Self { words, whole, geometry })
    }

    /// Returns the link's shape.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the link's file, to be passed on.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.words.file()
    }

    /// Returns the server's consumer and producer. To be called once per link.
    pub fn server(&self) -> (Consumer, Producer) {
        (Consumer::new(self.ring(0)), Producer::new(self.ring(1)))
    }

    /// Returns the peer's consumer and producer. To be called once per link.
    pub fn peer(&self) -> (Consumer, Producer) {
        (Consumer::new(self.ring(1)), Producer::new(self.ring(0)))
    }

    fn ring(&self, number: usize) -> Ring {
        let at = PAGE + number * self.geometry.ring();
        // The length was made, or checked, to hold both rings.
        let rest = self.words.split(at).map_or_else(|| self.words.clone(), |(_, rest)| rest);
        Ring::new(rest, &self.whole, at, &self.geometry)
    }
}
