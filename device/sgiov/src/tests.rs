//! Tests of the function with a hostile guest, on heap memory.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::{DmaMap, Lasting, Memory, Permissions, Region};
use slipway_ring::cross::{Arena, Shape};
use slipway_sgiov_spec::function::{
    Addresses, Broken, HOST_OVERFLOW, MESSAGE, Message, PIECE, RUNNING, SIGNALS, TO_HOST, register,
};

use crate::driver::{Direct, Driver, RegisterAccess, start};
use crate::fuzz::guests;
use crate::{Attended, Channel, Device, Parts, Peer};

#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Rig {
    registers: Direct<Device>,
    peer: Peer,
    sink: Arc<FifoSink>,
    bell: Arc<Bell>,
    memory: Memory,
}

const BASE: u64 = PIECE as u64;

impl Rig {
    fn over(memory: Memory) -> Self {
        let (sink, bell) = (FifoSink::new(), Arc::<Bell>::default());
        let interrupt = Interrupt::new(sink.clone(), 0);
        let peer = Waker::from(bell.clone());
        let (device, peer) = Device::new(Parts { memory: memory.clone(), interrupt, peer });
        Self { registers: Direct::new(device), peer, sink, bell, memory }
    }

    fn device(&mut self) -> &mut Device {
        &mut self.registers.function
    }

    fn new(pieces: usize) -> Self {
        Self::over(Memory::heap(PIECE * pieces))
    }

    fn status(&mut self) -> u32 {
        self.registers.read32(register::STATUS).unwrap()
    }

    fn start_at(&mut self, at: u64) -> u32 {
        start(&mut self.registers, at).unwrap()
    }

    fn stop(&mut self) {
        self.registers.write32(register::CONTROL, 0).unwrap();
    }

    /// Returns a rig whose guest has started the function.
    fn started(pieces: usize) -> (Self, Driver, Channel) {
        let mut rig = Self::new(pieces);
        let driver = Driver::new(guests(&rig.memory, BASE)).unwrap();
        assert_eq!(rig.start_at(BASE), RUNNING);
        let mut channel = rig.peer.take().unwrap();
        assert_eq!(channel.attend(), Ok(Attended::On));
        (rig, driver, channel)
    }

    /// Makes an arena at a piece, as the guest does.
    fn arena(&self, at: u64) -> Arena {
        let words = guests(&self.memory, at);
        Arena::within(words, Shape::filling(16, PIECE).unwrap()).unwrap()
    }
}

#[test]
fn registers_say_what_it_is() {
    let mut rig = Rig::new(1);
    let mut bytes = [0; 8];
    rig.registers.read(register::MAGIC, &mut bytes).unwrap();
    assert_eq!(&bytes, b"slipsock");
    rig.registers.write32(register::MEMORY + 4, 5).unwrap();
    rig.registers.write32(register::MEMORY, 7).unwrap();
    rig.registers.read(register::MEMORY, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 5 << 32 | 7);
    rig.registers.read(0x1ff8, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
    let mut config = [0; 4];
    rig.device().config_read(0, &mut config);
    assert_eq!(u32::from_le_bytes(config), 0x10f5_1af4);
    assert!(rig.device().description().pin);
}

#[test]
fn memory_that_cannot_be_is_refused() {
    let mut rig = Rig::new(2);
    for at in [1, 4096, BASE + 8, 2 * BASE, !(BASE - 1), 7 << 40] {
        assert_eq!(rig.start_at(at), Broken::Memory.status(), "{at:#x}");
        assert_eq!(rig.start_at(BASE), Broken::Memory.status(), "broken until it is reset");
        rig.stop();
        assert_eq!(rig.status(), 0);
    }
    assert_eq!(rig.start_at(BASE), Broken::Arena.status(), "nothing there");
    rig.stop();
    rig.arena(BASE);
    assert_eq!(rig.start_at(BASE), Broken::Arena.status(), "of another shape");
    assert!(rig.peer.take().is_none());
}

#[test]
fn memory_of_several_regions_or_of_a_vmm_that_may_take_it_away_is_refused() {
    let mut map = DmaMap::new();
    map.add(0, Region::heap(PIECE / 2)).unwrap();
    map.add(BASE / 2, Region::heap(PIECE / 2)).unwrap();
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BASE).unwrap();
    map.add(BASE, Region::mapped(file.as_fd(), 0, BASE, Permissions::READ_WRITE).unwrap()).unwrap();
    let sealed = Lasting::new("guest", PIECE).unwrap();
    map.add(
        2 * BASE,
        Region::mapped(sealed.file().unwrap(), 0, BASE, Permissions { read: true, write: false })
            .unwrap(),
    )
    .unwrap();
    map.add(
        3 * BASE,
        Region::mapped(sealed.file().unwrap(), 0, BASE, Permissions::READ_WRITE).unwrap(),
    )
    .unwrap();
    let mut rig = Rig::over(map.memory());
    for at in [0, BASE, 2 * BASE] {
        assert_eq!(rig.start_at(at), Broken::Memory.status(), "{at:#x}");
        rig.stop();
    }
    let _driver = Driver::new(sealed).unwrap();
    assert_eq!(rig.start_at(3 * BASE), RUNNING);
    rig.device().reset();
    assert_eq!(rig.status(), 0);
}

