//! A small HTTP server for the figures.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use slipway_runtime::Config;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};

/// The most connections at once. Further ones wait, for as long as silent ones are borne.
const MOST: usize = 64;
/// The time in which a client sends the head of a request.
const HEAD: Duration = Duration::from_secs(2);
/// The longest time of a connection.
const LONGEST: Duration = Duration::from_secs(40);
/// The age up to which figures are sent again: however many clients ask, the daemon is asked once
/// in this time.
const FRESH: Duration = Duration::from_secs(1);
/// The pause after an error of accepting, such as that of too many open files.
const PAUSE: Duration = Duration::from_millis(100);
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// The figures, for all clients.
struct Source {
    config: Config,
    last: Mutex<Option<(Instant, String)>>,
}

impl Source {
    /// Returns the figures, at most [`FRESH`] old. Clients that ask at the same time wait for one
    /// answer of the daemon.
    async fn text(&self) -> Result<String> {
        let mut last = self.last.lock().await;
        if let Some((_, text)) = last.as_ref().filter(|(asked, _)| asked.elapsed() < FRESH) {
            return Ok(text.clone());
        }
        *last = None;
        let text = super::text(&self.config).await?;
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

/// Serves the figures until the process is ended.
///
/// # Errors
/// If the address cannot be bound.
pub async fn serve(config: &Config, address: SocketAddr) -> Result<i32> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen at {address}"))?;
    eprintln!("Serving http://{}/metrics", listener.local_addr()?);
    let source = Arc::new(Source { config: config.clone(), last: Mutex::default() });
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        let place = Arc::clone(&places).acquire_owned().await?;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let source = Arc::clone(&source);
        tokio::spawn(async move {
            let answer = service_fn(|request| answer(&source, request));
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(HEAD).keep_alive(false);
            server.max_buf_size(16 << 10);
            let connection = server.serve_connection(TokioIo::new(stream), answer);
            // A client that goes away, or is too slow, is its own concern.
            let _ = tokio::time::timeout(LONGEST, connection).await;
            drop(place);
        });
    }
}

async fn answer(
    source: &Source,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => match source.text().await {
            Ok(text) => (StatusCode::OK, OPEN_METRICS, text),
            Err(error) => (StatusCode::SERVICE_UNAVAILABLE, PLAIN, format!("{error:#}\n")),
        },
        (&Method::GET | &Method::HEAD, _) => {
            (StatusCode::NOT_FOUND, PLAIN, "the figures are at /metrics\n".to_owned())
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, PLAIN, "only GET is understood\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    Ok(response)
}
