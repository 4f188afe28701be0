//! The device's side of a split virtqueue (section 2.7).
//!
//! Rings are pinned once and accessed through [`Window`]s. Each ring entry, descriptor and table is
//! read once into a private copy. Buffers are used in the order in which they were made available,
//! so the used index alone says how far a queue came, and a successor goes on from it.
//!
//! rust-vmm's `virtio-queue` is not used. It reaches memory through `vm-memory`'s `GuestMemory`,
//! which gives out references and volatile slices into permanent mappings. Slipway's memory has
//! bounded copies that survive a client which takes its memory away, pinned spans without reference
//! counting per packet, and faults as values. The chain iterator of `virtio-queue` also reads a
//! descriptor only when it is asked for it, so lengths would be looked up again while the data
//! moves.

use std::sync::atomic::{Ordering, fence};

use slipway_ram::{Access, Memory, Span, Window};
use slipway_virtio_spec::queue::{
    DESCRIPTOR, Descriptor, UsedElement, available, descriptor_area, flag, passes, used,
};
use zerocopy::{FromBytes, IntoBytes};

pub use crate::chain::{Broken, Chain, Range, reachable};
use crate::notify::{Meeting, Notifications};

/// Most elements that are collected before they are written to the used ring.
pub const BATCH: usize = 64;

/// The size and addresses of a queue, as the driver configured them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The number of entries, a power of two.
    pub size: u16,
    /// The descriptor area.
    pub descriptors: u64,
    /// The driver area: the available ring.
    pub available: u64,
    /// The device area: the used ring.
    pub used: u64,
}

/// A split virtqueue, as the device sees it.
///
/// The order of calls for one buffer: [`Queue::look`], [`Queue::heads`], [`Queue::walk`],
/// [`Queue::advance`], [`Queue::report`], [`Queue::publish`].
pub struct Queue {
    size: u16,
    descriptors: Window,
    available: Window,
    used: Window,
    notifications: Notifications,
    event_index: bool,
    indirect: bool,
    /// Index of the next buffer to take.
    next: u16,
    /// The available index at the last look.
    seen: u16,
    /// Elements that are not written to the used ring yet. The first of them has index `written`.
    elements: Vec<UsedElement>,
    written: u16,
    /// The used index as published last, and at the last decision about an interrupt.
    published: u16,
    decided: u16,
}

impl Queue {
    /// Makes a queue without used buffers, with or without event indexes and indirect descriptors.
    pub fn new(layout: &Layout, event_index: bool, indirect: bool) -> Self {
        let size = layout.size;
        let window = |at, len, access| Window::new(at, len, access);
        Self {
            size,
            descriptors: window(layout.descriptors, descriptor_area(size), Access::Read),
            available: window(layout.available, available::area(size), Access::Read),
            used: window(layout.used, used::area(size), Access::Write),
            notifications: Notifications::new(event_index),
            event_index,
            indirect,
            next: 0,
            seen: 0,
            elements: Vec::with_capacity(BATCH),
            written: 0,
            published: 0,
            decided: 0,
        }
    }

