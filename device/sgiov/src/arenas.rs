//! The arenas that a guest has announced, by number: pieces of the guest's memory, pinned and
//! mapped.
//!
//! A suspension unmaps all arenas, and [`Arenas::resume`] maps them again. Numbers, shapes and the
//! bits of regions in use stay meanwhile, so that streams go on with the same arenas.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slipway_ram::{Access, Lasting, Memory};
use slipway_ring::cross::{Arena, Regions};
use slipway_sgiov_spec::function::{ARENAS, Broken, PIECE};

/// Pins the [`PIECE`] bytes of the guest's memory at `at`, a multiple of [`PIECE`]. They stay
/// mapped as long as the returned value lives.
///
/// # Errors
/// [`Broken::Memory`] if `at` is misaligned, or if the memory is absent, not writable, not
/// contiguous, or of a kind that its owner can take away.
pub fn piece(memory: &Memory, at: u64) -> Result<Lasting, Broken> {
    if !at.is_multiple_of(PIECE as u64) || at.checked_add(PIECE as u64).is_none() {
        return Err(Broken::Memory);
    }
    let mut spans = Vec::new();
    memory.pin(at, PIECE, Access::Write, &mut spans).map_err(|_| Broken::Memory)?;
    let span = spans.pop().filter(|span| spans.is_empty() && span.len() == PIECE);
    span.and_then(Lasting::over).ok_or(Broken::Memory)
}

/// One arena of the guest.
struct GuestArena {
    /// The guest's address of the arena.
    at: u64,
    /// The mapped arena. `None` while it is suspended.
    arena: Option<Arena>,
    /// The arena's shape, which must be the same after a suspension.
    shape: slipway_ring::cross::Shape,
    /// A bit for each region that this side writes: set if the region is in use.
    regions: Arc<[AtomicU64]>,
}

/// Maps the arena at `at`, and checks its header.
///
/// # Errors
/// [`Broken::Memory`] as for [`piece`]; [`Broken::Arena`] if there is no arena.
fn open(memory: &Memory, at: u64) -> Result<Arena, Broken> {
    let words = piece(memory, at)?;
    Ok(Arena::over(words).map_err(|_| Broken::Arena)?.across_machines())
}

/// All arenas of a guest, by number.
#[derive(Default)]
pub struct Arenas {
    all: Vec<Option<GuestArena>>,
}

impl Arenas {
    /// Maps the arena at the guest's address `at`, as arena `number`. `control` is the address of
    /// the control memory.
    ///
    /// # Errors
    /// [`Broken::Message`] if the number is too large or in use; [`Broken::Arena`] if the memory is
    /// in use, or has no arena; [`Broken::Memory`] as for [`piece`].
    pub fn add(
        &mut self,
        memory: &Memory,
        number: u32,
        at: u64,
        control: u64,
    ) -> Result<(), Broken> {
        let index = number as usize;
        if number >= ARENAS || self.held(number).is_some() {
            return Err(Broken::Message);
        }
        if at == control || self.all.iter().flatten().any(|held| held.at == at) {
            return Err(Broken::Arena);
        }
        let arena = open(memory, at)?;
        let regions = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        if self.all.len() <= index {
            self.all.resize_with(index + 1, || None);
        }
        self.all[index] =
            Some(GuestArena { at, shape: arena.shape(), arena: Some(arena), regions });
        Ok(())
    }

    /// Returns an arena, whether it is suspended or not.
    fn held(&self, number: u32) -> Option<&GuestArena> {
        self.all.get(number as usize)?.as_ref()
    }

    /// Returns an arena and the bits of its regions in use. Returns `None` if there is no such
    /// arena, or if it is suspended.
    pub fn get(&self, number: u32) -> Option<(&Arena, &Arc<[AtomicU64]>)> {
        let held = self.held(number)?;
        Some((held.arena.as_ref()?, &held.regions))
    }

    /// Returns the number of streams of an arena, whether it is suspended or not. Returns `None` if
    /// there is no such arena.
    pub fn streams(&self, number: u32) -> Option<u32> {
        self.held(number).map(|held| held.shape.streams)
    }

    /// Unmaps an arena and frees its number. Returns whether there was one.
    pub fn remove(&mut self, number: u32) -> bool {
        self.all.get_mut(number as usize).is_some_and(|place| place.take().is_some())
    }

    /// Unmaps all arenas, so that the guest's memory can be taken away.
    pub fn suspend(&mut self) {
        self.all.iter_mut().flatten().for_each(|held| held.arena = None);
    }

    /// Maps all arenas again after a suspension.
    ///
    /// # Errors
    /// [`Broken::Unmapped`]: an arena is no longer there, or another one is in its place.
    pub fn resume(&mut self, memory: &Memory) -> Result<(), Broken> {
        for held in self.all.iter_mut().flatten() {
            let arena = open(memory, held.at).map_err(|_| Broken::Unmapped)?;
            if arena.shape() != held.shape {
                return Err(Broken::Unmapped);
            }
            held.arena = Some(arena);
        }
        Ok(())
    }
}
