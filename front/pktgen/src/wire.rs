//! The interfaces that frames are sent to and received from.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use slipway_ethernet_spec::Mac;
use slipway_netlink::{LinkChange, Netlink};
use slipway_port::{Error, Port as MemoryPort};
use slipway_ram::Span;
use slipway_switch::ports::{PacketPort, TapPort};
use slipway_switch::{BURST, Burst, Offload, Pick, Port};

use crate::frame::{LONGEST, SHORTEST};

/// The longest time that a daemon may take to come back.
const RETURN: Duration = Duration::from_secs(30);

/// One end of a link.
pub trait Wire {
    /// Makes and sends up to `count` frames. `make` gets memory for the longest frame that was
    /// announced ([`Wire::reserve`]) and returns the frame's length. Returns the number of frames
    /// made; each is sent now or with the next call. 0: there is no room at present.
    ///
    /// # Errors
    /// If the wire is gone.
    fn send(&mut self, count: usize, make: &mut dyn FnMut(&mut [u8]) -> usize) -> Result<usize>;

    /// Takes up to `limit` frames that have arrived. `look` gets each frame's first bytes (at least
    /// 60 unless the frame is shorter) and its whole length. Returns the number of frames.
    ///
    /// # Errors
    /// If the wire is gone.
    fn receive(&mut self, limit: usize, look: &mut dyn FnMut(&[u8], usize)) -> Result<usize>;

    /// Waits until there may be a frame, for `timeout` at most.
    ///
    /// # Errors
    /// If the wire is gone.
    fn wait(&mut self, timeout: Duration) -> Result<()>;

    /// Sends frames that were made and not sent yet. Returns whether all were sent.
    ///
    /// # Errors
    /// If the wire is gone.
    fn flush(&mut self) -> Result<bool>;

    /// Returns the only source address that is allowed, or `None` if any is.
    fn mac(&self) -> Option<Mac>;

    /// Announces that frames will be up to `longest` bytes long.
    ///
    /// # Errors
    /// If the wire cannot carry them.
    fn reserve(&mut self, longest: usize) -> Result<()>;

    /// Returns the number of frames that were made and that the interface refused, and their bytes.
    fn refused(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Checks whether the other side is still there. Called about once a second.
    ///
    /// # Errors
    /// If the other side is gone for good.
    fn check(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A memory port. If its daemon goes away, it attaches to the next daemon's.
pub struct MemoryWire {
    port: MemoryPort,
    /// Buffer for a frame that is longer than a slot.
    long: Vec<u8>,
}

impl MemoryWire {
    /// Attaches to the port whose socket is at `path`.
    ///
    /// # Errors
    /// The errors of [`MemoryPort::connect`].
    pub fn connect(path: &Path) -> Result<Self> {
        Ok(Self { port: MemoryPort::connect(path)?, long: Vec::new() })
    }

    /// Attaches again after an error of the port, if the error allows it.
    fn recover(&mut self, error: Error) -> Result<()> {
        if !matches!(error, Error::Gone) {
            return Err(error.into());
        }
        eprintln!("slipway: the daemon of the memory port went away; waiting for the next");
        self.port.reconnect(RETURN).context("the memory port did not come back")?;
        eprintln!("slipway: attached again");
        Ok(())
    }
}

impl Wire for MemoryWire {
    fn send(&mut self, count: usize, make: &mut dyn FnMut(&mut [u8]) -> usize) -> Result<usize> {
        if self.long.is_empty() {
            return Ok(self.port.send_with(count, make)?);
        }
        let mut sent = 0;
        while sent < count && self.port.has_room(self.long.len())? {
            let len = make(&mut self.long);
            sent += self.port.send(&[&self.long[..len]])?;
        }
        Ok(sent)
    }

    fn receive(&mut self, limit: usize, look: &mut dyn FnMut(&[u8], usize)) -> Result<usize> {
        let burst = self.port.receive(limit)?;
        for frame in &burst {
            let bytes = frame.bytes();
            look(bytes, if frame.is_whole() { bytes.len() } else { frame.len() });
        }
        Ok(burst.len())
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        match self.port.wait(Some(timeout)) {
            Ok(_) => Ok(()),
            Err(error) => self.recover(error),
        }
    }

    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn mac(&self) -> Option<Mac> {
        self.port.mac().map(Mac)
    }

    fn reserve(&mut self, longest: usize) -> Result<()> {
        let slots = longest.div_ceil(self.port.slot_size());
        if slots > self.port.slots() {
            bail!(
                "frames of {longest} bytes do not fit into the port's ring; `slipway port create \
                 --slots` makes a larger one"
            );
        }
        self.long = if slots > 1 { vec![0; longest] } else { Vec::new() };
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        match self.port.check() {
            Ok(()) => Ok(()),
            Err(error) => self.recover(error),
        }
    }
}

/// A TAP interface or an interface of the host, used as a switch uses it.
pub struct PortWire {
    port: Box<dyn Port>,
    name: String,
    /// Frames that were made, [`PortWire::stride`] bytes apart.
    memory: Span,
    scratch: Vec<u8>,
    /// Frames on their way out; those before `done` were sent.
    out: Burst,
    done: usize,
    into: Burst,
    /// The frames that the interface refused, and their bytes.
    refused: (u64, u64),
}

impl PortWire {
    /// Opens the TAP interface `name`, makes it if need be, and brings it up. An interface that was
    /// made disappears with the wire.
    ///
    /// # Errors
    /// If the kernel does not grant the interface, or another process uses it.
    pub fn tap(name: &str) -> Result<Self> {
        let port =
            TapPort::open(name).with_context(|| format!("cannot have the TAP interface {name}"))?;
        let up = || -> std::io::Result<()> {
            let mut netlink = Netlink::open()?;
            let link = netlink.link(name)?.ok_or(std::io::ErrorKind::NotFound)?;
            netlink.change(link.index, LinkChange { up: Some(true), ..Default::default() })
        };
        up().with_context(|| format!("cannot bring the interface {name} up"))?;
        Ok(Self::new(Box::new(port), name))
    }

    /// Opens the interface `name` of the host.
    ///
    /// # Errors
    /// If there is no such interface, or opening it takes root.
    pub fn interface(name: &str) -> Result<Self> {
        let port = PacketPort::open(name).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => anyhow::anyhow!("{error}"),
            _ => anyhow::anyhow!("cannot use the interface {name}: {error}"),
        })?;
        Ok(Self::new(Box::new(port), name))
    }

    fn new(port: Box<dyn Port>, name: &str) -> Self {
        let (out, into) = (Burst::new(), Burst::new());
        let (memory, name) = (Span::heap(0), name.to_owned());
        let mut wire =
            Self { port, name, memory, scratch: Vec::new(), out, done: 0, into, refused: (0, 0) };
        wire.make_room(SHORTEST);
        wire
    }

    fn make_room(&mut self, longest: usize) {
        self.scratch = vec![0; longest];
        self.memory = Span::heap(BURST * longest.next_multiple_of(64));
    }

    fn stride(&self) -> usize {
        self.scratch.len().next_multiple_of(64)
    }

    /// Sends the frames that were not sent yet. Returns whether all were sent.
    fn deliver(&mut self) -> Result<bool> {
        if !self.port.is_up() {
            bail!("the interface {} was removed", self.name);
        }
        while self.done < self.out.len() {
            let rest = self.done..self.out.len();
            let picks: Vec<Pick> = rest.map(|at| Pick { frame: at as u16, tci: 0 }).collect();
            let delivered = self.port.deliver(&self.out, &picks);
            let gone = (delivered.frames + delivered.refused) as usize;
            // Ports take or refuse frames in order, so these are the first ones.
            let bytes: u64 = picks[..gone].iter().map(|pick| self.out.len_of(*pick) as u64).sum();
            self.refused.0 += u64::from(delivered.refused);
            self.refused.1 += bytes.saturating_sub(delivered.bytes);
            self.done += gone;
            if gone == 0 {
                return Ok(false);
            }
        }
        self.out.clear();
        self.done = 0;
        Ok(true)
    }
}

impl Wire for PortWire {
    fn send(&mut self, count: usize, make: &mut dyn FnMut(&mut [u8]) -> usize) -> Result<usize> {
        if !self.deliver()? {
            return Ok(0);
        }
        let count = count.min(BURST);
        for number in 0..count {
            let len = make(&mut self.scratch);
            let at = number * self.stride();
            // The span is memory of our own, so the write cannot fail.
            let _ = self.memory.write(at, &self.scratch[..len]);
            let _ = self.out.push(&self.memory, at, len, Offload::NONE);
        }
        self.deliver()?;
        Ok(count)
    }