    /// Goes on from a predecessor's used index. Buffers that the predecessor had begun and not
    /// reported are begun again. The driver is interrupted once more, in case the predecessor did
    /// not.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    pub fn resume(&mut self, memory: &Memory) -> Result<(), Broken> {
        let index = self.used.span(memory).ok_or(Broken::Memory)?.load_u16(used::INDEX)?;
        (self.next, self.seen, self.written) = (index, index, index);
        (self.published, self.decided) = (index, index.wrapping_sub(1));
        self.notifications = Notifications::new(self.event_index);
        Ok(())
    }

    /// Releases the memory until it is used again.
    pub fn release_memory(&mut self) {
        self.descriptors.release();
        self.available.release();
        self.used.release();
    }

    /// Returns the number of waiting buffers, as of the last look.
    #[inline]
    pub fn waiting(&self) -> u16 {
        self.seen.wrapping_sub(self.next)
    }

    /// Looks at the available index, and returns the number of waiting buffers.
    ///
    /// # Errors
    /// [`Broken::Memory`]; [`Broken::Index`] if the queue has no room for as many buffers.
    #[inline]
    pub fn look(&mut self, memory: &Memory) -> Result<u16, Broken> {
        let ring = self.available.span(memory).ok_or(Broken::Memory)?;
        let index = ring.load_u16(available::INDEX)?;
        self.saw(index)
    }

    #[inline]
    fn saw(&mut self, index: u16) -> Result<u16, Broken> {
        let waiting = index.wrapping_sub(self.next);
        // The driver cannot make buffers available again that were taken and are not published yet.
        if waiting > self.size - self.next.wrapping_sub(self.published).min(self.size) {
            return Err(Broken::Index);
        }
        self.seen = index;
        Ok(waiting)
    }

    /// Copies the heads of the next waiting chains, at most `into.len()`, without taking them.
    /// Returns their number.
    ///
    /// # Errors
    /// [`Broken::Memory`]; [`Broken::Index`] for a head that is no descriptor.
    #[inline]
    pub fn heads(&mut self, memory: &Memory, into: &mut [u16]) -> Result<usize, Broken> {
        let count = usize::from(self.waiting()).min(into.len());
        let ring = self.available.span(memory).ok_or(Broken::Memory)?;
        let start = self.next & (self.size - 1);
        let first = count.min(usize::from(self.size - start));
        let (before, after) = into[..count].split_at_mut(first);
        ring.read(available::entry(start, self.size), before.as_mut_bytes())?;
        if !after.is_empty() {
            ring.read(available::RING, after.as_mut_bytes())?;
        }
        for head in &mut into[..count] {
            *head = u16::from_le(*head);
            if *head >= self.size {
                return Err(Broken::Index);
            }
        }
        if let Some(table) = self.descriptors.span(memory) {
            for head in &into[..count] {
                table.prefetch(DESCRIPTOR * usize::from(*head));
            }
        }
        Ok(count)
    }

    /// Reads a descriptor.
    #[inline]
    fn descriptor(&mut self, memory: &Memory, index: u16) -> Result<Descriptor, Broken> {
        let table = self.descriptors.span(memory).ok_or(Broken::Memory)?;
        let mut descriptor = Descriptor::default();
        table.read(DESCRIPTOR * usize::from(index), descriptor.as_mut_bytes())?;
        Ok(descriptor)
    }

    /// Reads the chain that begins at `head`, which is below the queue's size.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn walk(&mut self, memory: &Memory, head: u16, chain: &mut Chain) -> Result<(), Broken> {
        chain.clear();
        let first = self.descriptor(memory, head)?;
        if first.flags.get() & (flag::NEXT | flag::INDIRECT) == 0 {
            chain.push(&first);
            return Ok(());
        }
        self.walk_on(memory, first, chain)
    }

    #[inline]
    fn walk_on(
        &mut self,
        memory: &Memory,
        first: Descriptor,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        let mut descriptor = first;
        // A chain is at most as long as the queue (section 2.7.5.3.1), so a longer chain is a
        // circle.
        for _ in 0..self.size {
            let flags = descriptor.flags.get();
            if flags & flag::INDIRECT != 0 {
                if flags & flag::NEXT != 0 || !self.indirect {
                    return Err(Broken::Chain);
                }
                return self.walk_table(memory, &descriptor, chain);
            }
            chain.push(&descriptor);
            if flags & flag::NEXT == 0 {
                return Ok(());
            }
            let next = descriptor.next.get();
            if next >= self.size {
                return Err(Broken::Index);
            }
            descriptor = self.descriptor(memory, next)?;
        }
        Err(Broken::Chain)
    }

    /// Reads the whole table that `descriptor` names, once, and the chain in it.
    fn walk_table(
        &mut self,
        memory: &Memory,
        descriptor: &Descriptor,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        let len = descriptor.len.get() as usize;
        let entries = len / DESCRIPTOR;
        let sound =
            len.is_multiple_of(DESCRIPTOR) && (1..=usize::from(self.size)).contains(&entries);
        if !sound {
            return Err(Broken::Chain);
        }
        chain.table.resize(len, 0);
        let address = descriptor.address.get();
        if memory.is_remote(address, len) {
            return Err(Broken::Memory);
        }
        memory.read(address, &mut chain.table)?;
        let mut at = 0;
        for _ in 0..entries {
            let bytes = &chain.table[at * DESCRIPTOR..][..DESCRIPTOR];
            let one = Descriptor::read_from_bytes(bytes).map_err(|_| Broken::Chain)?;
            if one.flags.get() & flag::INDIRECT != 0 {
                return Err(Broken::Chain);
            }
            chain.push(&one);
            if one.flags.get() & flag::NEXT == 0 {
                return Ok(());
            }
            at = usize::from(one.next.get());
            if at >= entries {
                return Err(Broken::Index);
            }
        }
        Err(Broken::Chain)
    }

    /// Takes the next chain, and returns its head. Returns `None` if there is none; the driver will
    /// then notify of the next one. A device that takes many chains at a time uses the single
    /// steps.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn take(&mut self, memory: &Memory, chain: &mut Chain) -> Result<Option<u16>, Broken> {
        if self.look(memory)? == 0 && (!self.arm(memory)? || self.look(memory)? == 0) {
            return Ok(None);
        }
        let mut head = [0];
        self.heads(memory, &mut head)?;
        self.walk(memory, head[0], chain)?;
        self.advance(1);
        Ok(Some(head[0]))
    }

    /// Takes the next chain, as [`Queue::take`] does, of a queue whose buffers the device writes.
    ///
    /// # Errors
    /// [`Broken`]; [`Broken::Chain`] for a buffer that the device reads, and if there is no byte to
    /// write.
    pub fn take_writable(
        &mut self,
        memory: &Memory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, Broken> {
        let head = self.take(memory, chain)?;
        let sound = chain.readable.is_empty() && chain.writable_len() > 0;
        if head.is_some() && !sound { Err(Broken::Chain) } else { Ok(head) }
    }

    /// Takes the next chain, as [`Queue::take`] does, of a queue whose buffers the device reads.
    ///
    /// # Errors
    /// [`Broken`]; [`Broken::Chain`] for a buffer that the device writes.
    pub fn take_readable(
        &mut self,
        memory: &Memory,
        chain: &mut Chain,
    ) -> Result<Option<u16>, Broken> {
        let head = self.take(memory, chain)?;
        let sound = chain.writable.is_empty();
        if head.is_some() && !sound { Err(Broken::Chain) } else { Ok(head) }
    }

    /// Takes `count` chains whose heads were read.
    #[inline]
    pub fn advance(&mut self, count: u16) {
        debug_assert!(count <= self.waiting());
        self.next = self.next.wrapping_add(count);
    }

    /// Reports the next chain in the order in which chains were taken. [`Queue::publish`] makes it
    /// visible to the driver.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    #[inline]
    pub fn report(&mut self, memory: &Memory, head: u16, len: u32) -> Result<(), Broken> {
        self.elements.push(UsedElement { id: u32::from(head).into(), len: len.into() });
        if self.elements.len() < BATCH {
            return Ok(());
        }
        self.write_elements(memory)
    }

    #[inline]
    fn write_elements(&mut self, memory: &Memory) -> Result<(), Broken> {
        let ring = self.used.span(memory).ok_or(Broken::Memory)?;
        let start = self.written & (self.size - 1);
        let room = usize::from(self.size - start);
        let first = self.elements.len().min(room);
        let (before, after) = self.elements.split_at(first);
        ring.write(used::entry(start, self.size), before.as_bytes())?;
        if !after.is_empty() {
            ring.write(used::RING, after.as_bytes())?;
        }
        self.written = self.written.wrapping_add(self.elements.len() as u16);
        self.elements.clear();
        Ok(())
    }

    /// Makes the reported chains visible to the driver.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    #[inline]
    pub fn publish(&mut self, memory: &Memory) -> Result<(), Broken> {
        if !self.elements.is_empty() {
            self.write_elements(memory)?;
        }
        if self.published != self.written {
            let ring = self.used.span(memory).ok_or(Broken::Memory)?;
            ring.store_u16(used::INDEX, self.written)?;
            self.published = self.written;
        }
        Ok(())
    }

    /// Returns whether the driver wants to be interrupted for the chains published since the last
    /// decision (section 2.7.7.2). Driver: store used_event, full barrier, load the used index. The
    /// fence here pairs with that barrier: either the driver sees the index, or the device sees the
    /// event.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    #[inline]
    pub fn wants_interrupt(&mut self, memory: &Memory) -> Result<bool, Broken> {
        let (old, new) = (self.decided, self.published);
        if old == new {
            return Ok(false);
        }
        self.decided = new;
        fence(Ordering::SeqCst);
        let ring = self.available.span(memory).ok_or(Broken::Memory)?;
        if self.event_index {
            let event = ring.load_u16(available::used_event(self.size))?;
            return Ok(passes(event, old, new));
        }
        Ok(ring.load_u16(available::FLAGS)? & available::NO_INTERRUPT == 0)
    }

    /// Asks for a notification of the next buffer, and returns whether that buffer is there
    /// already.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    pub fn arm(&mut self, memory: &Memory) -> Result<bool, Broken> {
        let mut meeting = Rings {
            available: self.available.span(memory).ok_or(Broken::Memory)?,
            used: self.used.span(memory).ok_or(Broken::Memory)?,
            size: self.size,
        };
        self.notifications.arm(&mut meeting, self.next)
    }
}

