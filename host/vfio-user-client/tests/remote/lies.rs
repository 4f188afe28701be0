//! Servers that lie, leave and fall silent: each breaks its own function, within a deadline.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use slipway_vfio_user_client::{ConnectionState, FunctionError, RemoteFunction};
use slipway_vfio_user_spec::{self as spec, Command, Header, U16, U32, U64, io_fd};
use zerocopy::{FromBytes, IntoBytes};

use crate::common::*;
use crate::liar::*;

/// Patience for tests in which the server falls silent.
const SHORT: Duration = Duration::from_millis(200);

/// Tries again until it succeeds. On a busy machine, an honest server may not answer within
/// [`SHORT`].
fn patient<T>(mut attempt: impl FnMut() -> Result<T, FunctionError>) -> T {
    for _ in 0..100 {
        if let Ok(outcome) = attempt() {
            return outcome;
        }
    }
    attempt().unwrap()
}

/// Connects to a server that is honest until the first access to region 0, and then does what
/// `spoil` says.
fn later(
    command: Command,
    patience: Duration,
    spoil: impl FnMut(&Header, &[u8]) -> Act + Send + 'static,
) -> RemoteFunction {
    let spoil = Arc::new(Mutex::new(spoil));
    patient(|| {
        let spoil = spoil.clone();
        liar(command, patience, move |header, payload| {
            let region = payload.get(8..12).map(|bytes| bytes[0]);
            // The identifiers in configuration space are read while connecting.
            if region != Some(0) {
                return Act::Honest;
            }
            let mut spoil = spoil.lock().unwrap();
            (*spoil)(header, payload)
        })
    })
}

/// Returns what a read gives when its reply is spoiled.
fn spoiled_read(
    spoil: impl FnMut(&Header, &[u8]) -> Act + Send + 'static,
) -> (Result<(), FunctionError>, RemoteFunction) {
    let function = later(Command::RegionRead, PATIENCE, spoil);
    let mut bytes = [0; 4];
    let outcome = function.read(0, 8, &mut bytes);
    if outcome.is_err() {
        assert_eq!(bytes, [0xff; 4]);
    }
    (outcome, function)
}

#[track_caller]
fn breaks(spoil: impl FnMut(&Header, &[u8]) -> Act + Send + 'static) {
    let (outcome, function) = spoiled_read(spoil);
    assert!(matches!(outcome, Err(FunctionError::Broken(_))), "{outcome:?}");
    assert!(matches!(function.state(), ConnectionState::Broken(_)));
    assert!(is_readable(&function));
    // At once, since nobody is asked any more.
    assert_eq!(read_u32(&function, 8), u32::MAX);
    assert!(function.write(0, 8, &[0; 4]).is_err() && function.post(0, 8, &[0; 4]).is_err());
    assert!(
        function.reset().is_err() && function.map_ram(0, 4096, memory(4096).as_fd(), 0).is_err()
    );
}

#[test]
fn the_honest_one_is_believed() {
    let (outcome, function) = spoiled_read(|_, _| Act::Honest);
    assert_eq!((outcome, function.state()), (Ok(()), ConnectionState::Connected));
}

#[test]
fn lengths_are_checked() {
    let with_size = |size: u32| {
        move |header: &Header, payload: &[u8]| {
            let mut sent = honest(header, payload);
            sent.bytes[4..8].copy_from_slice(&size.to_le_bytes());
            Act::Send(sent)
        }
    };
    for size in [0, 15, u32::MAX, 2 << 20] {
        breaks(with_size(size));
    }
    // Fewer bytes than were read, more, and none.
    for len in [0, 15, 16, 19, 21, 4096] {
        breaks(move |header, _| Act::Send(reply(header, &vec![0; len])));
    }
}

#[test]
fn a_reply_to_nothing_is_no_reply() {
    breaks(|header, _| {
        let other = Header { id: U16::new(header.id.get().wrapping_add(1)), ..*header };
        Act::Send(reply(&other, &[0; 20]))
    });
    breaks(|header, _| {
        let other = Header { command: U16::new(Command::DeviceReset as u16), ..*header };
        Act::Send(reply(&other, &[0; 20]))
    });
    breaks(|header, payload| {
        let mut sent = honest(header, payload);
        sent.bytes[8] = 7; // neither command nor reply
        Act::Send(sent)
    });
}

