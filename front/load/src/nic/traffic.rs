//! The two ends of a load, on ordinary sockets: one of them runs in a guest, as `slipway-load`, the
//! other one in another guest or in this process.
//!
//! The receiver measures, from its first datagram or byte on; of requests the end that asks. The
//! sender goes on until it is stopped or its connection is closed, so that the receiver is under
//! load for all of its time.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{NicLoad, Traffic};
use crate::Times;

/// The port of every receiver of UDP: that of the discard service (RFC 863), to which a memory
/// port's source sends too.
pub const UDP_PORT: u16 = 9;
/// The port of every server of TCP.
pub const TCP_PORT: u16 = 7009;
/// The longest time in which one end waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time after which an end that waits looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(100);
/// The most datagrams that are sent in a row to make up for a late wake-up.
const LATE: u64 = 100;

/// The result of one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Datagrams, bytes of a stream, or exchanges in the measured time.
    pub count: u64,
    /// The same from the first one to the last.
    pub all: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
}

/// Counts within the measured time, which begins after the warm-up that follows the first event.
struct Window {
    times: Times,
    first: Option<Instant>,
    start: Option<Instant>,
    counted: Counted,
}

impl Window {
    fn new(times: Times) -> Self {
        Self { times, first: None, start: None, counted: Counted::default() }
    }

    /// Counts `count` events that happened just now; 0 after a time without any. Returns `false`
    /// once the measured time is over.
    fn see(&mut self, count: u64) -> bool {
        let now = Instant::now();
        if self.first.is_none() && count == 0 {
            return true;
        }
        let first = *self.first.get_or_insert(now);
        self.counted.all += count;
        let Some(start) = self.start else {
            self.start = (now - first >= self.times.warm_up).then_some(now);
            return true;
        };
        let over = self.counted.elapsed_ns >= self.times.time.as_nanos() as u64;
        if !over {
            self.counted.count += count;
            self.counted.elapsed_ns = (now - start).as_nanos() as u64;
        }
        !over
    }
}

/// Sends `load` to the receiver at `to`, or asks the server there, until `stop` is set or the
/// connection is closed.
///
/// # Errors
/// If nobody accepts the connection, or the interface fails.
pub fn send(load: &NicLoad, to: IpAddr, times: Times, stop: &AtomicBool) -> Result<Counted> {
    match load.traffic {
        Traffic::Udp(bytes) => send_datagrams(to, bytes.into(), load.offered, times, stop),
        Traffic::Tcp(bytes) => write_stream(connect(to, stop)?, bytes.into(), times, stop),
        Traffic::RequestResponse => ask(connect(to, stop)?, times),
    }
}

/// Receives `load` at the address `at`, or answers its requests, until the measured time is over.
///
/// # Errors
/// If nothing comes within a minute, or the port is taken or needs more rights.
pub fn receive(load: &NicLoad, at: IpAddr, times: Times, stop: &AtomicBool) -> Result<Counted> {
    match load.traffic {
        Traffic::Udp(_) => receive_datagrams(at, times, stop),
        Traffic::Tcp(_) => read_stream(accept(at, stop)?, times, stop),
        Traffic::RequestResponse => answer(accept(at, stop)?),
    }
}

fn send_datagrams(
    to: IpAddr,
    bytes: usize,
    offered: u64,
    times: Times,
    stop: &AtomicBool,
) -> Result<Counted> {
    let socket = UdpSocket::bind(unspecified(to))?;
    socket.connect(SocketAddr::new(to, UDP_PORT))?;
    let data = vec![0x5a; bytes];
    let (begin, mut window, mut number) = (Instant::now(), Window::new(times), 0);
    while !stop.load(Ordering::Relaxed) {
        if offered > 0 {
            let due = (begin.elapsed().as_secs_f64() * offered as f64) as u64;
            if due <= number {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            // A sender that wakes late makes up for `LATE` datagrams at most.
            number = number.max(due.saturating_sub(LATE)) + 1;
        }
        match socket.send(&data) {
            Ok(_) => window.see(1),
            // The receiver's socket is not open yet or no more; the device's queue is full.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => window.see(0),
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                window.see(0)
            }
            Err(error) => return Err(error).context("sending datagrams"),
        };
    }
    Ok(window.counted)
}

