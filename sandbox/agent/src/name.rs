//! Names of containers, processes, volumes and directories, as the host chooses them.

use anyhow::{Result, bail};

/// Checks a name, since names become file names: at most 128 letters, digits, `_`, `.` and `-`,
/// beginning with a letter or a digit.
pub fn check(name: &str) -> Result<()> {
    let ordinary = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let starts = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !starts || name.len() > 128 || !name.bytes().all(ordinary) {
        bail!("{name:?} is not a name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_file_names() {
        for name in ["a", "web-1", "0_x.y", &"a".repeat(128)] {
            assert!(check(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a/b", "-a", "a b", "ä", &"a".repeat(129)] {
            assert!(check(name).is_err(), "{name}");
        }
    }
}
