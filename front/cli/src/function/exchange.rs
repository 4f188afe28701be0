//! A client of HTTP/1.1: one request over a connection that is open already.

use anyhow::{Context, Result, anyhow};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes};
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
    let mut content = Vec::new();
    let keep = |piece: Bytes| content.extend_from_slice(&piece);
    let answer = receive(stream, request, most, keep).await?;
    Ok(answer.map(|()| content.into()))
}

/// Sends a request, and returns the head of the answer once all of it, at most `most` bytes, has
/// come. Keeps nothing of its content.
///
/// # Errors
/// As for [`exchange`].
pub async fn exchange_head<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    most: usize,
) -> Result<Response<()>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    receive(stream, request, most, drop).await
}

/// Sends a request, and gives `take` the pieces of the answer's content. Returns the answer without
/// it.
async fn receive<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    most: usize,
    take: impl FnMut(Bytes),
) -> Result<Response<()>>
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
            let read = read(Limited::new(body, most), take).await;
            read.map(|()| Response::from_parts(head, ()))
        }
        Err(error) => Err(error),
    };
    carrier.abort();
    answer
}

async fn read<B>(mut body: B, mut take: impl FnMut(Bytes)) -> Result<()>
where
    B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| anyhow!("cannot read the answer: {error}"))?;
        if let Ok(piece) = frame.into_data() {
            take(piece);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    /// Returns a connection to a server that answers with four bytes.
    fn connected() -> DuplexStream {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            theirs.read_exact(&mut [0; 4]).await.unwrap();
            let answer = b"HTTP/1.1 200 OK\r\nname: one\r\ncontent-length: 4\r\n\r\nfour";
            theirs.write_all(answer).await.unwrap();
            // Until the client has left.
            let _ = theirs.read_to_end(&mut Vec::new()).await;
        });
        ours
    }

    #[tokio::test]
    async fn an_answer_has_at_most_so_many_bytes_whether_or_not_they_are_kept() {
        let request = || Request::get("/").body(Full::default()).unwrap();
        let whole = exchange(connected(), request(), 4).await.unwrap();
        assert_eq!(whole.headers()["name"], "one");
        assert_eq!(whole.into_body(), "four");
        let head = exchange_head(connected(), request(), 4).await.unwrap();
        assert_eq!(head.headers()["name"], "one");
        let whole = exchange(connected(), request(), 3).await.unwrap_err();
        let head = exchange_head(connected(), request(), 3).await.unwrap_err();
        for error in [whole, head] {
            assert!(error.to_string().contains("cannot read the answer"), "{error}");
        }
    }
}
