//! `slipway function ls` and `invoke`: questions to servers of functions, by their sockets.

use std::io::{Read, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::future::join_all;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Method, Request, Response, StatusCode};
use slipway_runtime::Config;
use tokio::net::UnixStream;

use super::exchange::exchange;
use super::http::STATUS;
use super::place;
use super::status::{About, Status};
use crate::args::FunctionInvokeArgs;
use crate::table::{printable, table};

/// The longest time in which a server tells its figures to `slipway function ls`.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most bytes of an answer: more than any server sends.
const LARGEST: usize = 1 << 30;

/// Sends a request to the server of the function `name`.
///
/// # Errors
/// No server runs, or the connection breaks.
async fn ask(config: &Config, name: &str, method: Method, path: &str, body: Bytes) -> Answer {
    let socket = place::socket(config, name)?;
    let missing = || format!("no function {name} is served; `slipway function ls` lists them");
    let stream = UnixStream::connect(&socket).await.with_context(missing)?;
    let request = Request::builder().method(method).uri(path).header(HOST, "localhost");
    exchange(stream, request.body(Full::new(body))?, LARGEST).await
}

type Answer = Result<Response<Bytes>>;

/// Runs `slipway function ls`.
///
/// # Errors
/// If the servers cannot be found.
pub async fn list(config: &Config, json: bool) -> Result<i32> {
    let all = statuses(config, PATIENCE).await?;
    if json {
        crate::out::json(&all)?;
        return Ok(0);
    }
    let rows: Vec<_> = all.iter().map(row).collect();
    let header = [
        "FUNCTION",
        "IMAGE",
        "ADDRESS",
        "SANDBOXES",
        "REPLICAS",
        "BUSY",
        "WAITING",
        "INVOCATIONS",
        "FAILED",
        "STATE",
    ];
    crate::out::print(format_args!("{}", table(header, &rows)));
    Ok(0)
}

/// Returns the figures of all functions, by name. Servers are asked at the same time, and one that
/// does not answer within `patience` has the state "silent".
///
/// # Errors
/// If the servers cannot be found.
pub async fn statuses(config: &Config, patience: Duration) -> Result<Vec<Status>> {
    let names = place::names(config)?;
    let all = join_all(names.iter().map(|name| status(config, name, patience))).await;
    Ok(all.into_iter().flatten().collect())
}

/// Returns the figures of a function; those of a server that was killed are zeros. Returns `None`
/// if the server has ended meanwhile.
async fn status(config: &Config, name: &str, patience: Duration) -> Option<Status> {
    let asked = ask(config, name, Method::GET, STATUS, Bytes::new());
    let state = match tokio::time::timeout(patience, asked).await {
        Ok(Ok(answer)) => match serde_json::from_slice(answer.body()) {
            Ok(status) => return Some(status),
            Err(_) => "unknown",
        },
        Ok(Err(_)) if !place::socket(config, name).is_ok_and(|path| path.exists()) => return None,
        Ok(Err(_)) => "killed",
        Err(_) => "silent",
    };
    let about = About { name: name.to_owned(), ..About::default() };
    Some(Status { about, state: state.to_owned(), ..Status::default() })
}

fn row(status: &Status) -> [String; 10] {
    let About { name, image, address, .. } = &status.about;
    [
        name.clone(),
        image.clone(),
        address.clone(),
        status.sandboxes.len().to_string(),
        status.replicas.to_string(),
        status.busy.to_string(),
        status.waiting.to_string(),
        status.invocations.to_string(),
        status.failed.to_string(),
        match status.zygote.as_str() {
            "" => status.state.clone(),
            zygote => format!("{}, zygote: {zygote}", status.state),
        },
    ]
}

/// Runs `slipway function invoke`.
///
/// # Errors
/// No server runs, or the function has no answer.
pub async fn invoke(config: &Config, args: &FunctionInvokeArgs) -> Result<i32> {
    let data = match args.data.as_deref() {
        Some("-") => {
            let mut data = Vec::new();
            std::io::stdin().lock().read_to_end(&mut data).context("cannot read the input")?;
            data
        }
        data => data.unwrap_or_default().as_bytes().to_vec(),
    };
    let answer = ask(config, &args.name, Method::POST, "/", data.into()).await?;
    if answer.status() != StatusCode::OK {
        let why = String::from_utf8_lossy(answer.body());
        bail!("function {}: {} ({})", args.name, printable(why.trim()), answer.status().as_u16());
    }
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_all(answer.body()).and_then(|()| stdout.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        bail!("cannot write the output: {error}");
    }
    Ok(0)
}
