//! The driver's side of an entropy device, for unit tests and fuzzing. It takes no interrupts.

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, SingleQueue, Used,
    notification,
};

/// Asks for bytes for buffers of these lengths, one chain, and waits for them.
///
/// # Errors
/// [`DriverError`].
pub fn ask<R: RegisterAccess>(
    driver: &mut SingleQueue<R>,
    lengths: &[u32],
) -> Result<Vec<u8>, DriverError> {
    let len: u32 = lengths.iter().sum();
    let at = driver.arena.allocate(len as usize)?;
    let mut next = at;
    let mut buffers = Vec::new();
    for &len in lengths {
        buffers.push(Buffer::writable(next, len));
        next += u64::from(len);
    }
    driver.ring.push(&buffers)?;
    let used = driver.wait()?;
    let mut bytes = vec![0; used.len.min(len) as usize];
    driver.arena.memory().read(at, &mut bytes)?;
    Ok(bytes)
}
