//! TAP interfaces that the fabric makes in network namespaces of the host, as ports of switches.
//!
//! The interface of such a port outlives this process, with its addresses and routes and those that
//! others gave it: the next process opens it by its name.
//!
//! A container controls the namespace. Its packet filters and packet sockets run within each system
//! call on the interface, for as long as the container wants. So each interface has a thread of its
//! own, which opens it, sets it up, serves it ([`PortThread`]) and closes it: no other thread makes
//! a call on it that passes a frame. The thread's descriptor is the last one of an interface that
//! is detached, and a caller who detaches it waits for the thread, for [`PATIENCE`] at most.
//!
//! The TAP interfaces of the host's own namespace have no such thread (`fabric`): the filters there
//! are the host administrator's, and every process of the host that sends packets runs them too.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SendError, Sender, SyncSender, channel, sync_channel,
};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_netlink::InterfaceSettings;
use slipway_netns::{Identity, Namespace};
use slipway_plane_api::v1;
use slipway_switch::ports::{PortThread, TapHold, TapPort, ThreadedPort};
use slipway_switch::{Handle, LinkSetting, Mac, Port, PortConfig, PortIndex};

use crate::error::Error;
use crate::rate::rate;
use crate::tap_settings::{ip, settings};

/// The longest name of such a port, in bytes.
const LONGEST_NAME: usize = 256;
/// The longest time after this process's start that an interface may be another process's, which
/// is about to end.
const BUSY: Duration = Duration::from_secs(1);
/// The longest time that a caller who detaches a port waits until its interface is removed. The
/// kernel takes milliseconds, and longer only for a container whose filters keep the port's thread.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest time that a caller who attaches a port waits until its interface is open. The kernel
/// takes milliseconds, and longer only for a container that slows it down.
const SLOW: Duration = Duration::from_secs(20);
/// Stack of a port's thread, bytes.
const STACK: usize = 256 << 10;

/// The ports at TAP interfaces in namespaces.
pub struct Taps {
    table: Mutex<Table>,
    /// The end of the time in which interfaces of the last process are waited for. One time for all
    /// of them: each container can have its interface open.
    patience: Instant,
}

impl Default for Taps {
    fn default() -> Self {
        Self { table: Mutex::default(), patience: Instant::now() + BUSY }
    }
}

#[derive(Default)]
struct Table {
    /// The ports by name.
    ports: BTreeMap<String, Tap>,
    /// The names of ports whose interfaces are being opened.
    opening: BTreeSet<String>,
}

/// The name of a port whose interface is being opened. No other port has the name until this is
/// dropped.
struct Reserved<'a> {
    taps: &'a Taps,
    name: &'a str,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.taps.lock().opening.remove(self.name);
    }
}

struct Tap {
    /// The name of the switch.
    switch: String,
    handle: Handle,
    port: PortIndex,
    interface: Interface,
}

/// An interface that a thread serves.
struct Interface {
    hold: TapHold,
    /// Disconnected when the thread has closed the interface.
    closed: Receiver<()>,
}

impl Interface {
    /// Has the interface removed with its last descriptor, which is the thread's. To be called
    /// before the port is dropped. The interface that the container removed is gone.
    fn give_up(self) -> std::io::Result<Receiver<()>> {
        match self.hold.set_persistent(false) {
            Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => {}
            done => done?,
        }
        Ok(self.closed)
    }
}

/// Waits until a thread has closed its interface, for [`PATIENCE`] at most.
fn wait(closed: &Receiver<()>) {
    // Nothing is sent: the sender is dropped.
    let _ = closed.recv_timeout(PATIENCE);
}

impl Taps {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each of the two is changed in single calls: a panic leaves them consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the ports of a switch that ends. Their interfaces stay.
    pub fn forget_of(&self, switch: &str) {
        self.lock().ports.retain(|_, tap| tap.switch != switch);
    }

    /// Reserves a name for a port whose interface is to be opened.
    ///
    /// # Errors
    /// [`Error::ExistingTap`].
    fn reserve<'a>(&'a self, name: &'a str) -> Result<Reserved<'a>, Error> {
        let mut table = self.lock();
        if table.ports.contains_key(name) || !table.opening.insert(name.to_owned()) {
            return Err(Error::ExistingTap(name.to_owned()));
        }
        Ok(Reserved { taps: self, name })
    }

