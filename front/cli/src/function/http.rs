//! The HTTP front of a function: each request is an invocation. Its body is the standard input of
//! the command, and the answer is what the command wrote. Root's own socket serves the figures,
//! too.
//!
//! Clients are not trusted. A connection is for one request and has a deadline for each of its
//! parts; nothing of a request reaches a replica before all of it is here; heads and bodies have
//! bounds; connections and places in the queue are shared among clients (`seats`, `queue`); root
//! has connections of its own. An invocation runs to its end even if its client leaves.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use slipway_rate::Lines;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};

use super::dispatcher::Handle;
use super::invocation::{Call, Outcome};
use super::queue::Client;
use super::scheduler::Refusal;
use super::seats::{Seat, Seats};

/// The name of the header with the replica that had the invocation, as POD/CONTAINER.
pub const REPLICA: &str = "x-slipway-replica";
/// The path of the figures, on root's socket only.
pub const STATUS: &str = "/status";
/// The time in which a client sends the head of its request.
const HEAD: Duration = Duration::from_secs(5);
/// The most bytes of a head.
const LARGEST_HEAD: usize = 16 << 10;
/// The most headers of a request.
const MOST_HEADERS: usize = 64;
/// The time in which a client sends the body of its request.
const BODY: Duration = Duration::from_secs(15);
/// The time in which a client takes the answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The most connections of root's commands at once. Those of other clients take none of them.
const ROOT_CONNECTIONS: usize = 64;
/// The most connections at once that are being turned away. Beyond them clients have no answer.
const TURNED_AWAY: usize = 64;
/// The longest time in which such a client takes its answer, and what it sends is read.
const LEAVE: Duration = Duration::from_secs(1);
/// The most bytes that are read of such a client.
const LEFT_UNREAD: u64 = 64 << 10;
/// The pause after an error of accepting, such as that of too many open files.
const PAUSE: Duration = Duration::from_millis(100);
/// The seconds after which a client that was refused may try again.
const RETRY: &str = "1";
/// The answer to a connection beyond the client's part, whatever it asks for.
const TOO_MANY: &[u8] =
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\n\
    content-length: 0\r\n\r\n";
const BYTES: &str = "application/octet-stream";
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

type Answer = Response<Full<Bytes>>;

/// An answer that is not the function's: its status, and a line about it.
struct Problem(StatusCode, Cow<'static, str>);

impl Problem {
    fn new(status: StatusCode, line: &'static str) -> Self {
        Self(status, Cow::Borrowed(line))
    }

    fn answer(self) -> Answer {
        let Self(status, line) = self;
        let mut answer = answer(status, TEXT, format!("{line}\n").into());
        if status == StatusCode::SERVICE_UNAVAILABLE {
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(RETRY));
        }
        answer
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let line = match refusal {
            Refusal::Full => "too many invocations wait",
            Refusal::Late => "no replica was free in time",
            Refusal::NotStarted => "no replica could be started",
            Refusal::Ending => "the function's server ends",
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, line)
    }
}

/// The bounds of requests.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes of a body.
    pub largest_body: usize,
    /// The most connections at once, those of root's commands left out.
    pub connections: usize,
    /// The longest time from the end of a request to its outcome: of the queue and of the command.
    pub outcome: Duration,
}

/// The HTTP front of a function.
pub struct Front {
    handle: Handle,
    bounds: Bounds,
    seats: Arc<Seats>,
    /// The connections of root's commands.
    root_seats: Arc<Seats>,
    /// The connections that are being turned away.
    leaving: Arc<Seats>,
    /// The limit of log lines about invocations.
    lines: Mutex<Lines>,
}

impl Front {
    /// Makes the front of the function behind `handle`.
    pub fn new(handle: Handle, bounds: Bounds) -> Self {
        let lines = Mutex::new(Lines::new(5, Instant::now()));
        let (seats, root_seats) = (Seats::new(bounds.connections), Seats::new(ROOT_CONNECTIONS));
        let leaving = Seats::new(TURNED_AWAY);
        Self { handle, bounds, seats, root_seats, leaving, lines }
    }

    /// Returns once no client is connected. Nothing may be accepted any more.
    pub async fn idle(&self) {
        self.seats.empty().await;
        self.root_seats.empty().await;
    }

    /// Takes the place of one connection. Returns `None` if the client has its part.
    fn seat(&self, client: Client) -> Option<Seat> {
        match client {
            Client::Root => self.root_seats.take(client),
            Client::Address(_) => self.seats.take(client),
        }
    }

