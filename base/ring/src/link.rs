//! A link: the memory of two rings.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use slipway_ram::{Lasting, Span};

use crate::layout::{Geometry, MAGIC, RINGS as PAGE, VERSION, ring_size};
use crate::ring::{Consumer, Producer, Ring};

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
        let words = Lasting::new("slipway-link", PAGE + 2 * ring_size(&geometry))?;
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
        if !known || words.len() < PAGE + 2 * ring_size(&geometry) {
            let text = "a file that is no link of packet rings, or of another version";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        Self::of(words, geometry)
    }

    fn of(words: Lasting, geometry: Geometry) -> std::io::Result<Self> {
        let file = words.file().ok_or(std::io::ErrorKind::InvalidInput)?;
        let whole = Span::file(file, 0, PAGE + 2 * ring_size(&geometry))?;
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
        let at = PAGE + number * ring_size(&self.geometry);
        // The length was made, or checked, to hold both rings.
        let rest = self.words.split(at).map_or_else(|| self.words.clone(), |(_, rest)| rest);
        Ring::new(rest, &self.whole, at, &self.geometry)
    }
}
