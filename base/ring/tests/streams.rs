//! Streams between two sides: what goes in comes out, whatever the sizes, and what a hostile side
//! writes spoils its own stream only.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(unsafe_code)] // a filter of system calls

mod party;

use std::sync::atomic::Ordering;

use party::Party;
use slipway_ring::cross::{Arena, Error, Fault, Regions, Shape, Side, Signals};

const MOST: usize = 512 << 10;

impl Party {
    fn write(&self, number: u32, bytes: &[u8]) -> Result<usize, Error> {
        self.stream(number).write(bytes, MOST, self.regions(), || ())
    }

    fn read(&self, number: u32, most: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; most];
        let count = self.stream(number).read(&mut bytes, || ())?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// Numbers that are the same each time.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    *state >> 33
}

#[test]
fn what_goes_in_comes_out() {
    let (here, there) = Party::both(3);
    let mut state = 1;
    let (mut sent, mut received) = ([0u32; 3], [0u32; 3]);
    for round in 0..5_000 {
        let number = (random(&mut state) % 3) as u32;
        let at = number as usize;
        let most = [10, 5000, 200_000][round % 3];
        let count = random(&mut state) as usize % most;
        if random(&mut state).is_multiple_of(2) {
            let bytes: Vec<u8> = (0..count as u32).map(|byte| (sent[at] + byte) as u8).collect();
            sent[at] += here.write(number, &bytes).unwrap() as u32;
        } else {
            for byte in there.read(number, count).unwrap() {
                assert_eq!(byte, received[at] as u8);
                received[at] += 1;
            }
        }
    }
    for number in 0..3 {
        let at = number as usize;
        received[at] += there.read(number, MOST).unwrap().len() as u32;
        assert_eq!(sent[at], received[at]);
        assert!(sent[at] > 1 << 22, "only {} bytes", sent[at]);
        assert!(here.stream(number).trim(here.bits.clone()));
        assert!(!here.stream(number).trim(here.bits.clone()));
        here.write(number, b"again").unwrap();
        assert_eq!(there.read(number, 9).unwrap(), b"again");
    }
    // Another thread gives them back.
    let begun = std::time::Instant::now();
    while here.bits.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
        assert!(begun.elapsed().as_secs() < 60, "regions are left");
        std::thread::yield_now();
    }
}

#[test]
fn a_consumer_knows_since_when_bytes_wait() {
    let (here, there) = Party::both(1);
    here.write(0, b"before it asks").unwrap();
    there.read(0, 100).unwrap();
    assert_eq!(there.stream(0).into.since(), None);
    there.stream(0).into.want_times();
    here.write(0, b"first").unwrap();
    let first = there.stream(0).into.since().unwrap();
    here.write(0, b"second").unwrap();
    there.read(0, 2).unwrap();
    here.write(0, b"third").unwrap();
    assert_eq!(there.stream(0).into.since(), Some(first), "the first byte that waits");
    there.read(0, 100).unwrap();
    here.stream(0).out.finish();
    let end = there.stream(0).into.since().unwrap();
    assert!(end > first, "the end comes as bytes do: {first}, {end}");
    there.write(0, b"nobody asked").unwrap();
    assert_eq!(here.stream(0).into.since(), None);
    here.arena.clear(0);
    assert_eq!(there.stream(0).into.since(), None);
}

#[test]
fn pieces_of_a_message_have_room_as_one() {
    let (here, there) = Party::both(1);
    here.stream(0).expect(60_000, MOST, here.regions()).unwrap();
    for _ in 0..6 {
        assert_eq!(here.write(0, &[7; 10_000]).unwrap(), 10_000);
    }
    // A FIFO with bytes stays where it is.
    here.stream(0).expect(MOST, MOST, here.regions()).unwrap();
    assert_eq!(here.stream(0).out.tail().size(), 64 << 10);
    assert_eq!(there.read(0, 100_000).unwrap().len(), 60_000);
}

#[test]
fn a_fifo_grows_when_it_was_full_and_not_beyond_what_it_may() {
    let (here, there) = Party::both(1);
    let mut sizes = vec![];
    for _ in 0..2000 {
        while here.write(0, &[7; 64]).unwrap() > 0 {}
        sizes.push(here.stream(0).out.tail().size());
        while !there.read(0, 1000).unwrap().is_empty() {}
    }
    sizes.dedup();
    assert_eq!(sizes, [4096, 16_384, 65_536, 524_288]);
}

