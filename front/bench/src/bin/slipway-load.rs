//! `slipway-load`: a load from our user-space NVMe driver, in a guest.
//!
//! `slipway bench block` copies this program into its guests. It is linked statically, so that it
//! runs in any.
//!
//! - `slipway-load take DEVICE` takes the NVMe function behind a block device from the guest's
//!   kernel, and prints its PCI address;
//! - `slipway-load run ADDRESS LOAD WARM-UP TIME` runs a load (`randread-4k-d1`) on it, with both
//!   times in milliseconds, and prints the result as JSON.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_bench::block::Workload;
use slipway_bench::block::native::{load_function, take};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("slipway-load: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<String> {
    match words {
        ["take", device] => take(Path::new(device)),
        ["run", address, load, warm_up, time] => {
            let load: Workload = load.parse().map_err(anyhow::Error::msg)?;
            let milliseconds = |text: &str| -> Result<Duration> {
                let number = text.parse().with_context(|| format!("{text}: no milliseconds"))?;
                Ok(Duration::from_millis(number))
            };
            let (warm_up, time) = (milliseconds(warm_up)?, milliseconds(time)?);
            let measured = load_function(address, &load, warm_up, time)?;
            Ok(serde_json::to_string(&measured)?)
        }
        _ => bail!("expected: take DEVICE, or: run ADDRESS LOAD WARM-UP TIME"),
    }
}
