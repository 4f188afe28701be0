//! The serving end of ttrpc: calls of one connection run beside each other.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tonic::Code;

use super::kept::{Next, Record, Requests};
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

    /// Answers a call that was under way when an earlier process was killed. It may have been
    /// carried out, in part or as a whole.
    fn repeat(
        self: Arc<Self>,
        service: String,
        method: String,
        payload: Vec<u8>,
    ) -> impl Future<Output = Result<Vec<u8>, Failure>> + Send {
        self.call(service, method, payload)
    }
}

/// Serves one connection until the peer closes it or sends an invalid frame.
#[cfg(test)]
pub async fn serve<H: Handler>(stream: UnixStream, handler: Arc<H>) {
    serve_kept(stream, handler, Record::default(), false).await;
}

/// Serves one connection, as [`serve`] does, with a record for the next process, which serves it
/// with `again`.
pub async fn serve_kept<H: Handler>(
    stream: UnixStream,
    handler: Arc<H>,
    record: Record,
    again: bool,
) {
    if !again {
        // Of a connection that was lost with its process, and had this number.
        record.delete();
    }
    let (from, to) = stream.into_split();
    let (responses, queue) = mpsc::channel(QUEUE);
    let mut calls = Calls { handler, responses, running: JoinSet::new() };
    let (left, requests) = match again {
        false => (Vec::new(), Ok(Requests::new(from, record.clone()))),
        true => (record.calls(), Requests::resume(from, record.clone())),
    };
    // The peer sees the end of a connection that cannot go on.
    if let (Ok(requests), false) = (requests, again && record.is_cut()) {
        left.into_iter().for_each(|(header, message)| calls.repeat(header, &message));
        tokio::select! {
            _ = calls.take(requests) => {}
            () = write_all(&to, queue, &record) => {}
        }
    }
    record.delete();
}

/// A response that waits to be written.
struct Answer {
    /// The number of the call.
    stream: u32,
    response: v1::Response,
    /// Told once the response is on the socket.
    written: Option<oneshot::Sender<()>>,
}

impl Answer {
    /// Returns the frame to be written: the response, or an error in place of one that is too large
    /// or cannot be recorded.
    fn frame(&self, record: &Record) -> io::Result<Vec<u8>> {
        let bytes = |response: &v1::Response| {
            frame::bytes(self.stream, frame::RESPONSE, &response.encode_to_vec())
        };
        let Ok(frame) = bytes(&self.response) else {
            let failure = Failure::new(Code::ResourceExhausted, "the response is too large");
            return bytes(&response_of(Err(failure)));
        };
        match record.begin(frame.len()) {
            Ok(()) => Ok(frame),
            Err(error) => bytes(&response_of(Err(Failure::unrecorded("the response", &error)))),
        }
    }
}

async fn write_all(to: &OwnedWriteHalf, mut queue: mpsc::Receiver<Answer>, record: &Record) {
    while let Some(answer) = queue.recv().await {
        let Ok(frame) = answer.frame(record) else { return };
        if record.write(to, &frame).await.is_err() {
            return;
        }
        record.answered(answer.stream);
        if let Some(written) = answer.written {
            // Fails if the connection has ended.
            let _ = written.send(());
        }
    }
}

/// The calls of a connection.
struct Calls<H> {
    handler: Arc<H>,
    responses: mpsc::Sender<Answer>,
    running: JoinSet<()>,
}

impl<H: Handler> Calls<H> {
    /// Takes calls until the peer closes the connection or sends an invalid frame.
    async fn take(&mut self, mut requests: Requests) -> io::Result<()> {
        while let Some(next) = requests.next().await? {
            while self.running.try_join_next().is_some() {}
            let (header, message) = match next {
                Next::Request(header, message) => (header, message),
                Next::Refused(stream, failure) => {
                    self.refuse(stream, failure).await?;
                    requests.pass_over()?;
                    continue;
                }
            };
            match self.request(header, &message) {
                Ok(request) => {
                    let call = answer(Arc::clone(&self.handler), request, H::call);
                    self.run(header.stream, call);
                }
                Err(reason) => {
                    let failure = Failure::new(Code::ResourceExhausted, reason);
                    self.refuse(header.stream, failure).await?;
                }
            }
        }
        Ok(())
    }

