//! Log lines that clients cause, at most one of each kind a second.

use std::collections::HashMap;
use std::fmt::Arguments;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_secs(1);

/// The time of each kind's last line, and the number of lines dropped since.
#[derive(Default)]
pub struct Log {
    kinds: HashMap<&'static str, (Instant, u64)>,
}

impl Log {
    /// Writes a line unless one of its kind was written within the last second. Returns whether it
    /// was written.
    pub fn line(&mut self, kind: &'static str, text: Arguments<'_>) -> bool {
        self.line_at(kind, text, Instant::now())
    }

    fn line_at(&mut self, kind: &'static str, text: Arguments<'_>, now: Instant) -> bool {
        let known = self.kinds.get(kind).copied();
        if let Some((last, missed)) = known
            && now - last < PAUSE
        {
            self.kinds.insert(kind, (last, missed + 1));
            return false;
        }
        self.kinds.insert(kind, (now, 0));
        match known.map_or(0, |(_, missed)| missed) {
            0 => tracing::warn!("{text}"),
            missed => tracing::warn!("{text} (and {missed} more of this kind)"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line() {
        let (mut log, now) = (Log::default(), Instant::now());
        let lines = (0..1000).filter(|_| log.line_at("a", format_args!("x"), now)).count();
        assert_eq!(lines, 1);
        assert!(log.line_at("b", format_args!("x"), now));
        assert!(log.line_at("a", format_args!("x"), now + PAUSE));
        assert!(!log.line_at("a", format_args!("x"), now + PAUSE));
    }
}
