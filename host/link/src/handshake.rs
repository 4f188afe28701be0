//! From a connected socket to keys for records: TLS 1.3, and a hello from each side.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustls::client::verify_server_name;
use rustls::pki_types::ServerName;
use rustls::server::ParsedCertificate;
use rustls::{ClientConnection, Connection, ServerConnection};
use slipway_sgiov_spec::link::{self, Cipher, EXPORTER, HELLO, Hello, TO_CLIENT, TO_SERVER};
use slipway_warp::{Opener, Sealer, Secret};

use crate::identity::Identity;

/// Bytes of the header of a TLS record (RFC 8446, section 5.1).
const HEADER: usize = 5;
/// Largest number of bytes after the header of a TLS record (section 5.2).
const RECORD: usize = (1 << 14) + 256;

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("handshake: {0}")]
    Tls(#[from] rustls::Error),
    #[error("handshake: {0}")]
    Io(#[from] std::io::Error),
    #[error("handshake: the connection was closed")]
    Closed,
    #[error("handshake: not what an engine of this version says")]
    Hello,
    #[error("handshake: a certificate that is not that of '{0}'")]
    Name(String),
    #[error("handshake: no streams of tenant '{tenant}' from engine '{engine}'")]
    NotAllowed { engine: String, tenant: String },
    #[error("handshake: refused there, errno {0}")]
    Refused(u32),
    #[error("handshake: many others began one after it")]
    Crowded,
    #[error("{0}: no name for a certificate")]
    NoName(String),
}

/// The result of a completed handshake.
pub(crate) struct Session {
    /// The hello of the other side.
    pub(crate) hello: Hello,
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
    /// Bytes that arrived after the handshake: the beginning of the records.
    pub(crate) rest: Vec<u8>,
}

/// Returns whether the accepting side takes a connection with this hello.
pub(crate) type Judge<'a> = &'a dyn Fn(&Hello) -> bool;

pub(crate) struct Handshake {
    tls: Connection,
    /// The hello of this side; the accepting side completes it when it has received the other one.
    ours: Hello,
    said: bool,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    heard: Vec<u8>,
}

impl Handshake {
    /// Begins the connecting side's handshake with the engine called `engine`.
    pub(crate) fn connect(
        identity: &Identity,
        engine: &str,
        ours: Hello,
    ) -> Result<Self, HandshakeError> {
        let name = ServerName::try_from(engine.to_owned());
        let name = name.map_err(|_| HandshakeError::NoName(engine.into()))?;
        let tls = ClientConnection::new(identity.client.clone(), name)?;
        Ok(Self::new(tls.into(), ours))
    }

    /// Begins the accepting side's handshake.
    pub(crate) fn accept(identity: &Identity, ours: Hello) -> Result<Self, HandshakeError> {
        let tls = ServerConnection::new(identity.server.clone())?;
        Ok(Self::new(tls.into(), ours))
    }

    fn new(tls: Connection, ours: Hello) -> Self {
        let (incoming, outgoing, heard) = Default::default();
        Self { tls, ours, said: false, incoming, outgoing, heard }
    }

    /// Returns whether this side began the connection.
    fn connects(&self) -> bool {
        matches!(self.tls, Connection::Client(_))
    }

    /// Returns whether something waits to be sent.
    pub(crate) fn wants_write(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Advances as far as the non-blocking `socket` allows. Returns `None` if the handshake is not
    /// done yet.
    pub(crate) fn step(
        &mut self,
        socket: BorrowedFd<'_>,
        judge: Judge<'_>,
    ) -> Result<Option<Session>, HandshakeError> {
        let done = self.advance(socket, judge);
        if done.is_err() {
            // Tells the other side why, if possible; the first error is the one to report.
            let _ = self.say(socket);
        }
        done
    }

    /// Does the steps of [`Handshake::step`], and stops at the first error.
    fn advance(
        &mut self,
        socket: BorrowedFd<'_>,
        judge: Judge<'_>,
    ) -> Result<Option<Session>, HandshakeError> {
        self.say(socket)?;
        let ended = self.receive(socket)?;
        let theirs = self.hear(judge)?;
        if self.connects() && !self.said && !self.tls.is_handshaking() {
            self.said = true;
            self.tls.writer().write_all(&self.ours.encode())?;
        }
        self.say(socket)?;
        match theirs {
            Some(theirs) if self.said && self.outgoing.is_empty() => {
                self.judge_answer(&theirs)?;
                Ok(Some(self.session(theirs)?))
            }
            _ if ended => Err(HandshakeError::Closed),
            _ => Ok(None),
        }
    }

    /// Sends pending bytes.
    fn say(&mut self, socket: BorrowedFd<'_>) -> Result<(), HandshakeError> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.outgoing)?;
        }
        while !self.outgoing.is_empty() {
            match rustix::io::write(socket, &self.outgoing) {
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// Receives bytes, up to those of one TLS record. Returns whether the other side has closed.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<bool, HandshakeError> {
        let mut bytes = [0; 4096];
        while self.incoming.len() < HEADER + RECORD {
            match rustix::io::read(socket, &mut bytes) {
                Ok(0) => return Ok(true),
                Ok(count) => self.incoming.extend_from_slice(&bytes[..count]),
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
        Ok(false)
    }

    /// Gives TLS one record after the other, and not a byte of what follows the other side's hello.
    fn hear(&mut self, judge: Judge<'_>) -> Result<Option<Hello>, HandshakeError> {
        while self.heard.len() < HELLO {
            let Some([_, _, _, high, low]) = self.incoming.first_chunk::<HEADER>() else {
                return Ok(None);
            };
            let length = HEADER + usize::from(u16::from_be_bytes([*high, *low]));
            if length > HEADER + RECORD {
                return Err(HandshakeError::Hello);
            }
            let Some(mut record) = self.incoming.get(..length) else { return Ok(None) };
            while !record.is_empty() {
                if self.tls.read_tls(&mut record)? == 0 {
                    return Err(HandshakeError::Closed);
                }
            }
            self.incoming.drain(..length);
            self.tls.process_new_packets()?;
            self.read_plaintext()?;
        }
        let heard: &[u8; HELLO] =
            self.heard.as_slice().try_into().map_err(|_| HandshakeError::Hello)?;
        let theirs = Hello::decode(heard).ok_or(HandshakeError::Hello)?;
        if !self.connects() && !self.said {
            self.answer(&theirs, judge)?;
        }
        Ok(Some(theirs))
    }

    /// Reads what TLS has decrypted. Fails for more bytes than a hello has: nothing may follow it.
    fn read_plaintext(&mut self) -> Result<(), HandshakeError> {
        let mut bytes = [0; HELLO + 1];
        match self.tls.reader().read(&mut bytes) {
            Ok(0) => return Err(HandshakeError::Closed),
            Ok(count) => self.heard.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if self.heard.len() > HELLO { Err(HandshakeError::Hello) } else { Ok(()) }
    }

    /// Checks the connecting side's hello against its certificate and `judge`, and writes the
    /// accepting side's hello.
    fn answer(&mut self, theirs: &Hello, judge: Judge<'_>) -> Result<(), HandshakeError> {
        let engine = theirs.engine.as_str().to_owned();
        let wrong = |_| HandshakeError::Name(engine.clone());
        let certificate = self.tls.peer_certificates().and_then(<[_]>::first);
        let certificate = certificate.ok_or(HandshakeError::Name(engine.clone()))?;
        let certificate = ParsedCertificate::try_from(certificate)?;
        let name = ServerName::try_from(engine.clone())
            .map_err(|_| HandshakeError::NoName(engine.clone()))?;
        verify_server_name(&certificate, &name).map_err(wrong)?;
        let allowed = judge(theirs);
        let refusal = rustix::io::Errno::ACCESS.raw_os_error().unsigned_abs();
        self.ours.status = if allowed { 0 } else { refusal };
        (self.ours.tenant, self.ours.cipher) = (theirs.tenant, theirs.cipher);
        self.said = true;
        self.tls.writer().write_all(&self.ours.encode())?;
        let tenant = theirs.tenant.as_str().to_owned();
        if allowed { Ok(()) } else { Err(HandshakeError::NotAllowed { engine, tenant }) }
    }

    /// Checks the other side's hello. (The connecting side leaves the name to TLS.)
    fn judge_answer(&self, theirs: &Hello) -> Result<(), HandshakeError> {
        // The accepting side has copied tenant and cipher.
        let same = (theirs.tenant, theirs.cipher) == (self.ours.tenant, self.ours.cipher);
        match theirs.status {
            0 if same => Ok(()),
            0 => Err(HandshakeError::Hello),
            _ if !self.connects() => Err(HandshakeError::Hello),
            status => Err(HandshakeError::Refused(status)),
        }
    }

    /// Derives the keys of both directions from those of TLS, and returns the session with the
    /// other side's `hello`.
    fn session(&mut self, hello: Hello) -> Result<Session, HandshakeError> {
        let tenant = self.ours.tenant.as_str().as_bytes();
        let master = self.tls.export_keying_material([0; 32], EXPORTER, Some(tenant))?;
        let secret = |direction| Secret::derive(&master, &[tenant, direction]);
        let (to, from) = match self.connects() {
            true => (TO_SERVER, TO_CLIENT),
            false => (TO_CLIENT, TO_SERVER),
        };
        let cipher = cipher(self.ours.cipher);
        let sealer = Sealer::new(cipher, &secret(to));
        let opener = Opener::new(cipher, &secret(from));
        Ok(Session { hello, sealer, opener, rest: std::mem::take(&mut self.incoming) })
    }
}

fn cipher(cipher: Cipher) -> slipway_warp::Cipher {
    match cipher {
        link::Cipher::Aes128Gcm => slipway_warp::Cipher::Aes128Gcm,
        link::Cipher::Aes256Gcm => slipway_warp::Cipher::Aes256Gcm,
    }
}

/// Returns the error number that a program gets if its engine did not reach the other one.
pub(crate) fn errno(error: &HandshakeError) -> u32 {
    use rustix::io::Errno;
    let told = match error {
        HandshakeError::Io(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(known @ (Errno::CONNREFUSED | Errno::TIMEDOUT | Errno::NETUNREACH)) => known,
            _ => Errno::HOSTUNREACH,
        },
        _ => Errno::HOSTUNREACH,
    };
    told.raw_os_error().unsigned_abs()
}

/// Returns the error of `socket`'s connect(2), if it has failed.
pub(crate) fn connected(socket: BorrowedFd<'_>) -> std::io::Result<()> {
    rustix::net::sockopt::socket_error(socket.as_fd())?.map_err(Into::into)
}