    /// Answers a call by an error, and returns once the answer is on the socket.
    async fn refuse(&self, stream: u32, failure: Failure) -> io::Result<()> {
        let (written, is_written) = oneshot::channel();
        let (response, written) = (response_of(Err(failure)), Some(written));
        // Fails if the connection has ended, as the next line tells.
        let _ = self.responses.send(Answer { stream, response, written }).await;
        is_written.await.map_err(io::Error::other)
    }

    /// Answers a call that an earlier process has taken.
    fn repeat(&mut self, header: frame::Header, message: &[u8]) {
        let request = self.request(header, message);
        let handler = Arc::clone(&self.handler);
        self.run(header.stream, async move {
            match request {
                Ok(request) => answer(handler, request, H::repeat).await,
                Err(reason) => Err(Failure::new(Code::ResourceExhausted, reason)),
            }
        });
    }

    fn request(&self, header: frame::Header, message: &[u8]) -> Result<v1::Request, &'static str> {
        match v1::Request::decode(message) {
            _ if header.kind != frame::REQUEST => Err("the shim's services have no streams"),
            Ok(request) if self.running.len() < MOST_CALLS => Ok(request),
            Ok(_) => Err("too many calls at once"),
            Err(_) => Err("the request is not a message of ttrpc"),
        }
    }

    fn run(
        &mut self,
        stream: u32,
        call: impl Future<Output = Result<Vec<u8>, Failure>> + Send + 'static,
    ) {
        let responses = self.responses.clone();
        self.running.spawn(async move {
            let (response, written) = (response_of(call.await), None);
            // Fails if the connection has ended, and then nobody waits for the response.
            let _ = responses.send(Answer { stream, response, written }).await;
        });
    }
}

/// Carries out a call by the method `way` of the handler.
async fn answer<H: Handler, F>(
    handler: Arc<H>,
    request: v1::Request,
    way: impl FnOnce(Arc<H>, String, String, Vec<u8>) -> F,
) -> Result<Vec<u8>, Failure>
where
    F: Future<Output = Result<Vec<u8>, Failure>> + Send,
{
    let v1::Request { service, method, payload, timeout_nano } = request;
    let call = way(handler, service, method, payload);
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
    use crate::store::Store;

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
                "Medium" => Ok(vec![0; frame::MOST / 2]),
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
    async fn a_call_without_room_for_its_record_is_refused_and_the_next_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::make(&dir.path().join("state")).unwrap();
        let full = dir.path().join("state/part-7");
        std::os::unix::fs::symlink("/dev/full", full).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        // Not as a new connection, which would remove what it finds of its number.
        let record = Record::new(&store, 7);
        let (from, to) = theirs.into_split();
        let (responses, queue) = mpsc::channel(QUEUE);
        let mut calls = Calls { handler: Arc::new(Echo), responses, running: JoinSet::new() };
        tokio::spawn(async move {
            tokio::select! {
                taken = calls.take(Requests::new(from, record.clone())) => taken,
                () = write_all(&to, queue, &record) => Ok(()),
            }
        });
        let mut client = Client::over(ours);
        let failed = client.call("s", "Echo", b"one".to_vec()).await.unwrap_err().to_string();
        assert!(failed.contains("cannot keep a record of the call: No space"), "{failed}");
        assert_eq!(client.call("s", "Echo", b"two".to_vec()).await.unwrap(), b"two");
        // No file can take its place. A part of the response could be on the socket without it.
        std::fs::create_dir(dir.path().join("state/cut-7")).unwrap();
        let failed = client.call("s", "Medium", Vec::new()).await.unwrap_err().to_string();
        assert!(failed.contains("cannot keep a record of the response"), "{failed}");
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
