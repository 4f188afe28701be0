//! The kinds of network interface that are measured in guests.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use slipway_runtime::Config;

/// The driver that a guest's interface has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// That of the node's kernel.
    Virtio,
    /// Linux's e1000.
    Stock,
    /// `guest/e1000-slipway`.
    Own,
}

impl Driver {
    /// Returns the directory of the guests' kernel, which is beside the node's own, and the command
    /// that makes it; `None` stands for the node's own.
    pub fn kernel(self, config: &Config) -> Option<(PathBuf, &'static str)> {
        let (end, how) = match self {
            Self::Virtio => return None,
            Self::Stock => ("-e1000", "deploy/setup/setup.sh e1000"),
            Self::Own => {
                ("-e1000-slipway", "`make -C guest/e1000-slipway kernel`, as its README says")
            }
        };
        let mut path = config.kernel_dir.clone().into_os_string();
        path.push(end);
        Some((path.into(), how))
    }
}

/// The device of a guest's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// A function of Slipway's, at the switch: `--nic`.
    Slipway(&'static str),
    /// A device that QEMU emulates, at a TAP interface of the host.
    Qemu(&'static str),
}

/// A kind of interface, with what its guests are told before each turn.
#[derive(Clone, Copy, Debug)]
pub struct Interface {
    pub name: &'static str,
    pub about: &'static str,
    pub model: Model,
    pub driver: Driver,
    /// The script that a guest runs before each turn.
    pub setup: &'static str,
    /// The script that a guest runs after each turn, so that it costs the next ones nothing; empty:
    /// none.
    pub rest: &'static str,
}

/// The setup of our driver without any of the paper's techniques.
const PLAIN: &str = "ethtool --set-priv-flags eth0 lazy-tx off && ethtool -C eth0 rx-usecs 0";

/// The kinds of interface, in the order of their turns.
pub const INTERFACES: [Interface; 11] = [
    Interface {
        name: "stock",
        about: "an e1000 with Linux's driver, which moderates its interrupts as it sees fit",
        model: Model::Slipway("e1000"),
        driver: Driver::Stock,
        setup: ":",
        rest: "",
    },
    Interface {
        name: "base",
        about: "an e1000 with our driver and none of the paper's techniques",
        model: Model::Slipway("e1000"),
        driver: Driver::Own,
        setup: PLAIN,
        rest: "",
    },
    Interface {
        name: "itr",
        about: "the same, interrupts at least 64 us apart (the paper's itr=250)",
        model: Model::Slipway("e1000"),
        driver: Driver::Own,
        setup: "ethtool --set-priv-flags eth0 lazy-tx off && ethtool -C eth0 rx-usecs 64",
        rest: "",
    },
    Interface {
        name: "sc",
        about: "the same with send combining",
        model: Model::Slipway("e1000"),
        driver: Driver::Own,
        setup: "ethtool --set-priv-flags eth0 lazy-tx off && \
                ethtool --set-priv-flags eth0 send-combining on && ethtool -C eth0 rx-usecs 64",
        rest: "",
    },
    Interface {
        name: "csb",
        about: "an e1000 with our driver and the communication status block",
        model: Model::Slipway("e1000-csb"),
        driver: Driver::Own,
        setup: "ethtool -C eth0 rx-usecs 0",
        rest: "",
    },
    Interface {
        name: "polling",
        about: "the same, polled on a timer's ticks; programs keep most of a busy processor",
        model: Model::Slipway("e1000-csb"),
        driver: Driver::Own,
        setup: "ethtool --set-priv-flags eth0 polling on",
        rest: "ethtool --set-priv-flags eth0 polling off",
    },
    Interface {
        name: "idle",
        about: "polling, and in the idle loop too (the paper's section 3.3.2)",
        model: Model::Slipway("e1000-csb"),
        driver: Driver::Own,
        setup: "echo 1 >/sys/module/e1000_slipway/parameters/poll_idle && \
                ethtool --set-priv-flags eth0 polling on",
        rest: "ethtool --set-priv-flags eth0 polling off",
    },
    Interface {
        name: "virtio",
        about: "Slipway's virtio-net with Linux's driver",
        model: Model::Slipway("virtio"),
        driver: Driver::Virtio,
        setup: ":",
        rest: "",
    },
    Interface {
        name: "qemu-e1000",
        about: "QEMU's own e1000, driven as base; QEMU moderates its interrupts by itself",
        model: Model::Qemu("e1000"),
        driver: Driver::Own,
        setup: PLAIN,
        rest: "",
    },
    Interface {
        name: "qemu-sc",
        about: "the same with send combining, which needs no change of the VMM",
        model: Model::Qemu("e1000"),
        driver: Driver::Own,
        setup: "ethtool --set-priv-flags eth0 lazy-tx off && \
                ethtool --set-priv-flags eth0 send-combining on && ethtool -C eth0 rx-usecs 0",
        rest: "",
    },
    Interface {
        name: "qemu-virtio",
        about: "QEMU's own virtio-net, without vhost; a Linux bridge between guests",
        model: Model::Qemu("virtio"),
        driver: Driver::Virtio,
        setup: ":",
        rest: "",
    },
];

impl Interface {
    /// Checks that the node has what the guests need.
    ///
    /// # Errors
    /// A sentence about what is missing, with the next step.
    pub fn check(&self, config: &Config) -> Result<()> {
        let Some((directory, how)) = self.driver.kernel(config) else { return Ok(()) };
        ensure!(
            directory.join("vmlinuz").is_file(),
            "a guest kernel in {}; next step: {how}",
            directory.display()
        );
        Ok(())
    }
}
