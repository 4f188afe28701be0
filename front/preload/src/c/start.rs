//! The start of a program: what the library does before the program's main function.

use super::guard::guarded;
use crate::{inherit, libcs, program, real};

/// The loader calls `begin` before the program's main function.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let saved = real::errno();
    guarded(|| {
        program::begin();
        libcs::begin();
        inherit::begin();
    });
    real::set_errno(saved);
}
