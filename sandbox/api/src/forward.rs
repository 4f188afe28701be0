//! Connections to TCP ports of a sandbox, from a client's side.
//!
//! A connection ends with the sandbox's end, or with the local one. A local end that was closed
//! looks like one that has ended its input and waits for the rest of an answer, as `nc` does, until
//! something is sent to it. So after the end of its input the connection lasts as long as the
//! sandbox's end sends something every minute: a guest that is silent cannot hold it for ever.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use crate::SandboxClient;
use crate::v1::{self, forward_in};

/// The most bytes of a message.
const PIECE: usize = 16 << 10;
/// The most messages in flight to the daemon.
const QUEUE: usize = 4;
/// The longest time without progress once the local end has ended its input.
const GRACE: Duration = Duration::from_secs(60);

/// Carries bytes between a local connection and a port of 127.0.0.1 or ::1 in the sandbox `name`,
/// until the sandbox's end has sent everything or the local end is gone. A local end that has ended
/// its input counts as gone after a minute in which the sandbox's end has sent nothing.
///
/// # Errors
/// The daemon's status: the sandbox does not run, or no program accepts connections at the port.
pub async fn carry(
    client: &mut SandboxClient,
    name: &str,
    port: u16,
    stream: TcpStream,
) -> Result<(), Status> {
    let (sender, messages) = mpsc::channel(QUEUE);
    let first = v1::ForwardTo { name: name.to_owned(), port: port.into() };
    // The queue is empty, so this never fails.
    let _ = sender.try_send(v1::ForwardIn { kind: Some(forward_in::Kind::To(first)) });
    let replies = client.forward(ReceiverStream::new(messages)).await?.into_inner();
    let (from, to) = stream.into_split();
    let heard = Notify::new();
    tokio::select! {
        received = receive(replies, to, &heard) => received,
        () = send(from, sender, &heard, GRACE) => Ok(()),
    }
}

/// Carries the local end's bytes to the daemon, and then the end of its input. Returns once the
/// local end is gone. `heard` tells of bytes from the sandbox's end, and `grace` is the longest
/// time without any after the end of the input, whether or not the daemon has taken all of it.
async fn send(
    mut from: OwnedReadHalf,
    sender: mpsc::Sender<v1::ForwardIn>,
    heard: &Notify,
    grace: Duration,
) {
    let mut buffer = vec![0; PIECE];
    loop {
        let kind = match from.read(&mut buffer).await {
            Ok(0) => forward_in::Kind::End(true),
            Ok(bytes) => forward_in::Kind::Data(buffer[..bytes].to_vec()),
            Err(_) => return,
        };
        let is_end = matches!(kind, forward_in::Kind::End(_));
        if !pass(&from, &sender, kind, heard, grace).await {
            return;
        }
        if is_end {
            // The stream of messages stays open until the replies have ended: `sender` lives on.
            return linger(&from, heard, grace).await;
        }
    }
}

/// Passes a message to the daemon as soon as it takes one. A message that the daemon does not take
/// any more is dropped: the replies are about to end. Returns `false` if the local end is gone
/// before that: it was reset, or has ended its input and `grace` has passed without `heard`.
async fn pass(
    from: &OwnedReadHalf,
    sender: &mpsc::Sender<v1::ForwardIn>,
    kind: forward_in::Kind,
    heard: &Notify,
    grace: Duration,
) -> bool {
    let passing = sender.send(v1::ForwardIn { kind: Some(kind) });
    tokio::pin!(passing);
    loop {
        tokio::select! {
            biased;
            _ = &mut passing => return true,
            // A program may send all that it has before it reads: the time begins anew.
            () = heard.notified() => {}
            _ = from.ready(Interest::ERROR) => return false,
            () = tokio::time::sleep(grace) => {
                if has_ended(from) {
                    return false;
                }
            }
        }
    }
}

/// Waits until the local end, which has ended its input, is gone.
async fn linger(from: &OwnedReadHalf, heard: &Notify, grace: Duration) {
    loop {
        tokio::select! {
            biased;
            () = heard.notified() => {}
            _ = from.ready(Interest::ERROR) => return,
            () = tokio::time::sleep(grace) => return,
        }
    }
}

