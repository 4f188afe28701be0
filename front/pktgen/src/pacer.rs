//! The rate at which frames are sent: its text for users, and the time when the next burst is due.

use std::time::{Duration, Instant};

/// The longest delay that a sender makes up for. A sender that could not run for longer continues
/// at its rate from then on, so that it does not flood the receiver.
const LATEST: Duration = Duration::from_millis(10);
/// The longest wait that spins: a sleep would take longer.
const SHORT: Duration = Duration::from_micros(100);
/// The longest sleep, after which a sender looks whether it is to end.
const LONG: Duration = Duration::from_millis(50);

/// The lowest rate, in frames per second: one frame in about eleven days.
const SLOWEST: f64 = 1e-6;
/// The highest rate, in frames per second.
const FASTEST: f64 = 1e9;

/// Parses a rate in frames per second, such as "20", "100k", "1.5M" or "1G". It is 0.000001 at
/// least and 1G at most.
///
/// # Errors
/// One line that names `text` and says what is wrong with it.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    let factor = match text.as_bytes().last() {
        Some(b'k' | b'K') => 1e3,
        Some(b'm' | b'M') => 1e6,
        Some(b'g' | b'G') => 1e9,
        _ => 1.0,
    };
    let number = text.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G']).unwrap_or(text);
    let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let rate = number.parse::<f64>().ok().filter(|_| plain).map(|number| number * factor);
    match rate {
        Some(0.0) => {
            Err("a rate of 0 sends nothing; leave --rate out to send as fast as can be".into())
        }
        Some(rate) if rate < SLOWEST => {
            Err(format!("\"{text}\" is less than {SLOWEST} frames per second"))
        }
        Some(rate) if rate <= FASTEST => Ok(rate),
        Some(_) => Err(format!("\"{text}\" is more than 1G frames per second")),
        None => Err(format!("\"{text}\" is no rate: frames per second, as 5M, 100k or 20")),
    }
}

/// Keeps bursts of frames at a rate.
#[derive(Debug)]
pub struct Pacer {
    /// Seconds per frame, or `None` if the rate is unlimited.
    each: Option<f64>,
    /// The time at which the first of `gone` frames was due.
    begin: Instant,
    /// The number of frames sent since `begin`.
    gone: u64,
}

impl Pacer {
    /// Makes a pacer whose first frame is due at `now`. `rate` is in frames per second, and is
    /// raised to 0.000001 if it is less; `None` is unlimited.
    pub fn new(rate: Option<f64>, now: Instant) -> Self {
        Self { each: rate.map(|rate| 1.0 / rate.max(SLOWEST)), begin: now, gone: 0 }
    }

    /// Returns `wanted` if the next frame is due at `now`: a burst of any size is due with its
    /// first frame. A sender that is more than 10 ms late starts anew at `now` and does not catch
    /// up.
    ///
    /// # Errors
    /// The time until the next frame is due.
    pub fn due(&mut self, wanted: u32, now: Instant) -> Result<u32, Duration> {
        let Some(each) = self.each else { return Ok(wanted) };
        let at = self.begin + Duration::from_secs_f64(self.gone as f64 * each);
        if let Some(early) = at.checked_duration_since(now).filter(|early| !early.is_zero()) {
            return Err(early);
        }
        if now - at > LATEST {
            (self.begin, self.gone) = (now, 0);
        }
        Ok(wanted)
    }

    /// Counts `count` frames as sent.
    pub fn went(&mut self, count: u64) {
        self.gone += count;
    }

    /// Waits for a part of `early`, the time until a frame is due: sleeps until 50 µs before that,
    /// for 50 ms at most, or spins for a moment if `early` is 100 µs or less.
    pub fn pause(early: Duration) {
        if early > SHORT {
            std::thread::sleep((early - SHORT / 2).min(LONG));
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_as_people_write_them() {
        for (text, rate) in [("5M", 5e6), ("100k", 1e5), ("1.5m", 1.5e6), ("20", 20.0), ("1G", 1e9)]
        {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        assert!(parse_rate("0").unwrap_err().contains("leave --rate out"));
        assert!(parse_rate("0k").is_err());
        assert_eq!(parse_rate("0.000001"), Ok(SLOWEST));
        for slow in ["0.0000009", "0.00000000000000000000000001"] {
            assert!(
                parse_rate(slow).unwrap_err().ends_with("less than 0.000001 frames per second")
            );
        }
        for bad in ["", "M", "-5", "5x", "2G", "inf", "nan", "1e5", "5 M"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rate_is_kept_and_the_past_forgotten() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let mut pacer = Pacer::new(Some(1000.0), begin);
        assert_eq!(pacer.due(4, begin), Ok(4));
        pacer.went(4);
        assert_eq!(pacer.due(4, at(1)), Err(Duration::from_millis(3)));
        assert_eq!(pacer.due(4, at(4)), Ok(4));
        pacer.went(4);
        // Late, but within the limit: the pacer catches up.
        assert_eq!(pacer.due(4, at(17)), Ok(4));
        pacer.went(4);
        assert_eq!(pacer.due(4, at(17)), Ok(4));
        pacer.went(4);
        assert!(pacer.due(4, at(15)).is_err());
        // Far too late: the rate starts anew.
        assert_eq!(pacer.due(4, at(1000)), Ok(4));
        pacer.went(4);
        assert_eq!(pacer.due(4, at(1000)), Err(Duration::from_millis(4)));
        assert_eq!(Pacer::new(None, begin).due(9, begin), Ok(9));
        let mut slow = Pacer::new(Some(1e-300), begin);
        slow.went(1);
        assert_eq!(slow.due(1, begin), Err(Duration::from_secs(1_000_000)));
    }
}
