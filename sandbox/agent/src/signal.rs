//! Sending signals by their Linux number, including real-time signals.

use std::io;

/// Sends `signal` (1 to 64) to the process `pid`. A process that is gone is no error.
pub fn send(pid: i32, signal: u32) -> io::Result<()> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("no signal {signal}"));
    let number = i32::try_from(signal).map_err(|_| invalid())?;
    // Non-positive ids address groups or all processes.
    if !(1..=64).contains(&number) || pid <= 0 {
        return Err(invalid());
    }
    // SAFETY: kill has no memory effects on this process.
    if unsafe { libc::kill(pid, number) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(super::send(1, 0).is_err());
        assert!(super::send(1, 65).is_err());
        assert!(super::send(-1, 15).is_err());
        assert!(super::send(0, 15).is_err());
    }
}
