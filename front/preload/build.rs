//! Links the library's unwinder statically.
//!
//! Rust's standard library asks the linker for the shared library `gcc_s`. Many small images lack
//! it (busybox's, distroless ones), and no program could start there with `libslipway.so` in
//! `LD_PRELOAD`. A linker script of that name, which is found before the system's library, names
//! the static archives of the same functions. The C library remains the only shared one.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let script = folder.join("libgcc_s.so");
    std::fs::write(script, "INPUT(-lgcc_eh -lgcc)\n").expect("OUT_DIR is writable");
    println!("cargo::rustc-link-search=native={}", folder.display());
}
