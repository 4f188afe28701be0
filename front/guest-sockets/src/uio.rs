//! Registers and interrupts of the function, by the kernel's driver for user space.
//!
//! At each interrupt the driver masks the pin (Command, Interrupt Disable) and counts the
//! interrupt. This program does the rest, and clears that bit again in configuration space. When
//! this program ends in any way, the driver clears Bus Master, which tells the machine that the
//! guest's engine is gone.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};
use slipway_sgiov::guest::{Device, Piece};
use slipway_sgiov_spec::function::BAR;

use crate::sysfs::Function;

/// Command register (PCI Local Bus 3.0, 6.2.2).
const COMMAND: u64 = 0x04;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const INTERRUPT_DISABLE: u16 = 1 << 10;

/// The function, in use by this program.
pub struct Uio {
    registers: Registers,
    config: File,
    /// The value of the Command register while interrupts are allowed.
    command: u16,
    /// The device file for interrupts, or `None` without them. `_device` stays open all the same,
    /// since closing it ends the function.
    interrupt: Option<File>,
    _device: File,
}

impl Uio {
    /// Enables the function and maps its registers.
    ///
    /// # Errors
    /// If a file of the function is missing or may not be used.
    pub fn open(function: &Function, uio: &Path, interrupts: bool) -> Result<Self> {
        let folder = function.folder();
        let device = open(uio)?;
        let config = open(&folder.join("config"))?;
        let mut command = [0; 2];
        config.read_exact_at(&mut command, COMMAND).context("configuration space")?;
        let command = u16::from_le_bytes(command) | MEMORY_SPACE | BUS_MASTER;
        let command = command & !INTERRUPT_DISABLE;
        config.write_all_at(&command.to_le_bytes(), COMMAND).context("configuration space")?;
        let registers = Registers::map(&open(&folder.join("resource0"))?)?;
        if interrupts && !function.has_interrupt() {
            tracing::warn!(
                "the kernel has no interrupt for {function}: it is looked at every millisecond, \
                 which costs time of the processor's"
            );
        }
        let interrupt = (interrupts && function.has_interrupt()).then(|| device.try_clone());
        let interrupt = interrupt.transpose()?;
        Ok(Self { registers, config, command, interrupt, _device: device })
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    options.open(path).with_context(|| format!("cannot open {}", path.display()))
}

impl Device for Uio {
    fn read(&mut self, offset: u64) -> u32 {
        self.registers.read(offset)
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.registers.write(offset, value);
    }

    fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        self.interrupt.as_ref().map(AsFd::as_fd)
    }

    fn take_interrupt(&mut self) {
        let Some(device) = &mut self.interrupt else { return };
        let mut count = [0; 4];
        match device.read_exact(&mut count) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                tracing::error!("the function's interrupts cannot be read: {error}");
            }
            _ => {}
        }
    }

    fn unmask(&mut self) {
        if self.interrupt.is_some() {
            // Fails if the function is gone, and then nothing interrupts any more.
            let _ = self.config.write_all_at(&self.command.to_le_bytes(), COMMAND);
        }
    }

    fn piece(&mut self) -> std::io::Result<Piece> {
        crate::pages::piece()
    }
}

/// The registers of BAR 0, mapped.
struct Registers(*mut u32);

// SAFETY: the mapping belongs to this value alone, and any thread may reach it.
unsafe impl Send for Registers {}

impl Registers {
    fn map(file: &File) -> Result<Self> {
        let size = file.metadata()?.len();
        if size < BAR {
            bail!("the function's registers have {size} bytes, {BAR} are needed");
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BAR as usize, prot, MapFlags::SHARED, file, 0)
        };
        Ok(Self(base.context("the function's registers cannot be mapped")?.cast()))
    }

    fn at(&self, offset: u64) -> *mut u32 {
        assert!(offset.is_multiple_of(4) && offset < BAR, "no register");
        self.0.wrapping_add(offset as usize / 4)
    }

    fn read(&self, offset: u64) -> u32 {
        // SAFETY: `at` lies within the mapping and is aligned. Device memory: read once, by one
        // access of 4 bytes.
        u32::from_le(unsafe { self.at(offset).read_volatile() })
    }

    fn write(&self, offset: u64, value: u32) {
        // SAFETY: `at` lies within the mapping and is aligned. Device memory: written once, by one
        // access of 4 bytes.
        unsafe { self.at(offset).write_volatile(value.to_le()) };
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        #[allow(clippy::disallowed_methods, reason = "registers of a device, in the guest")]
        // SAFETY: mapped in `map` with this length, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), BAR as usize) };
    }
}
