//! SHA-256 digests, and a reader and a writer that compute one on the way.

use std::fmt;
use std::io::{self, Read, Seek};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits (OCI image
/// specification, *Digests*). SHA-512, which the specification also allows, is not supported.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns the 64 hexadecimal digits, without `sha256:`; fit for a file name.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Returns the first twelve digits, for tables.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }

    /// Returns the 32 bytes.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Returns a UUID (RFC 9562 version 8, "custom") of the digest's first bytes, so that the same
    /// image always becomes the same file system.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b.copy_from_slice(&self.0[..16]);
        b[6] = (b[6] & 0x0f) | 0x80;
        b[8] = (b[8] & 0x3f) | 0x80;
        b
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of a text that is no digest. Holds the text's first 200 characters.
#[derive(Debug, thiserror::Error)]
#[error(
    "'{}' is no digest: expected sha256: and 64 hexadecimal digits",
    slipway_printable::line(.0, 200)
)]
pub struct BadDigest(pub String);

impl FromStr for Digest {
    type Err = BadDigest;

    fn from_str(text: &str) -> Result<Self, BadDigest> {
        let bad = || BadDigest(text.chars().take(200).collect());
        let digits = text.strip_prefix("sha256:").ok_or_else(bad)?;
        if digits.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| bad())?;
        Ok(Self(bytes))
    }
}

impl From<[u8; 32]> for Digest {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = BadDigest;

    fn try_from(text: String) -> Result<Self, BadDigest> {
        text.parse()
    }
}

/// A reader that counts and digests the bytes that pass through it.
pub(crate) struct DigestReader<R> {
    inner: R,
    hash: Sha256,
    count: u64,
}

impl<R: Read> DigestReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new(), count: 0 }
    }

    /// Returns the number of bytes so far.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the digest of the bytes so far.
    pub(crate) fn digest(&self) -> Digest {
        Digest(self.hash.clone().finalize().into())
    }
}

impl<R: Read> Read for DigestReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hash.update(&buf[..n]);
        self.count += n as u64;
        Ok(n)
    }
}

/// A writer that counts and digests the bytes that pass through it.
pub(crate) struct DigestWriter<W> {
    inner: W,
    hash: Sha256,
    count: u64,
}

impl<W: io::Write> DigestWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), count: 0 }
    }

    /// Returns the inner writer, the digest of the bytes that passed through, and their number.
    pub(crate) fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest(self.hash.finalize().into()), self.count)
    }
}

impl<W: io::Write + Seek> DigestWriter<W> {
    /// Lets `len` zeros pass through. In the inner writer, which is at the end of a file, they
    /// become a hole; the file has its length once something is written behind them.
    pub(crate) fn zeros(&mut self, len: u64) -> io::Result<()> {
        static ZEROS: [u8; 4096] = [0; 4096];
        let step = i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if step == 0 {
            return Ok(());
        }
        self.inner.seek(io::SeekFrom::Current(step))?;
        let mut left = len;
        while left > 0 {
            let part = left.min(ZEROS.len() as u64);
            self.hash.update(&ZEROS[..part as usize]);
            left -= part;
        }
        self.count += len;
        Ok(())
    }
}

impl<W: io::Write> io::Write for DigestWriter<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buf)?;
        self.hash.update(&buf[..n]);
        self.count += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn round_trip() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse::<Digest>().unwrap(), Digest::of(b""));
        assert_eq!(Digest::of(b"").short(), "e3b0c44298fc");
        assert_eq!(Digest::from(Digest::of(b"").bytes()), Digest::of(b""));
        assert_eq!(hex::encode(Digest::of(b"").uuid()), "e3b0c44298fc8c149afbf4c8996fb924");
    }

    #[test]
    fn refuses_what_is_none() {
        let upper = EMPTY.to_uppercase().replace("SHA256", "sha256");
        for bad in ["", "sha256:", "sha256:e3b0", "sha512:00", &EMPTY[7..], &upper] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
