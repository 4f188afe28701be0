//! A published UDP port: pairs of a client and a socket to the sandbox.
//!
//! One task serves all clients of a port and waits for none of them: a datagram for which a socket
//! has no room is lost, as on any network. Two buffers serve a port, however many pairs it has.
//!
//! A client that has as many pairs as it may ([`Shares`]) loses the one that was not answered for
//! the longest time. So a program that opens pairs without end, from however many ports and
//! loopback addresses, keeps nobody from the port.
//!
//! An answer leaves by the socket of the port. The kernel chooses the source address if that socket
//! is bound to all addresses: it is the address that the client asked, except for loopback
//! addresses other than 127.0.0.1 (docs/networks.md). The packet filter redirects datagrams to
//! other addresses of the host before they reach the socket.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout_at};

use crate::shares::{Share, Shares, client_at};

/// The time without an answer of the sandbox's after which a pair is forgotten. Datagrams of the
/// client alone do not keep the pair, nor do errors; the next datagram makes a new pair.
const IDLE: Duration = Duration::from_secs(120);
/// The pause after an error of the socket to the sandbox.
const PAUSE: Duration = Duration::from_millis(10);
const MAX_DATAGRAM: usize = 65_535;

/// A client and a socket to the sandbox.
struct Pair {
    far: Arc<UdpSocket>,
    /// The time of the last answer, or that at which the pair was made.
    heard: Instant,
    /// The task that carries answers.
    task: AbortHandle,
    share: Share,
}

/// The pairs of one port.
pub struct Flows {
    /// The port's socket.
    near: UdpSocket,
    /// The address in the sandbox.
    to: SocketAddr,
    /// The pairs, by the client whose datagrams they carry.
    pairs: Mutex<HashMap<SocketAddr, Pair>>,
    /// The pairs that there may be.
    room: Arc<Shares>,
    /// The buffer for answers. A pair uses it for one answer and never while it waits.
    answer: Mutex<Vec<u8>>,
    /// The number of datagrams that were lost here.
    lost: AtomicU64,
}

impl Flows {
    /// Makes the pairs of the port of `near`, none yet. They carry datagrams to `to`.
    pub fn new(near: UdpSocket, to: SocketAddr, room: Arc<Shares>) -> Arc<Self> {
        let (pairs, answer) = (Mutex::default(), Mutex::new(vec![0; MAX_DATAGRAM]));
        Arc::new(Self { near, to, pairs, room, answer, lost: AtomicU64::new(0) })
    }