#[test]
fn messages_go_both_ways_and_who_sleeps_is_told() {
    let (mut rig, driver, mut channel) = Rig::started(2);
    assert!(channel.sleep(true) && driver.is_to_ring());
    assert!(driver.say(&Message::Hello { version: 1 }));
    assert!(!driver.is_to_ring(), "told already");
    let before = rig.bell.0.load(Ordering::Relaxed);
    rig.registers.write32(register::BELL, 0).unwrap();
    assert_eq!(rig.bell.0.load(Ordering::Relaxed), before + 1);
    assert!(!channel.sleep(true), "there is something to do");
    assert_eq!(channel.hear(), Ok(Some(Message::Hello { version: 1 })));
    assert_eq!(channel.hear(), Ok(None));
    let welcome = Message::Welcome(Addresses { count: 0, ips: [[0; 16]; 4] });
    channel.say(&welcome).unwrap();
    channel.tell();
    assert!(!rig.sink.pin(), "the guest is awake");
    assert_eq!(driver.hear(), Some(welcome));
    driver.sleep();
    channel.raise(3, 4).unwrap();
    channel.tell();
    channel.tell();
    assert!(rig.sink.pin());
    let mut status = [0; 2];
    rig.device().config_read(6, &mut status);
    assert_ne!(status[0] & 8, 0, "Interrupt Status");
    assert_eq!(rig.registers.read32(register::CAUSE), Ok(1));
    assert!(!rig.sink.pin());
    assert_eq!(rig.registers.read32(register::CAUSE), Ok(0));
}

#[test]
fn a_pin_that_is_disabled_waits_and_msix_is_used_when_it_is_on() {
    let (mut rig, mut driver, mut channel) = Rig::started(2);
    rig.device().config_write(4, &[0x06, 0x04]);
    driver.sleep();
    channel.raise(0, 1).unwrap();
    channel.tell();
    assert!(!rig.sink.pin());
    rig.device().config_write(4, &[0x06, 0x00]);
    assert!(rig.sink.pin());
    assert_eq!(driver.signal(), Some((0, 1)));
    // The MSI-X capability, and Enable.
    let mut at = [0];
    rig.device().config_read(0x34, &mut at);
    loop {
        let mut id = [0; 2];
        rig.device().config_read(at[0].into(), &mut id);
        if id[0] == 0x11 {
            break;
        }
        at[0] = id[1];
    }
    rig.device().config_write(u16::from(at[0]) + 2, &[0, 0x80]);
    assert!(!rig.sink.pin());
    driver.sleep();
    channel.raise(0, 2).unwrap();
    channel.tell();
    assert_eq!((rig.sink.take(), rig.sink.pin()), (vec![0], false));
}

#[test]
fn what_the_guest_does_not_read_waits() {
    let (_rig, driver, mut channel) = Rig::started(2);
    for connection in 0..2000 {
        channel.say(&Message::Connected { connection }).unwrap();
    }
    assert!(channel.backlog() > 0);
    let mut next = 0;
    while next < 2000 {
        match driver.hear() {
            Some(message) => {
                assert_eq!(message, Message::Connected { connection: next });
                next += 1;
            }
            None => assert!(channel.flush().unwrap()),
        }
    }
    assert_eq!(channel.backlog(), 0);
}

/// A side that reads no messages, because the other side reads none, sleeps until the other has
/// read.
#[test]
fn a_message_that_is_not_heard_keeps_nobody_awake() {
    let (_rig, driver, mut channel) = Rig::started(2);
    for connection in 0..2000 {
        channel.say(&Message::Connected { connection }).unwrap();
    }
    driver.say(&Message::Hello { version: 1 });
    assert!(!channel.sleep(true) && channel.sleep(false));
    while driver.hear().is_some() {}
    assert!(driver.is_to_ring());
    assert!(!channel.sleep(false), "there is room");
}

