//! The memory of one sandbox: given, its faults served, taken back.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use slipway_peer::{Bin, Foreign};
use slipway_pool_spec::{Answer, Range, Request, SERVED, Traits, faults};
use slipway_pool_wire::{WireError, receive, send};
use slipway_ram::{GRANULE, LateMemory};
use slipway_reactor::Bell;

use crate::fork::{self, Fork, leave_holes};
use crate::make::{at_home, page_size};
use crate::settle::{map, settle, settle_all};
use crate::shared::Shared;
use crate::shelf::{Left, ShelfPlace};
use crate::userfault::{Continued, Userfault};

/// The most bytes that are mapped for one fault.
const BATCH: u64 = 2 << 20;
/// The time between two looks whether a sandbox whose connection has ended is gone.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// The pause after an error of waiting for faults or of reading them.
const PAUSE: Duration = Duration::from_secs(1);

/// The memory of one sandbox.
pub(crate) struct Lease {
    shared: Arc<Shared>,
    memory: Arc<LateMemory>,
    /// Set if the memory began as a template.
    fork: Option<Fork>,
    /// The size of the memory's pages in bytes.
    page: u64,
    /// Rings when all of the memory was zeroed ahead.
    bell: Arc<Bell>,
    connection: OwnedFd,
    faults: Userfault,
    ranges: Vec<Range>,
    place: Option<ShelfPlace>,
}

/// The result of a poll.
struct Ready {
    /// The events that poll(2) reports for the userfaultfd.
    faults: PollFlags,
    hung_up: bool,
    bell: bool,
}

impl Lease {
    /// Gives the launcher at `connection` the memory that it asks for, and waits until its VMM has
    /// handed its faults over. If that never happens, the memory goes to the kernel: whoever has
    /// the file may have mapped it.
    pub(crate) fn give(
        shared: &Arc<Shared>,
        connection: OwnedFd,
        request: Request,
        bin: &Bin,
    ) -> Result<Self, WireError> {
        let (memory, place) = Self::offer(shared, &connection, request)?;
        let (faults, ranges) = Self::accept_faults(&memory, &connection, bin)?;
        let bell = Arc::new(Bell::new().map_err(WireError::io("making an eventfd"))?);
        if let Some(place) = &place {
            let kept = place.put(&memory, &connection, &faults, &ranges);
            kept.map_err(WireError::io("leaving memory with the keeper"))?;
        }
        leave_holes(&memory, &faults, &ranges);
        let fork = Self::fork(shared, &memory, request);
        let page = page_size(memory.file());
        let shared = Arc::clone(shared);
        let lease = Self { shared, memory, fork, page, bell, connection, faults, ranges, place };
        lease.shared.lend(&lease.memory, &lease.bell);
        match send(lease.connection.as_fd(), &SERVED, &[]) {
            // The VMM may have ended meanwhile, which is noticed later like any other end.
            Ok(()) | Err(WireError::Ended) => Ok(lease),
            Err(error) => {
                lease.shared.unlend(&lease.memory);
                Err(error)
            }
        }
    }

    /// Sends the memory that the launcher asks for, and then its token, for the VMM.
    fn offer(
        shared: &Shared,
        connection: &OwnedFd,
        request: Request,
    ) -> Result<(Arc<LateMemory>, Option<ShelfPlace>), WireError> {
        let (memory, place) = match Self::take_memory(shared, request) {
            Ok(taken) => taken,
            Err(text) => {
                send(connection.as_fd(), &Answer::Refused(text.as_bytes()).encode(), &[])?;
                return Err(WireError::Refused(text));
            }
        };
        // The file is noted before another process has it: a client may pass it to a device of this
        // process, which must find it here and map it behind its gate.
        shared.settings.files.add(&memory);
        let traits = Traits { home: memory.home(), fork: memory.template().is_some() };
        send(connection.as_fd(), &Answer::Given(traits).encode(), &[memory.file()])?;
        let token = token(&memory).map_err(WireError::io("opening memory for its name"))?;
        let files = [token.as_fd(), shared.device()];
        send(connection.as_fd(), &traits.encode_token(), &files)?;
        Ok((memory, place))
    }

