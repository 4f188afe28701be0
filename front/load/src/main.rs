//! `slipway-load`: a load in a guest, from our user-space NVMe driver or on sockets.
//!
//! `slipway bench` copies this program into its guests. It is linked statically, so that it runs in
//! any.
//!
//! - `slipway-load take DEVICE` takes the NVMe function behind a block device from the guest's
//!   kernel, and prints its PCI address;
//! - `slipway-load run ADDRESS LOAD WARM-UP TIME` runs a load (`randread-4k-d1`) on it, with both
//!   times in milliseconds, and prints the result as JSON;
//! - `slipway-load send LOAD ADDRESS WARM-UP TIME` sends a load of network interfaces (`udp8-gh`)
//!   until standard input ends, and `slipway-load receive LOAD WARM-UP TIME` receives it; both
//!   print what they have counted as JSON.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_load::native::{load_function, take};
use slipway_load::nic::{self, NicLoad};
use slipway_load::{Times, Workload};

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
            let times = times(warm_up, time)?;
            let measured = load_function(address, &load, times.warm_up, times.time)?;
            Ok(serde_json::to_string(&measured)?)
        }
        ["send", load, address, warm_up, time] => {
            let load: NicLoad = load.parse().map_err(anyhow::Error::msg)?;
            let times = times(warm_up, time)?;
            let address = address.parse().with_context(|| format!("{address}: no address"))?;
            let sent = nic::send(&load, address, times, &stopped_by_input())?;
            Ok(serde_json::to_string(&sent)?)
        }
        ["receive", load, warm_up, time] => {
            let load: NicLoad = load.parse().map_err(anyhow::Error::msg)?;
            let times = times(warm_up, time)?;
            let anywhere = std::net::Ipv4Addr::UNSPECIFIED.into();
            let received = nic::receive(&load, anywhere, times, &AtomicBool::new(false))?;
            Ok(serde_json::to_string(&received)?)
        }
        _ => bail!(
            "expected: take DEVICE, run ADDRESS LOAD WARM-UP TIME, send LOAD ADDRESS WARM-UP TIME, \
             or receive LOAD WARM-UP TIME"
        ),
    }
}

/// Parses a warm-up and a measured time in milliseconds.
fn times(warm_up: &str, time: &str) -> Result<Times> {
    let milliseconds = |text: &str| -> Result<Duration> {
        let number = text.parse().with_context(|| format!("{text}: no milliseconds"))?;
        Ok(Duration::from_millis(number))
    };
    Ok(Times { warm_up: milliseconds(warm_up)?, time: milliseconds(time)? })
}

/// Returns a flag that is set when standard input ends.
fn stopped_by_input() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    std::thread::spawn(move || {
        // An input that fails has ended, too.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        told.store(true, Ordering::Relaxed);
    });
    stop
}
