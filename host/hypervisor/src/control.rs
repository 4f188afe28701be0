//! The connection to a VMM's control channel.
//!
//! The VMM may have been taken over by its guest. It may pass descriptors that cannot be closed
//! without waiting, so none is closed here; a VMM that passes too many of them is disconnected. An
//! endless stream of data is read in turns with the data of other connections.

use std::path::Path;
use std::time::Duration;

use slipway_peer::Bin;
use slipway_peer::tokio::{InTurns, Stream};

use crate::qmp::Qmp;
use crate::{Error, Result};

/// The time that a VMM may take to answer. A hundred at once on two cores need some of it.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// Connects, and waits for the VMM's main loop: QEMU's greeting comes from a thread of its own
/// before the machine is complete, `query-status` is answered after that. Log lines name the VM by
/// the directory that `control` is in.
pub(crate) async fn connect(control: &Path) -> Result<Qmp> {
    let bin = Bin::new();
    let stream = Stream::connect(control, &bin).await;
    let stream = stream.map_err(|error| Error::Control(error.to_string()))?;
    let socket = stream.try_clone().map_err(|error| Error::Control(error.to_string()))?;
    let (reader, writer) = tokio::io::split(InTurns::new(stream, &bin));
    let vm = control.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let qmp = Qmp::connect(&vm, reader, writer).await?.passing_over(socket);
    qmp.execute("query-status", ANSWER_DEADLINE).await?;
    Ok(qmp)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    use serde_json::json;

    use super::*;
    use crate::VmSpec;
    use crate::logged::Logged;

    /// Has a thread play the VMM whose control socket is at `path`: it greets, answers the first
    /// two commands, and goes on with `rest`. The thread returns when `rest` does.
    pub(crate) fn play(
        path: &Path,
        rest: impl FnOnce(&UnixStream, &mut dyn Iterator<Item = String>) + Send + 'static,
    ) -> std::thread::JoinHandle<()> {
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            (&stream).write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut commands = BufReader::new(&stream).lines().map_while(Result::ok);
            for (id, _) in commands.by_ref().take(2).enumerate() {
                (&stream)
                    .write_all(format!("{{\"return\": {{}}, \"id\": {id}}}\n").as_bytes())
                    .unwrap();
            }
            rest(&stream, &mut commands);
        })
    }

    /// A VMM that was taken over repeats what costs a line of the log.
    #[tokio::test]
    async fn a_function_that_is_broken_for_good_is_logged_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let flood = |function: usize| {
            let reason = format!("\u{202e}{}", "x".repeat(1000));
            let data = json!({ "function": function, "final": true, "reason": reason });
            let event = json!({ "event": "SLIPWAY_FUNCTION_LOST", "data": data });
            format!("{event}\n").repeat(20)
        };
        let vmm = play(&path, move |mut stream, commands| {
            let all: String = (0..VmSpec::MAX_FUNCTIONS).map(flood).collect();
            stream.write_all(all.as_bytes()).unwrap();
            commands.next().unwrap();
            let plugged = "{\"return\": {\"function\": 3}, \"id\": 2}\n";
            stream.write_all([plugged, &all].concat().as_bytes()).unwrap();
        });
        let logged = Logged::here();
        let qmp = connect(&path).await.unwrap();
        let connection = rustix::pipe::pipe().unwrap().0;
        let number = qmp.plug("extra", connection, Duration::from_secs(60)).await.unwrap();
        assert_eq!(number, 3);
        qmp.drained().await;
        vmm.join().unwrap();
        let lines = logged.lines();
        assert_eq!(lines.len(), VmSpec::MAX_FUNCTIONS + 1, "once more for the one plugged there");
        let vm = directory.path().file_name().unwrap().to_str().unwrap();
        for line in lines {
            assert!(line.contains(&format!("vm=\"{vm}\"")), "{line}");
            assert!(!line.contains('\u{202e}') && line.len() < 500, "{line}");
        }
    }

    /// Sends `text` along with a descriptor that cannot be closed without waiting, or alone if the
    /// other end accepts no descriptors. Returns the socket's peer, whose drop ends the wait.
    fn send_lingering(to: &UnixStream, text: &[u8]) -> std::net::TcpStream {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
        use std::io::IoSlice;
        use std::os::fd::AsFd;
        let (socket, other) = slipway_peer::testing::lingering().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [socket.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let flags = SendFlags::empty();
        if rustix::net::sendmsg(to, &[IoSlice::new(text)], &mut control, flags).is_err() {
            // The other end may have hung up by now.
            let _ = (&mut &*to).write_all(text);
            // The descriptor was not sent, and this thread cannot close it.
            std::mem::forget(socket);
        }
        other
    }

    /// A VMM that was taken over passes descriptors that make the thread that closes them sleep;
    /// the thread that serves the channel also serves others.
    #[test]
    fn descriptors_on_the_control_channel_hold_nobody_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // Sent before the other end can announce that it accepts no descriptors.
        let attacker = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let greeting = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
            let mut others = vec![send_lingering(&stream, greeting)];
            for (id, line) in BufReader::new(&stream).lines().take(2).enumerate() {
                line.unwrap();
                let answer = format!("{{\"return\": {{}}, \"id\": {id}}}\n");
                others.push(send_lingering(&stream, answer.as_bytes()));
            }
            // Left unread when the channel is closed.
            others.push(send_lingering(&stream, b"{\"event\": \"X\"}\n"));
            others
        });
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                drop(connect(&path).await.unwrap());
                // The reader ends with its runtime's next turn.
                tokio::task::yield_now().await;
            });
            let _ = done.send(());
        });
        // The attacker holds its ends all the while.
        ended.recv_timeout(Duration::from_secs(60)).expect("the channel waits for its peer");
        drop(attacker.join().unwrap());
    }
}
