//! A client of HTTP/1.1: one request over a connection that is open already.

use anyhow::{Context, Result, anyhow};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// Sends a request, and returns the answer with at most `most` bytes.
///
/// # Errors
/// The connection breaks, what comes is no answer, or the answer has more bytes.
pub async fn exchange<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    most: usize,
) -> Result<Response<Bytes>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    // Errors of the connection are those of the request, too.
    let carrier = tokio::spawn(connection);
    let answer = sender.send_request(request).await.context("no answer");
    let answer = match answer {
        Ok(answer) => {
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, most).collect().await;
            let body = body.map_err(|error| anyhow!("cannot read the answer: {error}"));
            body.map(|body| Response::from_parts(head, body.to_bytes()))
        }
        Err(error) => Err(error),
    };
    carrier.abort();
    answer
}
