//! Names and ids of sandboxes.

use crate::{Error, Result};

const ADJECTIVES: [&str; 24] = [
    "amber", "brisk", "calm", "clear", "deep", "eager", "fair", "fleet", "gentle", "gusty", "keen",
    "level", "lucky", "mild", "nimble", "quiet", "rapid", "sleek", "steady", "still", "swift",
    "tidal", "trim", "vivid",
];
const NOUNS: [&str; 24] = [
    "anchor", "beacon", "buoy", "cutter", "dinghy", "dock", "ferry", "galley", "gull", "harbor",
    "heron", "hull", "keel", "ketch", "launch", "mast", "otter", "pier", "reef", "sail", "skiff",
    "sloop", "tern", "yawl",
];

/// Returns random bits from the kernel.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's random pool, the time makes an id that is still unique enough.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => slipway_telemetry::realtime_ns(),
    }
}

/// Makes a new sandbox id: 12 hexadecimal digits.
pub fn new_id() -> String {
    format!("{:012x}", random() & 0xffff_ffff_ffff)
}

/// Makes a random name that begins with words that are easy to say. Its digits keep the names of
/// hundreds of sandboxes apart: with two of them, two of 200 were alike once in eight times.
pub fn new_name() -> String {
    let bits = random();
    let adjective = ADJECTIVES[(bits % 24) as usize];
    let noun = NOUNS[(bits / 24 % 24) as usize];
    format!("{adjective}-{noun}-{:05x}", bits >> 44)
}

/// Checks a name that a user chose, since it becomes a host name and part of paths.
///
/// # Errors
/// [`Error::Invalid`] if the name is not valid.
pub fn check(name: &str) -> Result<()> {
    check_length(name, "sandbox", 63)
}

/// Checks a host name by RFC 1123 (section 2.1): labels of letters, digits and '-', of at most 63
/// characters, none of which begins or ends with '-', with dots between them. It has at most 64
/// characters in all, since Linux keeps no more (sethostname(2)).
///
/// # Errors
/// [`Error::Invalid`] if the name is not valid.
pub fn check_host(name: &str) -> Result<()> {
    let is_label = |label: &str| {
        let ends = !label.starts_with('-') && !label.ends_with('-');
        let all = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        ends && all && (1..=63).contains(&label.len())
    };
    if name.len() <= 64 && name.split('.').all(is_label) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "\"{name}\" is no host name: labels of 1 to 63 letters, digits or '-', neither beginning \
         nor ending with '-', with dots between them; at most 64 characters in all"
    )))
}

/// Checks the name of a container of a pod, since it becomes part of paths. Ids of containers that
/// orchestrators choose have 64 digits and more.
///
/// # Errors
/// [`Error::Invalid`] if the name is not valid.
pub fn check_container(name: &str) -> Result<()> {
    check_length(name, "container", 128)
}

/// Checks the name of a directory that the containers of a pod share, since it becomes part of
/// paths.
///
/// # Errors
/// [`Error::Invalid`] if the name is not valid.
pub(crate) fn check_empty_dir(name: &str) -> Result<()> {
    check_length(name, "directory of a pod", 128)
}

/// Checks the name of a template, since it becomes part of paths.
///
/// # Errors
/// [`Error::Invalid`] if the name is not valid.
pub(crate) fn check_template(name: &str) -> Result<()> {
    if name.contains('.') {
        let what = format!("\"{name}\" is no name for a template: it has no dots");
        return Err(Error::Invalid(what));
    }
    check_length(name, "template", 63)
}

fn check_length(name: &str, what: &str, most: usize) -> Result<()> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if first && rest && name.len() <= most {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "\"{name}\" is no name for a {what}: 1 to {most} letters, digits, '-', '_' or '.', \
         beginning with a letter or a digit"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_names_are_valid_and_ids_have_twelve_digits() {
        for _ in 0..100 {
            check(&new_name()).unwrap();
            assert_eq!(new_id().len(), 12);
        }
    }

    #[test]
    fn names_that_would_leave_a_directory_are_refused() {
        for bad in ["", ".", "..", "a/b", "-a", "a b", "ä", &"x".repeat(64)] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn host_names_are_those_of_rfc_1123() {
        let long = format!("{}.a", "x".repeat(62));
        for good in ["a", "web-1", "3com", "WEB.example.org", &"x".repeat(63), &long] {
            check_host(good).unwrap();
        }
        let longer = format!("{}.ab", "x".repeat(62));
        let label = "x".repeat(64);
        for bad in ["", "x y", "-a", "a-", "a..b", ".a", "a.", "a_b", "ä", "a\n", &label, &longer]
        {
            assert!(check_host(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn containers_of_pods_have_longer_names() {
        check_container(&"0".repeat(128)).unwrap();
        for bad in ["", "..", "a/b", &"0".repeat(129)] {
            assert!(check_container(bad).is_err(), "{bad:?}");
        }
    }
}