fn receive_datagrams(at: IpAddr, times: Times, stop: &AtomicBool) -> Result<Counted> {
    let socket = UdpSocket::bind((at, UDP_PORT));
    let socket = socket.with_context(|| format!("receiving at UDP port {UDP_PORT}"))?;
    socket.set_read_timeout(Some(LOOK))?;
    let (begin, mut window, mut data) = (Instant::now(), Window::new(times), [0; 2048]);
    loop {
        let count = match socket.recv(&mut data) {
            Ok(_) => 1,
            Err(error) if is_early(&error) => 0,
            Err(error) => return Err(error).context("receiving datagrams"),
        };
        if !window.see(count) || stop.load(Ordering::Relaxed) {
            return Ok(window.counted);
        }
        if count == 0 && window.counted.all == 0 && begin.elapsed() > PATIENCE {
            bail!("no datagram has arrived within {PATIENCE:?}");
        }
    }
}

fn write_stream(
    mut stream: TcpStream,
    bytes: usize,
    times: Times,
    stop: &AtomicBool,
) -> Result<Counted> {
    let (data, mut window) = (vec![0x5a; bytes], Window::new(times));
    // The receiver closes the connection when it has measured.
    while !stop.load(Ordering::Relaxed) {
        let Ok(written) = stream.write(&data) else { break };
        window.see(written as u64);
    }
    Ok(window.counted)
}

fn read_stream(mut stream: TcpStream, times: Times, stop: &AtomicBool) -> Result<Counted> {
    stream.set_read_timeout(Some(LOOK))?;
    let begin = Instant::now();
    let (mut window, mut data) = (Window::new(times), vec![0; 128 << 10]);
    loop {
        let count = match stream.read(&mut data) {
            Ok(0) => bail!("the sender closed the connection"),
            Ok(count) => count as u64,
            Err(error) if is_early(&error) => 0,
            Err(error) => return Err(error).context("receiving a stream"),
        };
        if !window.see(count) || stop.load(Ordering::Relaxed) {
            return Ok(window.counted);
        }
        if window.counted.all == 0 && begin.elapsed() > PATIENCE {
            bail!("no byte has arrived within {PATIENCE:?}");
        }
    }
}

fn ask(mut stream: TcpStream, times: Times) -> Result<Counted> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut window, mut byte) = (Window::new(times), [1]);
    loop {
        stream.write_all(&byte).and_then(|()| stream.read_exact(&mut byte)).context("a request")?;
        if !window.see(1) {
            return Ok(window.counted);
        }
    }
}

/// Answers until the other end, which measures, closes the connection.
fn answer(mut stream: TcpStream) -> Result<Counted> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut counted, mut byte) = (Counted::default(), [0]);
    while stream.read(&mut byte).context("waiting for a request")? > 0 {
        stream.write_all(&byte).context("an answer")?;
        counted.all += 1;
    }
    Ok(counted)
}

fn connect(to: IpAddr, stop: &AtomicBool) -> Result<TcpStream> {
    let address = SocketAddr::new(to, TCP_PORT);
    let begin = Instant::now();
    loop {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(_) if begin.elapsed() < PATIENCE && !stop.load(Ordering::Relaxed) => {
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(error).with_context(|| format!("connecting to {address}")),
        }
    }
}

