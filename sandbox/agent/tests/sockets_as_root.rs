//! Tests of a container's access to the sandbox's socket engine. The engine's program here only
//! runs, and its socket is the test's: the sockets that it serves are tested elsewhere.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use std::os::unix::fs::PermissionsExt;

use harness::{Sandbox, container, main, script};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use slipway_agent_protocol::v1::*;

const LOOK: &str = "echo \"$LD_PRELOAD $SLIPWAY_SOCKET\"; cat /run/slipway/libslipway.so
    test -S \"$SLIPWAY_SOCKET\" && ls -A /run/slipway /run/slipway/socket.d
    for file in libslipway.so socket.d/new; do
        echo x 2>/dev/null >>/run/slipway/$file && echo \"$file can be written\"; done; true";

#[tokio::test]
async fn containers_get_library_and_engine() {
    let Some(mut sandbox) = Sandbox::start("containers_get_library_and_engine").await else {
        return;
    };
    let at = |name: &str| sandbox.directory.path().join(name);
    let absent = sandbox.client.clone().start_sockets(StartSocketsRequest {}).await.unwrap_err();
    assert!(absent.message().contains("slipway-guest-sockets"), "{absent}");
    for dir in ["sockets", "run/socket.d"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    std::fs::write(at("sockets/libslipway.so"), "the library\n").unwrap();
    let program = at("sockets/slipway-guest-sockets");
    // The program ends when the test's folder is removed, since a remaining child would hold the
    // test's output open.
    let text =
        "#!/bin/sh\necho \"$@\" >\"$2.args\"; while test -e \"$2.args\"; do sleep 0.1; done\n";
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let engine = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let address = SocketAddrUnix::new(at("run/socket.d/engine.sock")).unwrap();
    rustix::net::bind(&engine, &address).unwrap();
    rustix::net::listen(&engine, 16).unwrap();
    let arguments = at("run/socket.sock.args");
    sandbox.client.start_sockets(StartSocketsRequest {}).await.unwrap();
    // A daemon that was killed does not know that it serves.
    sandbox.client.start_sockets(StartSocketsRequest {}).await.unwrap();

    let expected = |preload: &str| {
        format!(
            "{preload} /run/slipway/socket.d/engine.sock\nthe library\n\
             /run/slipway:\nlibslipway.so\nsocket.d\n\n/run/slipway/socket.d:\nengine.sock\n"
        )
    };
    let mut request = container("with", script(&format!("{LOOK}; exec sleep 1000")));
    request.sockets = true;
    sandbox.create(request).await;
    sandbox.start_container("with").await;
    let output = sandbox.exec("with", script(LOOK)).await.unwrap();
    assert_eq!(output.stdout, expected("/run/slipway/libslipway.so"), "{output:?}");
    let mut own = script(LOOK);
    own.env = vec!["LD_PRELOAD=/lib/own.so".into()];
    let output = sandbox.exec("with", own).await.unwrap();
    assert_eq!(output.stdout, expected("/run/slipway/libslipway.so:/lib/own.so"), "{output:?}");
    sandbox.signal(&main("with"), libc::SIGKILL, true).await;
    sandbox.remove("with").await;

    let without = script("echo \"$LD_PRELOAD\"; test ! -e /run/slipway");
    let output = sandbox.run(container("without", without)).await.unwrap();
    assert_eq!((output.status, output.stdout.as_str()), (0, "\n"), "{output:?}");
    let said = std::fs::read_to_string(arguments).unwrap();
    assert!(said.starts_with("--socket ") && said.ends_with("run/socket.sock\n"), "{said}");
}
