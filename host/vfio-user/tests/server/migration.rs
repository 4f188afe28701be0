//! `VFIO_USER_DEVICE_FEATURE`, `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE`.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_vfio_user::testing::{DONE, MAX_STATE};
use spec::device_state::{ERROR, RESUMING, RUNNING, STOP, STOP_COPY};
use spec::{DeviceFeature, DeviceState, MigrationData, feature};

use super::dma_map::copy;
use crate::common::*;

/// The length of the test function's state in bytes.
const STATE: usize = 0x60;
const STATES: [u32; 5] = [ERROR, STOP, RUNNING, STOP_COPY, RESUMING];

pub fn feature_call(raw: &mut Raw, argsz: usize, flags: u32, data: &[u8]) -> Reply {
    let head = DeviceFeature { argsz: U32::new(argsz as u32), flags: U32::new(flags) };
    raw.call(Command::DeviceFeature, &[head.as_bytes(), data].concat())
}

fn state_call(raw: &mut Raw, operation: u32, state: u32) -> Reply {
    let state = DeviceState { state: U32::new(state), ..Default::default() };
    feature_call(raw, 16, operation | feature::DEVICE_STATE, state.as_bytes())
}

fn state(raw: &mut Raw) -> u32 {
    let reply = feature_call(raw, 16, feature::GET | feature::DEVICE_STATE, &[]).ok();
    let (head, state) = DeviceFeature::read_from_prefix(&reply).unwrap();
    assert_eq!(head.argsz.get(), 16);
    DeviceState::read_from_bytes(state).unwrap().state.get()
}

fn set(raw: &mut Raw, to: u32) -> Result<(), Errno> {
    let reply = state_call(raw, feature::SET, to);
    if reply.header.errno().is_some() {
        return Err(reply.err());
    }
    assert_eq!(reply.ok()[8..12], to.to_le_bytes());
    assert_eq!(state(raw), to);
    Ok(())
}

fn data(size: usize) -> MigrationData {
    MigrationData { argsz: U32::new(8 + size as u32), size: U32::new(size as u32) }
}

fn read(raw: &mut Raw, size: usize) -> Vec<u8> {
    let reply = raw.call(Command::MigDataRead, data(size).as_bytes()).ok();
    let (head, bytes) = MigrationData::read_from_prefix(&reply).unwrap();
    assert_eq!((head.argsz.get() as usize, head.size.get() as usize), (reply.len(), bytes.len()));
    bytes.to_vec()
}

fn write(raw: &mut Raw, bytes: &[u8]) -> Reply {
    raw.call(Command::MigDataWrite, &[data(bytes.len()).as_bytes(), bytes].concat())
}

#[test]
fn a_state_moves_to_another_endpoint() {
    let (first, second) = (serve(), serve());
    let (mut from, mut to) = (first.client(), second.client());
    from.write_u32(0x10, 77);
    set(&mut from, STOP).unwrap();
    set(&mut from, STOP_COPY).unwrap();
    let bytes = [read(&mut from, 16), read(&mut from, 0), read(&mut from, 4096)].concat();
    assert_eq!(bytes.len(), STATE);
    assert!(read(&mut from, 4096).is_empty());
    // Every STOP_COPY has the whole state.
    set(&mut from, STOP).unwrap();
    set(&mut from, STOP_COPY).unwrap();
    assert_eq!(read(&mut from, 4096), bytes);

    set(&mut to, RESUMING).unwrap();
    assert!(write(&mut to, &bytes[..5]).ok().is_empty());
    write(&mut to, &[]).ok();
    write(&mut to, &bytes[5..]).ok();
    to.write_u32(0x10, 5);
    assert_eq!(second.knobs.resets.load(Ordering::SeqCst), 0);
    set(&mut to, RUNNING).unwrap();
    assert_eq!((to.read_u32(0x10), second.knobs.resets.load(Ordering::SeqCst)), (77, 1));
    // The saved function goes on, too.
    set(&mut from, RUNNING).unwrap();
    assert_eq!(from.read_u32(0x10), 77);
}

