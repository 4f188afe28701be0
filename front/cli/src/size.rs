//! Parses and formats the quantities of the command line: sizes, times, rates, fractions, CPUs,
//! lines, VLANs and block sizes. The error of each parser is a line for the user, which quotes the
//! text.

use std::time::Duration;

/// Reads a size in bytes: "512", "64K", "512M", "2G" or "1T" (powers of 1024; "MiB" and "mb" mean
/// the same).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 =
        number.parse().map_err(|_| format!("\"{text}\" is no size, as 512M or 2G"))?;
    let unit = unit.to_ascii_lowercase();
    let unit = unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("\"{text}\" has no unit that is known: K, M, G or T")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("\"{text}\" is too large"))
}

/// The longest time that [`parse_duration`] accepts: adding it to any clock's time does not
/// overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Reads a time: "250ms", "2s", "5m"; a plain number is in seconds. A year at most.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 =
        number.parse().map_err(|_| format!("\"{text}\" is no time, as 250ms or 2s"))?;
    let unit = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("\"{text}\" has no unit that is known: us, ms, s, m or h")),
    };
    let time = Duration::try_from_secs_f64(number * unit).ok().filter(|time| *time <= LONGEST);
    time.ok_or_else(|| format!("\"{text}\" is too long: 365 days at most"))
}

/// Reads a rate in bits as tc(8) does: "10Mbit", "1gbit", "64kbit", "8000bit" (powers of 1000).
/// Returns bytes per second: 0, or from 1 to less than 10^18.
pub fn parse_bit_rate(text: &str) -> Result<u64, String> {
    let wrong = || format!("\"{text}\" is no rate, as 10Mbit or 64kbit");
    let lower = text.to_ascii_lowercase();
    let number = lower.strip_suffix("bit").ok_or_else(wrong)?;
    let scale = match number.chars().last() {
        Some('k') => 1e3,
        Some('m') => 1e6,
        Some('g') => 1e9,
        Some('0'..='9') => 1.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.trim_end_matches(['k', 'm', 'g']).parse().map_err(|_| wrong())?;
    let bytes = number * scale / 8.0;
    match bytes {
        0.0 => Ok(0),
        1.0..1e18 => Ok(bytes as u64),
        _ => Err(format!("\"{text}\" is out of range: 0bit, or 8bit to less than 8e9Gbit")),
    }
}

/// Reads a fraction: "1%" or "0.01".
pub fn parse_fraction(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text, 1.0),
    };
    let number: f64 = number.parse().map_err(|_| format!("\"{text}\" is no fraction, as 1%"))?;
    match number / scale {
        fraction @ 0.0..=1.0 => Ok(fraction),
        _ => Err(format!("\"{text}\" is not within 0% and 100%")),
    }
}

/// A number of CPUs: of a sandbox whole ones, of a container of a pod the CPU time that it may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuCount {
    /// Thousandths of a CPU, 10 to 64,000.
    thousandths: u32,
}

impl CpuCount {
    /// Returns the number of a sandbox's virtual CPUs.
    ///
    /// # Errors
    /// A number that is not whole.
    pub fn whole(self) -> anyhow::Result<u32> {
        anyhow::ensure!(
            self.thousandths.is_multiple_of(1000),
            "{self} CPUs: a sandbox or a pod has whole CPUs, 1 to 64; a container of a pod can \
             have a part of one (`slipway run --pod POD --cpus {self}`, `slipway update \
             POD/CONTAINER --cpus {self}`)"
        );
        Ok(self.thousandths / 1000)
    }

    /// Returns the CPU time of a container in a period of 100 ms, microseconds.
    pub fn quota_us(self) -> u64 {
        u64::from(self.thousandths) * 100
    }
}

impl std::fmt::Display for CpuCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", f64::from(self.thousandths) / 1000.0)
    }
}

/// Reads a number of CPUs, from 0.01 to 64: "2", "0.5". Digits behind the third decimal place are
/// rounded.
pub fn parse_cpus(text: &str) -> Result<CpuCount, String> {
    let wrong = || {
        format!(
            "\"{text}\" is no number of CPUs: 1 to 64, or a part of one, from 0.01, for a \
             container of a pod"
        )
    };
    let number: f64 = text.parse().map_err(|_| wrong())?;
    match number {
        0.01..=64.0 => Ok(CpuCount { thousandths: (number * 1000.0).round() as u32 }),
        _ => Err(wrong()),
    }
}

/// Reads a number of whole CPUs, 1 to 64.
pub fn parse_whole_cpus(text: &str) -> Result<u32, String> {
    let whole = text.parse::<u32>().ok().filter(|cpus| (1..=64).contains(cpus));
    whole.ok_or_else(|| format!("\"{text}\" is no number of whole CPUs, 1 to 64"))
}

/// The last lines of a log, or all of them (`None`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail(pub Option<u64>);

/// Reads a number of lines, or "all".
pub fn parse_tail(text: &str) -> Result<Tail, String> {
    if text == "all" {
        return Ok(Tail(None));
    }
    let lines = text.parse().map_err(|_| format!("\"{text}\" is no number of lines, nor all"))?;
    Ok(Tail(Some(lines)))
}

/// The highest rate in bytes per second, or `None` without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxRate(pub Option<u64>);

