//! The program in the VMM's place. Started by hand, it does nothing.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use rustix::net::RecvFlags;
use slipway_peer::Bin;

use super::wait;

/// The functions without a connection, those that are broken for good, and the client of the
/// control channel.
#[derive(Default)]
struct State {
    lost: BTreeSet<usize>,
    broken: BTreeSet<usize>,
    client: Option<UnixStream>,
}

type Shared = Arc<Mutex<State>>;

fn tell(client: &mut UnixStream, message: &serde_json::Value) {
    // The launcher may be gone.
    let _ = client.write_all(format!("{message}\n").as_bytes());
}

fn lost(index: usize, is_final: bool) -> serde_json::Value {
    let data = serde_json::json!({ "function": index, "reason": "none", "final": is_final });
    serde_json::json!({ "event": "SLIPWAY_FUNCTION_LOST", "data": data })
}

/// Says `word` over a function's connection, and reports its end. A server that says anything
/// breaks the function.
fn use_function(shared: &Shared, index: usize, word: &str, mut connection: UnixStream) {
    connection.write_all(format!("{word} {index}").as_bytes()).unwrap();
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        let is_final = connection.read(&mut [0]).is_ok_and(|bytes| bytes > 0);
        let mut state = shared.lock().unwrap();
        match is_final {
            true => state.broken.insert(index),
            false => state.lost.insert(index),
        };
        if let Some(client) = &mut state.client {
            tell(client, &lost(index, is_final));
        }
    });
}

/// Reads a line, and the descriptors that came with it. Returns `None` at the end.
fn read_line(client: &UnixStream) -> Option<(serde_json::Value, Vec<OwnedFd>)> {
    let (mut line, mut descriptors) = (Vec::new(), Vec::new());
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        let parts = &mut [IoSliceMut::new(&mut byte)];
        let received = slipway_peer::receive(client, parts, &Bin::new(), RecvFlags::empty());
        let received = received.ok().filter(|received| received.bytes == 1)?;
        for file in &received.files {
            assert!(line.is_empty(), "it comes with the first byte");
            descriptors.push(file.as_fd().try_clone_to_owned().unwrap());
        }
        line.push(byte[0]);
    }
    Some((serde_json::from_slice(&line).unwrap(), descriptors))
}

/// Serves one client of the control channel.
fn serve(shared: &Shared, client: &UnixStream) {
    let mut writer = client.try_clone().unwrap();
    tell(&mut writer, &serde_json::json!({ "QMP": { "version": {}, "capabilities": [] } }));
    while let Some((request, mut descriptors)) = read_line(client) {
        let mut state = shared.lock().unwrap();
        let mut value = serde_json::json!({});
        match request["execute"].as_str().unwrap() {
            "query-status" => value = serde_json::json!({ "status": "paused" }),
            "query-kvm" => value = serde_json::json!({ "enabled": true, "present": true }),
            "cont" => println!("runs"),
            "slipway-reconnect" => {
                let index = request["arguments"]["function"].as_u64().unwrap() as usize;
                assert!(state.lost.remove(&index), "{index} is not lost");
                let connection = UnixStream::from(descriptors.remove(0));
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
                if let Some(connection) = descriptors.pop() {
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
            "slipway-copy-ahead" => {
                let mut pages = File::from(descriptors.pop().unwrap());
                let round = (u64::MAX - 1).to_le_bytes();
                let record = |byte| [&8192u64.to_le_bytes()[..], &[byte; 4096], &round].concat();
                pages.write_all(&[record(5), record(6), vec![0xff; 8]].concat()).unwrap();
            }
            "slipway-save" => {
                let rest = request["arguments"]["rest"] == true;
                let byte = if rest { 8 } else { 7 };
                let mut files = descriptors.into_iter().map(File::from);
                files.next().unwrap().write_all(b"state").unwrap();
                if let Some(mut pages) = files.next() {
                    let stream = [&4096u64.to_le_bytes()[..], &[byte; 4096], &[0xff; 8]].concat();
                    // A reader that does not like it is gone.
                    let _ = pages.write_all(&stream);
                }
                value = serde_json::json!({ "bytes": 5 });
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
            state.lost.iter().for_each(|index| tell(&mut writer, &lost(*index, false)));
            state.broken.iter().for_each(|index| tell(&mut writer, &lost(*index, true)));
            state.client = Some(writer.try_clone().unwrap());
        }
    }
    shared.lock().unwrap().client = None;
}

#[test]
#[ignore = "started as the VMM"]
fn main() {
    let Ok(arguments) = std::env::var("VMM_ARGUMENTS") else { return };
    let is_spare = arguments.contains("--spare");
    let arguments = wait::for_arguments(arguments);
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
    let _agent = take("--agent");
    assert_eq!(all("--kvm").len(), usize::from(!is_spare), "a spare has its KVM already");
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
