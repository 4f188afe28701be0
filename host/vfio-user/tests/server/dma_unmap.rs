use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_vfio_user::testing::{DONE, FAULT};

use super::dma_map::copy;
use crate::common::*;

#[test]
fn what_is_unmapped_faults_and_can_be_mapped_again() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x2000);
    for _ in 0..3 {
        raw.map(0, 0x2000, guest.as_fd()).ok();
        assert_eq!(copy(&mut raw, 0, 0x1000, 8), DONE);
        let request = dma_unmap(0, 0x2000);
        let reply = raw.call(Command::DmaUnmap, request.as_bytes()).ok();
        assert_eq!(reply, request.as_bytes(), "the request is echoed");
        assert_eq!(copy(&mut raw, 0, 0x1000, 8), FAULT);
    }
    assert!(served.control.stats().regions.is_empty());
}

/// SPDK unmaps with the descriptor that it mapped with.
#[test]
fn a_descriptor_that_comes_along_is_closed() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x1000);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    raw.map(0, 0x1000, guest.as_fd()).ok();
    let request = dma_unmap(0, 0x1000);
    raw.call_with(Command::DmaUnmap, request.as_bytes(), &[writer.as_fd()]).ok();
    assert!(served.control.stats().regions.is_empty());
    drop(writer);
    assert_eq!(rustix::io::read(&reader, &mut [0]).unwrap(), 0, "the server kept it");
}

#[test]
fn everything_at_once() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x1000);
    for iova in [0, 0x1000, 0x8000] {
        raw.map(iova, 0x1000, guest.as_fd()).ok();
    }
    let mut request = dma_unmap(0, 0);
    request.flags = U32::new(2);
    raw.call(Command::DmaUnmap, request.as_bytes()).ok();
    assert!(served.control.stats().regions.is_empty());
    request.size = U64::new(0x1000);
    assert_eq!(raw.call(Command::DmaUnmap, request.as_bytes()).err(), Errno::INVAL);
    request.size = U64::new(0);
    raw.call(Command::DmaUnmap, request.as_bytes()).ok();
}

#[test]
fn bad_requests_are_refused() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x4000);
    raw.map(0x1000, 0x4000, guest.as_fd()).ok();
    for (iova, len) in [(0, 0x1000), (0x1000, 0x1000), (0x2000, 0x3000), (0x1000, 0x8000), (0, 0)] {
        let reply = raw.call(Command::DmaUnmap, dma_unmap(iova, len).as_bytes());
        assert_eq!(reply.err(), Errno::NOENT);
    }
    let mut dirty = dma_unmap(0x1000, 0x4000);
    dirty.flags = U32::new(1);
    let with_bitmap = [dirty.as_bytes(), &[0; 16]].concat();
    assert_eq!(raw.call(Command::DmaUnmap, &with_bitmap).err(), Errno::NOTSUP);
    assert_eq!(raw.call(Command::DmaUnmap, dirty.as_bytes()).err(), Errno::NOTSUP);
    let mut unknown = dma_unmap(0x1000, 0x4000);
    unknown.flags = U32::new(4);
    assert_eq!(raw.call(Command::DmaUnmap, unknown.as_bytes()).err(), Errno::INVAL);
    let mut small = dma_unmap(0x1000, 0x4000);
    small.argsz = U32::new(23);
    assert_eq!(raw.call(Command::DmaUnmap, small.as_bytes()).err(), Errno::INVAL);
    for bad in [&[0; 23][..], &[0; 25], &[]] {
        assert_eq!(raw.call(Command::DmaUnmap, bad).err(), Errno::INVAL);
    }
    assert_eq!(served.control.stats().regions.len(), 1);
}

#[test]
fn the_reply_waits_until_the_function_is_quiet() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x1000);
    raw.map(0, 0x1000, guest.as_fd()).ok();
    served.knobs.restless.store(true, Ordering::SeqCst);
    let header = raw.header(Command::DmaUnmap as u16, 24);
    raw.send(&[header.as_bytes(), dma_unmap(0, 0x1000).as_bytes()].concat(), &[]);
    // A later request waits behind the unmap.
    let later = raw.header(Command::RegionRead as u16, 16);
    raw.send(&[later.as_bytes(), access(0, 0, 4).as_bytes()].concat(), &[]);
    eventually("the request is taken", || served.control.stats().messages >= 3);
    assert_eq!(served.control.stats().regions.len(), 1);
    served.knobs.restless.store(false, Ordering::SeqCst);
    let reply = raw.reply();
    assert_eq!(reply.header.id.get(), header.id.get());
    reply.ok();
    assert_eq!(raw.reply().header.id.get(), later.id.get());
    assert!(served.control.stats().regions.is_empty());
}

#[test]
fn a_function_that_does_not_get_quiet_costs_an_error_not_the_connection() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(30));
    let mut raw = served.client();
    let guest = memory(0x1000);
    raw.map(0, 0x1000, guest.as_fd()).ok();
    served.knobs.restless.store(true, Ordering::SeqCst);
    let reply = raw.call(Command::DmaUnmap, dma_unmap(0, 0x1000).as_bytes());
    assert_eq!(reply.err(), Errno::BUSY);
    assert_eq!(served.control.stats().regions.len(), 1, "nothing has changed");
    let again = raw.call(Command::DmaUnmap, dma_unmap(0, 0x1000).as_bytes());
    assert_eq!(again.err(), Errno::BUSY);
    served.knobs.restless.store(false, Ordering::SeqCst);
    raw.call(Command::DmaUnmap, dma_unmap(0, 0x1000).as_bytes()).ok();
}

#[test]
fn a_client_that_goes_while_it_waits_is_cleared_away() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(100));
    let mut raw = served.client();
    let guest = memory(0x1000);
    raw.map(0, 0x1000, guest.as_fd()).ok();
    served.knobs.restless.store(true, Ordering::SeqCst);
    let header = raw.header(Command::DmaUnmap as u16, 24);
    raw.send(&[header.as_bytes(), dma_unmap(0, 0x1000).as_bytes()].concat(), &[]);
    drop(raw);
    eventually("cleared away", || served.control.stats().regions.is_empty());
    assert!(served.client().is_alive());
}