    /// Accepts clients for ever.
    pub async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, peer)) = listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let client = Client::of(peer.ip());
            match self.seat(client) {
                Some(seat) => serve(Arc::clone(&self), client, stream, seat),
                None => {
                    if let Some(seat) = self.leaving.take(client) {
                        tokio::spawn(turn_away(stream, seat));
                    }
                }
            }
        }
    }

    /// Accepts root's commands for ever.
    pub async fn accept_root(self: Arc<Self>, listener: UnixListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            if let Some(seat) = self.seat(Client::Root) {
                serve(Arc::clone(&self), Client::Root, stream, seat);
            }
        }
    }

    /// Returns the figures as JSON.
    async fn status(&self) -> Answer {
        let status = self.handle.status().await;
        match status.and_then(|status| serde_json::to_vec(&status).ok()) {
            Some(json) => answer(StatusCode::OK, JSON, json.into()),
            None => Problem::from(Refusal::Ending).answer(),
        }
    }

    /// Logs the failure of an invocation, unless there were many.
    fn log(&self, replica: &str, what: &str, words: &str) {
        let may = self.lines.lock().unwrap_or_else(PoisonError::into_inner).may(Instant::now());
        if let Some(left_out) = may {
            let words = slipway_printable::line(words.trim(), slipway_printable::MESSAGE);
            tracing::warn!(replica, words, left_out, "{what}");
        }
    }

    /// Reads the body of a request.
    async fn body(&self, body: Incoming) -> Result<Bytes, Problem> {
        let too_large = || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large");
        if body.size_hint().lower() > self.bounds.largest_body as u64 {
            return Err(too_large());
        }
        let read = Limited::new(body, self.bounds.largest_body).collect();
        match tokio::time::timeout(BODY, read).await {
            Ok(Ok(read)) => Ok(read.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(_)) => Err(Problem::new(StatusCode::BAD_REQUEST, "the body is cut")),
            Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body comes too slowly")),
        }
    }

    /// Has a replica run the command for a request.
    async fn invocation(
        self: &Arc<Self>,
        client: Client,
        request: Request<Incoming>,
    ) -> Result<Answer, Problem> {
        let (head, body) = request.into_parts();
        let body = self.body(body).await?;
        let call = Call { env: environment(&head, body.len()), body };
        let permit = self.handle.replica(client).await?;
        let front = Arc::clone(self);
        // A task of its own: a client that leaves does not end the invocation.
        let invoked = tokio::spawn(async move { front.handle.invoke(permit, call).await }).await;
        let Ok((outcome, replica)) = invoked else {
            return Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the server failed"));
        };
        let mut answer = self.told(outcome, &replica).unwrap_or_else(Problem::answer);
        if let Ok(replica) = HeaderValue::from_str(&replica) {
            answer.headers_mut().insert(HeaderName::from_static(REPLICA), replica);
        }
        Ok(answer)
    }

    /// Returns the answer for the end of an invocation.
    fn told(&self, outcome: Outcome, replica: &str) -> Result<Answer, Problem> {
        match outcome {
            Outcome::Answer(data) => Ok(answer(StatusCode::OK, BYTES, data.into())),
            Outcome::Failed(status, words) => {
                let line = format!("the function ended with status {status}");
                self.log(replica, &line, &words);
                Err(Problem(StatusCode::BAD_GATEWAY, line.into()))
            }
            Outcome::TooLarge => {
                let line = "the function's answer is too large";
                self.log(replica, line, "");
                Err(Problem::new(StatusCode::BAD_GATEWAY, line))
            }
            Outcome::Late => {
                let line = "the function took too long";
                self.log(replica, line, "");
                Err(Problem::new(StatusCode::GATEWAY_TIMEOUT, line))
            }
            Outcome::Lost(error) => {
                self.log(replica, "an invocation was lost", &format!("{error:#}"));
                Err(Problem::new(StatusCode::BAD_GATEWAY, "the replica did not run it"))
            }
        }
    }
}

/// Tells a client that it has too many connections. What it sends is read for a moment: the end of
/// a connection with unread input is a reset, by which the client's kernel may drop the answer.
async fn turn_away<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, seat: Seat) {
    let told = async {
        stream.write_all(TOO_MANY).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LEFT_UNREAD), &mut tokio::io::sink()).await
    };
    // A client that goes away, or is too slow, is its own concern.
    let _ = tokio::time::timeout(LEAVE, told).await;
    drop(seat);
}

/// Serves one request of a connection, in a task.
fn serve<S>(front: Arc<Front>, client: Client, stream: S, seat: Seat)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    tokio::spawn(async move {
        let service = service_fn(|request| respond(&front, client, request));
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(HEAD).keep_alive(false);
        server.max_buf_size(LARGEST_HEAD).max_headers(MOST_HEADERS);
        let connection = server.serve_connection(TokioIo::new(stream), service);
        let longest = HEAD + BODY + front.bounds.outcome + ANSWER;
        // A client that goes away, or is too slow, is its own concern.
        let _ = tokio::time::timeout(longest, connection).await;
        drop(seat);
    });
}