#[test]
fn any_number_is_an_errno() {
    for (number, errno) in [
        (0, Errno::IO),
        (22, Errno::INVAL),
        (4096, Errno::IO),
        (70_000, Errno::IO),
        (u32::MAX, Errno::IO),
    ] {
        let (outcome, function) = spoiled_read(move |header, _| {
            let mut head = header.error_reply(1);
            head.error = U32::new(number);
            Act::Send(Sent { bytes: head.as_bytes().to_vec(), files: Vec::new() })
        });
        assert_eq!(outcome, Err(FunctionError::Refused(errno)), "{number}");
        assert_eq!(function.state(), ConnectionState::Connected);
    }
}

#[test]
fn descriptors_that_nobody_asked_for_end_it() {
    for count in [1, 16, 17, 32] {
        breaks(move |header, payload| {
            let files = (0..count).map(|_| event()).collect();
            Act::Send(Sent { files, ..honest(header, payload) })
        });
    }
}

/// Returns the bytes of a server's access to the client's memory.
fn dma_read(id: u16) -> Vec<u8> {
    let access = spec::DmaAccess { address: U64::new(0), count: U64::new(4) };
    [Header::command(id, Command::DmaRead, 16).as_bytes(), access.as_bytes()].concat()
}

#[test]
fn accesses_by_messages_are_refused_and_counted() {
    let few = |header: &Header, payload: &[u8]| {
        let accesses: Vec<u8> = (0..10).flat_map(dma_read).collect();
        let sent = honest(header, payload);
        Act::Send(Sent { bytes: [accesses, sent.bytes].concat(), ..sent })
    };
    // The refusals arrive at the server, which answers each as if it were a request.
    let refused = Arc::new(AtomicBool::new(false));
    let seen = refused.clone();
    let socket = start(move |header, payload| {
        if header.is_reply() {
            assert_eq!(header.errno(), Some(Errno::FAULT.raw_os_error() as u32));
            seen.store(true, Ordering::SeqCst);
            return Act::Send(Sent { bytes: Vec::new(), files: Vec::new() });
        }
        let is_read = header.command.get() == Command::RegionRead as u16;
        if is_read && payload[8] == 0 { few(header, payload) } else { Act::Honest }
    });
    let function = RemoteFunction::new(socket, PATIENCE).unwrap();
    assert_eq!(read_u32(&function, 8), 0);
    eventually("a refusal", || refused.load(Ordering::SeqCst));

    breaks(|_, _| {
        let bytes = (0..1000).flat_map(dma_read).collect();
        Act::Send(Sent { bytes, files: Vec::new() })
    });
}

#[test]
fn a_server_that_permits_no_posted_writes_is_waited_for() {
    let function = later(Command::RegionWrite, PATIENCE, |header, _| {
        assert!(!header.no_reply());
        let bytes = header.error_reply(5).as_bytes().to_vec();
        Act::Send(Sent { bytes, files: Vec::new() })
    });
    let refused = function.put(0, 8, &[0; 4]);
    assert!(matches!(refused, Err(FunctionError::Refused(_))), "{refused:?}");
}

#[test]
fn silence_ends_with_the_patience() {
    let function = later(Command::RegionRead, SHORT, |_, _| Act::Silence);
    assert_eq!(read_u32(&function, 8), u32::MAX);
    assert!(matches!(function.state(), ConnectionState::Broken(_)));
    for command in [Command::Version, Command::DeviceGetInfo, Command::DeviceGetIrqInfo] {
        let outcome = liar(command, SHORT, |_, _| Act::Silence);
        assert!(matches!(outcome.err(), Some(FunctionError::Connection(_))), "{command:?}");
    }
}

