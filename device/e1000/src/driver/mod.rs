//! A small real e1000 driver, for unit tests, fuzzing and benchmarks.
//!
//! [`Driver`] is generic over [`RegisterAccess`], so that it runs on a device by direct calls
//! ([`Direct`]) as well as over a socket. Rings and buffers lie in one region of memory that driver
//! and device both reach. The caller has enabled memory space and bus mastering.
//!
//! While frames move, it makes exactly the register accesses that Linux's e1000 driver makes:
//! - a write of TDT for each [`Driver::flush`], which Linux does after each frame unless more
//!   follow at once;
//! - a write of RDT for each 16 receive buffers that were used, and at the end of a poll;
//! - for each interrupt ([`Driver::interrupt`]): a read of ICR, a write of IMC, a read of STATUS
//!   that flushes it; after the poll a write of IMS and another read of STATUS.
//!
//! With the communication status block there is none of these while both sides are busy. A driver
//! that takes the device's heads from the block as well ([`Options::heads`]) asks for no reports
//! and looks at no status: a descriptor is written by one side only.
//!
//! Two further techniques of *Speeding Up Packet I/O in Virtual Machines* need no more of a device
//! than that it delays its interrupts: moderation ([`Options::throttle`], section 3.1) and send
//! combining ([`Driver::combine`], section 3.2).

mod rings;

use slipway_e1000_spec::{
    DESCRIPTOR, cause, control, csb, eeprom, eerd, rctl, register, rxcsum, tctl,
};
use slipway_ram::{Access, Fault, Memory, Span};

pub use rings::{Received, Receiving, Sending, Unread};
pub use slipway_pci::driver::{AccessError, Direct, RegisterAccess};

/// The causes that the driver enables: the ones that Linux's does.
pub const ENABLED: u32 = cause::RXT0 | cause::TXDW | cause::RXDMT0 | cause::LSC | 1 << 3;

/// The reason why the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// A register access failed.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The driver's memory failed, or is too small.
    #[error("the driver's memory: {0}")]
    Memory(String),
    /// The device is not in order.
    #[error("the device: {0}")]
    Device(&'static str),
}

impl From<Fault> for DriverError {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault.to_string())
    }
}

/// The sizes and settings that a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Descriptors of each ring, a multiple of 8.
    pub descriptors: u32,
    /// The communication status block is used, if the device has one. The driver asks for
    /// interrupts only by its words.
    pub csb: bool,
    /// With the block: received frames have the header of [`csb::HEADER`] bytes in front, and may
    /// have work left.
    pub offloads: bool,
    /// With the block: frames are found by the heads in it, and received unread. Each must fit one
    /// buffer.
    pub heads: bool,
    /// ITR, in units of 256 ns.
    pub throttle: u32,
    /// RDTR, RADV, TIDV and TADV, in units of 1024 ns.
    pub delays: [u32; 4],
    /// Further bits of RCTL.
    pub receive: u32,
    /// Tags are stripped and inserted.
    pub vlans: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            descriptors: 256,
            csb: false,
            offloads: false,
            heads: false,
            throttle: 0,
            delays: [0; 4],
            receive: 0,
            vlans: false,
        }
    }
}

/// Bytes of each buffer.
pub const BUFFER: usize = 2048;

/// The driver of one device.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// The address in the EEPROM.
    pub mac: [u8; 6],
    /// The transmit ring.
    pub sending: Sending,
    /// The receive ring.
    pub receiving: Receiving,
    options: Options,
    /// The communication status block, if it is in use.
    block: Option<Span>,
    /// The register that tells the device of frames: TDT, or CSBK for a device with the block.
    kick: u32,
    /// The number of descriptors that there were at the last kick; 0 if the device has been awake
    /// since.
    kicked: u64,
    /// The tail that the device was told last.
    told: u32,
}

/// Pieces of one region of memory, one after the other.
struct Pieces {
    memory: Memory,
    next: u64,
    end: u64,
}

