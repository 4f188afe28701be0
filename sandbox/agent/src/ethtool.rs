//! Commands of ethtool(8) to the drivers of network interfaces.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::machine::interface_request;
use crate::{log, nvme};

/// `SIOCETHTOOL` (linux/sockios.h).
const SIOCETHTOOL: u32 = 0x8946;
// The commands, and words of their structures, of linux/ethtool.h.
const NWAY_RST: u32 = 0x09;
const GCHANNELS: u32 = 0x3c;
const SCHANNELS: u32 = 0x3d;
const MAX_COMBINED: usize = 4;
const COMBINED_COUNT: usize = 8;

/// `struct ethtool_channels`, which begins with the command.
type Channels = [u32; 9];

/// The driver whose queues follow the CPUs. Drivers of hardware may reset their device for that.
const VIRTIO: &str = "virtio_net";

/// Has the driver of an interface negotiate its link anew, as `ethtool --negotiate` does. Linux's
/// e1000 resets its device for that, and sets it up as it was.
pub fn renegotiate(name: &str) -> io::Result<()> {
    // `struct ethtool_value`.
    carry_out(name, &mut [NWAY_RST, 0])
}

/// Has each virtio interface use as many queue pairs as there are CPUs, as far as its device has
/// them. An interface that does not stays as it is, with a line in the log. Waits for the devices.
pub fn follow_cpus(sysfs: &Path, cpus: u32) {
    for name in virtio_interfaces(sysfs) {
        if let Err(error) = set_pairs(&name, cpus) {
            log!("{name}: it keeps its queues: {error}");
        }
    }
}

/// Returns the names of the interfaces with a virtio device.
fn virtio_interfaces(sysfs: &Path) -> Vec<String> {
    let interfaces = nvme::entries(&sysfs.join("class/net")).into_iter().filter(|interface| {
        let driver = std::fs::read_link(interface.join("device/driver"));
        driver.is_ok_and(|driver| driver.ends_with(VIRTIO))
    });
    interfaces.filter_map(|interface| Some(interface.file_name()?.to_str()?.to_owned())).collect()
}

/// Has an interface use `cpus` queue pairs, or all that it has if those are fewer.
fn set_pairs(name: &str, cpus: u32) -> io::Result<()> {
    let mut channels: Channels = [0; 9];
    channels[0] = GCHANNELS;
    carry_out(name, &mut channels)?;
    match changed(channels, cpus) {
        Some(mut channels) => carry_out(name, &mut channels),
        None => Ok(()),
    }
}

/// Returns the command that changes the channels which an interface has to one for each CPU.
/// Returns `None` if nothing is to be changed.
fn changed(mut channels: Channels, cpus: u32) -> Option<Channels> {
    let wanted = cpus.min(channels[MAX_COMBINED]);
    if wanted == 0 || wanted == channels[COMBINED_COUNT] {
        return None;
    }
    (channels[0], channels[COMBINED_COUNT]) = (SCHANNELS, wanted);
    Some(channels)
}

/// Has the driver of an interface carry out a command. `command` is the command's structure, of
/// which the first word names the command.
fn carry_out(name: &str, command: &mut [u32]) -> io::Result<()> {
    let (socket, mut request) = interface_request(name)?;
    request.ifr_ifru.ifru_data = command.as_mut_ptr().cast();
    // SAFETY: SIOCETHTOOL reads one ifreq, which `request` is, and reads and writes the structure
    // that it points to. The callers, all in this module, give a command as many words as its
    // structure has, and the words outlive the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_queue_pair_for_each_cpu_as_far_as_there_are_pairs() {
        let pairs = |most, has, cpus| {
            let mut channels: Channels = [0; 9];
            (channels[MAX_COMBINED], channels[COMBINED_COUNT]) = (most, has);
            changed(channels, cpus).map(|channels| (channels[0], channels[COMBINED_COUNT]))
        };
        assert_eq!(pairs(4, 1, 2), Some((SCHANNELS, 2)));
        assert_eq!(pairs(4, 2, 8), Some((SCHANNELS, 4)));
        assert_eq!(pairs(4, 3, 1), Some((SCHANNELS, 1)));
        assert_eq!((pairs(4, 2, 2), pairs(1, 1, 4), pairs(0, 0, 4)), (None, None, None));
    }

    #[test]
    fn interfaces_of_other_drivers_are_left_alone() {
        let sysfs = tempfile::tempdir().unwrap();
        for (name, driver) in [("eth0", VIRTIO), ("eth1", "e1000")] {
            let device = sysfs.path().join("class/net").join(name).join("device");
            std::fs::create_dir_all(&device).unwrap();
            let driver = Path::new("../../../bus/drivers").join(driver);
            std::os::unix::fs::symlink(driver, device.join("driver")).unwrap();
        }
        std::fs::create_dir_all(sysfs.path().join("class/net/lo")).unwrap();
        assert_eq!(virtio_interfaces(sysfs.path()), ["eth0"]);
        assert!(virtio_interfaces(Path::new("/does/not/exist")).is_empty());
    }

    #[test]
    fn an_interface_without_a_device_has_no_queue_pairs() {
        assert!(set_pairs("lo", 1).is_err());
        assert!(set_pairs("none-such", 1).is_err());
    }
}