    /// Carries datagrams both ways, until the future is dropped.
    pub async fn serve(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            while tasks.try_join_next().is_some() {}
            let Ok((length, client)) = self.near.recv_from(&mut buffer).await else {
                // The network reported an error about an earlier answer.
                sleep(Duration::from_millis(1)).await;
                continue;
            };
            let datagram = &buffer[..length];
            let sent = match self.pair(client, &mut tasks).await {
                // A socket reports an error about an earlier datagram in place of sending one.
                Ok(far) => far.try_send(datagram).or_else(|_| far.try_send(datagram)),
                Err(error) => Err(error),
            };
            if let Err(error) = sent {
                self.lose(&error);
            }
        }
    }

    /// Returns the socket that carries a client's datagrams. Makes one, whose answers a task of
    /// `tasks` carries back, if the client has none.
    ///
    /// # Errors
    /// The clients have all pairs that there may be, or no descriptors are left.
    async fn pair(
        self: &Arc<Self>,
        client: SocketAddr,
        tasks: &mut JoinSet<()>,
    ) -> io::Result<Arc<UdpSocket>> {
        let known = lock(&self.pairs).get(&client).map(|pair| pair.far.clone());
        if let Some(far) = known {
            return Ok(far);
        }
        let share = self.room_for(client.ip(), tasks).await;
        let share =
            share.ok_or_else(|| io::Error::other("there is no room for one more client"))?;
        let far = Arc::new(connected(self.to).await?);
        let (flows, back) = (self.clone(), far.clone());
        let task = tasks.spawn(async move {
            until_idle(IDLE, || flows.carry_answer(&back, client)).await;
            flows.forget(&back, client);
        });
        let pair = Pair { far: far.clone(), heard: Instant::now(), task, share };
        lock(&self.pairs).insert(client, pair);
        Ok(far)
    }

    /// Takes the share of one more pair of the client at `address`, if need be that of a pair which
    /// it has: others may have taken of the room since, and it loses no more than one pair. Returns
    /// `None` if it has none, and may have none.
    async fn room_for(&self, address: IpAddr, tasks: &mut JoinSet<()>) -> Option<Share> {
        if let Some(share) = self.room.take(address) {
            return Some(share);
        }
        let share = self.evict(client_at(address))?;
        // The task of such a pair has a descriptor until the runtime has dropped it.
        let _ = tasks.join_next().await;
        Some(share)
    }

    /// Ends that pair of a client which was not answered for the longest time. Returns its share,
    /// or `None` if the client has no pair.
    fn evict(&self, client: IpAddr) -> Option<Share> {
        let mut pairs = lock(&self.pairs);
        let its = pairs.iter().filter(|(at, _)| client_at(at.ip()) == client);
        let oldest = its.min_by_key(|(_, pair)| pair.heard).map(|(at, _)| *at)?;
        let pair = pairs.remove(&oldest)?;
        pair.task.abort();
        Some(pair.share)
    }

    /// Removes the pair with the socket `far`, unless it was ended and its client has another one.
    fn forget(&self, far: &Arc<UdpSocket>, client: SocketAddr) {
        let mut pairs = lock(&self.pairs);
        if pairs.get(&client).is_some_and(|pair| Arc::ptr_eq(&pair.far, far)) {
            pairs.remove(&client);
        }
    }

    /// Waits for an answer from `far` and carries it to the client.
    ///
    /// # Errors
    /// An error that the sandbox reported: it does not listen on the port (yet).
    async fn carry_answer(&self, far: &UdpSocket, client: SocketAddr) -> io::Result<()> {
        loop {
            far.readable().await?;
            match self.try_answer(far, client) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                carried => return carried,
            }
        }
    }

    /// Carries an answer to the client, if one has come.
    ///
    /// # Errors
    /// `WouldBlock` if none has come; an error that the sandbox reported.
    fn try_answer(&self, far: &UdpSocket, client: SocketAddr) -> io::Result<()> {
        let mut buffer = lock(&self.answer);
        let length = far.try_recv(&mut buffer)?;
        if let Some(pair) = lock(&self.pairs).get_mut(&client) {
            pair.heard = Instant::now();
        }
        if let Err(error) = self.near.try_send_to(&buffer[..length], client) {
            self.lose(&error);
        }
        Ok(())
    }

    /// Counts a lost datagram. Logs the first one, the second, the fourth, and so on.
    fn lose(&self, why: &io::Error) {
        let lost = self.lost.fetch_add(1, Ordering::Relaxed) + 1;
        if lost.is_power_of_two() {
            tracing::warn!(to = %self.to, lost, %why, "datagrams of a published port were lost");
        }
    }
}

/// Returns a socket that is connected to `to`.
async fn connected(to: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(to).await?;
    // The runtime learns that a new socket has room before `try_send` can use it.
    socket.writable().await?;
    Ok(socket)
}

