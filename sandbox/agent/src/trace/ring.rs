//! Pages of the kernel's trace ring (`trace_pipe_raw`), in the format of `events/header_page` and
//! `events/header_event`.

/// An event: its time, and its record, which begins with the event's id.
#[derive(Debug, PartialEq, Eq)]
pub struct Event<'a> {
    pub at_ns: u64,
    pub record: &'a [u8],
}

/// The bytes before a page's first event: time and length.
const HEADER: usize = 16;
/// The bits of a page's length that say that events were lost before this page.
const MISSED: u64 = 1 << 31 | 1 << 30;

/// Calls `each` for every event of `page`. Returns whether events were lost before the page.
/// Parsing ends at the first malformed event.
pub fn events(page: &[u8], mut each: impl FnMut(Event<'_>)) -> bool {
    let (Some(mut at_ns), Some(length)) = (u64_at(page, 0), u64_at(page, 8)) else { return false };
    let end = (HEADER + (length & 0xf_ffff) as usize).min(page.len());
    let mut at = HEADER;
    while let Some(word) = u32_at(&page[..end], at) {
        let (kind, delta) = (word & 31, u64::from(word >> 5));
        let next = u32_at(&page[..end], at + 4);
        let extended = delta | u64::from(next.unwrap_or(0)) << 27;
        let length = match kind {
            // The rest of the page is empty; with a time delta, this is a discarded event.
            29 if delta == 0 => break,
            29 => next.unwrap_or(0) as usize,
            30 => {
                at_ns = at_ns.wrapping_add(extended);
                4
            }
            31 => {
                at_ns = extended;
                4
            }
            kind => {
                at_ns = at_ns.wrapping_add(delta);
                // The length of a long record, including the length word itself, is in a word
                // before the record.
                let (from, length) = match kind {
                    0 => (at + 8, next.unwrap_or(0) as usize),
                    words => (at + 4, words as usize * 4),
                };
                let Some(record) = page[..end].get(from..at.saturating_add(4 + length)) else {
                    break;
                };
                each(Event { at_ns, record });
                length
            }
        };
        at = at.saturating_add(4 + length);
    }
    length & MISSED != 0
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Returns the 32-bit word at `at`. Returns `None` if it does not lie within `bytes`.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

/// Returns the 64-bit word at `at`. Returns `None` if it does not lie within `bytes`.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(length: u64, words: &[u32]) -> Vec<u8> {
        let mut page = 1_000_u64.to_le_bytes().to_vec();
        page.extend(length.to_le_bytes());
        page.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        page.resize(4096, 0);
        page
    }

    fn all(page: &[u8]) -> (Vec<(u64, Vec<u8>)>, bool) {
        let mut found = Vec::new();
        let lost = events(page, |event| found.push((event.at_ns, event.record.to_vec())));
        (found, lost)
    }

    #[test]
    fn records_times_and_paddings() {
        let words = [
            2 | 5 << 5, // two words, 5 ns later
            0xaaaa_aaaa,
            0xbbbb_bbbb,
            30 | 7 << 5, // 7 + 2^27 ns pass
            1,
            29 | 1 << 5, // a discarded event of one word
            4,
            0, // a long record, at the same time
            8,
            0xcccc_cccc,
            31 | 9 << 5, // the time is 9
            0,
            1,
            0xdddd_dddd,
            29, // nothing more
            1,
        ];
        let length = 4 * words.len() as u64;
        let (found, lost) = all(&page(length, &words));
        let times: Vec<u64> = found.iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [1_005, 1_012 + (1 << 27), 9]);
        let records: Vec<&[u8]> = found.iter().map(|(_, record)| record.as_slice()).collect();
        assert_eq!(records[0], [0xaa, 0xaa, 0xaa, 0xaa, 0xbb, 0xbb, 0xbb, 0xbb]);
        assert_eq!((records[1], records[2]), (&[0xcc; 4][..], &[0xdd; 4][..]));
        assert!(!lost && all(&page(length | 1 << 31, &words)).1);
    }

    #[test]
    fn any_bytes_end() {
        let mut seed = 1_u64;
        for round in 0..2_000 {
            let bytes: Vec<u8> = (0..round % 200)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (seed >> 56) as u8
                })
                .collect();
            all(&bytes);
        }
        assert_eq!(all(&page(8, &[0, u32::MAX, 3])).0, []);
    }
}