/// Reports the pages of a log as written by nobody, after more than half of [`SHORT`].
fn slow_report(header: &Header, payload: &[u8]) -> Act {
    let (request, data) = spec::DeviceFeature::read_from_prefix(payload).unwrap();
    if request.flags.get() & spec::feature::NUMBER != spec::feature::LOG_REPORT {
        return Act::Honest;
    }
    let (range, _) = spec::LogReport::read_from_prefix(data).unwrap();
    let words = (range.length.get() as usize / 4096).div_ceil(64);
    std::thread::sleep(SHORT * 3 / 5);
    Act::Send(reply(header, &[payload, &vec![0; words * 8]].concat()))
}

/// A report of large memory takes many messages, in each of which the function becomes quiet.
#[test]
fn each_part_of_a_report_has_the_patience() {
    let pages = 2 * (512 << 10) + 1;
    let words = patient(|| {
        let function = liar(Command::DeviceFeature, SHORT, slow_report)?;
        function.report_log(0, pages)
    });
    assert_eq!(words, vec![0; pages.div_ceil(64)]);
}

/// However much is posted to a server that does not read, the client keeps no more than a message.
#[test]
fn a_server_that_does_not_read_is_given_up() {
    let function = later(Command::RegionWrite, SHORT, |_, _| {
        std::thread::park();
        Act::Silence
    });
    let mut outcome = Ok(());
    for _ in 0..100_000 {
        outcome = function.post(0, 0, &[0; 64]);
        if outcome.is_err() {
            break;
        }
    }
    assert!(matches!(outcome, Err(FunctionError::Broken(_))), "{outcome:?}");
}

/// The state is told while another thread waits for the server.
#[test]
fn nobody_waits_for_the_state() {
    let (asked, was_asked) = mpsc::channel();
    let function = later(Command::RegionRead, PATIENCE * 100, move |_, _| {
        asked.send(()).unwrap();
        Act::Silence
    });
    // Ends with the process: the read would wait for all of its patience.
    let function = Arc::new(function);
    let reading = function.clone();
    std::thread::spawn(move || read_u32(&reading, 8));
    was_asked.recv_timeout(PATIENCE).unwrap();
    let begun = std::time::Instant::now();
    assert_eq!(function.state(), ConnectionState::Connected);
    assert!(!function.ring(0, 0, 0) && function.notifications(0).is_empty());
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn an_end_within_a_reply_is_an_end() {
    for part in [0, 1, 15, 16, 17, 35] {
        let (left, has_left) = mpsc::channel();
        let function = later(Command::RegionRead, PATIENCE, move |header, payload| {
            let mut sent = honest(header, payload);
            sent.bytes.truncate(part);
            left.send(()).unwrap();
            Act::SendAndLeave(sent)
        });
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| function.read(0, 8, &mut [1; 4]));
            has_left.recv_timeout(PATIENCE).unwrap();
            eventually("the end is known", || matches!(function.state(), ConnectionState::Lost(_)));
            function.reconnect(start(|_, _| Act::Honest)).unwrap();
            assert_eq!(reading.join().unwrap(), Ok(()), "{part}");
        });
    }
}

/// Commands that a client sends while it connects.
const CONNECTING: [Command; 3] = [Command::Version, Command::DeviceGetRegionInfo, Command::DmaMap];

#[test]
fn a_silent_successor_leaves_the_function_waiting() {
    let function = patient(|| {
        let function = RemoteFunction::new(start(|_, _| Act::Honest), SHORT)?;
        function.map_ram(0, 4096, memory(4096).as_fd(), 0)?;
        Ok(function)
    });
    for command in CONNECTING {
        let silent = start(move |header, _| match header.command.get() == command as u16 {
            true => Act::Silence,
            false => Act::Honest,
        });
        let outcome = function.reconnect(silent);
        assert!(matches!(outcome, Err(FunctionError::Connection(_))), "{outcome:?}");
    }
    assert_eq!(function.connections(), 1);
    patient(|| function.reconnect(start(|_, _| Act::Honest)));
    assert_eq!(function.connections(), 2);
}

