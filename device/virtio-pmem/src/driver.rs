//! The driver's side of persistent memory, for unit tests and fuzzing. It takes no interrupts.

use slipway_virtio_spec::pmem::{REQUEST, RESPONSE};

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, SingleQueue, Used,
    notification,
};

/// Pushes a request of type `kind` as one chain, whose response has bytes so far that no device
/// answers with. Returns the address of the response.
///
/// # Errors
/// [`DriverError`].
pub fn submit<R: RegisterAccess>(
    driver: &mut SingleQueue<R>,
    kind: u32,
) -> Result<u64, DriverError> {
    let at = driver.arena.allocate(REQUEST + RESPONSE)?;
    let response = at + REQUEST as u64;
    driver.arena.memory().write(at, &kind.to_le_bytes())?;
    driver.arena.memory().write(response, &[0xee; RESPONSE])?;
    let request = Buffer::readable(at, REQUEST as u32);
    driver.ring.push(&[request, Buffer::writable(response, RESPONSE as u32)])?;
    Ok(response)
}

/// Sends a request of type `kind`, and waits for its response.
///
/// # Errors
/// [`DriverError`].
pub fn ask<R: RegisterAccess>(driver: &mut SingleQueue<R>, kind: u32) -> Result<u32, DriverError> {
    let response = submit(driver, kind)?;
    driver.wait()?;
    let mut bytes = [0; RESPONSE];
    driver.arena.memory().read(response, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