    /// Receives the faults of the VMM, and where in its address space the memory is. Waits for
    /// them without a deadline: a VMM may begin late on a busy host, this thread serves nobody
    /// else, and the end of the launcher and of the VMM ends the connection.
    fn accept_faults(
        memory: &LateMemory,
        connection: &OwnedFd,
        bin: &Bin,
    ) -> Result<(Userfault, Vec<Range>), WireError> {
        let (message, [faults]) = receive(connection.as_fd(), bin)?;
        let ranges = faults::decode(&message).ok_or(WireError::Malformed)?;
        let page = page_size(memory.file());
        let is_of_memory = |Range { address, len, offset }: &Range| {
            let is_within = *offset + *len <= memory.len() as u64;
            is_within && [address, len, offset].iter().all(|one| one.is_multiple_of(page))
        };
        if !ranges.iter().all(is_of_memory) {
            return Err(WireError::Malformed);
        }
        let faults = Userfault::of_peer(Foreign::into_owned(faults));
        let faults = faults.map_err(WireError::io("taking a userfaultfd"))?;
        // A descriptor or an address that the kernel refuses here would never tell that the process
        // is gone ([`Lease::is_gone`]): its memory would stay lent for ever.
        let woken = ranges.iter().try_for_each(|range| faults.wake(range.address, range.len));
        woken.map_err(WireError::io("looking at the ranges of a VMM"))?;
        Ok((faults, ranges))
    }

    /// Returns what only memory with a template has.
    fn fork(shared: &Shared, memory: &LateMemory, request: Request) -> Option<Fork> {
        memory.template()?;
        let named = request.template.and_then(|name| shared.templates.get(&name));
        Some(Fork::new(named.as_ref().map_or(&[], |named| &named.ahead)))
    }

    /// Takes memory from the pool, and a place for it at the keeper if there is one. Without a
    /// keeper, or with [`Settings::zero_first`](crate::Settings::zero_first) for memory without a
    /// template, all of it is zeroed, or copied from its template, before this returns. Otherwise
    /// only the parts without pages are the sandbox's at once, since they read as zeros anyway.
    fn take_memory(
        shared: &Shared,
        request: Request,
    ) -> Result<(Arc<LateMemory>, Option<ShelfPlace>), String> {
        let place = match &shared.settings.shelves {
            Some(shelves) => Some(shelves.place().ok_or("the keeper is full")?),
            None => None,
        };
        let memory = shared.take(request)?;
        let zero_first = shared.settings.zero_first && request.template.is_none();
        match place.is_some() && !zero_first {
            true => memory.give_holes(),
            false => settle_all(&memory).map_err(|_| "the host has no memory left")?,
        }
        Ok((memory, place))
    }

    /// Goes on with what a predecessor left.
    pub(crate) fn resume(shared: &Arc<Shared>, left: Left) -> std::io::Result<Self> {
        let shelves = shared.settings.shelves.as_ref();
        let shelves = shelves.ok_or_else(|| std::io::Error::other("there is no keeper"))?;
        let place = shelves.used(left.number);
        if !left.has_faults() {
            // Its VMM was never told to begin: nobody waits, and all of it is freed.
            return Err(std::io::Error::other("its sandbox had not begun"));
        }
        let parts = left.take_apart(&shared.templates);
        let (parts, bell) = match parts.and_then(|parts| Ok((parts, Bell::new()?))) {
            Ok(taken) => taken,
            Err(error) => {
                // The last close of the userfaultfd would show the sandbox what is not zeroed. Its
                // faults wait, and what the keeper holds stays there.
                std::mem::forget(place);
                return Err(error);
            }
        };
        let home = parts.home.filter(|home| shared.topology.cpus(*home).is_some());
        let memory = Arc::new(at_home(parts.memory, home));
        // Pages that the predecessor had not copied ahead are copied when they are needed.
        let fork = memory.template().map(|_| Fork::new(&[]));
        let bell = Arc::new(bell);
        let page = page_size(memory.file());
        // A predecessor of an earlier version left them to the kernel.
        memory.give_holes();
        wake_all(&parts.faults, &parts.ranges);
        shared.settings.files.add(&memory);
        shared.lend(&memory, &bell);
        Ok(Self {
            shared: Arc::clone(shared),
            memory,
            fork,
            page,
            bell,
            connection: parts.connection,
            faults: parts.faults,
            ranges: parts.ranges,
            place: Some(place),
        })
    }