/// Calls `next` again and again until it has not succeeded for `idle`. Failures do not prolong that
/// time.
async fn until_idle<F>(idle: Duration, mut next: impl FnMut() -> F)
where
    F: Future<Output = io::Result<()>>,
{
    let mut last = Instant::now();
    while last.elapsed() < idle {
        match timeout_at(last + idle, next()).await {
            Ok(Ok(())) => last = Instant::now(),
            Ok(Err(_)) => sleep(PAUSE).await,
            Err(_) => return,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in between leaves the map consistent, and the buffer has no state.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    async fn bound(address: &str) -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind(address).await.unwrap();
        let own = socket.local_addr().unwrap();
        (socket, own)
    }

    #[tokio::test]
    async fn datagrams_find_their_way_back() {
        let (inside, to) = bound("127.0.0.2:0").await;
        let (near, outside) = bound("127.0.0.1:0").await;
        let flows = Flows::new(near, to, Shares::new(8));
        let mut serving = JoinSet::new();
        serving.spawn(flows.clone().serve());
        let mut buffer = [0; 16];
        let mut clients = Vec::new();
        for text in [b"one", b"two"] {
            let (client, _) = bound("127.0.0.1:0").await;
            client.connect(outside).await.unwrap();
            client.send(text).await.unwrap();
            let (length, from) = inside.recv_from(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], text);
            clients.push((client, from));
        }
        for ((client, from), text) in clients.iter().zip([b"1st", b"2nd"]) {
            inside.send_to(text, *from).await.unwrap();
            let length = client.recv(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], text);
        }
        // A client keeps its socket.
        clients[0].0.send(b"more").await.unwrap();
        assert_eq!(inside.recv_from(&mut buffer).await.unwrap(), (4, clients[0].1));
        assert_eq!(flows.lost.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn datagrams_without_room_are_counted() {
        let (_inside, to) = bound("127.0.0.2:0").await;
        let (near, outside) = bound("127.0.0.1:0").await;
        let flows = Flows::new(near, to, Shares::new(0));
        let mut serving = JoinSet::new();
        serving.spawn(flows.clone().serve());
        let (client, _) = bound("127.0.0.1:0").await;
        client.send_to(b"first", outside).await.unwrap();
        while flows.lost.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(lock(&flows.pairs).is_empty());
    }

    #[tokio::test]
    async fn a_client_loses_one_pair_for_one_more_also_if_others_have_taken_of_the_room() {
        let (inside, to) = bound("127.0.0.2:0").await;
        let (near, outside) = bound("127.0.0.1:0").await;
        let room = Shares::new(16);
        let flows = Flows::new(near, to, Arc::clone(&room));
        let mut serving = JoinSet::new();
        serving.spawn(flows.clone().serve());
        let (mut buffer, mut clients, mut others) = ([0; 16], Vec::new(), Vec::new());
        for count in 1..=9 {
            if count == 9 {
                // The client has half of the room, and nothing is left of the other half.
                others.extend((1..=8_u8).filter_map(|other| room.take([10, 0, 0, other].into())));
                assert_eq!(others.len(), 8);
            }
            let (client, _) = bound("127.0.0.1:0").await;
            client.send_to(b"any", outside).await.unwrap();
            inside.recv_from(&mut buffer).await.unwrap();
            clients.push(client);
        }
        assert_eq!((lock(&flows.pairs).len(), flows.lost.load(Ordering::Relaxed)), (8, 0));
    }

    #[tokio::test]
    async fn a_client_without_room_loses_the_pair_that_was_not_answered_for_longest() {
        let (inside, to) = bound("127.0.0.2:0").await;
        let (near, outside) = bound("127.0.0.1:0").await;
        // All loopback addresses together have half of the room.
        let flows = Flows::new(near, to, Shares::new(4));
        let mut serving = JoinSet::new();
        serving.spawn(flows.clone().serve());
        let mut buffer = [0; 16];
        let [(first, its), (second, _), (third, other)] =
            [bound("127.0.0.1:0").await, bound("127.0.0.1:0").await, bound("127.0.0.3:0").await];
        first.send_to(b"first", outside).await.unwrap();
        let (_, from) = inside.recv_from(&mut buffer).await.unwrap();
        second.send_to(b"second", outside).await.unwrap();
        inside.recv_from(&mut buffer).await.unwrap();
        inside.send_to(b"answer", from).await.unwrap();
        first.recv_from(&mut buffer).await.unwrap();
        third.send_to(b"third", outside).await.unwrap();
        let (length, _) = inside.recv_from(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], b"third");
        let left: HashSet<_> = lock(&flows.pairs).keys().copied().collect();
        assert_eq!(left, HashSet::from([its, other]));
        first.send_to(b"more", outside).await.unwrap();
        assert_eq!(inside.recv_from(&mut buffer).await.unwrap(), (4, from));
        second.send_to(b"again", outside).await.unwrap();
        inside.recv_from(&mut buffer).await.unwrap();
        assert_eq!((lock(&flows.pairs).len(), flows.lost.load(Ordering::Relaxed)), (2, 0));
    }

    #[tokio::test]
    async fn a_sandbox_that_begins_to_listen_gets_the_next_datagram() {
        let (closed, to) = bound("127.0.0.2:0").await;
        drop(closed);
        let (near, outside) = bound("127.0.0.1:0").await;
        let flows = Flows::new(near, to, Shares::new(8));
        let mut serving = JoinSet::new();
        serving.spawn(flows.clone().serve());
        let (client, _) = bound("127.0.0.1:0").await;
        client.send_to(b"early", outside).await.unwrap();
        while lock(&flows.pairs).is_empty() {
            tokio::task::yield_now().await;
        }
        let inside = UdpSocket::bind(to).await.unwrap();
        client.send_to(b"late", outside).await.unwrap();
        let mut buffer = [0; 16];
        let received = inside.recv_from(&mut buffer);
        let received = tokio::time::timeout(Duration::from_secs(60), received).await.unwrap();
        let (length, _) = received.unwrap();
        assert_eq!(&buffer[..length], b"late");
    }

    #[tokio::test]
    async fn failures_do_not_keep_a_pair() {
        let idle = Duration::from_millis(50);
        let refused = || io::Error::from(ErrorKind::ConnectionRefused);
        let failed = || std::future::ready(Err::<(), _>(refused()));
        let ended = until_idle(idle, failed);
        // Without an end in sight the test would not end.
        tokio::time::timeout(Duration::from_secs(60), ended).await.unwrap();
    }

    #[tokio::test]
    async fn answers_keep_a_pair() {
        let (idle, begun) = (Duration::from_millis(50), Instant::now());
        let mut answers = 0;
        until_idle(idle, || {
            answers += 1;
            let more = answers < 20;
            async move {
                if more {
                    sleep(Duration::from_millis(5)).await;
                    return Ok(());
                }
                std::future::pending().await
            }
        })
        .await;
        assert!(begun.elapsed() >= idle + Duration::from_millis(5));
    }
}