#[test]
fn a_stopped_function_is_not_polled_and_loses_no_doorbell() {
    for mapped in [false, true] {
        let doorbells = if mapped { DoorbellMode::Mapped } else { DoorbellMode::Trapped };
        let served = serve_with(|config| config.doorbells = doorbells);
        let mut client = Client::connect(&served.path, PATIENCE).unwrap();
        let (guest, interrupt) = (memory(0x2000), event());
        client.map(0, 0x2000, guest.as_fd(), 0, true).unwrap();
        client.route_irqs(spec::irq::MSIX, 0, 1, &[interrupt.as_fd()]).unwrap();
        client.set_device_state(STOP).unwrap();
        let polls = served.knobs.polls.load(Ordering::SeqCst);
        let window = client.window(0, 0x1000).unwrap();
        match &window {
            Some(window) => window.store_u32(0x1000, 1),
            None => client.write(0, 0x1000, &1_u32.to_le_bytes()).unwrap(),
        }
        // Whatever the endpoint does meanwhile, it does with these messages.
        for _ in 0..100 {
            client.write(0, 0x10, &[0; 4]).unwrap();
            served.control.stats();
        }
        assert_eq!(client.device_state().unwrap(), STOP);
        assert_eq!((served.knobs.polls.load(Ordering::SeqCst), count(&interrupt)), (polls, 0));
        client.set_device_state(RUNNING).unwrap();
        eventually("the doorbell is seen", || count(&interrupt) == 1);
    }
}

#[test]
fn memory_and_interrupts_stay_the_connections() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x3000);
    set(&mut raw, STOP).unwrap();
    raw.map(0, 0x3000, guest.as_fd()).ok();
    raw.call(Command::DmaUnmap, dma_unmap(0, 0x3000).as_bytes()).ok();
    raw.map(0, 0x2000, guest.as_fd()).ok();
    set(&mut raw, RESUMING).unwrap();
    write(&mut raw, &[0; STATE]).ok();
    set(&mut raw, RUNNING).unwrap();
    assert_eq!(copy(&mut raw, 0, 0x1000, 4), DONE);
}

/// Returns whether a function in `from` can be brought to `to`: by the arcs of the protocol, with
/// a state that was written whole.
fn is_reachable(from: u32, to: u32) -> bool {
    from != ERROR && to != ERROR
}

/// Connects a client once the last one is gone: a second one at a time is hung up on.
fn next_client(served: &Served) -> Raw {
    eventually("the last client is gone", || served.control.stats().client.is_none());
    served.client()
}

#[test]
fn every_state_leads_to_every_other_one() {
    let served = serve();
    for from in STATES {
        for to in STATES {
            let mut raw = next_client(&served);
            match from {
                // A state that is no such function's.
                ERROR => {
                    set(&mut raw, RESUMING).unwrap();
                    write(&mut raw, b"nonsense").ok();
                    assert_eq!(state_call(&mut raw, feature::SET, STOP).err(), Errno::INVAL);
                }
                from => set(&mut raw, from).unwrap(),
            }
            if from == RESUMING && to != RESUMING {
                write(&mut raw, &[0; STATE]).ok();
            }
            assert_eq!(state(&mut raw), from);
            match set(&mut raw, to) {
                Ok(()) => assert!(is_reachable(from, to), "{from} to {to}"),
                Err(errno) => {
                    assert_eq!(errno, Errno::INVAL);
                    assert!(!is_reachable(from, to), "{from} to {to}");
                    assert_eq!(state(&mut raw), from);
                }
            }
            // From wherever it is, a reset brings it back.
            raw.call(Command::DeviceReset, &[]).ok();
            assert_eq!(state(&mut raw), RUNNING);
            drop(raw);
        }
    }
    // A client may also disconnect in any state, and the next one finds a fresh function.
    for last in STATES.into_iter().filter(|last| *last != ERROR) {
        let mut raw = next_client(&served);
        assert_eq!(state(&mut raw), RUNNING);
        raw.write_u32(0x10, 3);
        set(&mut raw, last).unwrap();
    }
    let mut raw = next_client(&served);
    assert_eq!((state(&mut raw), raw.read_u32(0x10)), (RUNNING, 0));
}

