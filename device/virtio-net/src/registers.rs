//! The features of the device, and the purposes of its queues.
//!
//! A new feature is a bit of `spec/virtio-spec` (`net`), which `offered` has, and `accepts` if it
//! needs another one. The path reads it in `Rules::features`: `header` for offloads, `transmit`,
//! `receive`. A command of the control queue is in `control`, and what a driver sets by it in
//! `Driven`, which is part of the saved state; a field that drivers read is in `Device::config`.
//!
//! A saved state whose driver chose a feature that is not offered any more is refused, and so is
//! one of a later build that offers more. `driver` uses the feature in tests (`tests/features.rs`,
//! and `offloads` or `control`); the head of the crate lists those that are left out.

use slipway_virtio::registers::{Offer, Registers};
use slipway_virtio_spec::RingFeatures;
use slipway_virtio_spec::net::Features;

use crate::{Settings, parts};

/// The purpose of a queue (section 5.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Receive(usize),
    Transmit(usize),
    Control,
    /// There is no such queue with the negotiated features.
    None,
}

/// Returns the purpose of queue `number` of a device with `pairs` queue pairs. Without MQ the
/// control queue follows the one pair.
pub(crate) fn role(features: Features, pairs: u16, number: u16) -> Role {
    let pairs = if features.contains(Features::MQ) { pairs } else { 1 };
    let pair = usize::from(number / 2);
    match number {
        _ if number < 2 * pairs && number.is_multiple_of(2) => Role::Receive(pair),
        _ if number < 2 * pairs => Role::Transmit(pair),
        _ if number == 2 * pairs && features.contains(Features::CTRL_VQ) => Role::Control,
        _ => Role::None,
    }
}

/// Returns the features of the network device that the driver chose.
pub(crate) fn features(registers: &Registers) -> Features {
    Features::from_bits_truncate(registers.state.driver_features)
}

/// Returns the queues and features that a device with these settings offers.
pub(crate) fn offer(settings: &Settings) -> Offer {
    Offer {
        queues: 2 * settings.pairs + 1,
        queue_size: settings.queue_size,
        features: offered(settings),
        accepts,
    }
}

/// Returns whether these features fit together (section 5.1.3.1).
fn accepts(features: u64) -> bool {
    let features = Features::from_bits_truncate(features);
    let needs =
        |these: Features, one: Features| !features.intersects(these) || features.contains(one);
    let control = Features::CTRL_RX
        | Features::CTRL_VLAN
        | Features::CTRL_RX_EXTRA
        | Features::GUEST_ANNOUNCE
        | Features::MQ
        | Features::CTRL_MAC_ADDR
        | Features::CTRL_GUEST_OFFLOADS;
    let guest_cut =
        Features::GUEST_TSO4 | Features::GUEST_TSO6 | Features::GUEST_USO4 | Features::GUEST_USO6;
    let host_cut = Features::HOST_TSO4 | Features::HOST_TSO6 | Features::HOST_USO;
    needs(control, Features::CTRL_VQ)
        && needs(guest_cut, Features::GUEST_CSUM)
        && needs(host_cut, Features::CSUM)
}

/// Returns the features that a device with these settings offers.
fn offered(settings: &Settings) -> u64 {
    let ring = RingFeatures::all();
    let mut net = Features::MTU
        | Features::MAC
        | Features::MRG_RXBUF
        | Features::STATUS
        | Features::CTRL_VQ
        | Features::CTRL_RX
        | Features::CTRL_VLAN
        | Features::CTRL_RX_EXTRA
        | Features::GUEST_ANNOUNCE
        | Features::CTRL_MAC_ADDR
        | Features::SPEED_DUPLEX;
    if settings.pairs > 1 {
        net |= Features::MQ;
    }
    if settings.offloads {
        net |= Features::CSUM
            | Features::HOST_TSO4
            | Features::HOST_TSO6
            | Features::HOST_ECN
            | Features::HOST_USO
            | Features::CTRL_GUEST_OFFLOADS
            | Features::GUEST_OFFLOADS;
    }
    ring.bits() | net.bits()
}

const _: () = assert!(parts::MAX_QUEUE <= slipway_virtio_spec::queue::MAX_SIZE);