    fn receive(&mut self, limit: usize, look: &mut dyn FnMut(&[u8], usize)) -> Result<usize> {
        self.into.clear();
        self.port.take(&mut self.into, limit.min(BURST));
        for (number, frame) in self.into.frames().iter().enumerate() {
            look(self.into.head(number), frame.len as usize);
        }
        self.port.release();
        if !self.port.is_up() {
            bail!("the interface {} was removed", self.name);
        }
        Ok(self.into.len())
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        let Some(descriptor) = self.port.descriptor().filter(|_| self.port.is_up()) else {
            return Ok(());
        };
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn flush(&mut self) -> Result<bool> {
        self.deliver()
    }

    fn mac(&self) -> Option<Mac> {
        None
    }

    fn reserve(&mut self, longest: usize) -> Result<()> {
        self.make_room(longest.clamp(SHORTEST, LONGEST));
        Ok(())
    }

    fn refused(&self) -> (u64, u64) {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use slipway_switch::{Abilities, Delivered};

    use super::*;
    use crate::{Limits, Plan, Sizes, Vary, source};

    /// A port that refuses frames of more than 100 bytes.
    struct ShortFrames;

    impl Port for ShortFrames {
        fn abilities(&self) -> Abilities {
            Abilities::NONE
        }

        fn is_up(&self) -> bool {
            true
        }

        fn take(&mut self, _: &mut Burst, _: usize) -> bool {
            false
        }

        fn release(&mut self) {}

        fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
            let mut delivered = Delivered::default();
            for pick in picks {
                match burst.len_of(*pick) {
                    101.. => delivered.refused += 1,
                    len => {
                        delivered.frames += 1;
                        delivered.bytes += len as u64;
                    }
                }
            }
            delivered
        }

        fn arm(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn refused_frames_count_neither_as_frames_nor_as_bytes() {
        let mut wire = PortWire::new(Box::new(ShortFrames), "short");
        let plan = Plan {
            to: Mac::local(1),
            from: Some(Mac::local(2)),
            sizes: Sizes::Cycle(vec![60, 300, 100]),
            rate: None,
            burst: 4,
            flows: 1,
            vary: Vary { mac: false, ip: false, port: false },
            id: 7,
        };
        let stop = AtomicBool::new(false);
        let limits = Limits { count: Some(6), time: None, stop: &stop };
        let figures = source(&mut wire, &plan, limits, &mut |_| ()).unwrap();
        assert_eq!((figures.frames, figures.bytes, figures.refused), (4, 320, Some(2)));
        assert_eq!(wire.refused(), (2, 600));
    }
}