fn accept(at: IpAddr, stop: &AtomicBool) -> Result<TcpStream> {
    let listener = TcpListener::bind((at, TCP_PORT));
    let listener = listener.with_context(|| format!("listening at TCP port {TCP_PORT}"))?;
    listener.set_nonblocking(true)?;
    let begin = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if is_early(&error) => std::thread::sleep(LOOK / 10),
            Err(error) => return Err(error).context("accepting a connection"),
        }
        if begin.elapsed() > PATIENCE || stop.load(Ordering::Relaxed) {
            bail!("nobody has connected within {PATIENCE:?}");
        }
    }
}

/// Returns the address that stands for all of its own, of the family of `to`.
fn unspecified(to: IpAddr) -> SocketAddr {
    match to {
        IpAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Returns whether a call only ran out of time.
fn is_early(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    #[test]
    fn a_window_counts_after_the_warm_up() {
        let times = Times { warm_up: Duration::ZERO, time: Duration::ZERO };
        let mut window = Window::new(times);
        assert!(window.see(0) && window.first.is_none(), "nothing has begun");
        assert!(window.see(3), "the first event begins the warm-up, which ends at once");
        assert!(!window.see(5), "a measured time of nothing is over");
        assert_eq!((window.counted.all, window.counted.count), (8, 0));
    }

    /// Both ends have ports of their own in a network namespace of their own.
    #[test]
    fn each_kind_of_traffic_arrives_as_root() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: each_kind_of_traffic_arrives_as_root: needs root");
            return;
        }
        for text in ["udp8-gh", "udp1460-gh-o5k", "tcp1460-gh", "rr-gh"] {
            let load: NicLoad = text.parse().unwrap();
            // Longer each time: on a busy machine, an end may have no processor for a short time.
            let mut time = Duration::from_millis(100);
            loop {
                let (sent, received) = match exchange(&load, Times { warm_up: time / 5, time }) {
                    Ok(both) => both,
                    // Root in a container may lack the right to make namespaces.
                    Err(error) if format!("{error:#}").contains("namespace") => {
                        eprintln!("SKIPPED: each_kind_of_traffic_arrives_as_root: {error:#}");
                        return;
                    }
                    Err(error) => panic!("{text}: {error:#}"),
                };
                assert!(sent.all > 0 && received.all > 0, "{text}: {sent:?} {received:?}");
                let asks = load.traffic == Traffic::RequestResponse;
                let measures = if asks { sent } else { received };
                assert!(measures.elapsed_ns >= 100_000_000, "{text} {measures:?}");
                if measures.count > 0 {
                    break;
                }
                assert!(time < Duration::from_secs(10), "{text} {measures:?}");
                time *= 2;
            }
        }
    }

    /// Returns what the sender and the receiver of a load have counted.
    fn exchange(load: &NicLoad, times: Times) -> Result<(Counted, Counted)> {
        in_namespace(|| {
            up_loopback()?;
            let stop = AtomicBool::new(false);
            let to = IpAddr::from([127, 0, 0, 1]);
            // `in_namespace` runs this on a thread whose children share its namespace.
            std::thread::scope(|scope| {
                let sender = scope.spawn(|| send(load, to, times, &stop));
                let received = receive(load, to, times, &AtomicBool::new(false));
                stop.store(true, Ordering::Relaxed);
                Ok((sender.join().unwrap()?, received?))
            })
        })
    }

    /// Runs `work` on a thread with a network namespace of its own.
    fn in_namespace<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let thread = || {
            #[allow(unsafe_code)] // rustix has it as unsafe for the sake of another flag
            // SAFETY: only the network namespace is unshared, and no descriptors.
            let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
            unshared.context("a network namespace takes root")?;
            work()
        };
        std::thread::scope(|scope| scope.spawn(thread).join()).unwrap()
    }

    fn up_loopback() -> Result<()> {
        let mut ip = std::process::Command::new("ip");
        let ended =
            ip.args(["link", "set", "lo", "up"]).status().context("`ip` is not installed")?;
        anyhow::ensure!(ended.success(), "the loopback interface stays down");
        Ok(())
    }
}
