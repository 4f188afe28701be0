//! I/O descriptors of a region (section *VFIO_USER_DEVICE_GET_REGION_IO_FDS*).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::SealFlags;
use slipway_peer::Foreign;
use slipway_vfio_user_spec as spec;
use spec::{Command, RegionIoFds, SUB_REGION_LEN, SubRegion, SubRegionFlags, io_fd};
use zerocopy::{FromBytes, IntoBytes};

use crate::{Client, ClientError, RegisterWindow};

/// The largest reply that is taken, in bytes: more than a thousand sub-regions.
const ROOM: u32 = 64 << 10;
/// The most registers of a region whose writes raise an eventfd. KVM has room for a thousand in
/// all.
const MAX_NOTIFICATIONS: usize = 256;
/// The largest shadow memory that is mapped, in bytes.
const MAX_SHADOW: u64 = 1 << 20;

/// An eventfd of the server. It is raised by the kernel (`KVM_IOEVENTFD`), or without ever waiting.
#[derive(Clone, Debug)]
pub struct Event(Arc<Foreign>);

impl Event {
    /// Takes a descriptor of the server, and sets it not to wait, for [`Event::raise`].
    fn new(file: Foreign) -> rustix::io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(Arc::new(file)))
    }

    /// Adds one to the eventfd. Returns `false` if it was not raised.
    ///
    /// Never waits in a process that has the means for that
    /// ([`slipway_peer::eventfd::can_raise`]). A VMM in a cage has none of them. There, write(2) to
    /// a descriptor that was set not to wait is what is left: it waits only for a server that has
    /// undone the setting and filled the counter since, and then holds up a CPU whose guest's
    /// memory that server has anyway.
    #[must_use = "a function that was not told does not look"]
    pub fn raise(&self) -> bool {
        if slipway_peer::eventfd::can_raise() {
            return slipway_peer::eventfd::raise(self.0.as_fd());
        }
        // A counter that is full is raised already.
        let written = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
        matches!(written, Ok(_) | Err(rustix::io::Errno::AGAIN))
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A register of a region whose writes need no message: they raise an eventfd, and the value does
/// not matter. A VMM registers it as an ioeventfd of KVM.
#[derive(Clone, Debug)]
pub struct Notification {
    /// Offset of the register in the region, in bytes.
    pub offset: u64,
    /// Bytes that a write must have: 1, 2, 4 or 8, or 0 if that does not matter.
    pub size: u8,
    /// The only value that counts; `None` if any does.
    pub datamatch: Option<u64>,
    /// The eventfd to raise.
    pub event: Event,
}

/// A 32-bit register of a region whose writes need no message: the value is stored in memory that
/// the server shares with the VMM, and then an eventfd is raised.
#[derive(Clone, Debug)]
pub struct Bell {
    /// Offset of the register in the region, in bytes.
    pub offset: u64,
    /// The place of the value in `shadow`, in bytes.
    at: u64,
    shadow: Arc<RegisterWindow>,
    event: Event,
}

impl Bell {
    /// Stores `value` and raises the eventfd. Never waits. Returns `false` if the eventfd could not
    /// be raised.
    #[must_use = "a function that was not told does not look"]
    pub fn ring(&self, value: u32) -> bool {
        // The system call that follows orders the store before the function's look at the value.
        self.shadow.store_u32(self.at, value);
        self.event.raise()
    }

    /// Returns whether both registers raise the same eventfd, by the same descriptor.
    pub(crate) fn has_event_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.event.0, &other.event.0)
    }
}

/// The registers of a region that are written without messages.
#[derive(Clone, Debug, Default)]
pub struct IoFds {
    /// Registers whose value does not matter.
    pub notifications: Vec<Notification>,
    /// Registers whose value is stored.
    pub bells: Vec<Bell>,
}

impl IoFds {
    /// Raises each eventfd once. A server whose eventfd cannot be raised does not look anyway.
    pub(crate) fn raise_all(&self) {
        let mut events: Vec<&Event> = Vec::new();
        let notifications = self.notifications.iter().map(|one| &one.event);
        for event in notifications.chain(self.bells.iter().map(|bell| &bell.event)) {
            if !events.iter().any(|known| Arc::ptr_eq(&known.0, &event.0)) {
                events.push(event);
                let _ = event.raise();
            }
        }
    }
}

