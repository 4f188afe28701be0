//! The agent at the other end of a VM's port, as bytes: no client of its protocol is on this floor.

use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The first bytes of an HTTP/2 client: its preface and empty SETTINGS (RFC 9113, section 3.4). The
/// agent answers with its own.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// HTTP/2's frames (RFC 9113, section 6): their types and flags, and the bytes before each one.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const FRAME_HEADER: usize = 9;

/// Connects to the agent's socket and waits for the agent's first byte.
pub async fn greet(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.write_all(HELLO).await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    stream
}

/// Calls `Prepare` over a connection of [`greet`], as a node does before it saves a machine without
/// functions, and waits for the end of the answer.
pub async fn prepare(stream: &mut UnixStream) {
    let request = [frame(HEADERS, END_HEADERS, &headers()), frame(DATA, END_STREAM, &[0; 5])];
    stream.write_all(&request.concat()).await.unwrap();
    // The first byte of the agent's first frame was read.
    let mut start = [0; FRAME_HEADER];
    stream.read_exact(&mut start[1..]).await.unwrap();
    let mut answered = false;
    loop {
        let [first, second, third, kind, flags, stream_id @ ..] = start;
        let len = u32::from_be_bytes([0, first, second, third]);
        let mut content = vec![0; len as usize];
        stream.read_exact(&mut content).await.unwrap();
        let is_ours = stream_id[..] == 1u32.to_be_bytes();
        answered |= is_ours && kind == DATA;
        if is_ours && kind == HEADERS && flags & END_STREAM != 0 {
            assert!(answered, "the agent does not prepare the guest: {content:?}");
            return;
        }
        stream.read_exact(&mut start).await.unwrap();
    }
}

/// Makes a frame of stream 1.
fn frame(kind: u8, flags: u8, content: &[u8]) -> Vec<u8> {
    let len = (content.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags], &1u32.to_be_bytes(), content].concat()
}

/// Makes the header fields of the call, all of them without Huffman codes (RFC 7541, sections 6.1
/// and 6.2.2): POST and http by their indices, then the path, the authority and the type of the
/// content by the indices of their names, then one with its name.
fn headers() -> Vec<u8> {
    let mut fields = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        fields.extend_from_slice(name);
        fields.push(value.len() as u8);
        fields.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], "/slipway.agent.v1.Agent/Prepare");
    literal(&[0x01], "agent");
    literal(&[0x0f, 0x10], "application/grpc");
    literal(b"\0\x02te", "trailers");
    fields
}
