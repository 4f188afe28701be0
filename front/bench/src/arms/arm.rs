//! The ways in which sandboxes get their network, and the paper's figures of them. A way is Slipway
//! with or without a pool, an ablation of it (a mechanism that is switched off), or a peer.
//!
//! A new way is a variant of [`Arm`], with its place in [`Arm::ALL`], a name, a description and its
//! traits (`Arm::traits`), on which the predicates depend. `spec_of` and `prepare` of
//! `front/cli/src/bench/arms/turn.rs` start its sandboxes. An ablation by a setting of the daemon
//! has a change of the settings in `own_daemon.rs` there; it is a setting in
//! `sandbox/runtime/src/config.rs`. The help in `front/cli/src/args/startup.rs` and
//! `docs/bench-startup.md` name the way. Tests: those of this file and of `own_daemon.rs`, and
//! `tests/e2e/67-hollow.sh`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A way in which sandboxes get their network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// They have none.
    None,
    /// Each has a function that is made when the sandbox starts.
    Slipway,
    /// Each has a function of a pool, which was made before.
    Pool,
    /// As [`Arm::Slipway`], but its container waits for the network: FastIOV-A.
    NoAsync,
    /// As [`Arm::Pool`], behind a wait that stands for a reset on demand: FastIOV's locks.
    VfLocks,
    /// As [`Arm::VfLocks`], but the waits are under one lock, one after the other: FastIOV-L.
    OneLock,
    /// As [`Arm::Pool`], of a daemon without a pool of control groups.
    PoolNoCgroups,
    /// As [`Arm::Pool`], of a daemon that formats each volatile layer when its sandbox starts.
    PoolNoLayer,
    /// As [`Arm::Pool`], of a daemon that zeroes recycled memory before it gives it: FastIOV-D.
    PoolNoLate,
    /// As [`Arm::Pool`], of a daemon whose sandboxes have their images as disks and share no root.
    PoolNoRoot,
    /// Each has a veth pair, made when the sandbox starts: one end in a network namespace of its
    /// own, the other one in a bridge.
    Veth,
    /// Each has a macvlan interface in a network namespace of its own.
    Macvlan,
    /// Each has a macvtap interface in a network namespace of its own.
    Macvtap,
    /// Each has a virtio interface that QEMU emulates, on a TAP interface that QEMU makes.
    Tap,
    /// Each has a function of a pool of hardware.
    Vf,
    /// Instead of sandboxes: runc's containers with a veth pair as in [`Arm::Veth`].
    Runc,
    /// As [`Arm::Runc`], but the CNI plugin `bridge` makes the veth pair.
    RuncCni,
}

