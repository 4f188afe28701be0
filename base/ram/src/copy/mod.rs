//! Copies between guest memory and this process's memory.
//!
//! The guest may change its side meanwhile. For Rust that is another process's doing, outside the
//! program, as long as the compiler assumes nothing about those bytes. It would if it saw the copy:
//! from a plain `copy_nonoverlapping` into a local it may read the guest's memory a second time
//! where the program reads the local, and a checked length could differ from the used one. So the
//! copies are machine code that the compiler does not look into; their result is any mix of old and
//! new bytes, and does not change afterwards.
//!
//! The guest's owner may also take its memory away. `guarded` tells that this can happen; a copy
//! then ends early with `false` and no signal reaches the process. `x86_64.rs` does so without a
//! system call, `portable.rs` through the kernel.

#[cfg(not(target_arch = "x86_64"))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use portable::{
    between, load_u16, load_u32, prepare, publish, read, read_raw, store_u16, store_u32, write,
    write_raw, zero,
};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{
    between, load_u16, load_u32, prepare, publish, read, read_raw, store_u16, store_u32, write,
    write_raw, zero,
};

#[cfg(test)]
mod tests;