#[test]
fn a_state_that_is_refused_leaves_a_function_that_was_reset() {
    let served = serve();
    let mut raw = served.client();
    for bytes in [&[][..], &[1; STATE - 1], &[1; STATE + 1]] {
        raw.write_u32(0x10, 3);
        set(&mut raw, RESUMING).unwrap();
        write(&mut raw, bytes).ok();
        let next = [STOP, RUNNING, STOP_COPY][bytes.len() % 3];
        assert_eq!(state_call(&mut raw, feature::SET, next).err(), Errno::INVAL);
        assert_eq!((state(&mut raw), raw.read_u32(0x10)), (ERROR, 0));
        assert_eq!(raw.call(Command::MigDataRead, data(8).as_bytes()).err(), Errno::INVAL);
        assert_eq!(write(&mut raw, &[0]).err(), Errno::INVAL);
        raw.call(Command::DeviceReset, &[]).ok();
    }
}

#[test]
fn a_state_without_end_is_given_up() {
    let served = serve();
    let mut raw = served.client();
    set(&mut raw, RESUMING).unwrap();
    write(&mut raw, &[0; MAX_STATE]).ok();
    write(&mut raw, &[]).ok();
    assert_eq!(write(&mut raw, &[0]).err(), Errno::FBIG);
    assert_eq!(state(&mut raw), ERROR);
    raw.call(Command::DeviceReset, &[]).ok();
    set(&mut raw, RESUMING).unwrap();
    assert_eq!(write(&mut raw, &vec![0; 1 << 20]).err(), Errno::FBIG);
    raw.call(Command::DeviceReset, &[]).ok();
    assert!(raw.is_alive());
}

#[test]
fn data_of_a_wrong_length_or_in_a_wrong_state_are_refused() {
    let served = serve();
    let mut raw = served.client();
    for now in [RUNNING, STOP, RESUMING] {
        set(&mut raw, now).unwrap();
        assert_eq!(raw.call(Command::MigDataRead, data(8).as_bytes()).err(), Errno::INVAL);
    }
    for wrong in [&[][..], &[0; 7], &[0; 9], &[0xff; 8], &[8, 0, 0, 0, 1, 0, 0, 0, 5]] {
        assert_eq!(raw.call(Command::MigDataWrite, wrong).err(), Errno::INVAL);
    }
    write(&mut raw, &[0; STATE]).ok();
    set(&mut raw, STOP_COPY).unwrap();
    assert_eq!(write(&mut raw, &[0]).err(), Errno::INVAL);
    let small = MigrationData { argsz: U32::new(15), size: U32::new(8) };
    let (large, most) = (data((1 << 20) + 1), data(u32::MAX as usize - 8));
    for wrong in [small.as_bytes(), large.as_bytes(), most.as_bytes(), &[0; 9], &[0; 7], &[]] {
        assert_eq!(raw.call(Command::MigDataRead, wrong).err(), Errno::INVAL);
    }
    assert_eq!(read(&mut raw, 1 << 20).len(), STATE);
}

