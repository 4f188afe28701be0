//! Programs on tokio, and the engine in a thread.
#![allow(clippy::unwrap_used)]

#[path = "../../sgiov/tests/running/mod.rs"]
mod running;

use std::future::Future;
use std::io::ErrorKind;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use running::Running;
use slipway_sgiov::Settings;
use slipway_socket_tokio::{Engine, SocketListener, SocketStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

/// Longer than any step takes, on any machine.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOPBACK: &str = "127.0.0.1:0";

fn running() -> Running {
    Running::new(Settings { proof: true, ..Settings::default() })
}

impl Running {
    /// Returns the engine for a program of its own.
    fn engine(&self) -> Engine {
        Engine::at(&self.socket())
    }

    fn connections(&self) -> usize {
        slipway_sgiov::report(&self.socket()).unwrap().connections_in_all
    }
}

/// Runs `test` in both kinds of runtimes, with a time limit.
fn both<F: Future<Output = ()>>(test: impl Fn() -> F) {
    let one = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    one.block_on(async { timeout(PATIENCE, test()).await.unwrap() });
    let mut many = tokio::runtime::Builder::new_multi_thread();
    let many = many.worker_threads(2).enable_all().build().unwrap();
    many.block_on(async { timeout(PATIENCE, test()).await.unwrap() });
}

/// Returns a connection between two programs, and its listener.
async fn pair(running: &Running) -> (SocketListener, SocketStream, SocketStream) {
    let listener = running.engine().bind(LOOPBACK).await.unwrap();
    assert!(listener.is_device());
    let client = running.engine().connect(listener.local_addr().unwrap()).await.unwrap();
    let (server, from) = listener.accept().await.unwrap();
    assert!(client.is_device() && server.is_device());
    assert_eq!(client.local_addr().unwrap(), from);
    assert_eq!(server.peer_addr().unwrap(), from);
    assert_eq!(client.peer_addr().unwrap(), listener.local_addr().unwrap());
    (listener, client, server)
}

/// Sends and receives at once, then ends the sending direction.
async fn exchange(mut stream: SocketStream, sent: Vec<u8>) {
    let mut got = vec![0; sent.len()];
    let (mut reader, mut writer) = tokio::io::split(&mut stream);
    let (read, wrote) = tokio::join!(reader.read_exact(&mut got), writer.write_all(&sent));
    read.unwrap();
    wrote.unwrap();
    assert!(got == sent);
    stream.shutdown().await.unwrap();
    assert_eq!(stream.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(stream.read(&mut got).await.unwrap(), 0);
}

#[test]
fn what_is_sent_arrives_both_ways_and_the_end_after_it() {
    both(|| async {
        let running = running();
        let (_listener, client, server) = pair(&running).await;
        // More bytes than a FIFO has room for.
        let sent: Vec<u8> = (0..5u32 << 20).map(|at| (at.wrapping_mul(31) >> 7) as u8).collect();
        let there = tokio::spawn(exchange(server, sent.clone()));
        tokio::spawn(exchange(client, sent)).await.unwrap();
        there.await.unwrap();
    });
}

#[test]
fn half_of_a_stream_ends_and_the_other_goes_on() {
    both(|| async {
        let running = running();
        let (_listener, client, mut server) = pair(&running).await;
        let (mut reader, mut writer) = client.into_split();
        writer.write_all(b"question").await.unwrap();
        drop(writer);
        let mut got = Vec::new();
        server.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"question");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        got.clear();
        reader.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"answer");
        drop(reader);
        while running.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn who_does_not_read_stops_its_writer() {
    both(|| async {
        let running = running();
        let (_listener, mut client, mut server) = pair(&running).await;
        let block = vec![1; 64 << 10];
        let mut sent = 0;
        // Writes until there is no room: a write that was not ready has moved nothing.
        while let Ok(count) = timeout(Duration::from_millis(200), client.write(&block)).await {
            sent += count.unwrap();
            assert!(sent <= 4 << 20);
        }
        let mut got = vec![0; sent];
        server.read_exact(&mut got).await.unwrap();
        client.write_all(b"x").await.unwrap();
        assert_eq!(server.peek(&mut got).await.unwrap(), 1);
        assert_eq!(server.read(&mut got).await.unwrap(), 1);
    });
}

#[test]
fn left_unread_is_a_reset() {
    both(|| async {
        let running = running();
        let (_listener, mut client, server) = pair(&running).await;
        client.write_all(b"unread").await.unwrap();
        assert_eq!(server.peek(&mut [0; 8]).await.unwrap(), 6);
        drop(server);
        let error = client.read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0);
    });
}

#[test]
fn a_dead_engine_is_a_reset_and_what_is_new_is_the_kernels() {
    both(|| async {
        let mut running = running();
        let (listener, _client, mut server) = pair(&running).await;
        let (at, engine) = (listener.local_addr().unwrap(), running.engine());
        let waits = tokio::spawn(async move { server.read(&mut [0; 8]).await });
        let accepts = tokio::spawn(async move { listener.accept().await });
        // The tasks poll, or sleep already: both must notice.
        tokio::time::sleep(Duration::from_millis(20)).await;
        running.end();
        let error = waits.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let new = engine.connect(at).await.unwrap();
        assert!(!new.is_device());
        let (accepted, _) = accepts.await.unwrap().unwrap();
        assert!(!accepted.is_device());
    });
}

#[test]
fn peers_of_the_kernels_are_served_too() {
    both(|| async {
        let running = running();
        let listener = running.engine().bind(LOOPBACK).await.unwrap();
        let mut plain = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        assert!(!server.is_device());
        server.write_all(b"by the kernel").await.unwrap();
        server.shutdown().await.unwrap();
        let mut got = Vec::new();
        plain.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"by the kernel");

        let listener = TcpListener::bind(LOOPBACK).await.unwrap();
        let at = listener.local_addr().unwrap();
        let client = running.engine().connect(at).await.unwrap();
        assert!(!client.is_device());
        // A port that is bound and has no listener.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(LOOPBACK.parse().unwrap()).unwrap();
        let nobody = socket.local_addr().unwrap();
        let error = running.engine().connect(nobody).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn without_an_engine_everything_is_the_kernels() {
    both(|| async {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::at(&dir.path().join("nobody"));
        let listener = engine.bind(LOOPBACK).await.unwrap();
        assert!(!listener.is_device());
        let mut client = engine.connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        client.write_all(b"x").await.unwrap();
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 1);
    });
}

#[test]
fn an_accept_that_is_dropped_loses_nobody() {
    both(|| async {
        let running = running();
        let listener = running.engine().bind(LOOPBACK).await.unwrap();
        let (at, engine) = (listener.local_addr().unwrap(), running.engine());
        for round in 0..60 {
            let mut client = engine.connect(at).await.unwrap();
            client.write_all(b"x").await.unwrap();
            // Polled some times and dropped at an arbitrary point.
            let mut accepted = None;
            {
                let mut accept = pin!(listener.accept());
                for _ in 0..round % 4 {
                    let cx = &mut Context::from_waker(Waker::noop());
                    if let Poll::Ready(done) = accept.as_mut().poll(cx) {
                        accepted = Some(done);
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            let accepted = match accepted {
                Some(done) => done,
                None => listener.accept().await,
            };
            assert_eq!(accepted.unwrap().0.read(&mut [0; 8]).await.unwrap(), 1);
        }
    });
}

#[test]
fn many_streams_at_once() {
    both(|| async {
        let running = running();
        let listener = running.engine().bind(LOOPBACK).await.unwrap();
        let (at, engine) = (listener.local_addr().unwrap(), running.engine());
        let serves = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut word = [0; 4];
                    while stream.read_exact(&mut word).await.is_ok() {
                        stream.write_all(&word).await.unwrap();
                    }
                });
            }
        });
        let ask = |number: u32| {
            let engine = engine.clone();
            tokio::spawn(async move {
                let mut stream = engine.connect(at).await.unwrap();
                for trip in 0..50 {
                    let sent = (number * 1000 + trip).to_le_bytes();
                    let mut got = [0; 4];
                    stream.write_all(&sent).await.unwrap();
                    stream.read_exact(&mut got).await.unwrap();
                    assert_eq!(got, sent);
                }
            })
        };
        let all: Vec<_> = (0..64).map(ask).collect();
        for one in all {
            one.await.unwrap();
        }
        serves.abort();
    });
}
