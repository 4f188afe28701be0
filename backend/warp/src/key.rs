//! Record keys: derivation, counters and replacement.
//!
//! A [`Secret`] belongs to one direction of one connection of one tenant, and so does the
//! [`Sealer`] made from it: no two sealers ever count under the same key. A record's nonce is the
//! key's salt (32 bits) followed by the record's counter (64 bits, big-endian). The next
//! *generation* begins before the number of records comes near AES-GCM's bounds, or when the caller
//! asks: its secret is derived from the previous one and the counter starts at 0. The record's
//! header names the generation, so the peer follows without a message. A counter is never used
//! twice: when there is no further generation, sealing ends.

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, Algorithm, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};

use crate::header::{HEADER, Header, TAG};

/// The number of records under one key: 2^24, at which AES-GCM with full records is well within RFC
/// 8446, 5.5.
pub const RECORDS_PER_KEY: u64 = 1 << 24;

/// The cipher of a connection's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM.
    Aes128Gcm,
    /// AES-256-GCM.
    Aes256Gcm,
}

impl Cipher {
    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes128Gcm => &AES_128_GCM,
            Self::Aes256Gcm => &AES_256_GCM,
        }
    }
}

/// The reason why a key cannot seal or open a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// All counters of all generations are used.
    #[error("the key is used up")]
    UsedUp,
    /// The record is older or newer than the next one.
    #[error("record {counter} of generation {generation} is not the next one")]
    NotNext {
        /// The generation in the record's header.
        generation: u32,
        /// The counter in the record's header.
        counter: u64,
    },
    /// The tag does not match the header and the body: the record is forged or damaged.
    #[error("a forged or damaged record")]
    Forged,
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// A secret of 32 bytes from which keys are derived.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Derives the secret of one `context` (tenant, connection, direction: all that distinguishes
    /// it) from `master`, of which at least 16 bytes must be random. Uses HKDF with SHA-256 (RFC
    /// 5869).
    pub fn derive(master: &[u8], context: &[&[u8]]) -> Self {
        let root = Salt::new(HKDF_SHA256, b"slipway warp 1").extract(master);
        // Prefix each part with its length, or two different contexts could give the same bytes.
        let mut info = Vec::new();
        for part in context {
            info.extend_from_slice(&(part.len() as u64).to_le_bytes());
            info.extend_from_slice(part);
        }
        Self(expand(&root, &info))
    }

    fn part<const N: usize>(&self, label: &[u8]) -> [u8; N] {
        expand(&Prk::new_less_safe(HKDF_SHA256, &self.0), label)
    }

    fn next(&self) -> Self {
        Self(self.part(b"next"))
    }
}

/// Expands `root` with `info` to `N` bytes, at most 255 * 32 (RFC 5869, 2.3).
fn expand<const N: usize>(root: &Prk, info: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let done = root.expand(&[info], Length(N)).and_then(|okm| okm.fill(&mut bytes));
    // HKDF fails only for more than 255 blocks of output; `N` is far below.
    assert!(done.is_ok(), "HKDF gives 32 bytes");
    bytes
}

/// The key of one generation.
struct Generation {
    secret: Secret,
    key: LessSafeKey,
    salt: [u8; 4],
    number: u32,
}

impl Generation {
    fn new(cipher: Cipher, secret: Secret, number: u32) -> Self {
        let algorithm = cipher.algorithm();
        let key: [u8; 32] = secret.part(b"key");
        let key = UnboundKey::new(algorithm, &key[..algorithm.key_len()]);
        // This fails only for a key of the wrong length.
        let key = LessSafeKey::new(key.unwrap_or_else(|_| unreachable!("the key's own length")));
        let salt = secret.part(b"salt");
        Self { secret, key, salt, number }
    }

    /// Returns the next generation, or `None` if generation numbers are exhausted.
    fn next(&self, cipher: Cipher) -> Option<Self> {
        Some(Self::new(cipher, self.secret.next(), self.number.checked_add(1)?))
    }