#[test]
fn features_that_there_are_not_get_an_errno() {
    let served = serve();
    let mut raw = served.client();
    let (get, set, probe) = (feature::GET, feature::SET, feature::PROBE);
    let flags = feature_call(&mut raw, 16, get | feature::MIGRATION, &[]).ok();
    assert_eq!(flags[8..], 1_u64.to_le_bytes());
    // Features of other devices.
    for number in [0, 3, 4, 5, 0xffff] {
        for operation in [get, set, probe | get, 0] {
            let reply = feature_call(&mut raw, 4096, operation | number, &[0; 24]);
            assert_eq!(reply.err(), Errno::NOTSUP, "{number}");
        }
    }
    for (flags, may) in [
        (probe | feature::MIGRATION, true),
        (probe | get | feature::MIGRATION, true),
        (probe | set | feature::MIGRATION, false),
        (set | feature::MIGRATION, false),
        (probe | get | set | feature::DEVICE_STATE, true),
        (get | set | feature::DEVICE_STATE, false),
        (1 << 19 | get | feature::DEVICE_STATE, false),
        (feature::DEVICE_STATE, false),
    ] {
        let reply = feature_call(&mut raw, 8, flags, &[]);
        match may {
            true => assert_eq!(reply.ok()[4..], flags.to_le_bytes()),
            false => assert_eq!(reply.err(), Errno::INVAL, "{flags:x}"),
        }
    }
    for (argsz, flags, len) in
        [(15, get | 1, 0), (15, get | 2, 0), (15, set | 2, 8), (16, set | 2, 7), (16, set | 2, 9)]
    {
        let data = &[1, 0, 0, 0, 0, 0, 0, 0, 0][..len];
        assert_eq!(feature_call(&mut raw, argsz, flags, data).err(), Errno::INVAL);
    }
    assert_eq!(raw.call(Command::DeviceFeature, &[0; 7]).err(), Errno::INVAL);
    for target in [ERROR, 5, 6, 7, 8, u32::MAX] {
        assert_eq!(state_call(&mut raw, set, target).err(), Errno::INVAL);
    }
    assert_eq!(state(&mut raw), RUNNING);
}

#[test]
fn a_change_waits_until_the_function_is_quiet() {
    let served = serve();
    let mut raw = served.client();
    served.knobs.restless.store(true, Ordering::SeqCst);
    let state = DeviceState { state: U32::new(STOP), ..Default::default() };
    let flags = feature::SET | feature::DEVICE_STATE;
    let head = DeviceFeature { argsz: U32::new(16), flags: U32::new(flags) };
    let payload = [head.as_bytes(), state.as_bytes()].concat();
    let asked = raw.header(Command::DeviceFeature as u16, payload.len());
    raw.send(&[asked.as_bytes(), &payload].concat(), &[]);
    let later = raw.header(Command::RegionRead as u16, 16);
    raw.send(&[later.as_bytes(), access(0, 0, 4).as_bytes()].concat(), &[]);
    eventually("it is asked to be quiet", || served.knobs.quiesces.load(Ordering::SeqCst) > 3);
    served.knobs.restless.store(false, Ordering::SeqCst);
    for expected in [asked, later] {
        let reply = raw.reply();
        assert_eq!(reply.header.id.get(), expected.id.get());
        reply.ok();
    }
}

#[test]
fn a_function_that_does_not_get_quiet_goes_on() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(30));
    let mut raw = served.client();
    served.knobs.restless.store(true, Ordering::SeqCst);
    for to in [STOP, STOP_COPY, RESUMING] {
        assert_eq!(state_call(&mut raw, feature::SET, to).err(), Errno::BUSY);
        assert_eq!(state(&mut raw), RUNNING);
    }
    served.knobs.restless.store(false, Ordering::SeqCst);
    set(&mut raw, STOP).unwrap();
    // A save that is given up leaves the function stopped; a load leaves it in ERROR.
    served.knobs.restless.store(true, Ordering::SeqCst);
    assert_eq!(state_call(&mut raw, feature::SET, STOP_COPY).err(), Errno::BUSY);
    assert_eq!(state(&mut raw), STOP);
    set(&mut raw, RESUMING).unwrap();
    write(&mut raw, &[0; STATE]).ok();
    assert_eq!(state_call(&mut raw, feature::SET, STOP).err(), Errno::BUSY);
    assert_eq!(state(&mut raw), ERROR);
    served.knobs.restless.store(false, Ordering::SeqCst);
    raw.call(Command::DeviceReset, &[]).ok();
    set(&mut raw, STOP).unwrap();
}
