//! A letter and a colour for each stage.

use plotters::style::RGBColor;
use slipway_telemetry::Timeline;

/// Colours of the first subjects, in their order; all differ.
const SUBJECTS: [Colour; 12] =
    [GREY, INDIGO, TEAL, ROSE, OLIVE, WINE, CYAN, GREEN, SAND, PURPLE, DARK, ORANGE];

/// Returns the colour of a subject, given its place in a report. The colours of the first
/// [`SUBJECTS`] come again darker; beyond twice as many, colours repeat.
pub(crate) fn subject(place: usize) -> RGBColor {
    let (red, green, blue) = SUBJECTS[place % SUBJECTS.len()].0;
    let is_dark = place / SUBJECTS.len() % 2 == 1;
    let shade = |part: u8| if is_dark { (u16::from(part) * 3 / 5) as u8 } else { part };
    RGBColor(shade(red), shade(green), shade(blue))
}

/// The way in which a stage is shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Look {
    /// The stage's name.
    pub name: String,
    /// Capital letter, unique in a picture.
    pub letter: char,
    /// Red, green, blue.
    pub rgb: (u8, u8, u8),
    /// The nearest of the 256 colours that terminals have.
    pub ansi: u8,
    /// Text on this colour is white.
    pub dark: bool,
}

type Colour = ((u8, u8, u8), u8, bool);

/// Paul Tol's *muted* scheme, which people with any common colour blindness can tell apart, and two
/// greys. Neighbours in time also differ in lightness.
const INDIGO: Colour = ((0x33, 0x22, 0x88), 18, true);
const CYAN: Colour = ((0x88, 0xCC, 0xEE), 117, false);
const TEAL: Colour = ((0x44, 0xAA, 0x99), 73, false);
const GREEN: Colour = ((0x11, 0x77, 0x33), 28, true);
const OLIVE: Colour = ((0x99, 0x99, 0x33), 100, false);
const SAND: Colour = ((0xDD, 0xCC, 0x77), 186, false);
const ROSE: Colour = ((0xCC, 0x66, 0x77), 168, false);
const WINE: Colour = ((0x88, 0x22, 0x55), 89, true);
const PURPLE: Colour = ((0xAA, 0x44, 0x99), 133, true);
const GREY: Colour = ((0xBB, 0xBB, 0xBB), 250, false);
const DARK: Colour = ((0x55, 0x55, 0x55), 240, true);
/// Two colours of his *vibrant* scheme.
const ORANGE: Colour = ((0xEE, 0x77, 0x33), 208, false);
const BLUE: Colour = ((0x00, 0x77, 0xBB), 32, true);

/// The stages with fixed letters and colours, in the order in which a start goes through them.
const KNOWN: [(&str, char, Colour); 13] = [
    ("image", 'I', GREY),
    ("cgroup", 'C', WINE),
    ("dma-ram", 'D', SAND),
    ("rootfs", 'R', GREEN),
    ("dma-image", 'G', OLIVE),
    ("vf-attach", 'V', ROSE),
    ("vmm", 'M', CYAN),
    ("kernel", 'K', INDIGO),
    ("vf-driver", 'N', TEAL),
    ("agent", 'A', PURPLE),
    ("network", 'E', BLUE),
    ("sockets", 'S', ORANGE),
    ("container", 'P', DARK),
];

/// Colours for stages without a fixed one.
const SPARE: [Colour; 13] =
    [ROSE, TEAL, SAND, INDIGO, CYAN, GREEN, GREY, PURPLE, ORANGE, BLUE, WINE, OLIVE, DARK];

/// Returns the looks of all stages of `timelines`: stages with fixed looks in the order of a start,
/// then the others in the order in which they are met.
pub(crate) fn looks(timelines: &[Timeline]) -> Vec<Look> {
    let mut names: Vec<&str> = Vec::new();
    for stage in timelines.iter().flat_map(|timeline| &timeline.stages) {
        if !names.contains(&stage.name.as_str()) {
            names.push(&stage.name);
        }
    }
    let rank = |name: &str| KNOWN.iter().position(|known| known.0 == name);
    names.sort_by_key(|name| rank(name).unwrap_or(KNOWN.len()));

    let mut looks: Vec<Look> = Vec::new();
    for name in names {
        let (letter, (rgb, ansi, dark)) = match rank(name) {
            Some(index) => (KNOWN[index].1, KNOWN[index].2),
            None => (free_letter(name, &looks), free_colour(&looks)),
        };
        looks.push(Look { name: name.to_owned(), letter, rgb, ansi, dark });
    }
    looks
}

/// Returns a colour that no earlier stage has. Stages with fixed colours come first. Beyond
/// thirteen stages colours repeat; letters never do.
fn free_colour(taken: &[Look]) -> Colour {
    let free = |colour: &&Colour| taken.iter().all(|look| look.ansi != colour.1);
    SPARE.iter().find(free).copied().unwrap_or(SPARE[taken.len() % SPARE.len()])
}

/// Returns a letter of `name` that no known or earlier stage has, or else any free letter; `?` if
/// all are taken.
fn free_letter(name: &str, taken: &[Look]) -> char {
    let free = |letter: &char| {
        letter.is_ascii_uppercase()
            && KNOWN.iter().all(|known| known.1 != *letter)
            && taken.iter().all(|look| look.letter != *letter)
    };
    let own = name.chars().map(|letter| letter.to_ascii_uppercase()).find(free);
    own.or_else(|| ('A'..='Z').find(free)).unwrap_or('?')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn letters_and_known_colours_are_unique() {
        let letters: HashSet<_> = KNOWN.iter().map(|known| known.1).collect();
        assert_eq!(letters.len(), KNOWN.len());
        let colours: HashSet<_> = KNOWN.iter().map(|known| known.2.1).collect();
        assert_eq!(colours.len(), KNOWN.len());
    }

    #[test]
    fn subjects_and_stages_of_one_picture_differ_in_colour() {
        let far = |one: RGBColor, other: RGBColor| {
            let parts = [(one.0, other.0), (one.1, other.1), (one.2, other.2)];
            let squares = parts.map(|(one, other)| i32::from(one.abs_diff(other)).pow(2));
            squares.iter().sum::<i32>() >= 30 * 30
        };
        for place in 0..2 * SUBJECTS.len() {
            assert!((0..place).all(|other| far(subject(place), subject(other))), "{place}");
        }
        let mut timeline = Timeline::new("a");
        for name in ["kernel", "network", "vmm", "one", "two", "three", "four", "five", "six"] {
            timeline.record(name, 0, 1);
        }
        let looks = looks(&[timeline]);
        let colours: HashSet<_> = looks.iter().map(|look| look.rgb).collect();
        assert_eq!(colours.len(), looks.len());
    }

    #[test]
    fn unknown_stages_get_letters_of_their_own() {
        let mut timeline = Timeline::new("a");
        for name in ["warm-up", "kernel", "wait", "wax", "vmm"] {
            timeline.record(name, 0, 1);
        }
        let looks = looks(&[timeline]);
        let shown: Vec<_> = looks.iter().map(|look| (look.name.as_str(), look.letter)).collect();
        assert_eq!(
            shown,
            [("vmm", 'M'), ("kernel", 'K'), ("warm-up", 'W'), ("wait", 'T'), ("wax", 'X')]
        );
    }
}