impl Arm {
    /// All ways.
    pub const ALL: [Self; 17] = [
        Self::None,
        Self::Slipway,
        Self::Pool,
        Self::NoAsync,
        Self::VfLocks,
        Self::OneLock,
        Self::PoolNoCgroups,
        Self::PoolNoLayer,
        Self::PoolNoLate,
        Self::PoolNoRoot,
        Self::Veth,
        Self::Macvlan,
        Self::Macvtap,
        Self::Tap,
        Self::Vf,
        Self::Runc,
        Self::RuncCni,
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Slipway => "slipway",
            Self::Pool => "pool",
            Self::NoAsync => "no-async",
            Self::VfLocks => "vf-locks",
            Self::OneLock => "one-lock",
            Self::PoolNoCgroups => "pool-no-cgroups",
            Self::PoolNoLayer => "pool-no-layer",
            Self::PoolNoLate => "pool-no-late",
            Self::PoolNoRoot => "pool-no-root",
            Self::Veth => "veth",
            Self::Macvlan => "macvlan",
            Self::Macvtap => "macvtap",
            Self::Tap => "tap",
            Self::Vf => "vf",
            Self::Runc => "runc",
            Self::RuncCni => "runc-cni",
        }
    }

    /// Describes the way in a few words.
    pub fn about(self) -> &'static str {
        match self {
            Self::None => "no network",
            Self::Slipway => "a network function, made when it is needed",
            Self::Pool => "a network function of a pool, made before",
            Self::NoAsync => "a network function; the container waits for it",
            Self::VfLocks => "of a pool, behind a wait of 100 ms for a reset",
            Self::OneLock => "of a pool, behind such a wait under one lock for all",
            Self::PoolNoCgroups => "of a pool; each control group is made when it is needed",
            Self::PoolNoLayer => "of a pool; each volatile layer is formatted when it is needed",
            Self::PoolNoLate => "of a pool; recycled memory is zeroed before it is given",
            Self::PoolNoRoot => "of a pool; images are disks, in no shared pages",
            Self::Veth => "a veth pair and a bridge, made when it is needed",
            Self::Macvlan => "a macvlan interface, made when it is needed",
            Self::Macvtap => "a macvtap interface, made when it is needed",
            Self::Tap => "QEMU's own interface on a TAP, without addresses",
            Self::Vf => "a function of a pool of hardware",
            Self::Runc => "runc's containers, with a veth pair and a bridge by ip(8)",
            Self::RuncCni => "runc's containers, with a veth pair and a bridge by CNI",
        }
    }

    /// Returns the source of the way's network, and whether the mechanism that the way is about is
    /// one of guests.
    fn traits(self) -> (Source, bool) {
        match self {
            Self::None => (Source::Node, false),
            Self::Slipway => (Source::Node, false),
            Self::Pool => (Source::Pool, false),
            Self::NoAsync => (Source::Node, false),
            Self::VfLocks => (Source::PoolWithReset, false),
            Self::OneLock => (Source::PoolWithReset, false),
            Self::PoolNoCgroups => (Source::PoolOfOwnDaemon, false),
            Self::PoolNoLayer => (Source::PoolOfOwnDaemon, false),
            Self::PoolNoLate => (Source::PoolOfOwnDaemon, true),
            Self::PoolNoRoot => (Source::PoolOfOwnDaemon, true),
            Self::Veth => (Source::Namespace, false),
            Self::Macvlan => (Source::Namespace, false),
            Self::Macvtap => (Source::Namespace, false),
            Self::Tap => (Source::Node, true),
            Self::Vf => (Source::Node, false),
            Self::Runc => (Source::NamespaceOfRunc, false),
            Self::RuncCni => (Source::NamespaceOfRunc, false),
        }
    }

    fn source(self) -> Source {
        self.traits().0
    }

    /// Returns whether the function is one of a pool that is made for the measurement.
    pub fn takes_of_pool(self) -> bool {
        self.source() == Source::Pool || self.resets() || self.has_own_daemon()
    }

    /// Returns whether a setting of the daemon switches a mechanism off, so that the way has a
    /// daemon beside the node's.
    pub fn has_own_daemon(self) -> bool {
        self.source() == Source::PoolOfOwnDaemon
    }

    /// Returns whether the mechanism that the way is about is one of guests, which hollow sandboxes
    /// do not have.
    pub fn needs_guests(self) -> bool {
        self.traits().1
    }

    /// Returns whether a start has a wait that stands for a function-level reset.
    pub fn resets(self) -> bool {
        self.source() == Source::PoolWithReset
    }

    /// Returns whether the interface is one of the kernel's in a network namespace.
    pub fn is_in_namespace(self) -> bool {
        self.source() == Source::Namespace || self.is_runc()
    }

    /// Returns whether runc's containers are started in place of sandboxes.
    pub fn is_runc(self) -> bool {
        self.source() == Source::NamespaceOfRunc
    }
}

/// The source of a way's network.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The node's daemon as it is, or none.
    Node,
    /// A pool that is made for the measurement.
    Pool,
    /// As [`Source::Pool`], and each start waits as if for a function-level reset.
    PoolWithReset,
    /// As [`Source::Pool`], of a daemon that is started for the way, with a mechanism switched off.
    PoolOfOwnDaemon,
    /// An interface of the kernel's in a network namespace.
    Namespace,
    /// As [`Source::Namespace`], for runc's containers in place of sandboxes.
    NamespaceOfRunc,
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arm {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|arm| arm.name() == word);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            format!("\"{word}\" is no way; there are {}", names.join(", "))
        })
    }
}

/// A figure of FastIOV's evaluation (sections 6.2 and 6.4): 200 starts at once on another machine.
pub(super) struct Published {
    /// The name in the table.
    pub name: &'static str,
    /// The name in the picture.
    pub short: &'static str,
    /// The ways beside which it is shown; none: beside all.
    beside: &'static [Arm],
    /// The mean time over that of starts without a network.
    pub mean: f64,
    /// The same of the 99th percentile, where the paper tells.
    pub p99: Option<f64>,
}

/// The mean of starts with VFIO before FastIOV, over those without a network.
const VFIO: f64 = 4.052;

/// Returns a figure of FastIOV without one of its parts (figure 11), whose mean is `less` below
/// that of starts with VFIO.
const fn without(name: &'static str, short: &'static str, less: f64) -> Published {
    let beside = &[Arm::NoAsync, Arm::OneLock, Arm::PoolNoLate];
    Published { name, short, beside, mean: VFIO * (1.0 - less), p99: None }
}