    fn nonce(&self, counter: u64) -> Nonce {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&self.salt);
        nonce[4..].copy_from_slice(&counter.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Seals the records of one direction of one connection.
pub struct Sealer {
    cipher: Cipher,
    now: Generation,
    /// The counter of the next record.
    counter: u64,
    /// The number of records under one key.
    limit: u64,
}

/// One (generation, counter) pair: used once, since sealing consumes it.
pub struct Ticket {
    /// The number of the key.
    pub generation: u32,
    /// The number of the record under that key.
    pub counter: u64,
}

impl Sealer {
    /// Creates a sealer at generation 0.
    pub fn new(cipher: Cipher, secret: &Secret) -> Self {
        let now = Generation::new(cipher, secret.clone(), 0);
        Self { cipher, now, counter: 0, limit: RECORDS_PER_KEY }
    }

    /// Sets the number of records under one key, at least 1 and at most [`RECORDS_PER_KEY`].
    #[must_use]
    pub fn with_limit(mut self, records: u64) -> Self {
        self.limit = records.clamp(1, RECORDS_PER_KEY);
        self
    }

    /// Returns the number of the generation in use.
    pub fn generation(&self) -> u32 {
        self.now.number
    }

    /// Begins the next generation now.
    ///
    /// # Errors
    /// Returns [`KeyError::UsedUp`] if there is no further generation.
    pub fn rekey(&mut self) -> Result<(), KeyError> {
        self.now = self.now.next(self.cipher).ok_or(KeyError::UsedUp)?;
        self.counter = 0;
        Ok(())
    }

    /// Takes the next counter. Begins a new generation when the current one has reached its limit.
    ///
    /// # Errors
    /// Returns [`KeyError::UsedUp`] if there is no further generation.
    pub fn ticket(&mut self) -> Result<Ticket, KeyError> {
        if self.counter >= self.limit {
            self.rekey()?;
        }
        let counter = self.counter;
        self.counter += 1;
        Ok(Ticket { generation: self.now.number, counter })
    }

    /// Seals `body` in place under `header`, which must carry the ticket's generation and counter.
    ///
    /// # Errors
    /// Returns [`KeyError::UsedUp`] for a body beyond 2^36 bytes.
    ///
    /// # Panics
    /// If another ticket was taken since, which began another generation.
    pub fn seal(
        &self,
        ticket: Ticket,
        header: &[u8; HEADER],
        body: &mut [u8],
    ) -> Result<[u8; TAG], KeyError> {
        assert_eq!(ticket.generation, self.now.number, "a ticket of another key");
        let (nonce, header) = (self.now.nonce(ticket.counter), Aad::from(header));
        // This fails only for a body beyond 2^36 bytes; records are far smaller.
        let tag = self.now.key.seal_in_place_separate_tag(nonce, header, body);
        let tag = tag.map_err(|_| KeyError::UsedUp)?;
        tag.as_ref().try_into().map_err(|_| KeyError::UsedUp)
    }

    #[cfg(test)]
    pub(crate) fn at_generation(mut self, number: u32) -> Self {
        self.now.number = number;
        self
    }
}

/// Opens the records that a [`Sealer`] sealed, in the same order.
pub struct Opener {
    cipher: Cipher,
    now: Generation,
    /// The counter of the next record.
    counter: u64,
}

impl Opener {
    /// Creates an opener at generation 0.
    pub fn new(cipher: Cipher, secret: &Secret) -> Self {
        Self { cipher, now: Generation::new(cipher, secret.clone(), 0), counter: 0 }
    }

    /// Returns the number of the generation in use.
    pub fn generation(&self) -> u32 {
        self.now.number
    }

    /// Opens a record's body and tag (`body`) in place. `header` is the parsed header and `raw` is
    /// the same header as received. A record that fails to open changes nothing in the opener, but
    /// spoils `body`.
    ///
    /// # Errors
    /// Returns [`KeyError::NotNext`] or [`KeyError::Forged`].
    pub fn open<'a>(
        &mut self,
        header: &Header,
        raw: &[u8; HEADER],
        body: &'a mut [u8],
    ) -> Result<&'a mut [u8], KeyError> {
        let (generation, counter) = (header.generation, header.counter);
        if (generation, counter) == (self.now.number, self.counter) {
            let opened = open(&self.now, counter, raw, body)?;
            self.counter += 1;
            return Ok(opened);
        }
        let begins = self.now.number.checked_add(1) == Some(generation) && counter == 0;
        let next = begins.then(|| self.now.next(self.cipher)).flatten();
        let next = next.ok_or(KeyError::NotNext { generation, counter })?;
        let opened = open(&next, counter, raw, body)?;
        (self.now, self.counter) = (next, 1);
        Ok(opened)
    }
}

fn open<'a>(
    generation: &Generation,
    counter: u64,
    header: &[u8; HEADER],
    body: &'a mut [u8],
) -> Result<&'a mut [u8], KeyError> {
    let nonce = generation.nonce(counter);
    let opened = generation.key.open_in_place(nonce, Aad::from(header), body);
    opened.map_err(|_| KeyError::Forged)
}
