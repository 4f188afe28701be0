//! The PHY, and the link's negotiation, in virtual time.

use serde::{Deserialize, Serialize};
use slipway_e1000_spec::phy::{self, control, specific, status};

/// Nanoseconds of a negotiation. A copper link takes seconds; a driver that waits for it shall not.
pub(crate) const NEGOTIATION: u64 = 1_000_000;
/// [`phy::SPECIFIC_CONTROL`] after a reset: automatic crossover.
const SPECIFIC_INITIAL: u16 = 0x0068;

/// The PHY's registers and its link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Phy {
    /// Registers that keep what was written. Others are computed.
    written: [u16; phy::COUNT],
    /// The time at which the link's negotiation ends; `None` if none is under way.
    negotiates: Option<u64>,
    /// The link was lost since [`phy::STATUS`] was read.
    lost: bool,
    /// The host's link is up.
    carrier: bool,
}

impl Phy {
    /// Makes a PHY after power-on at `now`, whose link is being negotiated.
    pub fn new(now: u64) -> Self {
        let mut phy =
            Self { written: [0; phy::COUNT], negotiates: None, lost: false, carrier: true };
        phy.reset(now);
        phy
    }

    /// Returns to the state after a reset; the link is negotiated anew.
    pub fn reset(&mut self, now: u64) {
        self.written = [0; phy::COUNT];
        self.written[usize::from(phy::CONTROL)] = control::INITIAL;
        self.written[usize::from(phy::ADVERTISEMENT)] = phy::ADVERTISED;
        self.written[usize::from(phy::GIGABIT_CONTROL)] = phy::GIGABIT_ADVERTISED;
        self.written[usize::from(phy::SPECIFIC_CONTROL)] = SPECIFIC_INITIAL;
        self.negotiate(now);
    }

    fn negotiate(&mut self, now: u64) {
        self.lost = true;
        self.negotiates = Some(now.saturating_add(NEGOTIATION));
    }

    /// Sets whether the host's link is up. A link that comes up is negotiated.
    pub fn set_carrier(&mut self, now: u64, up: bool) {
        if up == std::mem::replace(&mut self.carrier, up) {
            return;
        }
        self.lost = true;
        self.negotiates = None;
        if up {
            self.negotiate(now);
        }
    }

    /// Ends a negotiation that is over at `now`.
    pub fn advance(&mut self, now: u64) {
        self.negotiates = self.negotiates.filter(|end| *end > now);
    }

    /// Returns the time at which the link's negotiation ends.
    pub fn deadline(&self) -> Option<u64> {
        self.negotiates
    }

    fn control(&self) -> u16 {
        self.written[usize::from(phy::CONTROL)]
    }

    /// Returns whether the link is up.
    pub fn link(&self) -> bool {
        self.carrier && self.negotiates.is_none() && self.control() & control::POWER_DOWN == 0
            || self.loops()
    }

    /// Returns whether frames that are sent come back.
    pub fn loops(&self) -> bool {
        self.control() & control::LOOPBACK != 0
    }

    /// Reads a register.
    pub fn read(&mut self, register: u8) -> u16 {
        let link = self.link();
        let when_up = |value: u16| if link { value } else { 0 };
        match register {
            phy::STATUS => {
                let lost = std::mem::take(&mut self.lost);
                let up = if lost { 0 } else { when_up(status::LINK) };
                status::ABILITIES | up | when_up(status::COMPLETE)
            }
            phy::ID1 => phy::IDENTIFIER[0],
            phy::ID2 => phy::IDENTIFIER[1],
            phy::PARTNER => when_up(phy::PARTNER_ABILITY),
            phy::EXPANSION => when_up(phy::PARTNER_NEGOTIATES),
            phy::GIGABIT_STATUS => when_up(phy::GIGABIT_GOOD),
            phy::EXTENDED_STATUS => phy::GIGABIT_ABLE,
            phy::SPECIFIC_STATUS => when_up(specific::GIGABIT | specific::LINK),
            other => self.written.get(usize::from(other)).copied().unwrap_or_default(),
        }
    }

