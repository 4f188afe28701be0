//! `slipway-guest-sockets`: the socket engine of a sandbox's guest.
//!
//! A sandbox with sockets has a PCI function of the machine's socket engine
//! (`slipway_sgiov_spec::function`). This program drives the function by the kernel's driver for
//! user space. It is to the guest's programs what `slipway socket engine` is to a host's: they
//! attach with the same library, talk to each other through shared memory, and to other sandboxes
//! through the function. The agent starts this program, which is linked statically and lies in the
//! initramfs.
//!
//! - [`sysfs`]: finds the function and binds `uio_pci_generic` to it;
//! - [`uio`]: the function's registers and interrupts;
//! - [`pages`]: huge pages, and their addresses in the guest's physical memory.
//!
//! The program needs root, the modules `uio` and `uio_pci_generic`, and huge pages of 2 MiB, for
//! which it reserves an eighth of the memory. It reports what is missing in one line on standard
//! error.
//!
//! Dependencies: `anyhow` for the context of errors, `tracing` with `tracing-subscriber` for the
//! engine's log.
#![allow(unsafe_code)] // registers in mapped memory

mod pages;
mod sysfs;
mod uio;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use slipway_sgiov::guest::FunctionRemote;
use slipway_sgiov::{Engine, Settings, raise_descriptor_limit};

const HELP: &str = "\
slipway-guest-sockets: the socket engine of a Slipway sandbox's guest

Usage: slipway-guest-sockets [OPTIONS]

Options:
      --socket PATH      Socket that programs attach to [default: /run/slipway/socket.sock]
      --no-interrupts    Look at the function every millisecond instead
      --beside PAGES     Huge pages of the kernel's that are for others [default: 0]
  -h, --help             Print help

It takes the PCI function 1af4:10f5 with uio_pci_generic, reserves huge pages for it, and
serves until it is ended. The agent of a sandbox with sockets starts it.
";

/// The limit of descriptors to set: a few for each connection.
const DESCRIPTORS: u64 = 1 << 20;

struct Options {
    socket: PathBuf,
    interrupts: bool,
    /// The huge pages of the kernel's pool that are for others.
    beside: u64,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match options(&arguments) {
        Ok(Some(options)) => run(&options),
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slipway-guest-sockets: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Reads the command line. Returns `None` if it asks for help.
fn options(arguments: &[String]) -> Result<Option<Options>> {
    let socket = "/run/slipway/socket.sock".into();
    let mut options = Options { socket, interrupts: true, beside: 0 };
    let mut rest = arguments.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-h" | "--help" => return Ok(None),
            "--no-interrupts" => options.interrupts = false,
            "--socket" => {
                options.socket = rest.next().context("--socket: a path is missing")?.into();
            }
            "--beside" => {
                let pages = rest.next().context("--beside: a number is missing")?;
                options.beside = pages.parse().context("--beside: no number of huge pages")?;
            }
            other => bail!("{other}: no such option; see --help"),
        }
    }
    Ok(Some(options))
}

fn run(options: &Options) -> Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .init();
    raise_descriptor_limit(DESCRIPTORS);
    let function = sysfs::Function::find(Path::new("/sys"))?;
    let uio = function.bind()?;
    let reserved = pages::reserve(Path::new("/"), options.beside)?;
    tracing::info!("function {function}, {reserved} huge pages");
    let device = uio::Uio::open(&function, &uio, options.interrupts)?;
    let remote = FunctionRemote::start(Box::new(device))?;
    let folder = options.socket.parent().context("the socket's path has no folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut engine = Engine::bind(Settings {
        socket: options.socket.clone(),
        remote: Some(Box::new(remote)),
        ..Settings::default()
    })?;
    tracing::info!("programs attach to {}", options.socket.display());
    engine.run()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_understood_and_others_are_refused() {
        let parse = |words: &[&str]| {
            options(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>())
        };
        let plain = parse(&[]).unwrap().unwrap();
        assert!(plain.interrupts && plain.socket == Path::new("/run/slipway/socket.sock"));
        assert_eq!(plain.beside, 0);
        let words = ["--socket", "/s", "--no-interrupts", "--beside", "32"];
        let set = parse(&words).unwrap().unwrap();
        assert!(!set.interrupts && set.socket == Path::new("/s") && set.beside == 32);
        assert!(parse(&["--help"]).unwrap().is_none());
        for wrong in [&["--socket"][..], &["x"], &["--interrupts"], &["--beside", "-1"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
