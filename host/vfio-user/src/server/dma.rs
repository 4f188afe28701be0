//! Client memory: `VFIO_USER_DMA_MAP` and `VFIO_USER_DMA_UNMAP`.

use std::os::fd::AsFd;
use std::time::Instant;

use rustix::io::Errno;
use slipway_peer::Foreign;
use slipway_ram::{MapError, Permissions, Region, Removed};
use slipway_vfio_user_spec::{DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags};
use zerocopy::IntoBytes;

use super::{Answer, REGIONS_PER_COST, Session, Waiting, exactly};
use crate::channel::RemoteMemory;
use crate::config::FileRole;
use crate::device::Device;
use crate::stats::add;
use crate::version::PAGE_SIZE;
use crate::{Config, MappedRange, MemoryFile};

/// A region without a descriptor, which is reached by messages only.
#[derive(Clone, Copy)]
pub(super) struct RemoteMap {
    iova: u64,
    len: u64,
    permissions: Permissions,
}

/// An unmap in progress.
pub(super) struct Unmap {
    request: DmaUnmap,
    /// The regions that were removed, once the function was quiet.
    removed: Option<Vec<Removed>>,
}

impl Session {
    pub(super) fn dma_map(
        &mut self,
        device: &mut Device,
        payload: &[u8],
        mut files: Vec<Foreign>,
    ) -> Result<Answer, Errno> {
        let request: DmaMap = exactly(payload)?;
        let permissions = check_map(&request, files.len())?;
        match files.pop() {
            Some(file) => self.map_file(device, &request, permissions, &file),
            None => {
                let (iova, len) = (request.address.get(), request.size.get());
                self.map_remote(device, RemoteMap { iova, len, permissions })
            }
        }
    }

    /// Adds message-only memory, or has a thread of its own continue with the session if the
    /// accesses to that memory may wait.
    fn map_remote(&mut self, device: &mut Device, map: RemoteMap) -> Result<Answer, Errno> {
        let large = map.len > self.config.remote_threshold;
        let moves = map.permissions.write && large && !self.private;
        if moves && (self.kept.is_some() || device.has_lanes || device.hardware.is_some()) {
            // On a thread of its own, a successor would not find the session; nor would its lanes
            // move there. Hardware cannot send messages.
            return Err(Errno::NOTSUP);
        }
        if moves {
            return Ok(Answer::Later(Waiting::Thread(map)));
        }
        self.add_remote(device, map).map(|()| Answer::Reply(Vec::new()))
    }

    /// Maps memory of a file. After an error, the keeper does not have the file either.
    fn map_file(
        &mut self,
        device: &mut Device,
        request: &DmaMap,
        permissions: Permissions,
        file: &Foreign,
    ) -> Result<Answer, Errno> {
        let started = Instant::now();
        let (iova, len) = (request.address.get(), request.size.get());
        let total = self.mapped_bytes.checked_add(len).ok_or(Errno::NOMEM)?;
        if total > self.config.max_dma_bytes {
            return Err(Errno::NOMEM);
        }
        let offset = request.offset.get();
        check_file(file, offset + len, permissions, &self.config)
            .inspect_err(|_| add(&self.live.refused_files, 1))?;
        let came = (file.as_fd(), self.late_added);
        let region = self.config.map(came, (offset, len), permissions, &device.bin);
        let region = region.map_err(|error| errno(&error))?;
        let slot = self.kept.as_mut().map(|kept| kept.put_region(file)).transpose()?;
        let given = region.clone();
        self.add(device, iova, region).inspect_err(|_| {
            if let (Some(kept), Some(slot)) = (&self.kept, slot) {
                kept.clear_region(slot);
            }
        })?;
        self.give(device, (iova, &given), permissions, (file, offset))?;
        if let Some(kept) = &mut self.kept {
            kept.region_added((iova, len, offset), permissions, slot);
        }
        self.mapped_bytes = total;
        let spent = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        add(&self.live.dma_map_ns, spent);
        Ok(Answer::Reply(Vec::new()))
    }