#[test]
fn the_end_is_the_end() {
    let (here, there) = Party::both(2);
    here.write(0, b"last words").unwrap();
    assert_eq!((there.stream(0).arm_data(10), there.stream(0).arm_data(11)), (Ok(true), Ok(false)));
    assert!(here.stream(0).out.finish(), "who waits for more is told");
    assert_eq!(here.write(0, b"x"), Err(Error::Shut));
    assert_eq!(there.read(0, 99).unwrap(), b"last words");
    assert_eq!(there.stream(0).available(), Ok((0, true)));
    here.write(1, b"lost").unwrap();
    here.stream(1).out.reset();
    assert_eq!(there.read(1, 2).unwrap(), b"lo");
    assert_eq!(there.read(1, 9).unwrap(), b"st");
    assert_eq!(there.read(1, 9), Err(Error::Reset));
    there.stream(1).into.shut();
    there.write(1, b"the other way").unwrap();
    assert_eq!(here.read(1, 13).unwrap(), b"the other way");
}

#[test]
fn a_liar_spoils_its_own_stream_only() {
    let (here, there) = Party::both(2);
    let (page, last) = (1u64 << 58, u64::from(here.arena.shape().pages));
    let lies = [
        1,
        page | 4097,
        page | last << 36 | 1,
        2 << 58 | (last - 1) << 36,
        12 << 58 | 1,
        page | 1 << 35,
    ];
    for lie in lies {
        there.arena.inbox(0, Side::Zero).tail.store(lie, Ordering::Relaxed);
        assert_eq!(here.read(0, 10), Err(Error::Spoiled), "{lie:x}");
    }
    here.write(0, b"12345").unwrap();
    for head in [6, 1 << 35, (1 << 36) - 1] {
        there.arena.inbox(0, Side::Zero).head.store(head, Ordering::Relaxed);
        assert_eq!(here.stream(0).space(), Err(Error::Spoiled), "{head:x}");
    }
    here.write(1, b"as ever").unwrap();
    assert_eq!(there.read(1, 10).unwrap(), b"as ever");
}

/// A reader makes its counter invalid while a long write goes on.
#[test]
fn a_write_tells_of_all_that_it_has_written() {
    let (here, there) = Party::both(1);
    here.stream(0).expect(64 << 10, MOST, here.regions()).unwrap();
    assert_eq!(there.stream(0).arm_data(1), Ok(false));
    let spoil = || there.arena.inbox(0, Side::Zero).head.store(1 << 35, Ordering::Relaxed);
    let written = here.stream(0).write(&[7; 96 << 10], MOST, here.regions(), spoil);
    assert_eq!(written, Ok(64 << 10));
    assert_eq!(here.write(0, b"x"), Err(Error::Spoiled));
    assert_eq!(there.read(0, MOST).unwrap().len(), 64 << 10);
}

#[test]
fn arenas_are_checked() {
    assert!(Arena::new(Shape { streams: 0, pages: 1 }).is_err());
    assert!(Arena::new(Shape { streams: 2, pages: 1 }).is_err());
    let arena = Arena::new(Shape { streams: 1, pages: 1 }).unwrap();
    let open = || Arena::open(arena.file().unwrap().try_clone_to_owned().unwrap());
    assert_eq!(open().unwrap().shape(), arena.shape());
    for (word, value) in [(0, 1), (1, 2), (2, 0), (2, 1 << 21), (3, 0), (3, 1 << 21)] {
        let before = arena.words()[word].swap(value, Ordering::Relaxed);
        assert!(open().is_err(), "word {word} is {value}");
        arena.words()[word].store(before, Ordering::Relaxed);
    }
}

#[test]
fn signals_come_in_turn_and_a_full_fifo_says_so() {
    let words = slipway_ram::Lasting::heap(Signals::bytes(4));
    let mut out = Signals::new(words.clone(), 4).unwrap();
    let mut into = Signals::new(words.clone(), 4).unwrap();
    assert!(Signals::new(words.clone(), 3).is_none() && Signals::new(words.clone(), 8).is_none());
    for round in 0..10 {
        for event in 0..4 {
            out.raise(round * 10 + event).unwrap().unwrap();
        }
        assert!(out.raise(99).unwrap().is_err());
        for event in 0..4 {
            assert_eq!(into.take(), Ok(Some(round * 10 + event)));
        }
        assert_eq!(into.take(), Ok(None));
    }
    words.words()[0].store(99, Ordering::Relaxed);
    assert!(into.take().is_err());
    words.words()[8].store(99, Ordering::Relaxed);
    for _ in 0..4 {
        let _ = out.raise(1);
    }
    assert!(out.raise(1).is_err());
}