impl Pieces {
    /// Returns `len` zeroed bytes at a multiple of 128, pinned.
    fn take(&mut self, len: usize) -> Result<Span, DriverError> {
        let at = self.next.next_multiple_of(128);
        let end = at.saturating_add(len as u64);
        if end > self.end {
            return Err(DriverError::Memory("too small for rings and buffers".into()));
        }
        self.next = end;
        self.memory.write(at, &vec![0; len])?;
        let mut spans = Vec::new();
        self.memory.pin(at, len, Access::Write, &mut spans)?;
        match spans.pop() {
            Some(span) if spans.is_empty() => Ok(span),
            _ => Err(DriverError::Memory("in several regions".into())),
        }
    }
}

/// Returns the bytes of memory that a driver with rings of `descriptors` entries needs.
pub const fn memory_len(descriptors: u32) -> usize {
    2 * descriptors as usize * (DESCRIPTOR + BUFFER) + 4 * 128 + csb::LEN
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets the device and starts it, with rings and buffers in the `len` bytes of `memory` at
    /// `base`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        mut registers: R,
        memory: &Memory,
        (base, len): (u64, u64),
        options: Options,
    ) -> Result<Self, DriverError> {
        let options = Options { heads: options.heads && options.csb, ..options };
        reset(&mut registers)?;
        let mac = read_address(&mut registers)?;
        let end = base.saturating_add(len);
        let mut pieces = Pieces { memory: memory.clone(), next: base, end };
        let ring = |pieces: &mut Pieces| {
            let ring = pieces.take(options.descriptors as usize * DESCRIPTOR)?;
            Ok::<_, DriverError>((ring, pieces.take(options.descriptors as usize * BUFFER)?))
        };
        let (sending, receiving) = (ring(&mut pieces)?, ring(&mut pieces)?);
        let block = if options.csb { Some(pieces.take(csb::LEN)?) } else { None };
        let mut driver = Self {
            registers,
            mac,
            sending: Sending::new(sending, options.descriptors, options.heads),
            receiving: Receiving::new(receiving, options.descriptors, options.heads),
            options,
            block,
            kick: register::TDT,
            kicked: 0,
            told: 0,
        };
        driver.start()?;
        Ok(driver)
    }

    /// Sets up the rings and enables the device.
    fn start(&mut self) -> Result<(), DriverError> {
        let Options { descriptors, throttle, delays, receive, vlans, .. } = self.options;
        let bytes = descriptors * DESCRIPTOR as u32;
        let mode = if vlans { control::VME } else { 0 };
        self.set(register::CTRL, control::FD | control::ASDE | control::SLU | mode)?;
        let [rdtr, radv, tidv, tadv] = delays;
        for (offset, value) in [
            (register::ITR, throttle),
            (register::RDTR, rdtr),
            (register::RADV, radv),
            (register::TIDV, tidv),
            (register::TADV, tadv),
            (register::RXCSUM, rxcsum::IPOFL | rxcsum::TUOFL),
        ] {
            self.set(offset, value)?;
        }
        let (tx, rx) = (self.sending.address(), self.receiving.address());
        for (offset, value) in [
            (register::TDBAL, tx as u32),
            (register::TDBAH, (tx >> 32) as u32),
            (register::TDLEN, bytes),
            (register::TDH, 0),
            (register::TDT, 0),
            (register::RDBAL, rx as u32),
            (register::RDBAH, (rx >> 32) as u32),
            (register::RDLEN, bytes),
            (register::RDH, 0),
            (register::RDT, 0),
        ] {
            self.set(offset, value)?;
        }
        self.sending.restart();
        (self.told, self.kicked) = (0, 0);
        let tail = self.receiving.fill()?;
        self.start_block(tail)?;
        self.set(register::TCTL, tctl::EN)?;
        self.set(register::RCTL, rctl::EN | rctl::BAM | receive)?;
        self.set(register::RDT, tail)?;
        self.set(register::IMS, ENABLED)
    }

    /// Turns the communication status block on, if it is to be used.
    fn start_block(&mut self, tail: u32) -> Result<(), DriverError> {
        let Some(block) = &self.block else { return Ok(()) };
        block.store_u32(csb::RDT, tail)?;
        let at = block.iova();
        self.set(register::CSBAH, (at >> 32) as u32)?;
        let offloads = if self.options.offloads { csb::OFFLOADS } else { 0 };
        self.set(register::CSBAL, at as u32 | csb::ENABLE | offloads)?;
        let low = self.get(register::CSBAL)?;
        if low & csb::ENABLE == 0 {
            return Err(DriverError::Device("it has no communication status block"));
        }
        if low & csb::KICKS != 0 {
            self.kick = register::CSBK;
        }
        Ok(())
    }

    /// Reads a register.
    ///
    /// # Errors
    /// [`DriverError::Access`].
    pub fn get(&mut self, offset: u32) -> Result<u32, DriverError> {
        Ok(self.registers.read32(offset.into())?)
    }

    /// Writes a register.
    ///
    /// # Errors
    /// [`DriverError::Access`].
    pub fn set(&mut self, offset: u32, value: u32) -> Result<(), DriverError> {
        Ok(self.registers.write32(offset.into(), value)?)
    }

    /// Writes a register without waiting for it, as every write of a PCI driver.
    fn post(&mut self, offset: u32, value: u32) -> Result<(), DriverError> {
        Ok(self.registers.post(offset.into(), &value.to_le_bytes())?)
    }

    /// Writes a register and flushes the write by a read of STATUS, as Linux's driver does.
    fn set_flushed(&mut self, offset: u32, value: u32) -> Result<(), DriverError> {
        let (write, status) = (value.to_le_bytes(), register::STATUS.into());
        Ok(self.registers.post_and_read((offset.into(), &write), (status, &mut [0; 4]))?)
    }

    /// Hands the queued descriptors to the device. With the communication status block, a register
    /// is written only if the device sleeps.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn flush(&mut self) -> Result<(), DriverError> {
        let tail = self.sending.tail();
        self.told = tail;
        if let Some(block) = &self.block {
            block.store_u32(csb::TDT, tail)?;
            // Pairs with the device's barrier between its store of the word and its load of the
            // tail.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            if block.load_u32(csb::NEED_TX_KICK)? == 0 {
                self.kicked = 0;
                return Ok(());
            }
            // One kick is enough until the device has come to its tail.
            if self.sending.done(block.load_u32(csb::TDH)?) < self.kicked {
                return Ok(());
            }
            self.kicked = self.sending.filled();
        }
        self.post(self.kick, tail)
    }

    /// Hands the queued descriptors to the device unless it still has some: these will end with an
    /// interrupt, and all that was queued until then goes with one register write (send combining).
    /// The caller calls this again after each interrupt.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn combine(&mut self) -> Result<(), DriverError> {
        let waits = self.told != self.sending.first();
        if waits || self.told == self.sending.tail() {
            return Ok(());
        }
        self.flush()
    }

    /// Takes back the descriptors that the device has done. Returns their number; without the
    /// heads, that of the reports.
    ///
    /// # Errors
    /// [`DriverError`].
    #[inline]
    pub fn clean(&mut self) -> Result<u32, DriverError> {
        match &self.block {
            Some(block) if self.options.heads => self.sending.take_back(block.load_u32(csb::TDH)?),
            _ => self.sending.clean(),
        }
    }

    /// Gives used receive buffers back to the device.
    fn refill(&mut self, tail: u32) -> Result<(), DriverError> {
        match &self.block {
            Some(block) => Ok(block.store_u32(csb::RDT, tail)?),
            None => self.post(register::RDT, tail),
        }
    }

    /// Passes received frames to `take`, up to `budget`, and returns their number. Buffers are
    /// given back in sixteens, and at the end.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn receive(
        &mut self,
        budget: usize,
        mut take: impl FnMut(Received<'_>),
    ) -> Result<usize, DriverError> {
        if self.options.heads {
            return Err(DriverError::Device("with the block's heads, frames are received unread"));
        }
        let mut count = 0;
        while count < budget && self.receiving.next(&mut take)? {
            count += 1;
            self.give_back(rings::REFILL)?;
        }
        self.give_back(1)?;
        Ok(count)
    }

    /// Gives the used buffers back to the device if there are at least so many.
    fn give_back(&mut self, least: u32) -> Result<(), DriverError> {
        if self.receiving.used() < least {
            return Ok(());
        }
        let tail = self.receiving.give_back()?;
        self.refill(tail)
    }

    /// Passes received frames to `take` unread, up to `budget`, and returns their number. Buffers
    /// are given back as in [`Driver::receive`]; with the heads, all at the end.
    ///
    /// # Errors
    /// [`DriverError`], also those of `take`; a frame in several buffers.
    #[inline]
    pub fn receive_unread(
        &mut self,
        budget: usize,
        mut take: impl FnMut(Unread<'_>) -> Result<(), DriverError>,
    ) -> Result<usize, DriverError> {
        let most = match &self.block {
            Some(block) if self.options.heads => {
                self.receiving.arrived(block.load_u32(csb::RDH)?)?.min(budget)
            }
            _ => budget,
        };
        let mut count = 0;
        while count < most && self.receiving.next_unread(&mut take)? {
            count += 1;
            if !self.options.heads {
                self.give_back(rings::REFILL)?;
            }
        }
        self.give_back(1)?;
        Ok(count)
    }

    /// Returns all received frames.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn received(&mut self) -> Result<Vec<Vec<u8>>, DriverError> {
        let mut frames = Vec::new();
        self.receive(usize::MAX, |one| frames.push(one.bytes.to_vec()))?;
        Ok(frames)
    }

    /// Serves an interrupt as Linux's driver does, with frames for `take`. Returns the causes, 0 if
    /// the interrupt was another device's.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn interrupt(&mut self, take: impl FnMut(Received<'_>)) -> Result<u32, DriverError> {
        self.serve(|driver| driver.receive(usize::MAX, take))
    }

    /// Serves an interrupt as [`Driver::interrupt`] does, with unread frames.
    ///
    /// # Errors
    /// [`DriverError`], also those of `take`.
    pub fn interrupt_unread(
        &mut self,
        take: impl FnMut(Unread<'_>) -> Result<(), DriverError>,
    ) -> Result<u32, DriverError> {
        self.serve(|driver| driver.receive_unread(usize::MAX, take))
    }

    fn serve(
        &mut self,
        receive: impl FnOnce(&mut Self) -> Result<usize, DriverError>,
    ) -> Result<u32, DriverError> {
        let causes = self.get(register::ICR)?;
        if causes == 0 {
            return Ok(0);
        }
        self.set_flushed(register::IMC, u32::MAX)?;
        self.clean()?;
        receive(self)?;
        self.set_flushed(register::IMS, ENABLED)?;
        Ok(causes)
    }

    /// Sets whether the driver wants interrupts for sent and for received frames, by the words of
    /// the communication status block; without one, nothing changes.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn want(&mut self, sent: bool, received: bool) -> Result<(), DriverError> {
        if let Some(block) = &self.block {
            block.store_u32(csb::WANT_TX, sent.into())?;
            block.store_u32(csb::WANT_RX, received.into())?;
            // The caller looks at the rings once more, behind this barrier.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
        Ok(())
    }

    /// Returns a word of the communication status block, or `None` without one.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn block(&self, word: usize) -> Result<Option<u32>, DriverError> {
        let Some(block) = &self.block else { return Ok(None) };
        Ok(Some(block.load_u32(word)?))
    }
}

