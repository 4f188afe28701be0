//! A switch's port at an interface in a network namespace of the host.
//!
//! The switch's thread makes the calls on the port's socket. The namespace is one that a sandbox
//! takes its network from: the sandbox's programs run in its guest, and cannot change the packet
//! filters of the namespace.

use std::path::Path;

use slipway_netns::{Identity, Namespace};
use slipway_plane_api::v1;
use slipway_switch::PortConfig;
use slipway_switch::ports::{PacketPort, Reception};

use crate::error::Error;
use crate::switch::SwitchHandle;

/// Attaches an interface to a switch; blocks. The port's socket stays in the interface's namespace,
/// which lives at least as long as the port.
///
/// # Errors
/// [`Error::Namespace`], [`Error::OtherNamespace`], [`Error::Uplink`]; nothing is attached then.
pub fn attach(switch: &SwitchHandle, uplink: &v1::Uplink) -> Result<(), Error> {
    let (index, name) = (uplink.index, uplink.interface.clone());
    let namespace = Namespace::open(Path::new(&uplink.namespace))?;
    if namespace.identity() != (Identity { device: uplink.device, inode: uplink.inode }) {
        return Err(Error::OtherNamespace(uplink.namespace.clone()));
    }
    // The peer behind the switch has the interface's own address.
    let port = namespace.run(|| PacketPort::open_index(index, Reception::OwnAndGroups))?;
    let port = port.map_err(|source| {
        let namespace = uplink.namespace.clone();
        Error::Uplink { name: name.clone(), namespace, source }
    })?;
    // The network of others is trusted as the host is: it forwards frames for others.
    let config =
        PortConfig { name: format!("uplink:{name}"), trust: true, ..PortConfig::default() };
    let attached = switch.handle.call(move |owner| owner.attach(Box::new(port), config));
    attached.map_err(|_| Error::Resources("the switch has ended".to_owned()))??;
    Ok(())
}
