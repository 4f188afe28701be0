//! The client of the published Rust crate, as a second opinion on the protocol.

use std::os::fd::AsRawFd;

use slipway_vfio_user::testing::{DONE, ID, VECTORS};

use crate::common::*;

fn drive(served: &Served) -> (vfio_user::Client, std::os::fd::OwnedFd) {
    let mut client = vfio_user::Client::new(&served.path).unwrap();
    let guest = memory(0x2000);
    pwrite(&guest, 0, b"second opinion");
    client.dma_map(0, 0x10_0000, 0x2000, guest.as_raw_fd()).unwrap();
    let mut id = [0; 4];
    client.region_read(0, 0, &mut id).unwrap();
    assert_eq!(u32::from_le_bytes(id), ID);
    client.region_write(0, 0x40, &0x10_0000u64.to_le_bytes()).unwrap();
    client.region_write(0, 0x48, &0x10_1000u64.to_le_bytes()).unwrap();
    client.region_write(0, 0x50, &14u32.to_le_bytes()).unwrap();
    client.region_write(0, 0x54, &1u32.to_le_bytes()).unwrap();
    let mut status = [0; 4];
    client.region_read(0, 0x54, &mut status).unwrap();
    assert_eq!(u32::from_le_bytes(status), DONE);
    assert_eq!(pread(&guest, 0x1000, 14), b"second opinion");
    (client, guest)
}

#[test]
fn it_drives_the_device() {
    let served = serve();
    let (mut client, _guest) = drive(&served);
    assert_eq!(client.region(spec::region::CONFIG).unwrap().size, 4096);
    let irq = client.get_irq_info(spec::irq::MSIX).unwrap();
    assert_eq!(irq.count, u32::from(VECTORS));
    let file = event();
    let flags = spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::TRIGGER;
    client.set_irqs(spec::irq::MSIX, flags.bits(), 1, 1, &[file.as_raw_fd()]).unwrap();
    client.region_write(0, 0x58, &1u32.to_le_bytes()).unwrap();
    assert_eq!(count(&file), 1);
    client.reset().unwrap();
    client.dma_unmap(0x10_0000, 0x2000).unwrap();
    client.shutdown().unwrap();
    assert_eq!(served.control.stats().errors, []);
}

#[test]
fn it_finds_the_mapped_doorbells() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Mapped);
    let (client, _guest) = drive(&served);
    let region = client.region(0).unwrap();
    assert_eq!(region.sparse_areas.len(), 1);
    assert_eq!((region.sparse_areas[0].offset, region.sparse_areas[0].size), (0x1000, 0x1000));
    assert!(region.file_offset.is_some());
}
