//! The serving end of ttrpc: calls of one connection run beside each other.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Code;

use super::{Failure, frame, v1};

/// The most calls of a connection that run at once. A call may wait as long as a container runs.
const MOST_CALLS: usize = 512;
/// The most responses that wait to be written.
const QUEUE: usize = 16;

/// A service.
pub trait Handler: Send + Sync + 'static {
    /// Answers one call. The call is cancelled when the connection ends or the caller's time is
    /// up; work that must not stop half-way belongs into a task of its own.
    fn call(
        self: Arc<Self>,
        service: String,
        method: String,
        payload: Vec<u8>,
    ) -> impl Future<Output = Result<Vec<u8>, Failure>> + Send;
}

/// Serves one connection until the peer closes it or sends an invalid frame.
pub async fn serve<H: Handler>(stream: UnixStream, handler: Arc<H>) {
    let (from, to) = stream.into_split();
    let (responses, queue) = mpsc::channel(QUEUE);
    tokio::select! {
        () = take_calls(from, responses, handler) => {}
        () = write_all(to, queue) => {}
    }
}

async fn write_all(mut to: OwnedWriteHalf, mut queue: mpsc::Receiver<(u32, v1::Response)>) {
    while let Some((stream, response)) = queue.recv().await {
        let mut message = response.encode_to_vec();
        if message.len() > frame::MOST {
            let failure = Failure::new(Code::ResourceExhausted, "the response is too large");
            message = response_of(Err(failure)).encode_to_vec();
        }
        if frame::write(&mut to, stream, frame::RESPONSE, &message).await.is_err() {
            return;
        }
    }
}

async fn take_calls<H: Handler>(
    mut from: OwnedReadHalf,
    responses: mpsc::Sender<(u32, v1::Response)>,
    handler: Arc<H>,
) {
    let mut calls = JoinSet::new();
    while let Ok(Some((header, message))) = frame::read(&mut from).await {
        while calls.try_join_next().is_some() {}
        let request = match v1::Request::decode(message.as_slice()) {
            _ if header.kind != frame::REQUEST => Err("the shim's services have no streams"),
            Ok(request) if calls.len() < MOST_CALLS => Ok(request),
            Ok(_) => Err("too many calls at once"),
            Err(_) => Err("the request is not a message of ttrpc"),
        };
        let (handler, responses) = (Arc::clone(&handler), responses.clone());
        match request {
            Ok(request) => drop(calls.spawn(async move {
                let response = response_of(answer(handler, request).await);
                // Fails if the connection has ended, and then nobody waits for the response.
                let _ = responses.send((header.stream, response)).await;
            })),
            Err(reason) => {
                let failure = Failure::new(Code::ResourceExhausted, reason);
                let _ = responses.send((header.stream, response_of(Err(failure)))).await;
            }
        }
    }
}

async fn answer<H: Handler>(handler: Arc<H>, request: v1::Request) -> Result<Vec<u8>, Failure> {
    let v1::Request { service, method, payload, timeout_nano } = request;
    let call = handler.call(service, method, payload);
    match u64::try_from(timeout_nano) {
        Ok(limit @ 1..) => {
            tokio::time::timeout(Duration::from_nanos(limit), call).await.unwrap_or_else(|_| {
                Err(Failure::new(Code::DeadlineExceeded, "the call took too long"))
            })
        }
        _ => call.await,
    }
}

fn response_of(answer: Result<Vec<u8>, Failure>) -> v1::Response {
    match answer {
        Ok(payload) => v1::Response { status: None, payload },
        Err(Failure { code, message }) => {
            let status = Some(v1::Status { code: code as i32, message });
            v1::Response { status, payload: Vec::new() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::client::Client;
    use super::*;

    struct Echo;

    impl Handler for Echo {
        async fn call(
            self: Arc<Self>,
            service: String,
            method: String,
            payload: Vec<u8>,
        ) -> Result<Vec<u8>, Failure> {
            match method.as_str() {
                "Echo" => Ok(payload),
                "Large" => Ok(vec![0; frame::MOST]),
                _ => Err(Failure::new(Code::Unimplemented, format!("{service}/{method}"))),
            }
        }
    }

    #[tokio::test]
    async fn calls_are_answered_one_after_another() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(serve(theirs, Arc::new(Echo)));
        let mut client = Client::over(ours);
        assert_eq!(client.call("s", "Echo", b"one".to_vec()).await.unwrap(), b"one");
        assert_eq!(client.call("s", "Echo", b"two".to_vec()).await.unwrap(), b"two");
        let failed = client.call("s", "Nothing", Vec::new()).await.unwrap_err();
        assert_eq!(failed.to_string(), "s/Nothing");
        let failed = client.call("s", "Large", Vec::new()).await.unwrap_err();
        assert_eq!(failed.to_string(), "the response is too large");
        assert_eq!(client.call("s", "Echo", b"on".to_vec()).await.unwrap(), b"on");
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused_and_the_connection_goes_on() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(serve(theirs, Arc::new(Echo)));
        for (kind, message) in [(3, &b""[..]), (frame::REQUEST, &b"\xff\xff"[..])] {
            frame::write(&mut ours, 9, kind, message).await.unwrap();
            let (header, message) = frame::read(&mut ours).await.unwrap().unwrap();
            assert_eq!((header.stream, header.kind), (9, frame::RESPONSE));
            let response = v1::Response::decode(message.as_slice()).unwrap();
            assert_ne!(response.status.unwrap().code, 0);
        }
    }
}
