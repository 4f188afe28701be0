//! The program in a VMM's place. It speaks as much QMP as its launcher needs, and attacks its host
//! once the guest is to run. Started by hand, these tests do nothing.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

use super::DONE;
use super::attacks::{self, Targets};
use super::wait;

fn arguments() -> Option<String> {
    std::env::var("VMM_ARGUMENTS").ok().map(wait::for_arguments)
}

/// Returns the listening socket of the control channel, as QEMU or `slipway-vmm` is given it.
fn control(arguments: &str) -> RawFd {
    let after = |option| arguments.split(option).nth(1);
    let rest = after("socket,id=qmp,fd=").or_else(|| after("--control fd:")).unwrap();
    rest.split([',', ' ']).next().unwrap().parse().unwrap()
}

/// Answers until the guest is to run.
fn serve_until_it_runs(mut stream: &UnixStream) {
    stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n").unwrap();
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let request: serde_json::Value = serde_json::from_str(&line).unwrap();
        let answer = serde_json::json!({ "return": {}, "id": request["id"] });
        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
        if request["execute"] == "cont" {
            return;
        }
    }
}

#[test]
#[ignore = "started in a VMM's place"]
fn program() {
    let Some(arguments) = arguments() else { return };
    // SAFETY: the launcher passed this descriptor for the VMM to own.
    let listener = unsafe { UnixListener::from_raw_fd(control(&arguments)) };
    let (stream, _) = listener.accept().unwrap();
    serve_until_it_runs(&stream);
    attacks::all(&Targets::of(&arguments));
    println!("\n{DONE}");
    loop {
        std::thread::park();
    }
}

#[test]
#[ignore = "started as the same user outside of a cage"]
fn outside() {
    let Some(arguments) = arguments() else { return };
    attacks::all(&Targets::of(&arguments));
    println!("\n{DONE}");
}