    /// Lets the hardware, if there is any, reach a region that was added. After an error, the
    /// region is not mapped any more.
    fn give(
        &mut self,
        device: &mut Device,
        (iova, region): (u64, &Region),
        permissions: Permissions,
        (file, offset): (&Foreign, u64),
    ) -> Result<(), Errno> {
        let Some(hardware) = &mut device.hardware else { return Ok(()) };
        let (len, file) = (region.len(), (file.as_fd(), offset));
        let live = &self.live;
        let given = region.give_to_hardware().ok_or(Errno::NOMEM).and_then(|given| {
            add(&live.zeroed_for_hardware, given.written);
            let address = given.address;
            hardware.map(&MappedRange { iova, len, permissions, address, file })
        });
        if given.is_err() {
            let _ = device.map.remove(iova, len);
            self.cost += self.live.mapped(&device.map) / REGIONS_PER_COST;
        }
        given
    }

    /// Adds message-only memory. Accesses to it fault where they may not wait (see
    /// [`crate::channel`]).
    pub(super) fn add_remote(&mut self, device: &mut Device, map: RemoteMap) -> Result<(), Errno> {
        let remote = std::sync::Arc::new(RemoteMemory(self.channel.clone()));
        self.add(device, map.iova, Region::remote(remote, map.len, map.permissions))?;
        if let Some(kept) = &mut self.kept {
            kept.region_added((map.iova, map.len, 0), map.permissions, None);
        }
        Ok(())
    }

    fn add(&mut self, device: &mut Device, iova: u64, region: Region) -> Result<(), Errno> {
        device.map.add(iova, region).map_err(|error| match error {
            MapError::BadRange => Errno::INVAL,
            MapError::Overlap => Errno::EXIST,
            MapError::TooMany => Errno::NOSPC,
            MapError::NotMapped => Errno::NOENT,
        })?;
        self.cost += self.live.mapped(&device.map) / REGIONS_PER_COST;
        self.live.stamp_dma_map();
        Ok(())
    }

    pub(super) fn dma_unmap(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        // The flag comes with a longer request; report that it is not supported, not that it is
        // malformed.
        let (request, rest): (DmaUnmap, _) = super::prefix(payload)?;
        let flags = DmaUnmapFlags::from_bits(request.flags.get()).ok_or(Errno::INVAL)?;
        if flags.contains(DmaUnmapFlags::GET_DIRTY_BITMAP) {
            return Err(Errno::NOTSUP);
        }
        let (iova, len) = (request.address.get(), request.size.get());
        if !rest.is_empty() || (request.argsz.get() as usize) < size_of::<DmaUnmap>() {
            return Err(Errno::INVAL);
        }
        if flags.contains(DmaUnmapFlags::ALL) {
            if iova != 0 || len != 0 {
                return Err(Errno::INVAL);
            }
        } else {
            let found = device.map.region_at(iova);
            let exact = found.is_some_and(|(start, region)| start == iova && region.len() == len);
            exact.then_some(()).ok_or(Errno::NOENT)?;
        }
        self.resume_unmap(device, Unmap { request, removed: None }, false)
    }

    /// Continues an unmap: waits until the function is quiet, removes the regions, and waits until
    /// nothing refers to them.
    ///
    /// The addresses are unmapped later, on another thread: the reply means that no access reaches
    /// the memory any more. At the deadline, an unmap that has not removed any region has changed
    /// nothing. An unmap that has removed a region leaves it unmapped and replies with an error,
    /// since the function still holds the memory.
    pub(super) fn resume_unmap(
        &mut self,
        device: &mut Device,
        mut unmap: Unmap,
        expired: bool,
    ) -> Result<Answer, Errno> {
        if unmap.removed.is_none() && device.function.quiesce() {
            let removed = self.remove(device, &unmap.request);
            unmap.removed = Some(removed.inspect_err(|_| device.pace.kick())?);
        }
        let idle = |removed: &Vec<Removed>| removed.iter().all(Removed::is_idle);
        match &unmap.removed {
            Some(removed) if idle(removed) => {
                self.stuck = false;
                device.pace.kick();
                Ok(Answer::Reply(unmap.request.as_bytes().to_vec()))
            }
            _ if expired => {
                self.stuck = true;
                device.pace.kick();
                Err(Errno::BUSY)
            }
            _ => Ok(Answer::Later(Waiting::Unmap(unmap))),
        }
    }