/// From now on the kernel has no memory that this thread asks for in advance: madvise(2) says
/// `ENOMEM`.
fn refuse_memory() {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter};
    let does = |code: u32, k: u32, (jt, jf): (u8, u8)| sock_filter { code: code as u16, jt, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::ENOMEM.unsigned_abs();
    let mut filter = [
        does(BPF_LD | BPF_W | BPF_ABS, 0, (0, 0)),
        does(BPF_JMP | BPF_JEQ | BPF_K, libc::SYS_madvise as u32, (0, 1)),
        does(BPF_RET | BPF_K, refused, (0, 0)),
        does(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW, (0, 0)),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives beyond the calls, which concern this thread alone.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn who_gets_no_memory_is_told_holds_nothing_and_may_try_again() {
    let (here, there) = Party::both(4);
    let held = |party: &Party| party.bits.iter().any(|word| word.load(Ordering::Relaxed) != 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(there.write(1, b"what is there needs no more"), Ok(27));
            refuse_memory();
            assert_eq!(here.write(0, &[7; 100_000]), Err(Error::NoMemory));
            assert_eq!(here.write(0, b"x"), Err(Error::NoMemory));
            assert!(!held(&here));
            // One that has a region goes on in it.
            assert_eq!(there.write(1, b"."), Ok(1));
        });
    });
    assert_eq!(there.read(0, 10), Ok(Vec::new()));
    assert_eq!(here.write(0, b"x"), Ok(1));
    assert_eq!(there.read(0, 10).as_deref(), Ok(&b"x"[..]));
    assert_eq!(here.read(1, 99).map(|bytes| bytes.len()), Ok(28));
}

#[test]
fn a_small_arena_has_regions_of_every_size_that_fits() {
    let shape = Shape::filling(32, 2 << 20).unwrap();
    assert!(shape.bytes() <= 2 << 20 && shape.pages > 250, "{shape:?}");
    assert_eq!(Shape::filling(32, 64 << 10), None);
    let bits: Vec<_> = (0..Regions::WORDS).map(|_| Default::default()).collect();
    let regions = Regions::new(&bits, shape);
    for _ in 0..2 {
        let mut taken = vec![false; shape.pages as usize];
        let mut all = Vec::new();
        while let Some(region) = regions.take(MOST, None) {
            for page in region.page..region.page + (1 << region.order) {
                assert!(page >= 32 && !std::mem::replace(&mut taken[page as usize], true));
            }
            all.push(region);
        }
        assert!(all.iter().filter(|region| region.order == 4).count() >= 4);
        assert!(taken.iter().filter(|taken| !**taken).count() < 32 + 4);
        all.into_iter().for_each(|region| regions.give(region));
    }
}

#[test]
fn an_arena_in_a_guests_memory_is_one() {
    let memory = slipway_ram::Lasting::heap(2 << 20);
    let shape = Shape::filling(4, 2 << 20).unwrap();
    assert!(Arena::within(memory.clone(), Shape { pages: 300, ..shape }).is_err());
    let guest = Arena::within(memory.clone(), shape).unwrap();
    let host = Arena::over(memory.clone()).unwrap();
    assert!(guest.is_across_machines() && host.is_across_machines() && host.shape() == shape);
    let (here, there) = (Party::new(guest, Side::Zero), Party::new(host, Side::One));
    for round in 0..100 {
        let bytes = vec![round; 100_000];
        let count = here.write(3, &bytes).unwrap();
        assert_eq!(there.read(3, MOST).unwrap(), bytes[..count]);
    }
    assert!(here.stream(3).out.tail().size() >= 64 << 10, "it did not grow");
    assert!(here.stream(3).trim(here.bits.clone()));
    memory.words()[0].store(0, Ordering::Relaxed);
    assert!(Arena::over(memory).is_err());
}

#[test]
fn who_stands_between_copies_once() {
    let (a, near) = Party::both(1);
    let (far, b) = Party::both(1);
    let mut state = 3;
    let (mut sent, mut received) = (0_u32, 0_u32);
    let mut told = (0, 0);
    while received < 5_000_000 {
        let count = random(&mut state) as usize % 100_000;
        let bytes: Vec<u8> = (0..count as u32).map(|byte| (sent + byte) as u8).collect();
        sent += a.write(0, &bytes).unwrap() as u32;
        let tells = (|| told.0 += 1, || told.1 += 1);
        let limit = random(&mut state) as usize % 70_000;
        let (source, target) = (near.stream(0), far.stream(0));
        source.transfer(&target, limit, MOST, far.regions(), tells).unwrap();
        for byte in b.read(0, random(&mut state) as usize % 150_000).unwrap() {
            assert_eq!(byte, received as u8);
            received += 1;
        }
    }
    assert_eq!(told, (0, 0), "nobody asked");
    b.stream(0).into.shut();
    a.write(0, b"x").unwrap();
    let shut = near.stream(0).transfer(&far.stream(0), 9, MOST, far.regions(), (|| (), || ()));
    assert_eq!(shut, Err(Fault::Into(Error::Shut)));
    a.stream(0).out.reset();
    near.read(0, MOST).unwrap();
    let reset = near.stream(0).transfer(&far.stream(0), 9, MOST, far.regions(), (|| (), || ()));
    assert_eq!(reset, Err(Fault::From(Error::Reset)));
}