#[test]
fn a_bad_successor_leaves_the_function_waiting() {
    let function = RemoteFunction::new(start(|_, _| Act::Honest), PATIENCE).unwrap();
    function.map_ram(0, 4096, memory(4096).as_fd(), 0).unwrap();
    for command in CONNECTING {
        let bad = start(move |header, _| match header.command.get() == command as u16 {
            true => Act::Send(Sent {
                bytes: header.error_reply(5).as_bytes().to_vec(),
                files: Vec::new(),
            }),
            false => Act::Honest,
        });
        let outcome = function.reconnect(bad);
        assert!(matches!(outcome, Err(FunctionError::Connection(_))), "{outcome:?}");
    }
    let other = start(|header, payload| match header.command.get() {
        code if code == Command::RegionRead as u16 => {
            let mut sent = honest(header, payload);
            sent.bytes[32] ^= 1;
            Act::Send(sent)
        }
        _ => Act::Honest,
    });
    assert!(matches!(function.reconnect(other), Err(FunctionError::Different(_))));
    assert_eq!(function.connections(), 1);
    function.reconnect(start(|_, _| Act::Honest)).unwrap();
    assert_eq!(function.connections(), 2);
}

#[test]
fn a_function_of_another_kind_is_no_function() {
    let cases: [fn(&mut spec::DeviceInfo); 3] = [
        |info| info.flags = U32::new(1),
        |info| info.num_regions = U32::new(8),
        |info| info.num_irqs = U32::new(0),
    ];
    for change in cases {
        let outcome = liar(Command::DeviceGetInfo, PATIENCE, move |header, payload| {
            let sent = honest(header, payload);
            let mut info = spec::DeviceInfo::read_from_bytes(&sent.bytes[16..]).unwrap();
            change(&mut info);
            Act::Send(reply(header, info.as_bytes()))
        });
        assert!(matches!(outcome.err(), Some(FunctionError::Connection(_))));
    }
}

/// Connects to a server whose region 0 has these mappable areas.
fn with_areas(areas: &'static [(u64, u64)], next: u32) -> Result<RemoteFunction, FunctionError> {
    liar(Command::DeviceGetRegionInfo, PATIENCE, move |header, payload| {
        if payload[8] != 0 {
            return Act::Honest;
        }
        let mut info = region_info(0);
        let flags = spec::RegionFlags::all();
        (info.flags, info.cap_offset) = (U32::new(flags.bits()), U32::new(32));
        let head = spec::CapabilityHeader {
            id: U16::new(spec::capability::SPARSE_MMAP),
            version: U16::new(1),
            next: U32::new(next),
        };
        let sparse = spec::SparseHeader {
            nr_areas: U32::new(areas.len() as u32),
            ..spec::SparseHeader::default()
        };
        let mut bytes = [info.as_bytes(), head.as_bytes(), sparse.as_bytes()].concat();
        for (offset, size) in areas {
            let area = spec::SparseArea { offset: U64::new(*offset), size: U64::new(*size) };
            bytes.extend_from_slice(area.as_bytes());
        }
        Act::Send(Sent { files: vec![memory(SIZE)], ..reply(header, &bytes) })
    })
}

#[test]
fn areas_lie_within_their_region() {
    let function = with_areas(&[(0x1000, 0x1000)], 0).unwrap();
    assert_eq!(function.regions()[0].areas, [(0x1000, 0x1000)]);
    for (areas, next) in [
        (&[(0, SIZE + 1)][..], 0),
        (&[(u64::MAX, 2)][..], 0),
        (&[(0, 1)][..], 32), // goes round for ever
        (&[(0, 1)][..], 5000),
    ] {
        assert!(with_areas(areas, next).is_err(), "{areas:?} {next}");
    }
}

/// A sub-region that is as it should be: register 4 in the first word of the shadow memory.
fn bell() -> spec::SubRegion {
    spec::SubRegion {
        offset: U64::new(4),
        size: U64::new(4),
        kind: U32::new(io_fd::IOEVENTFD_SHADOW),
        shadow_fd_index: U32::new(1),
        ..spec::SubRegion::default()
    }
}