    /// Serves the lease on a thread of its own.
    pub(crate) fn spawn(self) -> std::io::Result<()> {
        std::thread::Builder::new().name("pool-lease".into()).spawn(move || self.serve())?;
        Ok(())
    }

    /// Serves faults until the VMM's process is gone, and takes the memory back.
    pub(crate) fn serve(mut self) {
        let mut fork = self.fork.take();
        let mut hung_up = false;
        loop {
            let more = fork.as_ref().is_some_and(Fork::has_more);
            let served = self.wait(hung_up, more).and_then(|ready| {
                hung_up |= ready.hung_up;
                self.serve_turn(&ready, fork.as_mut(), hung_up)
            });
            if let Err(error) = served {
                tracing::error!(%error, "faults of a sandbox cannot be served");
                std::thread::sleep(PAUSE);
            }
            if hung_up && self.is_gone() {
                return self.take_back();
            }
        }
    }

    /// Does what a poll has found, or copies ahead if there is nothing else to do.
    fn serve_turn(
        &self,
        ready: &Ready,
        fork: Option<&mut Fork>,
        hung_up: bool,
    ) -> std::io::Result<()> {
        if ready.bell {
            self.bell.silence();
            self.release();
        }
        if ready.faults.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            // As when a process that has the userfaultfd, too, has made it block: the kernel says
            // nothing else of it then, and at once.
            self.faults.never_wait()?;
            return Err(std::io::Error::other("poll(2) fails for the userfaultfd"));
        }
        if ready.faults.contains(PollFlags::IN) {
            return self.serve_faults(fork.as_deref());
        }
        if let Some(fork) = fork.filter(|_| !hung_up) {
            let copied = fork::copy_ahead(&self.memory, &self.faults, &self.ranges, fork);
            self.shared.count_copied(copied);
        }
        Ok(())
    }

    /// Waits until there is something to do, for a moment only once the connection has ended, and
    /// not at all if there is `more` to be copied ahead.
    fn wait(&self, hung_up: bool, more: bool) -> std::io::Result<Ready> {
        let mut polled = [
            PollFd::new(&self.faults, PollFlags::IN),
            PollFd::new(&*self.bell, PollFlags::IN),
            PollFd::new(&self.connection, PollFlags::RDHUP),
        ];
        // A connection that has ended would end each poll at once.
        let (polled, limit) = match hung_up {
            true => (&mut polled[..2], Some(&LOOK)),
            false => (&mut polled[..], None),
        };
        let limit = if more && !hung_up { Some(&Timespec::default()) } else { limit };
        match rustix::event::poll(polled, limit) {
            Err(rustix::io::Errno::INTR) => {}
            other => drop(other?),
        }
        let found = |at: usize| polled.get(at).map_or(PollFlags::empty(), PollFd::revents);
        Ok(Ready {
            faults: found(0),
            bell: found(1).contains(PollFlags::IN),
            hung_up: found(2).intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR),
        })
    }

    fn serve_faults(&self, fork: Option<&Fork>) -> std::io::Result<()> {
        for address in self.faults.faults()? {
            self.shared.count_fault();
            let holds = |one: &&Range| one.address <= address && address - one.address < one.len;
            if let Some(range) = self.ranges.iter().find(holds) {
                let at = address - range.address;
                match fork {
                    Some(fork) => fork::serve(&self.memory, &self.faults, (range, at), fork),
                    None => self.serve_fault(range, at),
                }
            }
        }
        Ok(())
    }

    /// Zeroes and maps pages from byte `at` of a range on, up to the end of its block of 2 MiB.
    fn serve_fault(&self, range: &Range, at: u64) {
        let unit = self.page.max(GRANULE as u64);
        // By offsets in the file, since the table's granules are the file's.
        let offset = range.offset + at;
        let start = (offset - offset % unit).max(range.offset);
        let last = (offset - offset % BATCH + BATCH).min(range.offset + range.len);
        let mut end = (offset - offset % unit + unit).min(last);
        let _ = settle(&self.memory, start as usize, (end - start) as usize);
        while end < last {
            let part = unit.min(last - end);
            if self.memory.take(end as usize, part as usize).is_err() {
                break;
            }
            end += part;
        }
        let part = start - range.offset..end - range.offset;
        map(&self.faults, range, part, self.page, |_| ());
    }

    /// Leaves further faults to the kernel: all of the memory is zeroed.
    fn release(&self) {
        if settle_all(&self.memory).is_err() {
            return;
        }
        for range in &self.ranges {
            if let Err(error) = self.faults.unregister(range.address, range.len) {
                tracing::debug!(%error, "memory of a sandbox stays registered");
            }
        }
    }

    /// Returns whether no thread of the VMM's process runs any more: UFFDIO_CONTINUE fails with
    /// ESRCH then. A process that only closed its connection still has the memory.
    fn is_gone(&self) -> bool {
        let Some(range) = self.ranges.first() else { return false };
        // The call below maps this page if the process lives, so its bytes must be final.
        if settle(&self.memory, range.offset as usize, self.page as usize).is_err() {
            return false;
        }
        matches!(self.faults.go_on(range.address, self.page), Ok(Continued::Ended))
    }

    /// Gives the memory back to the pool as soon as nothing in this process refers to it.
    fn take_back(self) {
        let Self { shared, mut memory, place, .. } = self;
        shared.unlend(&memory);
        shared.settings.files.remove(&memory);
        let mut pause = Duration::from_millis(1);
        let (is_urgent, _turn) = loop {
            if let Some(alone) = Arc::get_mut(&mut memory) {
                if alone.template().is_some() || !shared.keeps(alone) {
                    // Its pages go to the kernel with the last of its descriptors.
                    drop(place);
                    return;
                }
                // Recycling makes pages, and what is beyond the pool's limit goes after it.
                let (had_hardware, turn) = (alone.had_hardware(), shared.recycling());
                if let Err(error) = alone.recycle() {
                    tracing::warn!(%error, "memory of a sandbox that is gone is not used again");
                    return;
                }
                break (had_hardware, turn);
            }
            // A request in flight, or an endpoint that has not noticed the end of its client.
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
        };
        // From here on a successor knows nothing of the memory.
        drop(place);
        shared.put(memory, is_urgent);
    }
}

/// Wakes all threads that wait in a fault of these ranges, so that each of them faults again.
///
/// The kernel tells of a fault once: neither poll(2) nor read(2) of the userfaultfd reports a fault
/// that was read before. A predecessor that was killed may have read faults and not served them,
/// and their threads would wait for ever.
fn wake_all(faults: &Userfault, ranges: &[Range]) {
    for range in ranges {
        if let Err(error) = faults.wake(range.address, range.len) {
            tracing::warn!(%error, "faults that a predecessor had read may wait");
        }
    }
}

/// Opens the file for no access: it can be neither read, nor written, nor mapped. A write(2) would
/// reach a granule whose user never faulted, which counts as zeros for the next user.
fn token(memory: &LateMemory) -> std::io::Result<OwnedFd> {
    // The access mode 3 of Linux (open(2)) needs the right to read and write, and gives neither.
    let neither = OFlags::from_bits_retain(3);
    let path = format!("/proc/self/fd/{}", memory.file().as_raw_fd());
    Ok(rustix::fs::open(path, neither | OFlags::CLOEXEC, Mode::empty())?)
}