/// For devices of the plane, which serve several queues on one thread.
#[cfg(feature = "plane")]
impl Queue {
    /// Asks the driver for no notifications.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    #[inline]
    pub fn stay_awake(&mut self, memory: &Memory) -> Result<(), Broken> {
        let mut meeting = Rings {
            available: self.available.span(memory).ok_or(Broken::Memory)?,
            used: self.used.span(memory).ok_or(Broken::Memory)?,
            size: self.size,
        };
        self.notifications.awake(&mut meeting, self.next)
    }

    /// Returns the number of entries, and the index of the next buffer to take.
    pub fn place(&self) -> (u16, u16) {
        (self.size, self.next)
    }

    /// Gives back the last `count` chains taken, of which none was reported.
    pub fn rewind(&mut self, count: u16) {
        self.next = self.next.wrapping_sub(count);
    }
}

/// The words of both rings that [`Notifications`] accesses.
struct Rings<'a> {
    available: &'a Span,
    used: &'a Span,
    size: u16,
}

impl Meeting for Rings<'_> {
    type Fault = Broken;

    fn available(&mut self) -> Result<u16, Broken> {
        Ok(self.available.load_u16(available::INDEX)?)
    }

    fn set_event(&mut self, index: u16) -> Result<(), Broken> {
        Ok(self.used.store_u16(used::avail_event(self.size), index)?)
    }

    fn set_flags(&mut self, flags: u16) -> Result<(), Broken> {
        Ok(self.used.store_u16(used::FLAGS, flags)?)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