/// Connects to a server that gives `one` as the sub-region of region 0, with an eventfd and
/// `shadow`, and `more` bytes less.
fn with_sub_region(
    one: spec::SubRegion,
    count: u32,
    shadow: fn() -> std::os::fd::OwnedFd,
) -> Result<RemoteFunction, FunctionError> {
    liar(Command::DeviceGetRegionIoFds, PATIENCE, move |header, _| {
        let head = spec::RegionIoFds {
            argsz: U32::new(64),
            count: U32::new(count),
            ..spec::RegionIoFds::default()
        };
        let bytes = [head.as_bytes(), one.as_bytes()].concat();
        Act::Send(Sent { files: vec![event(), shadow()], ..reply(header, &bytes) })
    })
}

#[test]
fn sub_regions_are_checked() {
    let good = || memory(4096);
    let function = with_sub_region(bell(), 1, good).unwrap();
    assert!(function.ring(0, 4, 1));
    let plain = spec::SubRegion { kind: U32::new(io_fd::IOEVENTFD), ..bell() };
    let matching = spec::SubRegion { flags: U32::new(1), datamatch: U64::new(7), ..plain };
    let function = with_sub_region(matching, 1, good).unwrap();
    let found = function.notifications(0);
    assert_eq!((found[0].offset, found[0].size, found[0].datamatch), (4, 4, Some(7)));
    // Of these, the client knows nothing: they are messages.
    for odd in [
        spec::SubRegion { kind: U32::new(3), ..bell() },
        spec::SubRegion { kind: U32::new(io_fd::IOREGIONFD), ..bell() },
        spec::SubRegion { flags: U32::new(2), ..bell() },
        spec::SubRegion { flags: U32::new(8), ..bell() },
        spec::SubRegion { size: U64::new(8), ..bell() },
    ] {
        let function = with_sub_region(odd, 1, good).unwrap();
        assert!(!function.ring(0, 4, 1) && function.notifications(0).is_empty());
    }
    for wrong in [
        spec::SubRegion { offset: U64::new(SIZE - 3), ..bell() },
        spec::SubRegion { offset: U64::new(u64::MAX), ..bell() },
        spec::SubRegion { size: U64::new(3), ..bell() },
        spec::SubRegion { size: U64::new(u64::MAX), ..bell() },
        spec::SubRegion { fd_index: U32::new(2), ..bell() },
        spec::SubRegion { fd_index: U32::new(u32::MAX), ..bell() },
        spec::SubRegion { shadow_fd_index: U32::new(2), ..bell() },
        spec::SubRegion { shadow_offset: U64::new(4096), ..bell() },
        spec::SubRegion { shadow_offset: U64::new(2), ..bell() },
        spec::SubRegion { shadow_offset: U64::new(u64::MAX), ..bell() },
    ] {
        assert!(with_sub_region(wrong, 1, good).is_err(), "{wrong:?}");
    }
    for count in [2, 3, u32::MAX] {
        assert!(with_sub_region(bell(), count, good).is_err());
    }
}

#[test]
fn shadow_memory_that_could_be_taken_away_is_not_used() {
    let unsealed = || {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("unsealed", flags).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        file
    };
    let empty = || memory(0);
    let too_large = || memory(1 << 40);
    for shadow in [event, unsealed, empty, too_large] {
        let function = with_sub_region(bell(), 1, shadow).unwrap();
        assert!(!function.ring(0, 4, 1));
        assert_eq!(function.state(), ConnectionState::Connected);
    }
}

/// An eventfd that is full and blocking: a write(2) would wait for the server for ever.
#[test]
fn a_full_eventfd_holds_nobody_up() {
    let function = liar(Command::DeviceGetRegionIoFds, PATIENCE, |header, _| {
        let head = spec::RegionIoFds { count: U32::new(1), ..spec::RegionIoFds::default() };
        let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let bytes = [head.as_bytes(), bell().as_bytes()].concat();
        Act::Send(Sent { files: vec![full, memory(4096)], ..reply(header, &bytes) })
    });
    let function = function.unwrap();
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        (0..100).for_each(|value| assert!(function.ring(0, 4, value)));
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENCE).unwrap();
}