/// Returns whether the local end has ended its input, of which a part may be unread.
fn has_ended(from: &OwnedReadHalf) -> bool {
    let stream: &TcpStream = from.as_ref();
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    // With no time to wait, poll(2) tells at once.
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Carries the sandbox's bytes to the local end, and then their end. Tells `heard` of each piece
/// that the sandbox's end has sent, and of each part of it that the local end has taken: a local
/// end that reads slowly is not gone.
async fn receive<S>(mut replies: S, mut to: OwnedWriteHalf, heard: &Notify) -> Result<(), Status>
where
    S: Stream<Item = Result<v1::ForwardOut, Status>> + Unpin,
{
    while let Some(reply) = replies.next().await {
        let reply = reply?;
        heard.notify_one();
        let mut data = &reply.data[..];
        while !data.is_empty() {
            match to.write(data).await {
                Ok(0) | Err(_) => return Ok(()),
                Ok(taken) => data = &data[taken..],
            }
            heard.notify_one();
        }
    }
    // Fails if the local end is gone.
    let _ = to.shutdown().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    /// A time that no test takes, even on a busy machine.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(100);

    /// Returns both ends of a connection.
    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(connecting, listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    /// Closes a connection with a reset.
    fn reset(client: TcpStream) {
        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
        drop(client);
    }

    #[tokio::test]
    async fn a_reset_ends_a_connection_whose_sandbox_is_silent() {
        for ends_input in [false, true] {
            let (mut client, local) = pair().await;
            let (from, _to) = local.into_split();
            let (sender, mut messages) = mpsc::channel(QUEUE);
            let heard = Notify::new();
            let sending = send(from, sender, &heard, 2 * LONG);
            let resetting = async {
                if ends_input {
                    client.shutdown().await.unwrap();
                    let end = v1::ForwardIn { kind: Some(forward_in::Kind::End(true)) };
                    assert_eq!(messages.recv().await, Some(end));
                }
                reset(client);
            };
            let both = async { tokio::join!(sending, resetting) };
            timeout(LONG, both).await.expect("the connection is held");
        }
    }

    #[tokio::test]
    async fn a_client_that_has_ended_its_input_stays_while_the_sandbox_sends() {
        let (mut client, local) = pair().await;
        client.shutdown().await.unwrap();
        let (from, _to) = local.into_split();
        let (sender, _messages) = mpsc::channel(QUEUE);
        let heard = Notify::new();
        let sending = send(from, sender, &heard, SHORT);
        tokio::pin!(sending);
        let talking = async {
            for _ in 0..20 {
                tokio::time::sleep(SHORT / 4).await;
                heard.notify_one();
            }
        };
        tokio::select! {
            biased;
            () = talking => {}
            () = &mut sending => panic!("it was given up"),
        }
        timeout(LONG, sending).await.expect("the connection is held");
    }

    #[tokio::test]
    async fn a_client_that_has_gone_is_noticed_while_the_sandbox_takes_nothing() {
        let (mut client, local) = pair().await;
        client.write_all(b"x").await.unwrap();
        let (from, _to) = local.into_split();
        let (sender, _messages) = mpsc::channel(1);
        sender.try_send(v1::ForwardIn::default()).unwrap();
        let heard = Notify::new();
        let sending = send(from, sender, &heard, SHORT);
        tokio::pin!(sending);
        assert!(timeout(5 * SHORT, &mut sending).await.is_err(), "the client is there");
        drop(client);
        timeout(LONG, sending).await.expect("the connection is held");
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_sandbox_sends_counts_while_it_takes_nothing() {
        let (mut client, local) = pair().await;
        client.shutdown().await.unwrap();
        let (from, _to) = local.into_split();
        while !has_ended(&from) {
            tokio::task::yield_now().await;
        }
        let (sender, _messages) = mpsc::channel(1);
        sender.try_send(v1::ForwardIn::default()).unwrap();
        let heard = Notify::new();
        let passing = pass(&from, &sender, forward_in::Kind::End(true), &heard, GRACE);
        tokio::pin!(passing);
        let talking = async {
            for _ in 0..5 {
                tokio::time::sleep(GRACE / 2).await;
                heard.notify_one();
            }
        };
        tokio::select! {
            biased;
            () = talking => {}
            _ = &mut passing => panic!("it was given up"),
        }
        assert!(!passing.await, "the connection ends once the sandbox is silent");
    }

    #[tokio::test]
    async fn what_the_sandbox_sends_counts_before_the_client_reads_it() {
        let (_client, local) = pair().await;
        let (_from, to) = local.into_split();
        to.writable().await.unwrap();
        while to.try_write(&[0; PIECE]).is_ok() {}
        let (reply, replies) = mpsc::channel(1);
        reply.try_send(Ok(v1::ForwardOut { data: vec![0; PIECE] })).unwrap();
        let heard = Notify::new();
        let receiving = receive(ReceiverStream::new(replies), to, &heard);
        let counted = async {
            tokio::select! {
                biased;
                () = heard.notified() => {}
                _ = receiving => panic!("the sandbox's end is open"),
            }
        };
        timeout(LONG, counted).await.expect("it does not count");
    }
}