/// Resets the controller and waits until that is over.
fn reset<R: RegisterAccess>(registers: &mut R) -> Result<(), DriverError> {
    registers.write32(register::IMC.into(), u32::MAX)?;
    registers.write32(register::CTRL.into(), control::RST)?;
    while registers.read32(register::CTRL.into())? & control::RST != 0 {
        registers.idle()?;
    }
    Ok(())
}

/// Reads the address from the EEPROM, whose checksum must be right.
fn read_address<R: RegisterAccess>(registers: &mut R) -> Result<[u8; 6], DriverError> {
    let mut words = [0; eeprom::WORDS];
    for (at, word) in words.iter_mut().enumerate() {
        let command = (at as u32) << eerd::ADDRESS | eerd::START;
        registers.write32(register::EERD.into(), command)?;
        let value = registers.read32(register::EERD.into())?;
        if value & eerd::DONE == 0 {
            return Err(DriverError::Device("a read of the EEPROM does not end"));
        }
        *word = (value >> eerd::DATA) as u16;
    }
    if eeprom::checksum(&words) != words[eeprom::CHECKSUM] {
        return Err(DriverError::Device("the EEPROM's checksum is wrong"));
    }
    let [a, b] = words[0].to_le_bytes();
    let [c, d] = words[1].to_le_bytes();
    let [e, f] = words[2].to_le_bytes();
    Ok([a, b, c, d, e, f])
}
