//! A guest's arenas.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slipway_ram::{Access, Lasting, Memory};
use slipway_ring::cross::{Arena, Regions};
use slipway_sgiov_spec::function::{ARENAS, Broken, PIECE};

/// Pins a piece of the guest's memory. It stays mapped as long as the returned value lives.
///
/// # Errors
/// [`Broken::Memory`].
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
    at: u64,
    /// The mapped arena. `None` while it is suspended.
    arena: Option<Arena>,
    shape: slipway_ring::cross::Shape,
    /// Marks of the regions in use, among those that this side writes.
    regions: Arc<[AtomicU64]>,
}

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
    /// # Errors
    /// [`Broken`]: the number or the memory is in use, or there is no arena.
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

    fn held(&self, number: u32) -> Option<&GuestArena> {
        self.all.get(number as usize)?.as_ref()
    }

    pub fn get(&self, number: u32) -> Option<(&Arena, &Arc<[AtomicU64]>)> {
        let held = self.held(number)?;
        Some((held.arena.as_ref()?, &held.regions))
    }

    /// Returns the number of streams of an arena, whether it is suspended or not.
    pub fn streams(&self, number: u32) -> Option<u32> {
        self.held(number).map(|held| held.shape.streams)
    }

    pub fn remove(&mut self, number: u32) -> bool {
        self.all.get_mut(number as usize).is_some_and(|place| place.take().is_some())
    }

    /// Releases the guest's memory.
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