impl Client {
    /// Asks for the I/O descriptors of a region of `size` bytes. A server that has none, or that
    /// does not know the request, gives an empty answer. Sub-regions of unknown types and with
    /// unknown flags are left out, and so are those whose shadow memory the server could take away:
    /// their registers are written by messages.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Malformed`] also if a sub-region is not in its region.
    pub fn io_fds(&mut self, index: u32, size: u64) -> Result<IoFds, ClientError> {
        let request = RegionIoFds::request(index, ROOM);
        let reply = match self.call(Command::DeviceGetRegionIoFds, request.as_bytes(), &[]) {
            Err(ClientError::Refused(_)) => return Ok(IoFds::default()),
            reply => reply?,
        };
        if reply.payload.len() > ROOM as usize {
            return Err(ClientError::Malformed("region I/O descriptors: more than was asked for"));
        }
        let files = reply.files.into_iter().map(Event::new).collect::<Result<_, _>>();
        let files = files.map_err(|_| ClientError::Malformed("a descriptor for events"))?;
        ReplyDescriptors { files, shadows: Vec::new(), size }.parse(&reply.payload)
    }
}

/// The descriptors of a reply.
struct ReplyDescriptors {
    files: Vec<Event>,
    /// Shadow memory that is mapped, with the index of its descriptor.
    shadows: Vec<(u32, Arc<RegisterWindow>)>,
    /// The size of the region in bytes.
    size: u64,
}

impl ReplyDescriptors {
    fn parse(mut self, payload: &[u8]) -> Result<IoFds, ClientError> {
        let short = || ClientError::Malformed("region I/O descriptors");
        let (head, rest) = RegionIoFds::read_from_prefix(payload).map_err(|_| short())?;
        let count = head.count.get() as usize;
        let mut found = IoFds::default();
        if count == 0 {
            return Ok(found);
        }
        let stride = rest.len() / count;
        if stride < SUB_REGION_LEN {
            // Also if all of the sub-regions did not fit.
            return Err(short());
        }
        for bytes in rest.chunks_exact(stride).take(count) {
            let one = SubRegion::parse(bytes).ok_or_else(short)?;
            self.add(&one, &mut found)?;
        }
        Ok(found)
    }

    fn add(&mut self, one: &SubRegion, found: &mut IoFds) -> Result<(), ClientError> {
        let (offset, size) = (one.offset.get(), one.size.get());
        let flags = SubRegionFlags::from_bits(one.flags.get());
        let Some(flags) = flags.filter(|flags| !flags.contains(SubRegionFlags::PIO)) else {
            return Ok(());
        };
        let size = match size {
            0 | 1 | 2 | 4 | 8 => size as u8,
            _ => return Err(ClientError::Malformed("width of a sub-region")),
        };
        let end = offset.checked_add(u64::from(size.max(1)));
        if end.is_none_or(|end| end > self.size) {
            return Err(ClientError::Malformed("a sub-region outside of its region"));
        }
        let event = || self.file(one.fd_index.get());
        let datamatch = flags.contains(SubRegionFlags::DATAMATCH).then(|| one.datamatch.get());
        match one.kind.get() {
            io_fd::IOEVENTFD if found.notifications.len() >= MAX_NOTIFICATIONS => {
                return Err(ClientError::Malformed("too many registers with events"));
            }
            io_fd::IOEVENTFD => {
                found.notifications.push(Notification { offset, size, datamatch, event: event()? });
            }
            io_fd::IOEVENTFD_SHADOW if size == 4 && datamatch.is_none() => {
                let (at, event) = (one.shadow_offset.get(), event()?);
                let Some(shadow) = self.shadow(one.shadow_fd_index.get())? else { return Ok(()) };
                if !shadow.holds_u32(at) {
                    return Err(ClientError::Malformed("a register outside of its shadow memory"));
                }
                found.bells.push(Bell { offset, at, shadow, event });
            }
            _ => {}
        }
        Ok(())
    }

    fn file(&self, index: u32) -> Result<Event, ClientError> {
        let file = usize::try_from(index).ok().and_then(|index| self.files.get(index));
        file.cloned().ok_or(ClientError::Malformed("index of a descriptor"))
    }

    /// Maps the shadow memory behind descriptor `index`, once. Returns `None` if it is not sealed
    /// against shrinking (libvfio-user seals none), is no memory, or is no page or more than
    /// [`MAX_SHADOW`].
    fn shadow(&mut self, index: u32) -> Result<Option<Arc<RegisterWindow>>, ClientError> {
        if let Some((_, window)) = self.shadows.iter().find(|(known, _)| *known == index) {
            return Ok(Some(window.clone()));
        }
        let file = self.file(index)?;
        // A file that shrinks would take the page away from this process, which would then die.
        let seals = rustix::fs::fcntl_get_seals(&file);
        let len = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_size);
        let len = u64::try_from(len).unwrap_or(0);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
            || !(1..=MAX_SHADOW).contains(&len)
            || !len.is_multiple_of(4096)
        {
            return Ok(None);
        }
        let window = RegisterWindow::map(&file, 0, 0, len as usize);
        let window = Arc::new(window.map_err(|_| ClientError::Malformed("shadow memory"))?);
        self.shadows.push((index, window.clone()));
        Ok(Some(window))
    }
}