#[test]
fn a_message_stream_that_is_spoiled_breaks_the_function() {
    for case in 0..4 {
        let (mut rig, driver, mut channel) = Rig::started(2);
        let inbox = driver.arena.inbox(0, slipway_ring::cross::Side::One);
        let why = match case {
            0 => {
                inbox.tail.store(u64::MAX >> 30, Ordering::Relaxed);
                channel.hear().unwrap_err()
            }
            1 => {
                inbox.head.store(12345, Ordering::Relaxed);
                channel.say(&Message::Ended { connection: 1 }).unwrap_err()
            }
            2 => {
                driver.stream().out.finish();
                channel.hear().unwrap_err()
            }
            _ => {
                driver.write(&[0xff; MESSAGE]);
                channel.hear().unwrap_err()
            }
        };
        let wanted = if case == 3 { Broken::Message } else { Broken::Spoiled };
        assert_eq!(why, wanted, "case {case}");
        channel.break_off(why);
        drop(channel);
        assert_eq!(rig.status(), why.status());
        assert!(rig.sink.pin(), "the guest is told");
        rig.stop();
        assert_eq!(rig.status(), 0);
    }
    // A message that only the machine may send.
    let (_rig, driver, mut channel) = Rig::started(2);
    driver.say(&Message::Ended { connection: 1 });
    assert_eq!(channel.hear(), Err(Broken::Message));
}

#[test]
fn signals_that_overflow_say_so_and_spoiled_ones_break() {
    let (_rig, mut driver, mut channel) = Rig::started(2);
    for stream in 0..SIGNALS as u32 + 5 {
        channel.raise(1, stream).unwrap();
    }
    assert!(driver.overflowed() && !driver.overflowed());
    assert_eq!(std::iter::from_fn(|| driver.signal()).count(), SIGNALS);
    assert!((0..SIGNALS as u32).all(|stream| driver.raise(2, stream)));
    assert!(!driver.raise(2, 0));
    driver.word(HOST_OVERFLOW).store(1, Ordering::Relaxed);
    assert!(channel.overflowed() && !channel.overflowed());
    assert_eq!(channel.signal(), Ok(Some((2, 0))));
    while channel.signal().unwrap().is_some() {}
    driver.word(TO_HOST).store(5, Ordering::Relaxed);
    assert_eq!(channel.signal(), Err(Broken::Spoiled));
}

#[test]
fn arenas_are_checked() {
    let (rig, _driver, mut channel) = Rig::started(5);
    rig.arena(2 * BASE);
    rig.arena(3 * BASE);
    assert_eq!(channel.add_arena(0, 2 * BASE), Ok(()));
    assert_eq!(channel.add_arena(0, 3 * BASE), Err(Broken::Message), "the number is in use");
    assert_eq!(channel.add_arena(64, 3 * BASE), Err(Broken::Message), "no such number");
    assert_eq!(channel.add_arena(1, 2 * BASE), Err(Broken::Arena), "the same memory twice");
    assert_eq!(channel.add_arena(1, BASE), Err(Broken::Arena), "the control memory");
    assert_eq!(channel.add_arena(1, 4 * BASE), Err(Broken::Arena), "nothing there");
    assert_eq!(channel.add_arena(1, 3 * BASE + 4096), Err(Broken::Memory), "not aligned");
    assert_eq!(channel.add_arena(1, 9 * BASE), Err(Broken::Memory), "not there");
    assert_eq!(channel.add_arena(63, 3 * BASE), Ok(()));
    assert_eq!((channel.streams(63), channel.streams(1)), (Some(16), None));
    assert!(channel.arena(63).unwrap().0.is_across_machines());
    assert!(channel.remove_arena(63) && !channel.remove_arena(63));
    assert_eq!(channel.add_arena(1, 3 * BASE), Ok(()));
}

