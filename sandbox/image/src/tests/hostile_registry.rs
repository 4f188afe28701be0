//! A registry on loopback that tries to fill its client's memory or to keep the client waiting,
//! with one thread for each connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::support::*;
use crate::source::registry::Registry;
use crate::source::{Fetcher, Spool};
use crate::{Access, Credentials, Digest, Error, Limits, Result, manifest};

/// The actual size of an endless body: enough to show that a client has no limit.
const ENDLESS: u64 = 256 << 20;
/// The most bytes of an answer that may be in sockets and in the client's buffers while nobody
/// reads it.
const ON_THE_WAY: u64 = 32 << 20;
/// The most bytes of a document in these tests.
const DOCUMENT: u64 = 64 << 10;
/// The time after which a test counts as waiting for the registry.
const FOR_EVER: Duration = Duration::from_secs(45);

/// The way in which a body is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Endless, with its actual length.
    WithLength,
    /// Endless, in chunks.
    Chunked,
    /// Endless, until the connection ends.
    UntilClosed,
    /// One byte, then nothing.
    Stalls,
    /// A byte now and then, for ever.
    Drips,
}

const ENDLESSLY: [How; 3] = [How::WithLength, How::Chunked, How::UntilClosed];

/// An answer of the registry.
#[derive(Clone)]
enum Answer {
    Body(&'static str, Vec<u8>),
    Hostile(&'static str, How),
    /// Requires a token of the registry's own token service, and accepts none.
    Challenge,
    /// Requires a token of the registry's own token service, and accepts the last one that was
    /// issued, once.
    Guarded(Vec<u8>),
    /// Issues a token.
    Token,
}

/// The number of tokens issued, and whether the last one is spent.
static TOKENS: Mutex<(u32, bool)> = Mutex::new((0, true));

/// The registry. It answers by the end of the path, and with 404 for other paths.
struct Hostile {
    host: String,
    routes: Arc<Mutex<Vec<(String, Answer)>>>,
    sent: Arc<AtomicU64>,
}

impl Hostile {
    fn start(routes: Vec<(String, Answer)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let (routes, sent) = (Arc::new(Mutex::new(routes)), Arc::<AtomicU64>::default());
        let (table, count) = (routes.clone(), sent.clone());
        // The thread ends with the test's process; its connections end when the client drops them.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (table, count) = (table.clone(), count.clone());
                std::thread::spawn(move || serve(stream, &table, &count));
            }
        });
        Self { host, routes, sent }
    }

    fn registry(&self, limits: &Limits) -> Arc<Registry> {
        self.registry_for(limits, Credentials::Anonymous)
    }

    fn registry_for(&self, limits: &Limits, credentials: Credentials) -> Arc<Registry> {
        let reference = format!("{}/app:1", self.host).parse().unwrap();
        let access = Access { credentials, plain_http: false };
        Arc::new(Registry::new(&reference, &access, limits).unwrap())
    }

    /// Does the part of a pull up to the list of layers.
    async fn plan(&self, limits: &Limits) -> Result<manifest::Plan> {
        let registry = self.registry(limits);
        let bytes = registry.manifest(None, limits.document_bytes).await?;
        crate::resolve::plan(&Fetcher::Registry(registry), bytes, "app", limits).await
    }

    fn assert_cut_off(&self, case: &str) {
        let sent = self.sent.load(Ordering::SeqCst);
        assert!(sent < ON_THE_WAY, "{case}: {sent} bytes were taken");
    }
}

