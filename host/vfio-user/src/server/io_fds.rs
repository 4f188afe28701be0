//! Registers that a client writes without messages: `VFIO_USER_DEVICE_GET_REGION_IO_FDS`.
//!
//! A write of a notification register raises an eventfd, and its value is dropped
//! ([`slipway_pci::Notifications`]). A write of a doorbell is stored in a page that the client
//! maps, and raises the eventfd as well ([`crate::DoorbellMode::Rung`]). All registers of a client
//! share one eventfd, which wakes the endpoint: more would have to be watched and counted, and the
//! function looks at everything anyway.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use slipway_vfio_user_spec::{RegionIoFds, SubRegion, U32, U64, io_fd, region};
use zerocopy::IntoBytes;

use super::{Answer, Session, exactly};
use crate::device::{DOORBELL, Device};
use crate::kept::Attachments;

/// The indexes of the reply's descriptors.
const BELL: u32 = 0;
const PAGE: u32 = 1;

impl Session {
    pub(super) fn region_io_fds(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let request: RegionIoFds = exactly(payload)?;
        let (room, index) = (request.argsz.get() as usize, request.index.get());
        let plain = size_of::<RegionIoFds>();
        if room < plain
            || request.flags.get() != 0
            || request.count.get() != 0
            || index >= region::COUNT
        {
            return Err(Errno::INVAL);
        }
        let max_files = self.negotiated.map_or(1, |agreed| agreed.max_files);
        let mut found = notifications(device, index);
        let doorbells = doorbells(device, index, max_files);
        let attachments = Attachments { bell: true, page: !doorbells.is_empty() };
        found.extend(doorbells);
        let full = plain + size_of_val(found.as_slice());
        let reply = RegionIoFds {
            argsz: U32::new(full as u32),
            flags: U32::new(0),
            index: request.index,
            count: U32::new(found.len() as u32),
        };
        if found.is_empty() || full > room || max_files == 0 {
            return Ok(Answer::Reply(reply.as_bytes().to_vec()));
        }
        let bell = self.bell(device)?;
        let page = device.rung.as_ref().filter(|_| attachments.page);
        let files = [bell.try_clone()].into_iter().chain(page.map(|rung| rung.page.file()));
        let files = files.collect::<Result<Vec<OwnedFd>, _>>().map_err(|_| Errno::MFILE)?;
        let payload = [reply.as_bytes(), found.as_bytes()].concat();
        Ok(Answer::ReplyWith(payload, attachments, files))
    }

    /// Returns the eventfd that the client raises. Made when the client first asks for it.
    fn bell(&mut self, device: &mut Device) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(bell) = device.bell() {
            return Ok(bell.clone());
        }
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        if let Some(kept) = &mut self.kept {
            kept.hang(&bell)?;
        }
        device.hang(bell.clone());
        Ok(bell)
    }
}

/// Returns the notification registers of region `index`. Their width does not matter.
fn notifications(device: &Device, index: u32) -> Vec<SubRegion> {
    let found = device.bar(index).and_then(|bar| bar.notifications.as_ref());
    let sub_region = |offset| SubRegion {
        offset: U64::new(offset),
        fd_index: U32::new(BELL),
        kind: U32::new(io_fd::IOEVENTFD),
        ..SubRegion::default()
    };
    found.into_iter().flat_map(|found| found.offsets()).map(sub_region).collect()
}

/// Returns the doorbells of region `index`, if the client takes the page's descriptor beside the
/// eventfd.
fn doorbells(device: &Device, index: u32, max_files: usize) -> Vec<SubRegion> {
    let rung = device.rung.as_ref().filter(|rung| u32::from(rung.bar) == index && max_files > 1);
    let Some(rung) = rung else { return Vec::new() };
    let start = rung.page.offset();
    let sub_region = |(cell, offset): (u64, &u64)| SubRegion {
        offset: U64::new(*offset),
        size: U64::new(DOORBELL),
        fd_index: U32::new(BELL),
        kind: U32::new(io_fd::IOEVENTFD_SHADOW),
        shadow_fd_index: U32::new(PAGE),
        shadow_offset: U64::new(start + cell * DOORBELL),
        ..SubRegion::default()
    };
    (0..).zip(&rung.offsets).map(sub_region).collect()
}