/// Reads a rate as [`parse_bit_rate`] does, or "none".
pub fn parse_max_rate(text: &str) -> Result<MaxRate, String> {
    if text == "none" {
        return Ok(MaxRate(None));
    }
    parse_bit_rate(text).map(|rate| MaxRate(Some(rate)))
}

/// Formats a rate in bytes per second as bits: "100 Mbit/s".
pub fn show_rate(bytes: u64) -> String {
    let bits = bytes as f64 * 8.0;
    let (value, unit) = match bits {
        _ if bits >= 1e9 => (bits / 1e9, "Gbit/s"),
        _ if bits >= 1e6 => (bits / 1e6, "Mbit/s"),
        _ if bits >= 1e3 => (bits / 1e3, "kbit/s"),
        _ => (bits, "bit/s"),
    };
    format!("{} {unit}", (value * 10.0).round() / 10.0)
}

/// Reads a VLAN, 1 to 4094, or "none", which is 0.
pub fn parse_vlan(text: &str) -> Result<u32, String> {
    let number = match text {
        "none" => Some(0),
        _ => text.parse().ok().filter(|vlan| (1..=4094).contains(vlan)),
    };
    number.ok_or_else(|| format!("\"{text}\" is no VLAN: 1 to 4094, or none"))
}

/// Formats bytes: "1.5 GiB".
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Reads the bytes of a logical block: 512 or 4096, also as "4k".
pub fn parse_block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4k" | "4K" => Ok(4096),
        _ => Err(format!("\"{text}\": a logical block has 512 or 4096 bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse_size("1"), Ok(1));
        assert_eq!(parse_size("64k"), Ok(64 << 10));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("3mb"), Ok(3 << 20));
    }

    #[test]
    fn what_is_no_size() {
        for bad in ["", "M", "1X", "-1", "1.5G", "99999999999999999999", "18446744073709551615G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("8760h"), Ok(LONGEST));
        assert!(parse_duration("8761h").unwrap_err().ends_with("365 days at most"));
        for bad in ["", "s", "1x", "-1s", "1e9s", "9999999999s", "9999999999999999999999h"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates() {
        assert_eq!(parse_bit_rate("10Mbit"), Ok(1_250_000));
        assert_eq!(parse_bit_rate("1.5gbit"), Ok(187_500_000));
        assert_eq!(parse_bit_rate("8000bit"), Ok(1000));
        assert_eq!(parse_bit_rate("0bit"), Ok(0));
        for bad in ["", "bit", "10", "10M", "Mbit", "-1Mbit", "1e3bit3", "nanbit", "1bit"] {
            assert!(parse_bit_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fractions() {
        assert_eq!(parse_fraction("1%"), Ok(0.01));
        assert_eq!(parse_fraction("0.5"), Ok(0.5));
        assert_eq!(parse_fraction("100%"), Ok(1.0));
        for bad in ["", "%", "101%", "1.1", "-1%", "nan", "inf"] {
            assert!(parse_fraction(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sandbox_has_whole_cpus_and_a_container_of_a_pod_any_part() {
        let cpus = |text: &str| parse_cpus(text).unwrap();
        assert_eq!((cpus("2").whole().unwrap(), cpus("2").quota_us()), (2, 200_000));
        assert_eq!((cpus("64.0").whole().unwrap(), cpus("0.01").quota_us()), (64, 1000));
        assert_eq!((cpus("0.5").quota_us(), cpus("1.25").quota_us()), (50_000, 125_000));
        assert_eq!((cpus("0.5").to_string(), cpus("3").to_string()), ("0.5".into(), "3".into()));
        let error = cpus("0.5").whole().unwrap_err().to_string();
        assert!(error.starts_with("0.5 CPUs: a sandbox or a pod has whole CPUs"), "{error}");
        assert!(error.contains("update POD/CONTAINER --cpus 0.5"), "{error}");
        for bad in ["", "0", "many", "-1", "0.001", "65", "64.1", "nan", "inf"] {
            assert!(parse_cpus(bad).unwrap_err().contains("no number of CPUs"), "{bad}");
        }
        assert_eq!(parse_whole_cpus("64"), Ok(64));
        for bad in ["", "0", "0.5", "65"] {
            assert!(parse_whole_cpus(bad).unwrap_err().contains("whole CPUs"), "{bad}");
        }
    }

    #[test]
    fn lines_of_a_log() {
        assert_eq!((parse_tail("all"), parse_tail("0")), (Ok(Tail(None)), Ok(Tail(Some(0)))));
        for bad in ["", "-1", "some", "1.5"] {
            assert!(parse_tail(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shown_sizes() {
        assert_eq!(show(512), "512 B");
        assert_eq!(show(1536 << 20), "1.5 GiB");
    }

    #[test]
    fn rates_and_vlans() {
        assert_eq!(parse_max_rate("100Mbit"), Ok(MaxRate(Some(12_500_000))));
        assert_eq!(parse_max_rate("none"), Ok(MaxRate(None)));
        assert!(parse_max_rate("fast").is_err());
        assert_eq!(show_rate(12_500_000), "100 Mbit/s");
        assert_eq!((show_rate(1), show_rate(187_500_000)), ("8 bit/s".into(), "1.5 Gbit/s".into()));
        assert_eq!((parse_vlan("7"), parse_vlan("none")), (Ok(7), Ok(0)));
        for bad in ["0", "4095", "x", ""] {
            assert!(parse_vlan(bad).is_err(), "{bad}");
        }
    }
}
