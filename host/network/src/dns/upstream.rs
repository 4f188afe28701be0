//! The host's own resolvers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::MAX_UDP;

/// The longest time for one resolver's answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// The most resolvers: as many as resolv.conf(5) has.
const MAX_SERVERS: usize = 3;
/// The largest file that is read.
const MAX_FILE: u64 = 64 << 10;
const PORT: u16 = 53;
/// The bit TC of a header's third byte: the message is cut (RFC 1035, section 4.1.1).
const CUT: u8 = 0x02;

/// Returns the resolvers that the resolv.conf(5) at `path` names.
pub async fn servers(path: &Path) -> Vec<SocketAddr> {
    let small = tokio::fs::metadata(path).await.is_ok_and(|file| file.len() <= MAX_FILE);
    let text = if small { tokio::fs::read_to_string(path).await } else { Ok(String::new()) };
    parse(&text.unwrap_or_default())
}

fn parse(text: &str) -> Vec<SocketAddr> {
    let named = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let word = (words.next() == Some("nameserver")).then(|| words.next()).flatten()?;
        // An address with a scope ("%eth0") does not parse: such a server is left out.
        word.parse::<IpAddr>().ok().map(|address| SocketAddr::new(address, PORT))
    });
    named.take(MAX_SERVERS).collect()
}

/// Asks one resolver after the other over UDP until one answers.
pub async fn ask(servers: &[SocketAddr], query: &[u8]) -> Option<Vec<u8>> {
    for server in servers {
        if let Ok(Ok(reply)) = tokio::time::timeout(PATIENCE, ask_one(*server, query)).await {
            return Some(reply);
        }
    }
    None
}

async fn ask_one(server: SocketAddr, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Each query has a port of its own, and an identifier that the sandbox did not choose: others
    // would have to guess both in order to forge an answer (RFC 5452, section 9.2).
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    let mut asked = query.to_vec();
    let own = identifier();
    asked[..2].copy_from_slice(&own);
    socket.send(&asked).await?;
    let mut reply = vec![0; MAX_UDP + 1];
    loop {
        let length = socket.recv(&mut reply).await?;
        if matches(&reply[..length], own) {
            if length > MAX_UDP {
                // The sandbox asks once more, by TCP.
                reply[2] |= CUT;
            }
            reply.truncate(length.min(MAX_UDP));
            reply[..2].copy_from_slice(&query[..2]);
            return Ok(reply);
        }
    }
}

/// Asks one resolver after the other over TCP until one answers.
pub async fn ask_stream(servers: &[SocketAddr], query: &[u8]) -> Option<Vec<u8>> {
    for server in servers {
        let asked = tokio::time::timeout(PATIENCE, ask_stream_one(*server, query)).await;
        if let Ok(Ok(reply)) = asked {
            return Some(reply);
        }
    }
    None
}

async fn ask_stream_one(server: SocketAddr, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(std::io::Error::other)?;
    let own = identifier();
    let mut asked = length.to_be_bytes().to_vec();
    asked.extend(own);
    asked.extend(&query[2..]);
    stream.write_all(&asked).await?;
    let length = stream.read_u16().await?;
    let mut reply = vec![0; usize::from(length)];
    stream.read_exact(&mut reply).await?;
    if !matches(&reply, own) {
        return Err(std::io::Error::other("an answer to something else"));
    }
    reply[..2].copy_from_slice(&query[..2]);
    Ok(reply)
}

/// Returns whether `reply` has a header and answers the query with `identifier`.
fn matches(reply: &[u8], identifier: [u8; 2]) -> bool {
    reply.len() >= 12 && reply[..2] == identifier && reply[2] & 0x80 != 0
}

fn identifier() -> [u8; 2] {
    let mut bytes = [0; 2];
    // This never fails for so few bytes once the system has started.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf() {
        let text = "# x\nnameserver 192.0.2.1\nsearch example.org\n nameserver ::1 \n\
                    nameserver fe80::1%eth0\nnameserver\nnameserver 192.0.2.2\nnameserver \
                    192.0.2.3\n";
        let found: Vec<_> = parse(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["192.0.2.1:53", "[::1]:53", "192.0.2.2:53"]);
    }

    #[tokio::test]
    async fn a_reply_that_is_cut_says_so() {
        let resolver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let server = resolver.local_addr().unwrap();
        let mut query = [0; 12];
        query[..2].copy_from_slice(&[7, 9]);
        for (length, is_cut) in [(12, false), (MAX_UDP, false), (MAX_UDP + 1, true), (9000, true)] {
            let answers = async {
                let mut reply = vec![0; length];
                let (_, client) = resolver.recv_from(&mut reply[..12]).await.unwrap();
                reply[2] |= 0x80;
                resolver.send_to(&reply, client).await.unwrap();
            };
            let (reply, ()) = tokio::join!(ask_one(server, &query), answers);
            let reply = reply.unwrap();
            assert_eq!((reply.len(), reply[2] & CUT != 0), (length.min(MAX_UDP), is_cut));
            assert_eq!(reply[..2], query[..2]);
        }
    }
}
