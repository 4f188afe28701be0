//! Variables of an invocation in a file, for programs that are forked once they are set up: such a
//! program's environment is that of its zygote.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::{IntoRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The descriptor at which a program has the file.
pub const DESCRIPTOR: i32 = 3;

/// Makes a file with `text` that cannot be changed, and stays open at execute.
pub fn file(text: &str) -> Result<OwnedFd> {
    let mut file: File = memfd_create(c"variables", MemfdFlags::ALLOW_SEALING)?.into();
    file.write_all(text.as_bytes()).context("writing the variables")?;
    file.rewind().context("writing the variables")?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).context("sealing the variables")?;
    Ok(file.into())
}

/// Leaves such a file open at [`DESCRIPTOR`] for the program that this process executes next.
///
/// # Errors
/// The descriptor is in use, or the file cannot be made.
pub fn leave(text: &str) -> Result<()> {
    let number = file(text)?.into_raw_fd();
    if number != DESCRIPTOR {
        bail!("descriptor {DESCRIPTOR} is in use");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_file_of_variables_is_read_from_its_beginning_and_never_written() {
        let mut file: File = file("A=1\nB=2\n").unwrap().into();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "A=1\nB=2\n");
        assert!(file.write_all(b"x").is_err());
    }
}