/// All figures. Those without one part and IPvtap are computed: the paper has them in relation to
/// starts with VFIO and to FastIOV (31.8 % more than it).
static PUBLISHED: [Published; 7] = [
    Published {
        name: "FastIOV, as published",
        short: "FastIOV (paper)",
        beside: &[],
        mean: 1.391,
        p99: Some(1.116),
    },
    Published {
        name: "VFIO before it",
        short: "VFIO (paper)",
        beside: &[],
        mean: VFIO,
        p99: Some(4.545),
    },
    without("FastIOV-A, as published", "FastIOV-A (paper)", 0.403),
    without("FastIOV-L, as published", "FastIOV-L (paper)", 0.218),
    without("FastIOV-S, as published", "FastIOV-S (paper)", 0.582),
    without("FastIOV-D, as published", "FastIOV-D (paper)", 0.437),
    Published {
        name: "IPvtap, as published",
        short: "IPvtap (paper)",
        beside: &[Arm::Macvlan, Arm::Macvtap],
        // FastIOV takes 31.8 % less time.
        mean: 1.391 / 0.682,
        p99: None,
    },
];

/// Returns the paper's figures that belong beside these ways.
pub(super) fn published(arms: &[Arm]) -> impl Iterator<Item = &'static Published> {
    let belongs = move |one: &&Published| {
        one.beside.is_empty() || one.beside.iter().any(|arm| arms.contains(arm))
    };
    PUBLISHED.iter().filter(belongs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_read_as_they_are_written() {
        assert!(Arm::ALL.iter().all(|arm| arm.to_string().parse() == Ok(*arm)));
        let json = |arm: &Arm| serde_json::to_string(arm).unwrap();
        assert!(Arm::ALL.iter().all(|arm| json(arm) == format!("\"{arm}\"")));
        assert!("vanilla".parse::<Arm>().unwrap_err().contains("none, slipway, pool, no-async"));
    }

    #[test]
    fn ways_with_a_reset_take_functions_of_a_pool() {
        let of_pool: Vec<_> = Arm::ALL.into_iter().filter(|arm| arm.takes_of_pool()).collect();
        let (own, others): (Vec<_>, Vec<_>) =
            of_pool.into_iter().partition(|arm| arm.has_own_daemon());
        assert_eq!(others, [Arm::Pool, Arm::VfLocks, Arm::OneLock]);
        assert!(own.len() == 4 && own.iter().all(|arm| !arm.resets()), "{own:?}");
        assert!(!Arm::Pool.resets() && Arm::OneLock.resets());
        assert!(published(&[Arm::OneLock]).any(|one| one.short == "FastIOV-L (paper)"));
    }

    #[test]
    fn each_way_has_its_traits() {
        let with = |has: fn(Arm) -> bool| -> Vec<Arm> {
            Arm::ALL.into_iter().filter(|arm| has(*arm)).collect()
        };
        assert_eq!(with(Arm::needs_guests), [Arm::PoolNoLate, Arm::PoolNoRoot, Arm::Tap]);
        assert_eq!(with(Arm::is_runc), [Arm::Runc, Arm::RuncCni]);
        let in_namespaces = [Arm::Veth, Arm::Macvlan, Arm::Macvtap, Arm::Runc, Arm::RuncCni];
        assert_eq!(with(Arm::is_in_namespace), in_namespaces);
    }

    #[test]
    fn published_figures_are_beside_their_ways() {
        let names = |arms: &[Arm]| published(arms).map(|one| one.name).collect::<Vec<_>>();
        assert_eq!(names(&[Arm::None]), ["FastIOV, as published", "VFIO before it"]);
        assert_eq!(names(&[Arm::NoAsync])[2], "FastIOV-A, as published");
        assert_eq!(names(&[Arm::PoolNoLate])[5], "FastIOV-D, as published");
        let parts: Vec<_> = published(&[Arm::NoAsync]).skip(2).map(|one| one.mean).collect();
        for (mean, expected) in parts.iter().zip([2.42, 3.17, 1.69, 2.28]) {
            assert!((mean - expected).abs() < 0.01, "{mean} {expected}");
        }
        assert_eq!(parts.len(), 4);
        let found: Vec<_> = published(&[Arm::Macvtap]).collect();
        assert_eq!((found.len(), found[2].short), (3, "IPvtap (paper)"));
        assert!((found[2].mean - 2.04).abs() < 0.01, "{}", found[2].mean);
    }
}
