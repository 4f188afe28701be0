//! The boot of the host, without which process ids and start times of processes mean nothing.

use std::io::{Error, Result};

/// The file with the id of the boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the id of the host's present boot: 36 characters, a UUID without a line feed.
///
/// Files that outlive a boot have it beside what a boot ends: processes, bindings of drivers, files
/// of a tmpfs.
///
/// # Errors
/// The file cannot be read; the error names it.
pub fn boot_id() -> Result<String> {
    match std::fs::read_to_string(BOOT_ID) {
        Ok(id) => Ok(id.trim().to_owned()),
        Err(error) => Err(Error::new(error.kind(), format!("cannot read {BOOT_ID}: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_a_uuid_and_stays() {
        let id = boot_id().unwrap();
        assert_eq!((id.len(), id.matches('-').count()), (36, 4), "{id}");
        assert!(id.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit()), "{id}");
        assert_eq!(boot_id().unwrap(), id);
    }
}