#[test]
fn a_quiesced_function_holds_no_memory_and_goes_on() {
    let mut map = DmaMap::new();
    let ram = Lasting::new("guest", 3 * PIECE).unwrap();
    let region =
        || Region::mapped(ram.file().unwrap(), 0, 3 * BASE, Permissions::READ_WRITE).unwrap();
    map.add(0, region()).unwrap();
    let mut rig = Rig::over(map.memory());
    let (first, rest) = ram.split(PIECE).unwrap();
    let driver = Driver::new(first).unwrap();
    let (second, _) = rest.split(PIECE).unwrap();
    Arena::within(second, Shape::filling(16, PIECE).unwrap()).unwrap();
    assert_eq!(rig.start_at(0), RUNNING);
    // The peer has not taken the channel yet.
    assert!(rig.device().quiesce());
    assert!(map.remove(0, 3 * BASE).unwrap().is_idle());
    map.add(0, region()).unwrap();
    rig.device().poll();
    let mut channel = rig.peer.take().unwrap();
    assert_eq!(channel.attend(), Ok(Attended::On));
    channel.add_arena(0, BASE).unwrap();
    driver.say(&Message::Hello { version: 1 });
    assert_eq!(channel.hear(), Ok(Some(Message::Hello { version: 1 })));
    assert!(!rig.device().quiesce());
    assert_eq!(channel.attend(), Ok(Attended::Suspended));
    assert!(rig.device().quiesce() && channel.arena(0).is_none());
    let removed = map.remove(0, 3 * BASE).unwrap();
    assert!(removed.is_idle(), "nothing refers to the memory");
    assert_eq!(channel.hear(), Ok(None));
    channel.say(&Message::Connected { connection: 4 }).unwrap();
    map.add(0, region()).unwrap();
    rig.device().poll();
    assert_eq!(channel.attend(), Ok(Attended::On));
    assert!(channel.arena(0).is_some() && channel.flush().unwrap());
    assert_eq!(driver.hear(), Some(Message::Connected { connection: 4 }));
    // The guest's memory does not come back.
    rig.device().quiesce();
    assert_eq!(channel.attend(), Ok(Attended::Suspended));
    map.clear();
    rig.device().poll();
    assert_eq!(channel.attend(), Err(Broken::Unmapped));
    drop(channel);
    assert_eq!(rig.status(), Broken::Unmapped.status());
}

#[test]
fn a_reset_waits_for_the_channel_and_nothing_starts_before() {
    let (mut rig, _driver, mut channel) = Rig::started(2);
    rig.stop();
    assert_eq!(rig.status(), RUNNING);
    assert_eq!(rig.start_at(BASE), RUNNING);
    assert!(rig.peer.take().is_none());
    assert_eq!(channel.attend(), Ok(Attended::Over));
    drop(channel);
    assert_eq!(rig.status(), 0);
    assert_eq!(rig.start_at(BASE), RUNNING);
    drop(rig.peer.take().unwrap());
    assert_eq!(rig.status(), Broken::Unserved.status(), "nobody serves it");
}

#[test]
fn a_saved_state_comes_back_without_its_channel() {
    let (mut rig, _driver, channel) = Rig::started(2);
    assert!(!rig.device().quiesce());
    let saved = rig.device().save();
    drop(channel);
    let mut other = Rig::new(2);
    other.device().restore(&saved).unwrap();
    assert_eq!(other.status(), Broken::Unserved.status());
    let mut at = [0; 8];
    other.registers.read(register::MEMORY, &mut at).unwrap();
    assert_eq!(u64::from_le_bytes(at), BASE);
    let text = String::from_utf8(saved).unwrap();
    for bad in [text.replace("sgiov", "other"), text.replace("\"status\":1", "\"status\":9")] {
        assert!(other.device().restore(bad.as_bytes()).is_err(), "{bad}");
        assert_eq!(other.status(), 0);
    }
    assert!(other.device().restore(b"").is_err());
}

#[test]
fn a_driver_that_has_gone_takes_bus_master_away_and_resets_it() {
    let (mut rig, _driver, mut channel) = Rig::started(2);
    rig.device().config_write(4, &[0x06, 0x00]);
    assert_eq!(channel.attend(), Ok(Attended::On));
    rig.device().config_write(4, &[0x02, 0x00]);
    assert_eq!(channel.attend(), Ok(Attended::Over));
    assert_eq!(rig.status(), RUNNING, "until the channel is back");
    drop(channel);
    assert_eq!(rig.status(), 0);
}

#[test]
fn the_cause_says_that_it_is_broken() {
    let (mut rig, _driver, channel) = Rig::started(2);
    channel.break_off(Broken::Message);
    for expected in [3, 2, 2] {
        assert_eq!(rig.registers.read32(register::CAUSE), Ok(expected));
    }
}
