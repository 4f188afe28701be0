//! The body of the fuzz target.

use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, send,
    socket_with,
};
use serde_json::{Value, json};

use crate::control::Control;
use crate::qmp;

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket")
}

/// Makes a control socket and a client of it.
fn connected() -> (Control, OwnedFd) {
    let listener = socket();
    // The kernel chooses the address (unix(7), autobind).
    bind(&listener, &SocketAddrUnix::new_unnamed()).expect("an address");
    listen(&listener, 1).expect("a listening socket");
    let address = rustix::net::getsockname(&listener).expect("its address");
    let client = socket();
    connect(&client, &address).expect("a place in the queue");
    let mut control = Control::new(listener);
    control.accept();
    (control, client)
}

/// Sends `data` as a client does, in parts as long as its first byte says, and answers each command
/// as the machine would refuse it.
pub fn control(data: &[u8]) {
    let Some((&part, bytes)) = data.split_first() else { return };
    let (mut control, client) = connected();
    for part in bytes.chunks(usize::from(part) * 16 + 1) {
        if send(&client, part, SendFlags::NOSIGNAL).is_err() {
            return;
        }
        for incoming in control.receive() {
            assert!(incoming.files.is_empty(), "a descriptor that nobody sent");
            let request = incoming.request;
            let reason = match request.command {
                Ok(command) => format!("{command:?} is refused"),
                Err(reason) => reason,
            };
            check(&request.id, reason.clone());
            control.send(&qmp::answer(&request.id, Err(reason)));
        }
    }
}

/// Checks that an answer is one line, which says what it should.
fn check(id: &Value, reason: String) {
    let answer = qmp::answer(id, Err(reason.clone()));
    assert_eq!(answer.iter().position(|byte| *byte == b'\n'), Some(answer.len() - 1));
    let said: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
    assert_eq!(said["error"]["desc"], json!(reason));
    assert_eq!(said.get("id").unwrap_or(&Value::Null), id);
}
