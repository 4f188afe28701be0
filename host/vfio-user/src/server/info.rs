//! The requests that describe the device: `VFIO_USER_DEVICE_GET_INFO` and
//! `VFIO_USER_DEVICE_GET_REGION_INFO`.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use slipway_vfio_user_spec::{
    CapabilityHeader, DeviceFlags, DeviceInfo, RegionFlags, RegionInfo, SparseArea, SparseHeader,
    U16, U32, U64, capability, irq, region,
};
use zerocopy::IntoBytes;

use super::{Answer, Session, exactly, prefix};
use crate::device::Device;
use crate::kept::Attachments;

/// The size of the configuration space in bytes: that of PCI Express.
pub(super) const CONFIG_SIZE: u64 = 4096;

impl Session {
    pub(super) fn device_info(&self, payload: &[u8]) -> Result<Answer, Errno> {
        let request: DeviceInfo = exactly(payload)?;
        let size = size_of::<DeviceInfo>() as u32;
        if request.argsz.get() < size {
            return Err(Errno::INVAL);
        }
        self.live.stamp_first(&self.live.attached_at);
        let reply = DeviceInfo {
            argsz: U32::new(size),
            flags: U32::new((DeviceFlags::RESET | DeviceFlags::PCI).bits()),
            num_regions: U32::new(region::COUNT),
            num_irqs: U32::new(irq::COUNT),
        };
        Ok(Answer::Reply(reply.as_bytes().to_vec()))
    }
}

pub(super) fn region_info(device: &Device, payload: &[u8]) -> Result<Answer, Errno> {
    // Clients such as SPDK send a buffer as large as the reply may be; its content after the
    // request is ignored.
    let (request, _): (RegionInfo, _) = prefix(payload)?;
    let (room, index) = (request.argsz.get() as usize, request.index.get());
    let plain = size_of::<RegionInfo>();
    if room < plain || index >= region::COUNT {
        return Err(Errno::INVAL);
    }
    let size = region_size(device, index);
    let mut flags = RegionFlags::empty();
    if size > 0 {
        flags = RegionFlags::READ | RegionFlags::WRITE;
    }
    let area = mappable(device, index)?;
    let full = plain + area.as_ref().map_or(0, |(bytes, _)| bytes.len());
    let mut reply = RegionInfo {
        argsz: U32::new(full as u32),
        index: request.index,
        size: U64::new(size),
        ..RegionInfo::default()
    };
    let fits = full <= room;
    if area.is_some() {
        flags |= RegionFlags::MMAP | RegionFlags::CAPS;
        // Set even if the capabilities do not fit: QEMU checks it before `argsz` and asks again
        // with more room.
        reply.cap_offset = U32::new(plain as u32);
    }
    reply.flags = U32::new(flags.bits());
    Ok(match area {
        Some((bytes, file)) if fits => {
            let page = Attachments { page: true, ..Attachments::default() };
            Answer::ReplyWith([reply.as_bytes(), &bytes].concat(), page, vec![file])
        }
        _ => Answer::Reply(reply.as_bytes().to_vec()),
    })
}

/// Returns the size of a region in bytes, or zero if the region does not exist.
pub(super) fn region_size(device: &Device, index: u32) -> u64 {
    match index {
        region::CONFIG => CONFIG_SIZE,
        _ => device.bar(index).map_or(0, |bar| bar.size),
    }
}

/// Returns the capability that describes the mappable part of a region, and the descriptor to map.
/// Returns `None` if no part is mappable.
fn mappable(device: &Device, index: u32) -> Result<Option<(Vec<u8>, OwnedFd)>, Errno> {
    let mapped = device.mapped.as_ref().filter(|mapped| u32::from(mapped.bar) == index);
    let Some(mapped) = mapped else { return Ok(None) };
    let header = CapabilityHeader {
        id: U16::new(capability::SPARSE_MMAP),
        version: U16::new(1),
        next: U32::new(0),
    };
    let sparse = SparseHeader { nr_areas: U32::new(1), reserved: U32::new(0) };
    debug_assert_eq!(mapped.page.offset(), mapped.offset);
    let area = SparseArea { offset: U64::new(mapped.offset), size: U64::new(mapped.page.len()) };
    let file = mapped.page.file().map_err(|_| Errno::MFILE)?;
    Ok(Some(([header.as_bytes(), sparse.as_bytes(), area.as_bytes()].concat(), file)))
}
