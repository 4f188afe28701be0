//! Shows the PCI function behind the socket of any vfio-user server, and accesses it:
//!
//! ```text
//! cargo run -p slipway-vfio-user-client --example inspect -- SOCKET [OPERATION...]
//! ```
//!
//! Prints regions, interrupts and registers that are written without messages, then configuration
//! space in the form that `lspci -F` reads. Then carries out the operations in their order. Numbers
//! are decimal, or hexadecimal with `0x`. Regions are 0 to 5 for BARs, 6 for the ROM, 7 for
//! configuration space.
//!
//! - `read REGION OFFSET BYTES` reads a register of 1 to 8 bytes.
//! - `write REGION OFFSET BYTES VALUE` writes a register of 1 to 8 bytes.
//! - `ring REGION OFFSET VALUE` writes a 32-bit register without a message.
//! - `ram ADDRESS BYTES` gives the function fresh RAM; `dump ADDRESS BYTES` prints the start of it.
//! - `listen` routes the interrupt pin and the MSI-X vectors; `wait SECONDS` waits for the first
//!   interrupt and prints which it is.
//! - `reset` resets the function.
//! - `again` waits until the server has ended, and connects to the next one at the socket.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_vfio_user_client::RemoteFunction;
use slipway_vfio_user_spec::region;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The longest wait for the server.
const PATIENCE: Duration = Duration::from_secs(10);
const REGIONS: [&str; region::COUNT as usize] =
    ["BAR0", "BAR1", "BAR2", "BAR3", "BAR4", "BAR5", "ROM", "config", "VGA"];

fn main() -> Outcome<()> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("usage: inspect SOCKET [OPERATION...]")?;
    let mut session = Session {
        function: RemoteFunction::new(UnixStream::connect(&path)?.into(), PATIENCE)?,
        ram: BTreeMap::new(),
        events: Vec::new(),
    };
    shape(&session.function);
    config_space(&session.function)?;
    while let Some(operation) = words.next() {
        let outcome = session.perform(Path::new(&path), &operation, &mut words);
        outcome.map_err(|error| format!("{operation}: {error}"))?;
    }
    Ok(())
}

fn shape(function: &RemoteFunction) {
    for ((index, name), one) in (0..).zip(REGIONS).zip(function.regions()) {
        if one.size > 0 {
            println!("{name}: {:#x} bytes, {:?}", one.size, one.flags);
        }
        for (start, len) in &one.areas {
            println!("  mappable: {len:#x} bytes at {start:#x}");
        }
        for one in function.notifications(index) {
            println!("  notification: {:#x}, width {}, {:?}", one.offset, one.size, one.datamatch);
        }
    }
    for (name, irq) in [("INTx", function.pin()), ("MSI-X", function.vectors())] {
        println!("{name}: {}, {:?}", irq.count, irq.flags);
    }
}

/// Prints configuration space without its lines of zeros.
fn config_space(function: &RemoteFunction) -> Outcome<()> {
    let size = function.regions()[region::CONFIG as usize].size.min(4096);
    let mut content = vec![0; size as usize];
    for (offset, line) in (0_u64..).step_by(16).zip(content.chunks_mut(16)) {
        function.read(region::CONFIG, offset, line)?;
    }
    println!("00:00.0 a function");
    for (number, line) in content.chunks(16).enumerate() {
        if line.iter().any(|byte| *byte != 0) {
            println!("{:02x}: {}", number * 16, hex(line));
        }
    }
    println!();
    Ok(())
}

/// A connected function, and what it was given.
struct Session {
    function: RemoteFunction,
    /// RAM, by its address.
    ram: BTreeMap<u64, OwnedFd>,
    /// The names of interrupts, and their eventfds.
    events: Vec<(String, OwnedFd)>,
}

impl Session {
    fn perform(
        &mut self,
        path: &Path,
        operation: &str,
        words: &mut impl Iterator<Item = String>,
    ) -> Outcome<()> {
        let mut next = || number(words.next());
        match operation {
            "read" => self.read(next()? as u32, next()?, next()?),
            "write" => self.write(next()? as u32, next()?, next()?, next()?),
            "ring" => match self.function.ring(next()? as u32, next()?, next()? as u32) {
                true => Ok(()),
                false => Err("this register has to be written by a message".into()),
            },
            "ram" => self.give(next()?, next()?),
            "dump" => self.dump(next()?, next()?),
            "listen" => self.listen(),
            "wait" => self.wait(next()?),
            "reset" => Ok(self.function.reset()?),
            "again" => self.again(path),
            _ => Err("there is no such operation".into()),
        }
    }

    fn read(&self, region: u32, offset: u64, width: u64) -> Outcome<()> {
        let mut value = [0; 8];
        let place = value.get_mut(..width as usize).ok_or("1 to 8 bytes")?;
        self.function.read(region, offset, place)?;
        println!("read: {:#x}", u64::from_le_bytes(value));
        Ok(())
    }

    fn write(&self, region: u32, offset: u64, width: u64, value: u64) -> Outcome<()> {
        let bytes = value.to_le_bytes();
        let bytes = bytes.get(..width as usize).ok_or("1 to 8 bytes")?;
        Ok(self.function.write(region, offset, bytes)?)
    }

    fn give(&mut self, address: u64, len: u64) -> Outcome<()> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("ram", flags)?;
        rustix::fs::ftruncate(&file, len)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        self.function.map_ram(address, len, file.as_fd(), 0)?;
        self.ram.insert(address, file);
        Ok(())
    }

    fn dump(&self, address: u64, len: u64) -> Outcome<()> {
        let file = self.ram.get(&address).ok_or("no RAM begins there")?;
        let mut bytes = vec![0; len.min(1 << 20) as usize];
        let count = rustix::io::pread(file, &mut bytes, 0)?;
        for (offset, line) in (address..).step_by(16).zip(bytes[..count].chunks(16)) {
            println!("{offset:08x}: {}", hex(line));
        }
        Ok(())
    }

    fn listen(&mut self) -> Outcome<()> {
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        if self.function.pin().count > 0 {
            let pin = event()?;
            self.function.route_pin(Some(pin.as_fd()))?;
            self.events.push(("INTx".into(), pin));
        }
        for vector in 0..self.function.vectors().count {
            let file = event()?;
            self.function.route(vector, &[file.as_fd()])?;
            self.events.push((format!("MSI-X vector {vector}"), file));
        }
        Ok(())
    }

    fn wait(&self, seconds: u64) -> Outcome<()> {
        let files = self.events.iter().map(|(_, file)| file);
        let mut polled: Vec<_> = files.map(|file| PollFd::new(file, PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: seconds.try_into()?, tv_nsec: 0 };
        if poll(&mut polled, Some(&limit))? == 0 {
            return Err("no interrupt".into());
        }
        for (polled, (name, file)) in polled.iter().zip(&self.events) {
            if !polled.revents().is_empty() {
                rustix::io::read(file, &mut [0; 8])?;
                println!("interrupt: {name}");
            }
        }
        Ok(())
    }

    fn again(&self, path: &Path) -> Outcome<()> {
        println!("waiting for the server to end");
        poll(&mut [PollFd::new(&self.function, PollFlags::IN)], None)?;
        println!("{:?}", self.function.state());
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        println!("connected again: {:?}", self.function.reconnect(socket.into())?);
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

fn number(word: Option<String>) -> Outcome<u64> {
    let word = word.ok_or("a number is missing")?;
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|_| format!("{word} is no number").into())
}
