//! TAP interfaces that the fabric makes in network namespaces of the host, as ports of switches.
//!
//! The interface of such a port outlives this process, with the addresses and routes that others
//! gave it: the next process opens it by its name. The port holds a second descriptor, so that the
//! interface is removed by the thread that detaches it: the kernel takes milliseconds for that, and
//! the switch's thread must not wait.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_netns::{Identity, Namespace};
use slipway_plane_api::v1;
use slipway_switch::ports::{TapHold, TapPort};
use slipway_switch::{Handle, PortConfig, PortIndex};

use crate::error::Error;

/// The longest name of such a port, in bytes.
const LONGEST_NAME: usize = 256;
/// The longest time after this process's start that an interface may be another process's, which
/// is about to end.
const BUSY: Duration = Duration::from_secs(1);

/// The ports at TAP interfaces in namespaces.
pub struct Taps {
    /// The ports by name.
    table: Mutex<BTreeMap<String, Tap>>,
    /// The end of the time in which interfaces of the last process are waited for. One time for all
    /// of them: each container can have its interface open.
    patience: Instant,
}

impl Default for Taps {
    fn default() -> Self {
        Self { table: Mutex::default(), patience: Instant::now() + BUSY }
    }
}

struct Tap {
    /// The name of the switch.
    switch: String,
    handle: Handle,
    port: PortIndex,
    hold: TapHold,
}

impl Taps {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Tap>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the ports of a switch that ends. Their interfaces stay.
    pub fn forget_of(&self, switch: &str) {
        self.lock().retain(|_, tap| tap.switch != switch);
    }

    /// Attaches a TAP interface in a network namespace to the switch behind `handle`; blocks.
    ///
    /// # Errors
    /// [`Error`]; no port is left then, and no interface that was made here.
    pub fn attach(&self, request: &v1::AttachTapRequest, handle: Handle) -> Result<(), Error> {
        let name = &request.name;
        check_name(name)?;
        let config = config(request)?;
        if self.lock().contains_key(name) {
            return Err(Error::ExistingTap(name.clone()));
        }
        let tap = open(request, self.patience)?;
        let failed = |source| Error::Tap { name: request.interface.clone(), source };
        let hold = tap.hold().map_err(failed)?;
        // Before it stays: whoever finds it after a crash knows it by its address.
        config.mac.map_or(Ok(()), |mac| tap.set_mac(mac)).map_err(failed)?;
        hold.set_persistent(true).map_err(failed)?;
        if request.placeholder {
            return Ok(());
        }
        let attached = handle.call(move |owner| owner.attach(Box::new(tap), config));
        let attached = attached.map_err(|_| Error::Resources("the switch has ended".to_owned()));
        let port = match attached.and_then(|port| Ok(port?)) {
            Ok(port) => port,
            Err(error) => {
                if request.create {
                    remove(&hold).map_err(failed)?;
                }
                return Err(error);
            }
        };
        let tap = Tap { switch: request.switch.clone(), handle, port, hold };
        self.lock().insert(name.clone(), tap);
        Ok(())
    }

    /// Detaches a TAP interface and removes it; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownTap`], [`Error::Tap`].
    pub fn detach(&self, name: &str) -> Result<(), Error> {
        let removed = self.lock().remove(name);
        let Tap { handle, port, hold, .. } =
            removed.ok_or_else(|| Error::UnknownTap(name.to_owned()))?;
        // A switch that has ended has no ports. This thread drops the port, and the interface goes
        // with `hold`.
        drop(handle.call(move |owner| owner.detach(port)));
        let failed = |source| Error::Tap { name: name.to_owned(), source };
        remove(&hold).map_err(failed)
    }
}

/// Has the interface removed with its last descriptor. The one that the container removed is gone.
fn remove(hold: &TapHold) -> std::io::Result<()> {
    match hold.set_persistent(false) {
        Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => Ok(()),
        done => done,
    }
}

/// Opens the interface on a thread in its namespace, waiting until `patience` at most if it is
/// busy. The interface stays there.
fn open(request: &v1::AttachTapRequest, patience: Instant) -> Result<TapPort, Error> {
    let namespace = Namespace::open_any(Path::new(&request.namespace))?;
    if namespace.identity() != (Identity { device: request.device, inode: request.inode }) {
        return Err(Error::OtherNamespace(request.namespace.clone()));
    }
    let name = &request.interface;
    let open = || if request.create { TapPort::create(name) } else { open_left(name, patience) };
    let opened = namespace.run(open)?;
    opened.map_err(|source| Error::Tap { name: name.clone(), source })
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

/// Returns the port's settings: the container behind it has its own addresses and no others.
fn config(request: &v1::AttachTapRequest) -> Result<PortConfig, Error> {
    let mac = request.mac.parse().map_err(|error| {
        Error::Invalid(format!("\"{}\" is no MAC address: {error}", request.mac))
    })?;
    let address = |text: &String| {
        text.parse().map_err(|_| Error::Invalid(format!("\"{text}\" is no IP address")))
    };
    Ok(PortConfig {
        name: format!("tap:{}", request.name),
        mac: Some(mac),
        addresses: request.addresses.iter().map(address).collect::<Result<_, _>>()?,
        spoof_check: true,
        ..PortConfig::default()
    })
}