fn serve(mut stream: TcpStream, table: &Mutex<Vec<(String, Answer)>>, sent: &AtomicU64) {
    let (mut path, mut shown) = (String::new(), String::new());
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    while let Some(Ok(line)) = lines.next() {
        if path.is_empty() {
            path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("authorization: ") {
            shown = value.to_owned();
        }
        if line.is_empty() {
            break;
        }
    }
    let path = path.split('?').next().unwrap_or_default();
    let table = table.lock().unwrap().clone();
    let found = table.into_iter().find(|(end, _)| path.ends_with(end.as_str()));
    // The tests want to see the client hang up, so a failed write is no error.
    let _ = match found.map(|(_, answer)| answer) {
        Some(answer) => send(&mut stream, answer, &shown, sent),
        None => stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    };
}

fn send(
    stream: &mut TcpStream,
    answer: Answer,
    shown: &str,
    sent: &AtomicU64,
) -> std::io::Result<()> {
    match answer {
        Answer::Guarded(body) => {
            let right = {
                let mut tokens = TOKENS.lock().unwrap();
                let right = !tokens.1 && shown == format!("bearer t{}", tokens.0);
                tokens.1 |= right;
                right
            };
            let answer = if right { Answer::Body("200 OK", body) } else { Answer::Challenge };
            send(stream, answer, shown, sent)
        }
        Answer::Token => {
            let token = {
                let mut tokens = TOKENS.lock().unwrap();
                *tokens = (tokens.0 + 1, false);
                format!("{{\"access_token\":\"t{}\"}}", tokens.0)
            };
            send(stream, Answer::Body("200 OK", token.into_bytes()), shown, sent)
        }
        Answer::Body(status, body) => {
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
            stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
            stream.write_all(&body)
        }
        Answer::Challenge => {
            let host = stream.local_addr()?;
            let realm = format!("Bearer realm=\"http://{host}/token\",service=\"x\"");
            let head = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n";
            stream.write_all(format!("{head}WWW-Authenticate: {realm}\r\n\r\n").as_bytes())
        }
        Answer::Hostile(status, how) => flood(stream, status, how, sent),
    }
}

fn flood(stream: &mut TcpStream, status: &str, how: How, sent: &AtomicU64) -> std::io::Result<()> {
    let head = match how {
        How::WithLength => format!("Content-Length: {ENDLESS}\r\n"),
        How::UntilClosed => "Connection: close\r\n".to_owned(),
        How::Chunked | How::Stalls | How::Drips => "Transfer-Encoding: chunked\r\n".to_owned(),
    };
    stream.write_all(format!("HTTP/1.1 {status}\r\n{head}\r\n").as_bytes())?;
    if matches!(how, How::Stalls | How::Drips) {
        loop {
            stream.write_all(b"1\r\n{\r\n")?;
            if how == How::Stalls {
                // The thread waits until the client gives up.
                return stream.read(&mut [0; 1]).map(drop);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let piece = vec![b'x'; 64 << 10];
    let mut done = 0;
    while done < ENDLESS {
        if how == How::Chunked {
            stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes())?;
        }
        stream.write_all(&piece)?;
        if how == How::Chunked {
            stream.write_all(b"\r\n")?;
        }
        done += piece.len() as u64;
        sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
    }
    match how {
        How::Chunked => stream.write_all(b"0\r\n\r\n"),
        _ => Ok(()),
    }
}

fn limits() -> Limits {
    Limits { document_bytes: DOCUMENT, ..Limits::default() }
}

/// The documents and the layer of an image in a registry.
struct Documents {
    index: Vec<u8>,
    manifest: Vec<u8>,
    config: Vec<u8>,
    layer: Blob,
}

fn documents() -> Documents {
    let layer = gzip(&Tar::new().file("x", "1").end());
    let config = config_json("amd64", std::slice::from_ref(&layer));
    let manifest = manifest_json(&config, std::slice::from_ref(&layer));
    let index = index_json(&[descriptor(MANIFEST, manifest.as_bytes(), "")]);
    let (index, manifest) = (index.into_bytes(), manifest.into_bytes());
    Documents { index, manifest, config: config.into_bytes(), layer }
}

impl Documents {
    /// Returns routes to all documents, with `answer` in the place of the document `hostile`.
    fn routes(&self, hostile: &str, answer: &Answer) -> Vec<(String, Answer)> {
        let blob = |kind: &str, bytes: &[u8]| format!("{kind}/{}", Digest::of(bytes));
        let all = [
            ("tag", "manifests/1".to_owned(), &self.index),
            ("manifest", blob("manifests", &self.manifest), &self.manifest),
            ("config", blob("blobs", &self.config), &self.config),
            ("layer", blob("blobs", &self.layer.bytes), &self.layer.bytes),
        ];
        let route = |(name, path, bytes): (&str, String, &Vec<u8>)| match name == hostile {
            true => (path, answer.clone()),
            false => (path, Answer::Body("200 OK", bytes.clone())),
        };
        all.into_iter().map(route).collect()
    }
}

#[tokio::test]
async fn a_well_behaved_registry_on_the_same_code() {
    let documents = documents();
    let hostile = Hostile::start(documents.routes("none", &Answer::Challenge));
    let plan = hostile.plan(&limits()).await.unwrap();
    assert_eq!(plan.digest, Digest::of(&documents.manifest));
    // This registry requires a token, which has expired by the next document.
    let hostile = Hostile::start(documents.routes("none", &Answer::Challenge));
    for (_, answer) in hostile.routes.lock().unwrap().iter_mut() {
        if let Answer::Body(_, bytes) = answer {
            *answer = Answer::Guarded(bytes.clone());
        }
    }
    hostile.routes.lock().unwrap().push(("/token".into(), Answer::Token));
    let plan = hostile.plan(&limits()).await.unwrap();
    assert_eq!(plan.digest, Digest::of(&documents.manifest));
    assert_eq!(TOKENS.lock().unwrap().0, 3, "a token for each document");
    // This registry never accepts a token: the client must give up after two requests.
    let hostile = Hostile::start(documents.routes("tag", &Answer::Challenge));
    let token = br#"{"token":"x"}"#.to_vec();
    hostile.routes.lock().unwrap().push(("/token".into(), Answer::Body("200 OK", token)));
    let error = hostile.plan(&limits()).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error}");
}

#[tokio::test]
async fn an_endless_document_is_cut_off_at_its_limit() {
    let documents = documents();
    for what in ["tag", "manifest", "config"] {
        for how in ENDLESSLY {
            let hostile = Hostile::start(documents.routes(what, &Answer::Hostile("200 OK", how)));
            let error = hostile.plan(&limits()).await.map(|_| ()).unwrap_err();
            let case = format!("{what} {how:?}");
            assert!(matches!(error, Error::TooLarge { .. }), "{case}: {error}");
            hostile.assert_cut_off(&case);
        }
    }
}

#[tokio::test]
async fn an_endless_error_or_token_is_cut_off_at_its_limit() {
    let documents = documents();
    for how in ENDLESSLY {
        for status in ["404 Not Found", "403 Forbidden", "400 Bad Request", "500 Oh No"] {
            for what in ["tag", "manifest", "config"] {
                let hostile = Hostile::start(documents.routes(what, &Answer::Hostile(status, how)));
                let error = hostile.plan(&limits()).await.map(|_| ()).unwrap_err();
                let case = format!("{what} {status} {how:?}: {error}");
                hostile.assert_cut_off(&case);
                assert!(error.to_string().len() < 1000, "{case}");
            }
        }
        for status in ["200 OK", "403 Forbidden", "500 Oh No"] {
            let hostile = Hostile::start(documents.routes("tag", &Answer::Challenge));
            let token = ("/token".to_owned(), Answer::Hostile(status, how));
            hostile.routes.lock().unwrap().push(token);
            let error = hostile.plan(&limits()).await.map(|_| ()).unwrap_err();
            hostile.assert_cut_off(&format!("token {status} {how:?}: {error}"));
        }
    }
}

#[tokio::test]
async fn an_endless_layer_is_cut_off_at_its_size() {
    let documents = documents();
    for how in ENDLESSLY {
        let hostile = Hostile::start(documents.routes("layer", &Answer::Hostile("200 OK", how)));
        let plan = hostile.plan(&limits()).await.unwrap();
        let fetcher = Fetcher::Registry(hostile.registry(&limits()));
        let dir = std::env::temp_dir();
        let spool = Spool { dir, limits: limits(), total: AtomicU64::new(0) };
        let error = fetcher.layer(plan.layers[0], Arc::new(spool), |_| {}).await.unwrap_err();
        assert!(matches!(error, Error::SizeMismatch { .. }), "{how:?}: {error}");
        hostile.assert_cut_off(&format!("{how:?}"));
    }
}

#[tokio::test]
async fn an_endless_layer_is_cut_off_behind_a_part_of_it() {
    let digest = Digest::of(b"x");
    let start = |how| Hostile::start(vec![(digest.to_string(), Answer::Hostile("200 OK", how))]);
    for how in ENDLESSLY {
        let hostile = start(how);
        let part = hostile.registry(&limits()).blob_range(&digest, 1000, 500).await.unwrap();
        assert_eq!(part, vec![b'x'; 500], "{how:?}");
        hostile.assert_cut_off(&format!("{how:?}"));
    }
    let limits = Limits { document_time: Duration::from_secs(1), ..limits() };
    for how in [How::Stalls, How::Drips] {
        let registry = start(how).registry(&limits);
        let ended = tokio::time::timeout(FOR_EVER, registry.blob_range(&digest, 1000, 500)).await;
        let text = ended.unwrap_or_else(|_| panic!("{how:?}: waits for the registry"));
        let text = text.unwrap_err().to_string();
        assert!(text.contains("does not answer in time"), "{how:?}: {text}");
    }
}

/// The registry keeps the connection open throughout, so the client must end by itself.
#[tokio::test]
async fn a_registry_that_stalls_or_drips_is_given_up() {
    let documents = documents();
    let second = Duration::from_secs(1);
    for (how, limits) in [
        (How::Stalls, Limits { stall_time: second, ..limits() }),
        (How::Stalls, Limits { document_time: second, ..limits() }),
        // Bytes arrive all the time, so only the limit on the total time helps.
        (How::Drips, Limits { document_time: second, ..limits() }),
    ] {
        for what in ["tag", "manifest", "config", "token"] {
            let answer = Answer::Hostile("200 OK", how);
            let hostile = match what {
                "token" => {
                    let hostile = Hostile::start(documents.routes("tag", &Answer::Challenge));
                    hostile.routes.lock().unwrap().push(("/token".into(), answer));
                    hostile
                }
                what => Hostile::start(documents.routes(what, &answer)),
            };
            let ended = tokio::time::timeout(FOR_EVER, hostile.plan(&limits)).await;
            let error = ended.unwrap_or_else(|_| panic!("{what} {how:?}: waits for the registry"));
            let text = error.map(|_| ()).unwrap_err().to_string();
            assert!(text.contains("does not answer in time"), "{what} {how:?}: {text}");
        }
    }
}

#[tokio::test]
async fn a_layer_that_drips_is_given_up() {
    let digest = Digest::of(b"x");
    let drips = Answer::Hostile("200 OK", How::Drips);
    let hostile = Hostile::start(vec![(digest.to_string(), drips)]);
    let limits = Limits { rate_time: Duration::from_secs(1), ..limits() };
    let registry = hostile.registry(&limits);
    let (sender, mut receiver) = tokio::sync::mpsc::channel(16);
    let read = async { while receiver.recv().await.is_some() {} };
    let fed = async { tokio::join!(registry.feed(digest, sender), read).0 };
    let ended = tokio::time::timeout(FOR_EVER, fed).await.expect("it waits for the registry");
    let text = ended.unwrap_err().to_string();
    assert!(text.contains("too slowly") && text.contains(&digest.to_string()), "{text}");
}

#[tokio::test]
async fn what_a_registry_says_does_nothing_to_a_terminal() {
    let told = "{\"errors\":[{\"code\":\"X\x7f\",\"message\":\
        \"\\u001b[2J\\u009b31m\\u202e\\r\\nslipway: fine\"}]}";
    let answer = Answer::Body("400 Bad Request", told.as_bytes().to_vec());
    let documents = documents();
    let hostile = Hostile::start(documents.routes("tag", &answer));
    let text = hostile.plan(&limits()).await.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("\\u001b[2J") && text.contains("slipway: fine"), "{text}");
    assert!(text.chars().all(slipway_printable::is_printable), "{text:?}");
}

/// A token is sent to the registry that it was made for, and not to hosts that the registry
/// redirects to.
#[tokio::test]
async fn credentials_stay_with_their_host() {
    let heard = Arc::new(Mutex::new(String::new()));
    let elsewhere = TcpListener::bind("127.0.0.2:0").unwrap();
    let address = elsewhere.local_addr().unwrap();
    let log = heard.clone();
    std::thread::spawn(move || {
        for mut stream in elsewhere.incoming().flatten() {
            let mut bytes = [0; 4096];
            let n = stream.read(&mut bytes).unwrap_or(0);
            log.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            let _ = stream.write_all(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let status: &'static str = format!("307 There\r\nLocation: http://{address}/m").leak();
    let routes = vec![("manifests/1".to_owned(), Answer::Body(status, Vec::new()))];
    let hostile = Hostile::start(routes);
    let registry = hostile.registry_for(&limits(), Credentials::Bearer("t0p-secret".into()));
    registry.manifest(None, DOCUMENT).await.unwrap_err();
    let heard = heard.lock().unwrap().to_lowercase();
    assert!(heard.contains("get /m") && !heard.contains("t0p-secret"), "{heard}");
}