    /// Removes the regions that a request names. Hardware may refuse to let go of one: that region
    /// and those after it stay mapped, so that their memory is not another's while the hardware may
    /// reach it, and the client can ask again. The regions before it are removed.
    fn remove(&mut self, device: &mut Device, request: &DmaUnmap) -> Result<Vec<Removed>, Errno> {
        let (iova, len) = (request.address.get(), request.size.get());
        let mut mapped: Vec<(u64, u64)> = device
            .map
            .regions()
            .iter()
            .filter(|(start, region)| !region.is_remote() && (len == 0 || *start == iova))
            .map(|(start, region)| (*start, region.len()))
            .collect();
        let mut unmapped = Ok(());
        if let Some(hardware) = &mut device.hardware {
            let let_go = mapped.iter().take_while(|(start, len)| {
                unmapped = hardware.unmap(*start, *len);
                unmapped.is_ok()
            });
            let let_go = let_go.count();
            mapped.truncate(let_go);
        }
        let gone: u64 = mapped.iter().map(|(_, len)| len).sum();
        let removed = match (unmapped, len) {
            (Err(_), _) => {
                let removed = mapped.iter().map(|(start, len)| device.map.remove(*start, *len));
                removed.filter_map(Result::ok).collect()
            }
            (Ok(()), 0) => device.map.clear(),
            (Ok(()), _) => vec![device.map.remove(iova, len).map_err(|_| Errno::NOENT)?],
        };
        if let Some(kept) = &mut self.kept {
            kept.regions_removed(&device.map);
        }
        self.mapped_bytes = self.mapped_bytes.saturating_sub(gone);
        self.cost += self.live.mapped(&device.map) / REGIONS_PER_COST;
        unmapped.map(|()| removed)
    }
}

fn check_map(request: &DmaMap, files: usize) -> Result<Permissions, Errno> {
    let flags = DmaMapFlags::from_bits(request.flags.get()).ok_or(Errno::INVAL)?;
    let permissions = Permissions {
        read: flags.contains(DmaMapFlags::READ),
        write: flags.contains(DmaMapFlags::WRITE),
    };
    let (iova, len, offset) = (request.address.get(), request.size.get(), request.offset.get());
    // A descriptor that allows file I/O only, not mapping, would make accesses block.
    let file_only = flags.contains(DmaMapFlags::FILE_IO) && !flags.contains(DmaMapFlags::MMAP);
    if file_only && files > 0 {
        return Err(Errno::NOTSUP);
    }
    let aligned = [iova, len, offset].iter().all(|value| value.is_multiple_of(PAGE_SIZE));
    let sound = (request.argsz.get() as usize) >= size_of::<DmaMap>()
        && (permissions.read || permissions.write)
        && files <= 1
        && !(flags.contains(DmaMapFlags::MMAP) && files == 0)
        && len > 0
        && aligned
        && iova.checked_add(len).is_some()
        && offset.checked_add(len).is_some();
    sound.then_some(permissions).ok_or(Errno::INVAL)
}

/// Checks that `file` is memory and long enough for a map that ends at `end`.
///
/// An access to any other kind of file could wait for a disk, a network or a process of the
/// client's (FUSE), and so could fstat(2). An access past the end of a file faults. A file of huge
/// pages grows instead, by pages that the client does not see: SPDK's initiator maps many such
/// files by the descriptor of the first one, unless it is told to use a single file.
fn check_file(
    file: &Foreign,
    end: u64,
    permissions: Permissions,
    config: &Config,
) -> Result<(), Errno> {
    if !slipway_peer::is_memory_file(file) {
        return Err(Errno::INVAL);
    }
    let status = rustix::fs::fstat(file)?;
    let this = MemoryFile { device: status.st_dev, inode: status.st_ino };
    if config.role_of(this, permissions) == FileRole::Refused {
        return Err(Errno::ACCESS);
    }
    let size = u64::try_from(status.st_size).unwrap_or(0);
    // The rest of the last page is mapped, whatever the file's size.
    let fits = end <= size.next_multiple_of(PAGE_SIZE);
    fits.then_some(()).ok_or(Errno::INVAL)
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::INVAL)
}
