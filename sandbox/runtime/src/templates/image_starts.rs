//! The recent starts of images, by which the node chooses templates for images that are started
//! often.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// The most images, each with one machine, whose starts are known. With one more, that which was
/// not started for the longest time is forgotten.
const MOST: usize = 256;

/// The number of starts within a time from which an image is started often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Threshold {
    /// The least number of starts, at least 1.
    pub(crate) starts: usize,
    /// The time within which they are.
    pub(crate) within: Duration,
}

/// How often an image is started, the present start included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frequency {
    /// The image was never started often, as far as that is known.
    Seldom,
    /// The image was started often at some time, and is not now.
    OftenBefore,
    /// The image is started often now.
    OftenNow,
}

/// The recent starts of images, each on the machine of one template.
#[derive(Debug, Default)]
pub(crate) struct ImageStarts(BTreeMap<Key, Recent>);

/// The digest of an image and the name of the template of its machine.
type Key = (String, String);

#[derive(Debug, Default)]
struct Recent {
    /// The times of the latest starts, as many as the threshold asks for, the oldest first.
    times: VecDeque<Instant>,
    was_often: bool,
}

impl ImageStarts {
    /// Notes a start of the image with this digest, on the machine of the template `template`, at
    /// the time `now`. Returns how often the image is started on that machine.
    pub(crate) fn note(
        &mut self,
        (image, template): (&str, &str),
        now: Instant,
        threshold: Threshold,
    ) -> Frequency {
        let key = (image.to_owned(), template.to_owned());
        if !self.0.contains_key(&key) && self.0.len() >= MOST {
            self.forget_oldest();
        }
        let recent = self.0.entry(key).or_default();
        recent.times.retain(|at| now.saturating_duration_since(*at) < threshold.within);
        recent.times.push_back(now);
        while recent.times.len() > threshold.starts {
            recent.times.pop_front();
        }
        if recent.times.len() >= threshold.starts {
            recent.was_often = true;
            return Frequency::OftenNow;
        }
        if recent.was_often { Frequency::OftenBefore } else { Frequency::Seldom }
    }

    /// Forgets the image that was not started for the longest time.
    fn forget_oldest(&mut self) {
        let oldest = self.0.iter().min_by_key(|(_, recent)| recent.times.back());
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.0.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const THREE_A_MINUTE: Threshold = Threshold { starts: 3, within: Duration::from_secs(60) };

    #[test]
    fn an_image_is_started_often_once_enough_starts_are_near_each_other() {
        let (mut starts, began) = (ImageStarts::default(), Instant::now());
        let mut at = |second| starts.note(("a", "t"), began + SECOND * second, THREE_A_MINUTE);
        assert_eq!([at(0), at(30), at(60)], [Frequency::Seldom; 3], "the first was a minute ago");
        assert_eq!(at(61), Frequency::OftenNow);
        assert_eq!(at(89), Frequency::OftenNow);
        assert_eq!([at(200), at(201)], [Frequency::OftenBefore; 2]);
        assert_eq!(at(202), Frequency::OftenNow);
    }

    #[test]
    fn one_start_can_be_enough() {
        let once = Threshold { starts: 1, ..THREE_A_MINUTE };
        let mut starts = ImageStarts::default();
        assert_eq!(starts.note(("a", "t"), Instant::now(), once), Frequency::OftenNow);
    }

    #[test]
    fn starts_of_another_image_or_on_another_machine_do_not_count() {
        let (mut starts, now) = (ImageStarts::default(), Instant::now());
        for _ in 0..2 {
            for which in [("a", "t"), ("b", "t"), ("a", "u")] {
                assert_eq!(starts.note(which, now, THREE_A_MINUTE), Frequency::Seldom);
            }
        }
        assert_eq!(starts.note(("b", "t"), now, THREE_A_MINUTE), Frequency::OftenNow);
    }

    #[test]
    fn what_is_known_is_bounded_and_the_image_that_rested_longest_is_forgotten() {
        let (mut starts, began) = (ImageStarts::default(), Instant::now());
        let twice = Threshold { starts: 2, within: SECOND * 10_000 };
        let mut at = |second, image: &str| {
            let told = starts.note((image, "t"), began + SECOND * second, twice);
            let times = starts.0.values().map(|recent| recent.times.len()).max();
            assert!(starts.0.len() <= MOST && times <= Some(2), "{}", starts.0.len());
            told
        };
        assert_eq!(at(0, "kept"), Frequency::Seldom);
        assert_eq!(at(1, "forgotten"), Frequency::Seldom);
        assert_eq!(at(2, "kept"), Frequency::OftenNow);
        for second in 3..=257 {
            assert_eq!(at(second, &second.to_string()), Frequency::Seldom);
        }
        assert_eq!(at(300, "kept"), Frequency::OftenNow);
        assert_eq!(at(301, "forgotten"), Frequency::Seldom);
    }
}
