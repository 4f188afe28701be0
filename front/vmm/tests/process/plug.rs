//! Hot plug by the control socket.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{ChildStdout, Stdio};

use serde_json::{Value, json};
use slipway_reactor::{Reactor, Settings};

use crate::common::{self, has_kvm};
use crate::{Client, Running, TestDir, counts_for_ever, error_of, ramdisk, start, vmm};

/// Starts a guest that prints what hot plug tells it, and waits until it is ready. Returns the
/// VMM, what the guest prints, and a client of the VMM.
fn start_listening(place: &TestDir, options: [&str; 2]) -> (Running, ChildStdout, Client) {
    let control = place.path("control");
    let mut command = vmm(&place.kernel(common::events()));
    command.arg("--control").arg(&control).args(options).stdout(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let mut console = running.0.stdout.take().unwrap();
    let client = Client::connect(&control);
    assert_prints(&mut console, b"r");
    (running, console, client)
}

fn assert_prints(console: &mut ChildStdout, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    console.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, expected);
}

#[test]
fn functions_come_and_go() {
    if !has_kvm("functions_come_and_go") {
        return;
    }
    let place = TestDir::new();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let disks = ["a", "b", "c"].map(|name| place.path(name));
    let serve = |path: &PathBuf| ramdisk::serve(path.to_str().unwrap(), &reactor).unwrap();
    let servers = disks.each_ref().map(serve);
    // Connections that are refused before anybody speaks to the server.
    let unused = place.path("unused");
    let _unused = UnixListener::bind(&unused).unwrap();
    let (mut running, mut console, mut client) = start_listening(&place, ["--slots", "2"]);
    let mut prints = |expected: &[u8]| assert_prints(&mut console, expected);
    let error = |answer: &Value, words: &str| {
        let text = answer["error"]["desc"].as_str().unwrap();
        assert!(text.contains(words), "{text}");
    };
    for _ in 0..3 {
        assert_eq!(client.plug("a", &disks[0])["return"], json!({ "function": 0 }));
        prints(b"4p\xf4.");
        error(&client.plug("a", &unused), "already");
        assert_eq!(client.unplug("a")["return"], json!({}));
        prints(b"4e\xff.");
        assert_eq!(client.event(), "DEVICE_DELETED");
        error(&client.unplug("a"), "there is no device");
    }
    // The bus is full, until one of them has left.
    assert_eq!(client.plug("a", &disks[0])["return"]["function"], 0);
    let answer = client.plug("b", &disks[1]);
    assert_eq!(answer["return"]["function"], 1, "{answer}");
    error(&client.plug("c", &unused), "2 slots");
    client.unplug("b");
    assert_eq!(client.event(), "DEVICE_DELETED");
    let answer = client.plug("c", &disks[2]);
    assert_eq!(answer["return"]["function"], 1, "{answer}");
    // A path without a server gives an error and changes nothing.
    client.unplug("a");
    assert_eq!(client.event(), "DEVICE_DELETED");
    let silent = place.path("hung-up");
    let listener = UnixListener::bind(&silent).unwrap();
    let hanging_up = std::thread::spawn(move || drop(listener.accept()));
    error(&client.plug("d", &silent), "function 0: ");
    hanging_up.join().unwrap();
    error(&client.ask(&add_without_a_descriptor()), "descriptor");
    let answer = client.plug("d", &disks[0]);
    assert_eq!(answer["return"]["function"], 0, "{answer}");
    client.execute("system_powerdown");
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
    servers.iter().for_each(|server| server.close());
}

#[test]
fn cpus_come_and_go() {
    if !has_kvm("cpus_come_and_go") {
        return;
    }
    let place = TestDir::new();
    let (mut running, mut console, mut client) = start_listening(&place, ["--max-cpus", "3"]);
    let mut prints = |expected: &[u8]| assert_prints(&mut console, expected);
    let there = |client: &mut Client| {
        let all = client.execute("query-hotpluggable-cpus");
        let all = all.as_array().unwrap().clone();
        assert_eq!(all.len(), 3);
        all.iter().filter(|cpu| cpu.get("qom-path").is_some()).count()
    };
    let add = |client: &mut Client, name: &str, core: u32| {
        let arguments = json!({ "driver": "host-x86_64-cpu", "id": name, "core-id": core });
        client.ask(&json!({ "execute": "device_add", "arguments": arguments }).to_string())
    };
    for _ in 0..3 {
        assert_eq!(there(&mut client), 1);
        assert_eq!(add(&mut client, "second", 1)["return"], json!({}));
        prints(b"8c.");
        for (name, core, words) in [
            ("second", 2, "already"),
            ("again", 1, "already"),
            ("no", 0, "max-cpus"),
            ("x", 3, "3"),
        ] {
            let answer = add(&mut client, name, core);
            assert!(answer["error"]["desc"].as_str().unwrap().contains(words), "{answer}");
        }
        assert_eq!(there(&mut client), 2);
        client.execute("stop");
        client.execute("cont");
        assert_eq!(client.unplug("second")["return"], json!({}));
        prints(b"8d.");
        while client.event() != "DEVICE_DELETED" {}
    }
    client.execute("stop");
    client.execute("quit");
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

fn add_without_a_descriptor() -> String {
    let arguments = json!({ "driver": "vfio-user-pci", "id": "e" });
    json!({ "execute": "device_add", "arguments": arguments }).to_string()
}

#[test]
fn a_server_that_says_nothing_holds_up_nobody() {
    if !has_kvm("a_server_that_says_nothing_holds_up_nobody") {
        return;
    }
    let place = TestDir::new();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let (disk, silent, control) = (place.path("disk"), place.path("silent"), place.path("control"));
    let server = ramdisk::serve(disk.to_str().unwrap(), &reactor).unwrap();
    let _silent = UnixListener::bind(&silent).unwrap();
    let mut command = vmm(&place.kernel(counts_for_ever()));
    command.arg("--control").arg(&control).args(["--slots", "2"]).stdout(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    let mut client = Client::connect(&control);
    client.begin_to_plug("silent", &silent);
    assert_eq!(client.execute("query-status")["running"], true);
    let removal = client.unplug("silent");
    assert!(removal["error"]["desc"].is_string(), "it is not there yet: {removal}");
    assert_eq!(client.plug("disk", &disk)["return"], json!({ "function": 1 }));
    // This guest never ejects what it is asked for.
    let expected = |leaving: bool| {
        let disk = json!({ "function": 1, "id": "disk", "connected": true, "leaving": leaving });
        json!([disk])
    };
    assert_eq!(client.execute("slipway-functions"), expected(false));
    for _ in 0..3 {
        assert_eq!(client.unplug("disk")["return"], json!({}));
        assert_eq!(client.execute("slipway-functions"), expected(true));
    }
    let before = client.exits();
    while client.exits() == before {}
    client.execute("quit");
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
    server.close();
}

#[test]
fn a_machine_without_slots_says_so() {
    if !has_kvm("a_machine_without_slots_says_so") {
        return;
    }
    let place = TestDir::new();
    let (_running, mut client) = start(&place, counts_for_ever());
    let listener = place.path("server");
    let _server = UnixListener::bind(&listener).unwrap();
    let answer = client.plug("a", &listener);
    assert!(answer["error"]["desc"].as_str().unwrap().contains("--slots"), "{answer}");
    let output = vmm(&place.path("kernel")).args(["--slots", "29"]).output().unwrap();
    assert!(error_of(&output).contains("the bus has room for 28"));
}
