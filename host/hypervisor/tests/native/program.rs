//! The program in the VMM's place. Started by hand, it does nothing.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use rustix::net::RecvFlags;
use slipway_peer::Bin;

/// The functions without a connection, and the client of the control channel.
#[derive(Default)]
struct State {
    lost: BTreeSet<usize>,
    client: Option<UnixStream>,
}

type Shared = Arc<Mutex<State>>;

fn tell(client: &mut UnixStream, message: &serde_json::Value) {
    // The launcher may be gone.
    let _ = client.write_all(format!("{message}\n").as_bytes());
}

fn lost(index: usize) -> serde_json::Value {
    serde_json::json!({ "event": "SLIPWAY_FUNCTION_LOST", "data": { "function": index } })
}

/// Says `word` over a function's connection, and reports its end.
fn use_function(shared: &Shared, index: usize, word: &str, mut connection: UnixStream) {
    connection.write_all(format!("{word} {index}").as_bytes()).unwrap();
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        let _ = connection.read(&mut [0]);
        let mut state = shared.lock().unwrap();
        state.lost.insert(index);
        if let Some(client) = &mut state.client {
            tell(client, &lost(index));
        }
    });
}

/// Reads a line, and the descriptor that came with it. Returns `None` at the end.
fn read_line(client: &UnixStream) -> Option<(serde_json::Value, Option<OwnedFd>)> {
    let (mut line, mut descriptor) = (Vec::new(), None);
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        let parts = &mut [IoSliceMut::new(&mut byte)];
        let received = slipway_peer::receive(client, parts, &Bin::new(), RecvFlags::empty());
        let received = received.ok().filter(|received| received.bytes == 1)?;
        if let Some(file) = received.files.first() {
            assert!(line.is_empty(), "it comes with the first byte");
            descriptor = Some(file.as_fd().try_clone_to_owned().unwrap());
        }
        line.push(byte[0]);
    }
    Some((serde_json::from_slice(&line).unwrap(), descriptor))
}

/// Serves one client of the control channel.
fn serve(shared: &Shared, client: &UnixStream) {
    let mut writer = client.try_clone().unwrap();
    tell(&mut writer, &serde_json::json!({ "QMP": { "version": {}, "capabilities": [] } }));
    while let Some((request, descriptor)) = read_line(client) {
        let mut state = shared.lock().unwrap();
        let mut value = serde_json::json!({});
        match request["execute"].as_str().unwrap() {
            "query-status" => value = serde_json::json!({ "status": "paused" }),
            "query-kvm" => value = serde_json::json!({ "enabled": true, "present": true }),
            "cont" => println!("runs"),
            "slipway-reconnect" => {
                let index = request["arguments"]["function"].as_u64().unwrap() as usize;
                assert!(state.lost.remove(&index), "{index} is not lost");
                let connection = UnixStream::from(descriptor.unwrap());
                use_function(shared, index, "again", connection);
            }
            "query-hotpluggable-cpus" => {
                let kind = "host-x86_64-cpu";
                value = serde_json::json!([
                    { "type": kind, "vcpus-count": 1, "props": { "core-id": 1 } },
                    { "type": kind, "vcpus-count": 1, "props": { "core-id": 0 }, "qom-path": "/0" },
                ]);
            }
            "device_add" => {
                let arguments = &request["arguments"];
                if let Some(connection) = descriptor {
                    assert_eq!(arguments["driver"], "vfio-user-pci");
                    assert_eq!(arguments["id"], "more");
                    use_function(shared, 2, "hello", UnixStream::from(connection));
                    value = serde_json::json!({ "function": 2 });
                } else {
                    assert_eq!(arguments["driver"], "host-x86_64-cpu");
                    assert_eq!(
                        (&arguments["id"], &arguments["core-id"]),
                        (&"cpu".into(), &1.into())
                    );
                }
            }
            "device_del" => {
                let data = serde_json::json!({ "device": request["arguments"]["id"] });
                let event = serde_json::json!({ "event": "DEVICE_DELETED", "data": data });
                tell(&mut writer, &event);
            }
            "quit" => {
                let data = serde_json::json!({ "guest": true, "reason": "guest-reset" });
                let event = serde_json::json!({ "event": "SHUTDOWN", "data": data });
                tell(&mut writer, &serde_json::json!({ "return": {}, "id": request["id"] }));
                tell(&mut writer, &event);
                std::process::exit(0);
            }
            _ => {}
        }
        tell(&mut writer, &serde_json::json!({ "return": value, "id": request["id"] }));
        if request["execute"] == "qmp_capabilities" {
            state.lost.iter().for_each(|index| tell(&mut writer, &lost(*index)));
            state.client = Some(writer.try_clone().unwrap());
        }
    }
    shared.lock().unwrap().client = None;
}

#[test]
#[ignore = "started as the VMM"]
fn main() {
    let Ok(arguments) = std::env::var("VMM_ARGUMENTS") else { return };
    let words: Vec<_> = arguments.split(' ').collect();
    let all = |option: &str| -> Vec<RawFd> {
        let pairs = words.windows(2).filter(|pair| pair[0] == option);
        pairs.map(|pair| pair[1].strip_prefix("fd:").unwrap().parse().unwrap()).collect()
    };
    // SAFETY: the launcher passed each of these descriptors for this program to own.
    let take = |option: &str| unsafe { OwnedFd::from_raw_fd(all(option)[0]) };
    assert!(words.contains(&"--paused"));
    println!("\nmemory {}", File::from(take("--memory")).metadata().unwrap().len());
    for option in ["--kernel", "--initramfs"] {
        let mut text = String::new();
        File::from(take(option)).read_to_string(&mut text).unwrap();
        println!("{} {text}", option.trim_start_matches('-'));
    }
    let (_kvm, _agent) = (take("--kvm"), take("--agent"));
    let shared = Shared::default();
    for (index, function) in all("--function").into_iter().enumerate() {
        // SAFETY: as above.
        let connection = UnixStream::from(unsafe { OwnedFd::from_raw_fd(function) });
        use_function(&shared, index, "hello", connection);
    }
    let listener = UnixListener::from(take("--control"));
    loop {
        serve(&shared, &listener.accept().unwrap().0);
    }
}
