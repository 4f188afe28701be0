//! The kernel's lists of CPUs and nodes, such as `0-3,8`.

/// Returns the numbers of a list that are less than `end`, in the list's order, or `None` if the
/// list has a number that is not, is not in ascending order or has another form. The empty list has
/// no numbers.
pub fn numbers(text: &str, end: usize) -> Option<Vec<usize>> {
    let text = text.trim();
    let mut numbers = Vec::new();
    for part in text.split(',').filter(|_| !text.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first, end)?, number(last, end)?);
        // Ascending, so that no list has more than `end` numbers.
        if first > last || numbers.last().is_some_and(|before| first <= *before) {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

fn number(digits: &str, end: usize) -> Option<usize> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|number| plain && *number < end)
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn ranges_and_single_numbers_are_read() {
        for (text, expected) in [
            ("", vec![]),
            ("\n", vec![]),
            ("0", vec![0]),
            ("0-3\n", vec![0, 1, 2, 3]),
            ("0-1,4,6-7\n", vec![0, 1, 4, 6, 7]),
            ("5-5", vec![5]),
            ("1023", vec![1023]),
        ] {
            assert_eq!(numbers(text, 1024), Some(expected), "{text:?}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "1024",
            "0-1024",
            "3-1",
            "1,1",
            "1,0",
            "0-3,3",
            "0-3,2-5",
            "-1",
            "1-",
            "-",
            ",",
            "0,",
            "0-1-2",
            "a",
            "+1",
            "1 2",
            "0x1",
            "99999999999999999999",
            "0-3:1/2",
        ] {
            assert_eq!(numbers(text, 1024), None, "{text:?}");
        }
    }
}