    /// Attaches a TAP interface in a network namespace to the switch behind `handle`, and makes its
    /// settings; blocks. Returns whether the interface has IPv6.
    ///
    /// # Errors
    /// [`Error`]; no port is left then, and no interface that was made here. If the settings of an
    /// interface that was left fail ([`Error::TapSettings`]), its port is there.
    pub fn attach(&self, request: &v1::AttachTapRequest, handle: Handle) -> Result<bool, Error> {
        let name = &request.name;
        check_name(name)?;
        let mac = mac(request)?;
        let config = config(request, mac)?;
        let _reserved = self.reserve(name)?;
        let opening = Opening::new(request, mac, self.patience)?;
        if request.placeholder {
            let (Opened { hold, has_ipv6 }, closed) = start(opening, None)?;
            drop(hold);
            wait(&closed);
            return has_ipv6;
        }
        let (port, thread) = ThreadedPort::new(TapPort::ABILITIES).map_err(out_of)?;
        let (Opened { hold, has_ipv6 }, closed) = start(opening, Some(thread))?;
        let interface = Interface { hold, closed };
        let attached = handle.call(move |owner| owner.attach(Box::new(port), config));
        let attached = attached.map_err(|_| Error::Resources("the switch has ended".to_owned()));
        let port = match attached.and_then(|port| Ok(port?)) {
            Ok(port) => port,
            Err(error) => {
                // The port was dropped, so the thread ends.
                let Interface { hold, closed } = interface;
                if request.create {
                    hold.set_persistent(false).map_err(|source| failed(request, source))?;
                }
                drop(hold);
                wait(&closed);
                return Err(error);
            }
        };
        let tap = Tap { switch: request.switch.clone(), handle, port, interface };
        self.lock().ports.insert(name.clone(), tap);
        has_ipv6
    }

    /// Detaches a TAP interface and removes it; blocks. If the container keeps the port's thread
    /// busy, the interface is removed later, when the thread ends.
    ///
    /// # Errors
    /// [`Error::UnknownTap`], [`Error::Tap`].
    pub fn detach(&self, name: &str) -> Result<(), Error> {
        let removed = self.lock().ports.remove(name);
        let Tap { handle, port, interface, .. } =
            removed.ok_or_else(|| Error::UnknownTap(name.to_owned()))?;
        let closed = interface.give_up();
        // A switch that has ended has no ports.
        drop(handle.call(move |owner| owner.detach(port)));
        let closed = closed.map_err(|source| Error::Tap { name: name.to_owned(), source })?;
        wait(&closed);
        Ok(())
    }
}

/// The settings by which a thread opens an interface.
struct Opening {
    namespace: Namespace,
    request: v1::AttachTapRequest,
    mac: Mac,
    settings: Option<InterfaceSettings>,
    patience: Instant,
}

/// An interface that is open, beside its port.
struct Opened {
    hold: TapHold,
    /// `true` if the interface has IPv6; an error if the settings of one that was left failed.
    has_ipv6: Result<bool, Error>,
}

impl Opening {
    fn new(request: &v1::AttachTapRequest, mac: Mac, patience: Instant) -> Result<Self, Error> {
        let settings = settings(request, mac)?;
        let namespace = Namespace::open_any(Path::new(&request.namespace))?;
        if namespace.identity() != (Identity { device: request.device, inode: request.inode }) {
            return Err(Error::OtherNamespace(request.namespace.clone()));
        }
        Ok(Self { namespace, request: request.clone(), mac, settings, patience })
    }

    /// Opens the interface on a thread in its namespace, waiting until `patience` at most if it is
    /// busy, and makes its settings. The interface stays there.
    ///
    /// # Errors
    /// [`Error`]; an interface that was made here is gone then.
    fn open(&self) -> Result<(TapPort, Opened), Error> {
        let (request, name) = (&self.request, &self.request.interface);
        let opened =
            if request.create { TapPort::create(name) } else { open_left(name, self.patience) };
        let failed = |source| failed(request, source);
        let mut tap = opened.map_err(failed)?;
        let hold = tap.hold().map_err(failed)?;
        // Before it stays: whoever finds it after a crash knows it by its address.
        tap.set_mac(self.mac).map_err(failed)?;
        if request.placeholder {
            // It is set up as it will be when it is closed.
            tap.set_link(LinkSetting::Down);
        }
        let mut has_ipv6 = self.set_up();
        if request.create {
            has_ipv6 = Ok(has_ipv6?);
        }
        hold.set_persistent(true).map_err(failed)?;
        Ok((tap, Opened { hold, has_ipv6 }))
    }

    /// Makes the interface's settings. Returns whether it has IPv6.
    fn set_up(&self) -> Result<bool, Error> {
        let applied = self.settings.as_ref().map_or(Ok(false), InterfaceSettings::apply);
        applied.map_err(Error::TapSettings)
    }
}

fn failed(request: &v1::AttachTapRequest, source: std::io::Error) -> Error {
    Error::Tap { name: request.interface.clone(), source }
}

fn out_of(error: std::io::Error) -> Error {
    Error::Resources(error.to_string())
}

