//! The lengths of frames.

use std::str::FromStr;

use crate::frame::{LONGEST, SHORTEST};

/// Simple IMIX, as (length, share): of twelve packets seven are short, four medium and one is long.
const IMIX: [(usize, usize); 3] = [(64, 7), (576, 4), (1500, 1)];

/// Lengths of frames in bytes, without the check sequence, which software never sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// These lengths in turn, repeated.
    Cycle(Vec<usize>),
    /// Lengths between the two, evenly distributed.
    Range(usize, usize),
}

impl Default for Sizes {
    fn default() -> Self {
        Self::Cycle(vec![64])
    }
}

impl FromStr for Sizes {
    type Err = String;

    /// Reads "64", "64,512,1500", "64-1500" or "imix".
    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("imix") {
            let each = IMIX.iter().flat_map(|(len, times)| std::iter::repeat_n(*len, *times));
            return Ok(Self::Cycle(each.collect()));
        }
        if let Some((least, most)) = text.split_once('-') {
            let (least, most) = (size(least)?, size(most)?);
            return match least <= most {
                true => Ok(Self::Range(least, most)),
                false => {
                    Err(format!("\"{text}\" ends before it begins: put the smaller size first"))
                }
            };
        }
        text.split(',').map(size).collect::<Result<_, _>>().map(Self::Cycle)
    }
}

fn size(text: &str) -> Result<usize, String> {
    let bad = format!(
        "\"{text}\" is no size of a frame: {SHORTEST} to {LONGEST} bytes, as 64, 64-1500, 64,1500 \
         or imix"
    );
    text.parse().ok().filter(|len| (SHORTEST..=LONGEST).contains(len)).ok_or(bad)
}

impl Sizes {
    /// Returns the length of frame `number`.
    #[inline]
    pub fn of(&self, number: u64) -> usize {
        match self {
            Self::Cycle(all) if all.len() == 1 => all[0],
            Self::Cycle(all) => all[(number % all.len() as u64) as usize],
            Self::Range(least, most) => {
                // SplitMix64's mixing step: each number gets a length of its own, the same in every
                // run.
                let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
                let mixed = mixed ^ mixed >> 31;
                least + (mixed % (most - least + 1) as u64) as usize
            }
        }
    }

    /// Returns the greatest length.
    pub fn longest(&self) -> usize {
        match self {
            Self::Cycle(all) => all.iter().copied().max().unwrap_or(SHORTEST),
            Self::Range(_, most) => *most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let of = |text: &str, count| {
            let sizes: Sizes = text.parse().unwrap();
            (0..count).map(|number| sizes.of(number)).collect::<Vec<_>>()
        };
        assert_eq!(of("64", 2), [64, 64]);
        assert_eq!(of("64,1500", 3), [64, 1500, 64]);
        let mix = of("IMIX", 12);
        assert_eq!((mix.iter().filter(|len| **len == 64).count(), mix[11]), (7, 1500));
        let range = of("60-63", 400);
        assert!((60..=63).all(|len| range.iter().filter(|one| **one == len).count() > 50));
        assert_eq!("100-9000".parse::<Sizes>().unwrap().longest(), 9000);
        for bad in ["", "59", "65550", "64-", "1500-64", "x", "64,,64", "-5"] {
            assert!(bad.parse::<Sizes>().is_err(), "{bad}");
        }
    }
}
