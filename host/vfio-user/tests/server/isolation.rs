//! Clients on one reactor are isolated from each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slipway_reactor::{Reactor, Settings};

use crate::common::*;

/// Pseudo-random bytes.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Sends noise, sometimes behind a valid header, until told to stop.
fn garbage(served: &Served, stop: &AtomicBool) {
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let interrupt = event();
    while !stop.load(Ordering::Relaxed) {
        let mut raw = served.connect();
        if !noise.next().is_multiple_of(4) {
            let data = b"\0\0\x01\0";
            let header = raw.header(1, data.len());
            let _ = raw.try_send(&[header.as_bytes(), data].concat(), &[]);
        }
        for _ in 0..noise.next() % 64 {
            let len = (noise.next() % 300) as usize;
            let body: Vec<u8> = (0..len).map(|_| noise.next() as u8).collect();
            let header = raw.header((noise.next() % 20) as u16, len);
            let bytes = match noise.next() % 8 {
                0 => body,
                _ => [header.as_bytes(), &body].concat(),
            };
            use std::os::fd::AsFd;
            let files = vec![interrupt.as_fd(); (noise.next() % 4) as usize];
            if !bytes.is_empty() && raw.try_send(&bytes, &files).is_err() {
                break;
            }
        }
    }
}

#[test]
fn garbage_and_stuck_clients_change_nothing_for_others() {
    let reactor = Arc::new(Reactor::spawn(Settings::default()).unwrap());
    let noisy = serve_on(reactor.clone(), |_| {});
    let stuck = serve_on(reactor.clone(), |_| {});
    let deaf = serve_on(reactor.clone(), |config| config.max_queued_bytes = 1 << 30);
    let good = serve_on(reactor, |_| {});

    // A client that sends half a message and never the rest.
    let mut half = stuck.client();
    let header = half.header(Command::RegionWrite as u16, 1 << 20);
    half.send(&[header.as_bytes(), &[0; 1000]].concat(), &[]);
    // A client that sends requests and does not read the replies.
    let mut unread = deaf.client();
    let header = unread.header(Command::RegionRead as u16, 16);
    let request = [header.as_bytes(), access(spec::region::CONFIG, 0, 4096).as_bytes()].concat();
    for _ in 0..1000 {
        unread.send(&request, &[]);
    }

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| garbage(&noisy, &stop));
        let mut raw = good.client();
        for value in 0..2000u32 {
            raw.write_u32(0x10, value);
            assert_eq!(raw.read_u32(0x10), value);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(good.control.stats().errors, []);
    assert!(noisy.control.stats().messages > 0);
    assert!(noisy.control.stats().errors.iter().all(|(errno, _)| *errno > 0));
    // The rest of the half message is still accepted.
    half.send(&vec![0; (1 << 20) - 1000], &[]);
    assert_eq!(half.reply().err(), Errno::INVAL);
}

#[test]
fn a_function_that_panics_takes_nobody_along() {
    let settings = Settings { on_panic: Arc::new(|_| {}), ..Settings::default() };
    let reactor = Arc::new(Reactor::spawn(settings).unwrap());
    let broken = serve_on(reactor.clone(), |_| {});
    let good = serve_on(reactor, |_| {});
    let (mut victim, mut other) = (broken.client(), good.client());
    broken.knobs.broken.store(true, Ordering::SeqCst);
    let payload = [access(0, 0x10, 4).as_bytes(), &[0; 4]].concat();
    let header = victim.header(Command::RegionWrite as u16, payload.len());
    victim.send(&[header.as_bytes(), &payload].concat(), &[]);
    assert!(victim.try_reply().is_none());
    assert!(broken.control.wait_closed(PATIENCE));
    assert!(!broken.path.exists());
    assert!(other.is_alive());
}