/// Starts the thread of an interface, whose side of the port is `port` if there is one, and waits
/// until the thread has opened the interface. Returns what it has opened, and the receiver that is
/// disconnected when the thread has closed the interface.
///
/// # Errors
/// [`Error`]. The port's thread ends, and no interface is left that it made.
fn start(opening: Opening, port: Option<PortThread>) -> Result<(Opened, Receiver<()>), Error> {
    let interface = opening.request.interface.clone();
    // Without room: the thread knows that its message was received, and not lost in the channel by
    // a receiver that has just given up.
    let (tell, opened) = sync_channel(0);
    let (closing, closed) = channel();
    let builder = std::thread::Builder::new().name("tap".to_owned()).stack_size(STACK);
    builder.spawn(move || serve(opening, port, &tell, closing)).map_err(out_of)?;
    Ok((in_time(&opened, interface, SLOW)?, closed))
}

/// Waits until a thread tells that it has opened an interface, for `patience` at most.
fn in_time<T>(
    opened: &Receiver<Result<T, Error>>,
    interface: String,
    patience: Duration,
) -> Result<T, Error> {
    match opened.recv_timeout(patience) {
        Ok(opened) => opened,
        Err(RecvTimeoutError::Timeout) => Err(Error::SlowTap { name: interface, patience }),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::Resources("the thread of a TAP interface has ended".to_owned()))
        }
    }
}

/// The thread of an interface: opens it, tells whether that succeeded, and serves it until its port
/// is dropped or the container has removed it. Without a port, it closes the interface at once. If
/// nobody waits for the interface any more, one that was made here is removed.
fn serve(
    opening: Opening,
    port: Option<PortThread>,
    tell: &SyncSender<Result<Opened, Error>>,
    closing: Sender<()>,
) {
    let opened = opening.namespace.enter().map_err(Error::from).and_then(|()| opening.open());
    let is_new = opening.request.create;
    // The namespace lives as long as its interface.
    drop(opening);
    let (tap, told) = match opened {
        Ok((tap, opened)) => (Some(tap), tell.send(Ok(opened))),
        Err(error) => (None, tell.send(Err(error))),
    };
    match (tap, port, told) {
        (Some(tap), Some(port), Ok(())) => port.serve(Box::new(tap)),
        (tap, _, Err(SendError(Ok(Opened { hold, .. })))) if is_new => {
            if let Err(error) = hold.set_persistent(false) {
                tracing::warn!(%error, "a TAP interface that took too long is left");
            }
            drop((tap, hold));
        }
        (tap, ..) => drop(tap),
    }
    drop(closing);
}

/// Opens the interface that the last process left. A program that the last process was just
/// starting may have its descriptors for a moment longer than it.
fn open_left(name: &str, patience: Instant) -> std::io::Result<TapPort> {
    loop {
        match TapPort::open(name) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && Instant::now() < patience => {
                std::thread::sleep(BUSY / 100);
            }
            opened => return opened,
        }
    }
}

fn check_name(name: &str) -> Result<(), Error> {
    let printable = name.bytes().all(|byte| byte.is_ascii_graphic());
    match printable && (1..=LONGEST_NAME).contains(&name.len()) {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "a TAP interface's port has a name of 1 to {LONGEST_NAME} printable characters"
        ))),
    }
}

fn mac(request: &v1::AttachTapRequest) -> Result<Mac, Error> {
    request
        .mac
        .parse()
        .map_err(|error| Error::Invalid(format!("\"{}\" is no MAC address: {error}", request.mac)))
}

/// Returns the port's settings: the container behind it has its own addresses and no others.
fn config(request: &v1::AttachTapRequest, mac: Mac) -> Result<PortConfig, Error> {
    Ok(PortConfig {
        name: format!("tap:{}", request.name),
        mac: Some(mac),
        addresses: request.addresses.iter().map(|text| ip(text)).collect::<Result<_, _>>()?,
        spoof_check: true,
        max_rate: rate(request.max_rate, request.max_burst),
        receive_rate: rate(request.receive_rate, request.receive_burst),
        ..PortConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_ports_while_its_interface_is_opened() {
        let taps = Taps::default();
        let first = taps.reserve("one").unwrap();
        assert!(matches!(taps.reserve("one"), Err(Error::ExistingTap(name)) if name == "one"));
        drop(taps.reserve("two").unwrap());
        drop(first);
        drop(taps.reserve("one").unwrap());
    }

    #[test]
    fn an_interface_that_is_not_open_in_time_is_an_error_that_says_so() {
        let (tell, opened) = channel::<Result<(), Error>>();
        let slow = in_time(&opened, "eth0".to_owned(), Duration::ZERO).unwrap_err();
        let text = slow.to_string();
        assert!(text.starts_with("the TAP interface eth0 was not open within 0 s: "), "{text}");
        tell.send(Ok(())).unwrap();
        in_time(&opened, "eth0".to_owned(), SLOW).unwrap();
        drop(tell);
        let ended = in_time(&opened, "eth0".to_owned(), SLOW);
        assert!(matches!(ended, Err(Error::Resources(_))), "{ended:?}");
    }
}