async fn respond(
    front: &Arc<Front>,
    client: Client,
    request: Request<Incoming>,
) -> Result<Answer, Infallible> {
    let asks = (request.method(), request.uri().path()) == (&Method::GET, STATUS);
    if client == Client::Root && asks {
        return Ok(front.status().await);
    }
    Ok(front.invocation(client, request).await.unwrap_or_else(Problem::answer))
}

fn answer(status: StatusCode, kind: &'static str, data: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(data));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Returns what the environment tells the command of its request, by the names of CGI (RFC 3875,
/// section 4.1). No other header reaches it.
fn environment(head: &hyper::http::request::Parts, length: usize) -> Vec<String> {
    let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    vec![
        "GATEWAY_INTERFACE=CGI/1.1".to_owned(),
        format!("REQUEST_METHOD={}", head.method),
        format!("PATH_INFO={}", head.uri.path()),
        format!("QUERY_STRING={}", head.uri.query().unwrap_or_default()),
        format!("CONTENT_TYPE={}", kind.unwrap_or_default()),
        format!("CONTENT_LENGTH={length}"),
    ]
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::net::UnixStream;

    use super::super::dispatcher::tests::dispatcher;
    use super::*;

    #[tokio::test]
    async fn clients_that_have_all_connections_leave_root_its_own() {
        let (stream, _daemon) = UnixStream::pair().unwrap();
        let (_dispatcher, handle) = dispatcher(stream).await;
        let bounds = Bounds { largest_body: 1, connections: 4, outcome: Duration::ZERO };
        let front = Front::new(handle, bounds);
        let clients = (0..=255).map(|last: u8| Client::of([10, 0, 0, last].into()));
        let seats: Vec<_> = clients.filter_map(|client| front.seat(client)).collect();
        assert_eq!(seats.len(), 4);
        let root = front.seat(Client::Root);
        assert!(root.is_some());
        drop(seats);
        assert!(front.idle().now_or_never().is_none());
        drop(root);
        assert!(front.idle().now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_are_cut_or_do_not_come_are_refused() {
        let (stream, _daemon) = UnixStream::pair().unwrap();
        let (_dispatcher, handle) = dispatcher(stream).await;
        let bounds = Bounds { largest_body: 2, connections: 1, outcome: Duration::ZERO };
        let front = Arc::new(Front::new(handle, bounds));
        for (length, is_cut, status) in [(2, true, 400), (2, false, 408), (3, false, 413)] {
            let (mut client, server) = tokio::io::duplex(1024);
            let seat = front.seat(Client::Root).unwrap();
            serve(Arc::clone(&front), Client::Root, server, seat);
            let head = format!("POST / HTTP/1.1\r\nhost: f\r\ncontent-length: {length}\r\n\r\n");
            client.write_all(format!("{head}a").as_bytes()).await.unwrap();
            if is_cut {
                client.shutdown().await.unwrap();
            }
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_turned_away_has_an_answer_and_is_not_waited_for() {
        let seats = Seats::new(1);
        let seat = || seats.take(Client::Root).unwrap();
        let (mut client, server) = tokio::io::duplex(1024);
        let (told, served) = (String::from_utf8(TOO_MANY.to_vec()).unwrap(), seat());
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        // It stays connected.
        turn_away(server, served).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, told);
        // It sends without an end.
        let served = seat();
        let (mut client, server) = tokio::io::duplex(1024);
        let mut endless = tokio::io::repeat(b'x');
        tokio::select! {
            _ = tokio::io::copy(&mut endless, &mut client) => {}
            () = turn_away(server, served) => {}
        }
        drop(seat());
    }

    #[test]
    fn a_command_learns_of_its_request_as_by_cgi() {
        let request = Request::post("http://host/a%20b/c?x=1&y").header(CONTENT_TYPE, "text/x");
        let (head, ()) = request.header("proxy", "http://evil").body(()).unwrap().into_parts();
        let told = environment(&head, 5);
        for entry in [
            "REQUEST_METHOD=POST",
            "PATH_INFO=/a%20b/c",
            "QUERY_STRING=x=1&y",
            "CONTENT_TYPE=text/x",
            "CONTENT_LENGTH=5",
        ] {
            assert!(told.iter().any(|told| told == entry), "{entry}: {told:?}");
        }
        assert!(!told.iter().any(|told| told.contains("evil")), "{told:?}");
    }

    #[test]
    fn refusals_say_when_to_try_again() {
        let answer = Problem::from(Refusal::Full).answer();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.headers()[RETRY_AFTER], RETRY);
        let answer = Problem::new(StatusCode::BAD_GATEWAY, "x").answer();
        assert_eq!(answer.headers().get(RETRY_AFTER), None);
    }
}
