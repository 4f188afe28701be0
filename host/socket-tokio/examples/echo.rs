//! `echo serve ADDRESS` sends back what it receives; `echo ask ADDRESS [TRIPS]` sends 64 bytes that
//! many times, waits for each answer, and prints how long that took.
#![allow(missing_docs)]

use std::io;
use std::time::Instant;

use slipway_socket_tokio::{SocketListener, SocketStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MESSAGE: usize = 64;

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", at] => serve(at).await,
        ["ask", at] => ask(at, 100_000).await,
        ["ask", at, trips] => ask(at, trips.parse().map_err(io::Error::other)?).await,
        _ => Err(io::Error::other("echo serve ADDRESS | echo ask ADDRESS [TRIPS]")),
    }
}

async fn serve(at: &str) -> io::Result<()> {
    let listener = SocketListener::bind(at).await?;
    loop {
        let (stream, from) = listener.accept().await?;
        println!("{from}, device: {}", stream.is_device());
        tokio::spawn(async move {
            if let Err(error) = echo(stream).await {
                eprintln!("{from}: {error}");
            }
        });
    }
}

async fn echo(mut stream: SocketStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = stream.read(&mut bytes).await?;
        if count == 0 {
            return stream.shutdown().await;
        }
        stream.write_all(&bytes[..count]).await?;
    }
}

async fn ask(at: &str, trips: usize) -> io::Result<()> {
    let mut stream = SocketStream::connect(at).await?;
    stream.set_nodelay(true)?;
    let (message, mut answer) = ([7; MESSAGE], [0; MESSAGE]);
    let mut took = Vec::with_capacity(trips);
    for _ in 0..trips {
        let begun = Instant::now();
        stream.write_all(&message).await?;
        stream.read_exact(&mut answer).await?;
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    let (Some(median), Some(high)) = (took.get(trips / 2), took.get(trips * 99 / 100)) else {
        return Ok(());
    };
    println!("device: {}, p50 {median:?}, p99 {high:?}", stream.is_device());
    Ok(())
}
