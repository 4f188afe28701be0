//! QEMU's vfio-user-pci device as the client.

use std::io::{Read, Write};
use std::process::{Child, Command as Process, Stdio};

use slipway_vfio_user::RegionKind;
use slipway_vfio_user::testing::IDENTIFIERS;

use crate::common::*;

/// Finds a QEMU with vfio-user: `$QEMU`, Slipway's private one, or the system's. Returns `None` if
/// there is none.
fn qemu() -> Option<String> {
    let candidates = [
        std::env::var("QEMU").ok(),
        Some("/var/lib/slipway/tools/bin/qemu-system-x86_64".to_owned()),
        Some("qemu-system-x86_64".to_owned()),
    ];
    candidates.into_iter().flatten().find(|program| {
        let help = Process::new(program).args(["-device", "vfio-user-pci,help"]).output();
        help.is_ok_and(|help| help.status.success())
    })
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots firmware against `served`. Returns the output of `info pci` when the firmware has placed
/// the function's BAR, or `None` if the test is skipped.
fn boot(test: &str, served: &Served, shared: bool) -> Option<String> {
    let Some(program) = qemu() else {
        skipped(test, "a QEMU with vfio-user-pci (10.1 or newer)");
        return None;
    };
    let device = format!(
        r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{}"}}}}"#,
        served.path.display()
    );
    let mut command = Process::new(program);
    if shared {
        command.args(["-M", "q35,memory-backend=m0"]);
        command.args(["-object", "memory-backend-memfd,id=m0,size=128M,share=on"]);
    } else {
        command.args(["-M", "q35", "-m", "128M"]);
    }
    command.args(["-accel", "tcg", "-nodefaults", "-display", "none", "-monitor", "stdio"]);
    command.args(["-device", &device]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Killed(command.spawn().unwrap());
    // The firmware sizes and places the BAR, and copies itself to RAM, which splits the DMA map.
    eventually("firmware has set the function up", || {
        let over = child.0.try_wait().unwrap().is_some();
        assert!(!over, "QEMU ended; the server says {:?}", served.control.stats());
        let stats = served.control.stats();
        stats.region_writes >= 20 && stats.regions.len() >= 5
    });
    let stats = served.control.stats();
    let ram = stats.regions.iter().max_by_key(|region| region.len);
    let expected = if shared { RegionKind::Mapped } else { RegionKind::Remote };
    assert_eq!(ram.map(|region| region.kind), Some(expected), "{stats:?}");
    assert_eq!(stats.client.map(|client| client.private), Some(!shared));
    let mut input = child.0.stdin.take().unwrap();
    input.write_all(b"info pci\nquit\n").unwrap();
    let mut output = String::new();
    child.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    Some(output)
}

fn check(output: &str, served: &Served) {
    let name = format!("{:04x}:{:04x}", IDENTIFIERS.0, IDENTIFIERS.1);
    assert!(output.contains(&name), "{output}");
    assert!(output.contains("BAR0: 64 bit memory"), "{output}");
    eventually("QEMU has gone", || served.control.stats().client.is_none());
    assert_eq!(served.control.stats().errors, [], "QEMU asks for nothing that is refused");
}

#[test]
fn qemu_takes_the_device_with_shared_memory() {
    let served = serve();
    let Some(output) = boot("qemu_takes_the_device_with_shared_memory", &served, true) else {
        return;
    };
    check(&output, &served);
}

#[test]
fn qemu_takes_mapped_doorbells() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Mapped);
    let Some(output) = boot("qemu_takes_mapped_doorbells", &served, true) else { return };
    check(&output, &served);
}

#[test]
fn qemu_takes_the_device_with_private_memory() {
    let served = serve();
    let test = "qemu_takes_the_device_with_private_memory";
    let Some(output) = boot(test, &served, false) else { return };
    check(&output, &served);
}