    /// Writes a register.
    pub fn write(&mut self, now: u64, register: u8, value: u16) {
        match register {
            phy::CONTROL => {
                if value & control::RESET != 0 {
                    // Loopback is set after a reset, in a write of its own.
                    self.reset(now);
                }
                let before = self.control();
                let kept = value & !(control::RESET | control::RESTART);
                self.written[usize::from(phy::CONTROL)] = kept;
                let wakes = before & !kept & control::POWER_DOWN != 0;
                if value & control::RESTART != 0 || wakes {
                    self.negotiate(now);
                }
            }
            phy::ADVERTISEMENT
            | phy::NEXT_PAGE
            | phy::GIGABIT_CONTROL
            | phy::SPECIFIC_CONTROL
            | phy::INTERRUPT_ENABLE
            | phy::EXTENDED_CONTROL
            | 22..=31 => {
                if let Some(place) = self.written.get_mut(usize::from(register)) {
                    *place = value;
                }
            }
            _ => {}
        }
    }
}

/// Saved form of a [`Phy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PhyState {
    written: [u16; phy::COUNT],
    /// Nanoseconds that the negotiation takes from the time of saving on.
    left: Option<u64>,
    lost: bool,
    carrier: bool,
}

impl Phy {
    pub fn save(&self, now: u64) -> PhyState {
        let left = self.negotiates.map(|end| end.saturating_sub(now));
        PhyState { written: self.written, left, lost: self.lost, carrier: self.carrier }
    }

    /// Makes a PHY from a saved state. Returns `None` if it cannot be one.
    pub fn restored(now: u64, state: &PhyState) -> Option<Self> {
        let cleared = control::RESET | control::RESTART;
        let sound = state.left.is_none_or(|left| left <= NEGOTIATION)
            && state.written[usize::from(phy::CONTROL)] & cleared == 0;
        sound.then(|| Self {
            written: state.written,
            negotiates: state.left.map(|left| now.saturating_add(left)),
            lost: state.lost,
            carrier: state.carrier,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_comes_up_when_its_negotiation_ends() {
        let mut phy = Phy::new(0);
        assert_eq!(phy.deadline(), Some(NEGOTIATION));
        assert_eq!(phy.read(phy::STATUS) & status::LINK, 0);
        phy.advance(NEGOTIATION - 1);
        assert!(!phy.link());
        phy.advance(NEGOTIATION);
        assert!(phy.link() && phy.deadline().is_none());
        assert_ne!(phy.read(phy::STATUS) & status::LINK, 0);
        assert_ne!(phy.read(phy::SPECIFIC_STATUS) & specific::LINK, 0);
        phy.write(NEGOTIATION, phy::CONTROL, control::INITIAL | control::RESTART);
        assert_eq!(phy.deadline(), Some(2 * NEGOTIATION));
        assert_eq!(phy.read(phy::CONTROL), control::INITIAL, "the restart clears itself");
    }

    #[test]
    fn a_lost_link_is_seen_once_even_if_it_is_back() {
        let mut phy = Phy::new(0);
        phy.advance(NEGOTIATION);
        phy.read(phy::STATUS);
        phy.set_carrier(5, false);
        assert!(!phy.link());
        phy.set_carrier(6, true);
        phy.advance(6 + NEGOTIATION);
        assert!(phy.link());
        assert_eq!(phy.read(phy::STATUS) & status::LINK, 0, "it was lost in between");
        assert_ne!(phy.read(phy::STATUS) & status::LINK, 0);
    }

    #[test]
    fn loopback_needs_no_carrier_and_power_down_ends_the_link() {
        let mut phy = Phy::new(0);
        phy.set_carrier(0, false);
        phy.write(0, phy::CONTROL, 0x4140);
        assert!(phy.loops() && phy.link());
        phy.write(0, phy::CONTROL, control::RESET);
        assert!(!phy.loops() && !phy.link());
        phy.set_carrier(1, true);
        phy.advance(NEGOTIATION + 1);
        phy.write(2, phy::CONTROL, control::INITIAL | control::POWER_DOWN);
        assert!(!phy.link());
        phy.write(3, phy::CONTROL, control::INITIAL);
        assert_eq!(phy.deadline(), Some(3 + NEGOTIATION));
    }

    #[test]
    fn identifiers_and_read_only_registers_stay() {
        let mut phy = Phy::new(0);
        for register in 0..=255 {
            phy.write(0, register, 0x5555);
            phy.read(register);
        }
        assert_eq!([phy.read(phy::ID1), phy.read(phy::ID2)], phy::IDENTIFIER);
        let again = Phy::restored(9, &phy.save(0));
        assert_eq!(again.map(|mut phy| phy.read(phy::ID1)), Some(phy::IDENTIFIER[0]));
    }
}
