//! Makes the initramfs of a sandbox and prints its path: `initramfs KERNEL AGENT FOLDER`. KERNEL is
//! a folder with `vmlinuz`, `release` and `modules/`.
#![allow(clippy::unwrap_used)] // What cannot be made is reported by the panic.

use std::path::Path;

use slipway_initramfs::{Extras, Kernel, build};

fn main() {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let [kernel, agent, folder] = words.as_slice() else {
        panic!("usage: initramfs KERNEL AGENT FOLDER");
    };
    let kernel = Kernel::locate(Some(Path::new(kernel)), Path::new("/")).unwrap();
    let made = build(&kernel, Path::new(agent), Extras::default(), Path::new(folder)).unwrap();
    println!("{}", made.display());
}
