//! The driver's side of a memory device, for unit tests and fuzzing. It takes no interrupts.

use slipway_virtio_spec::mem::{Features, Request, Response, request};
use zerocopy::IntoBytes;

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, SingleQueue, Used,
    notification,
};

/// The features that the driver accepts.
pub const FEATURES: u64 = Features::all().bits();

/// Returns a request of type `kind` for `blocks` blocks from the guest-physical address `addr` on.
pub fn request(kind: u16, addr: u64, blocks: u16) -> Request {
    Request { kind: kind.into(), addr: addr.into(), blocks: blocks.into(), ..Request::default() }
}

/// Returns a request to unplug all blocks.
pub fn unplug_all() -> Request {
    request(request::UNPLUG_ALL, 0, 0)
}

/// Pushes a request as one chain, whose response has bytes so far that no device answers with.
/// Returns the address of the response.
///
/// # Errors
/// [`DriverError`].
pub fn submit<R: RegisterAccess>(
    driver: &mut SingleQueue<R>,
    request: &Request,
) -> Result<u64, DriverError> {
    let at = driver.arena.allocate(size_of::<Request>() + size_of::<Response>())?;
    let response = at + size_of::<Request>() as u64;
    driver.arena.memory().write(at, request.as_bytes())?;
    driver.arena.memory().write(response, &[0xee; size_of::<Response>()])?;
    let readable = Buffer::readable(at, size_of::<Request>() as u32);
    driver.ring.push(&[readable, Buffer::writable(response, size_of::<Response>() as u32)])?;
    Ok(response)
}

/// Returns the response at `at`: its type and state.
///
/// # Errors
/// [`DriverError`].
pub fn response<R: RegisterAccess>(
    driver: &SingleQueue<R>,
    at: u64,
) -> Result<(u16, u16), DriverError> {
    let mut response = Response::default();
    driver.arena.memory().read(at, response.as_mut_bytes())?;
    Ok((response.kind.get(), response.state.get()))
}

/// Sends a request, and waits for its response: type and state.
///
/// # Errors
/// [`DriverError`].
pub fn ask<R: RegisterAccess>(
    driver: &mut SingleQueue<R>,
    request: &Request,
) -> Result<(u16, u16), DriverError> {
    let at = submit(driver, request)?;
    driver.wait()?;
    response(driver, at)
}
