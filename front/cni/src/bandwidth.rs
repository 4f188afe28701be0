//! The capability `bandwidth`: how fast a container may send and receive (CNI's conventions,
//! *Dynamic plugin specific fields*).
//!
//! Kubernetes has no words for a burst, so its runtimes give the largest one that they can. Such a
//! burst would let a pod pass half a gigabyte or more before its rate counts. It stands for none.

use serde::Deserialize;
use serde_json::Number;
use slipway_plane_api::network_v1::PortRates;

use crate::failure::{Code, Failure};

/// The smallest burst that stands for none, in bits: containerd gives 2^32 - 1, and others more.
const NO_CHOICE: u64 = u32::MAX as u64;
/// The smallest burst that is out of range, in bits, as for CNI's own plugin: 4 GiB.
const TOO_MUCH: u64 = 8 * u32::MAX as u64;

/// The values of the capability: bits per second and bits, 0 for none. *Ingress* is towards the
/// container. Programs in Go do not distinguish the case of names, and containerd's names begin
/// with a capital letter.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// The rate at which the container receives.
    #[serde(default, alias = "IngressRate")]
    pub ingress_rate: Option<Number>,
    /// Bits that the container receives at once after a pause.
    #[serde(default, alias = "IngressBurst")]
    pub ingress_burst: Option<Number>,
    /// The rate at which the container may send.
    #[serde(default, alias = "EgressRate")]
    pub egress_rate: Option<Number>,
    /// Bits that the container may send at once after a pause.
    #[serde(default, alias = "EgressBurst")]
    pub egress_burst: Option<Number>,
}

impl Bandwidth {
    /// Returns the rates of the container's port.
    ///
    /// # Errors
    /// [`Code::Invalid`]: a value is out of range, or a burst has no rate.
    pub fn rates(&self) -> Result<PortRates, Failure> {
        let Self { ingress_rate, ingress_burst, egress_rate, egress_burst } = self;
        let (max_rate, max_burst) = limit("egress", egress_rate, egress_burst)?;
        let (receive_rate, receive_burst) = limit("ingress", ingress_rate, ingress_burst)?;
        Ok(PortRates { max_rate, max_burst, receive_rate, receive_burst })
    }
}

/// Returns a rate in bytes per second, or 0 for any, and its burst in bytes, or 0 for the default.
fn limit(way: &str, rate: &Option<Number>, burst: &Option<Number>) -> Result<(u64, u64), Failure> {
    let rate = bits(way, "Rate", rate)?;
    let burst = bits(way, "Burst", burst)?;
    let invalid = |text: String| Err(Failure::new(Code::Invalid, text));
    match (rate, burst) {
        (0, 0) => Ok((0, 0)),
        (0, _) => invalid(format!(
            "\"{way}Burst\" of \"bandwidth\" is {burst} and there is no \"{way}Rate\"; give a \
             rate, or no burst"
        )),
        (1..8, _) => invalid(format!(
            "\"{way}Rate\" of \"bandwidth\" is {rate} bit/s; the least is 8, and 0 is no limit"
        )),
        (_, TOO_MUCH..) => invalid(format!(
            "\"{way}Burst\" of \"bandwidth\" is {burst} bits; the most is {}",
            TOO_MUCH - 1
        )),
        (_, NO_CHOICE..) => Ok((rate / 8, 0)),
        (_, _) => Ok((rate / 8, burst.div_ceil(8))),
    }
}

/// Returns a value, or 0 if it is absent.
fn bits(way: &str, what: &str, value: &Option<Number>) -> Result<u64, Failure> {
    let Some(value) = value else { return Ok(0) };
    value.as_u64().ok_or_else(|| {
        Failure::new(
            Code::Invalid,
            format!(
                "\"{way}{what}\" of \"bandwidth\" is {value}; it is a whole number of bits from 0 \
                 to {}",
                u64::MAX
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(json: &str) -> Result<[u64; 4], Failure> {
        let found = serde_json::from_str::<Bandwidth>(json).unwrap().rates()?;
        Ok([found.max_rate, found.max_burst, found.receive_rate, found.receive_burst])
    }

    #[test]
    fn ingress_is_what_the_container_receives() {
        let both =
            r#"{"ingressRate": 8000, "ingressBurst": 801, "egressRate": 16, "egressBurst": 0}"#;
        assert_eq!(rates(both), Ok([2, 0, 1000, 101]));
        // As containerd writes it.
        let pod = r#"{"IngressRate": 10000000, "IngressBurst": 4294967295, "EgressRate": 0,
                      "EgressBurst": 0}"#;
        assert_eq!(rates(pod), Ok([0, 0, 1_250_000, 0]), "nobody chose this burst");
        let largest = r#"{"egressRate": 18446744073709551615, "egressBurst": 34359738359}"#;
        assert_eq!(rates(largest), Ok([u64::MAX / 8, 0, 0, 0]));
        let chosen = r#"{"egressRate": 8, "egressBurst": 4294967294}"#;
        assert_eq!(rates(chosen), Ok([1, 536_870_912, 0, 0]));
        assert_eq!(rates(r#"{"ingressRate": null}"#), Ok([0; 4]));
    }

    #[test]
    fn values_out_of_range_are_an_invalid_configuration() {
        for (json, word) in [
            (r#"{"ingressRate": -1}"#, "ingressRate"),
            (r#"{"egressRate": 1.5}"#, "egressRate"),
            (r#"{"egressRate": 18446744073709551616}"#, "egressRate"),
            (r#"{"ingressRate": 7}"#, "ingressRate"),
            (r#"{"ingressBurst": 8}"#, "no \"ingressRate\""),
            (r#"{"egressRate": 8, "egressBurst": 34359738360}"#, "egressBurst"),
            (r#"{"egressRate": 8, "egressBurst": -8}"#, "egressBurst"),
        ] {
            let failure = rates(json).unwrap_err();
            assert_eq!(failure.code(), Code::Invalid as u32, "{json}");
            assert!(failure.message().contains(word), "{json}: {}", failure.message());
        }
    }
}
