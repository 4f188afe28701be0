//! What a host core does with bytes.

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use slipway_ram::Fault;
use zstd::bulk::{Compressor, Decompressor};

use crate::key::{KeyError, Opener, Sealer};
use crate::memory::{Input, Output, copy_rings};
use crate::record::{
    self, CHECKSUM, Flags, HEADER, Header, HeaderError, MAX_PAYLOAD, MAX_RECORD, TAG,
};
use crate::{Needs, Rule, Sizes};

/// The level of zstd: its fastest but for the negative ones.
const ZSTD_LEVEL: i32 = 1;
/// A part of a ring that is copied to be looked at: it stays in the first cache.
const PART: usize = 8 * 1024;

/// How a payload is compressed. What does not get smaller goes as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Compression {
    /// It is not.
    #[default]
    None,
    /// LZ4: fast.
    Lz4,
    /// zstd, level 1: smaller.
    Zstd,
}

/// What is done with a payload beside sealing it.
///
/// Whoever can choose part of a payload and see a record's length learns something about the rest of the
/// payload if it is compressed first; so it is off unless somebody asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Options {
    /// Compression, before all else.
    pub compression: Compression,
    /// A checksum (CRC32C) of the payload. A sealed record is protected without it.
    pub checksum: bool,
}

/// Why a transform failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// Memory of a ring vanished or was refused.
    #[error("ring memory: {0}")]
    Memory(#[from] Fault),
    /// No room for what comes out, or more input than a record takes, or none.
    #[error("{input} bytes do not fit into {room}")]
    NoRoom {
        /// Bytes that go in.
        input: usize,
        /// Bytes of room.
        room: usize,
    },
    /// Not a record.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The record has not all come yet, or there is more than it.
    #[error("{there} bytes of a record of {record}")]
    NotWhole {
        /// Bytes that are there.
        there: usize,
        /// Bytes of the record.
        record: usize,
    },
    /// The key does not serve.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A record in the open where a sealed one is due, or the other way round.
    #[error("a record that is sealed, or that is not, against what was agreed")]
    Sealing,
    /// The checksum is not the payload's.
    #[error("a wrong checksum")]
    Checksum,
    /// The body does not decompress to the payload's length.
    #[error("a damaged compressed body")]
    Compression,
    /// An executor did less than it was given.
    #[error("{done} bytes done of a piece of {given}")]
    Short {
        /// Bytes that it did.
        done: usize,
        /// Bytes that it was given.
        given: usize,
    },
    /// The executor has no such key.
    #[error("no such key")]
    NoKey,
}

/// How records change sizes, for [`Rule::piece`]: of up to `most` bytes, `sealed` or not, and none of less
/// than `least` just to spare a copy. `needs` are the executor's.
pub fn records(most: usize, least: usize, sealed: bool, options: Options, needs: Needs) -> Rule {
    let tag = if sealed { TAG } else { 0 };
    let checksum = if options.checksum { CHECKSUM } else { 0 };
    let exact = options.compression == Compression::None;
    let (most, overhead) = (most.clamp(1, MAX_PAYLOAD), HEADER + tag + checksum);
    Rule { sizes: Sizes::Record { most, overhead, exact }, needs, least }
}

/// The transforms of one host core, with the memory that they need between two copies. Once every
/// transform was used there are no allocations.
pub struct Worker {
    /// What came out of a ring.
    plain: Vec<u8>,
    /// A record on its way to a ring, or what was decompressed.
    made: Vec<u8>,
    /// What LZ4 makes; empty until it is used.
    packed: Vec<u8>,
    lz4: CompressTable,
    zstd: Option<(Compressor<'static>, Decompressor<'static>)>,
}

impl Default for Worker {
    fn default() -> Self {
        Self::new()
    }
}

impl Worker {
    /// With its buffers: two records' worth.
    pub fn new() -> Self {
        let (plain, made) = (vec![0; MAX_RECORD], vec![0; MAX_RECORD]);
        Self { plain, made, packed: Vec::new(), lz4: CompressTable::large(), zstd: None }
    }

    /// Copies all of `input`, as far as `output` has room, and gives the bytes that it had room for.
    ///
    /// # Errors
    /// When memory vanished.
    pub fn copy(&mut self, input: &Input<'_>, output: &mut Output<'_>) -> Result<usize, Fault> {
        let length = input.length().min(output.room());
        match (input, output) {
            (Input::Ring(from, source), Output::Ring(to, sink)) => {
                let needs = Needs::default();
                let rule = Rule { sizes: Sizes::Same, needs, least: 1 };
                rule.piece(*source, *sink).map_or(Ok(()), |piece| copy_rings(from, to, piece))?;
            }
            (Input::Ring(from, source), Output::Bytes(into)) => {
                Input::Ring(from, source.first(length)).read(into)?;
            }
            (Input::Bytes(bytes), output) => output.write(&bytes[..length])?,
        }
        Ok(length)
    }

    /// As [`Worker::copy`], and the CRC32C of what was copied. The bytes are looked at where nobody
    /// changes them any more.
    ///
    /// # Errors
    /// When memory vanished.
    pub fn copy_checked(
        &mut self,
        input: &Input<'_>,
        output: &mut Output<'_>,
    ) -> Result<(usize, u32), Fault> {
        let length = input.length().min(output.room());
        if let (Input::Ring(from, source), Output::Bytes(into)) = (input, &mut *output) {
            Input::Ring(from, source.first(length)).read(into)?;
            return Ok((length, crc_fast::crc32_iscsi(&into[..length])));
        }
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        let mut done = 0;
        while done < length {
            let part = PART.min(length - done);
            let bytes = match input {
                Input::Bytes(bytes) => &bytes[done..done + part],
                Input::Ring(from, source) => {
                    let piece = Input::Ring(from, source.after(done).first(part));
                    piece.slice(&mut self.plain)?
                }
            };
            digest.update(bytes);
            output.after(done).write(bytes)?;
            done += part;
        }
        Ok((length, digest.finalize() as u32))
    }

    /// Makes one record of all of `input` (1 to [`MAX_PAYLOAD`] bytes), sealed when there is a sealer, and
    /// gives its length. An output of [`OVERHEAD`](crate::record::OVERHEAD) bytes more than the input is always enough.
    ///
    /// # Errors
    /// [`TransformError::NoRoom`], [`TransformError::Memory`], or [`TransformError::Key`] when the key is
    /// used up. Nothing is in the output then that means anything.
    pub fn seal(
        &mut self,
        sealer: Option<&mut Sealer>,
        options: Options,
        input: &Input<'_>,
        output: &mut Output<'_>,
    ) -> Result<usize, TransformError> {
        let (length, room) = (input.length(), output.room());
        let tag = if sealer.is_some() { TAG } else { 0 };
        let checksum = if options.checksum { CHECKSUM } else { 0 };
        if length == 0 || length > MAX_PAYLOAD || room < HEADER + length + checksum + tag {
            return Err(TransformError::NoRoom { input: length, room });
        }
        match output {
            Output::Bytes(into) => self.make(sealer, options, input, into),
            Output::Ring(..) => {
                let mut made = std::mem::take(&mut self.made);
                let record = self.make(sealer, options, input, &mut made);
                let written = record.and_then(|record| {
                    output.write(&made[..record])?;
                    Ok(record)
                });
                self.made = made;
                written
            }
        }
    }

    /// Makes a record in `into`, which has room for it.
    fn make(
        &mut self,
        sealer: Option<&mut Sealer>,
        options: Options,
        input: &Input<'_>,
        into: &mut [u8],
    ) -> Result<usize, TransformError> {
        let payload = input.length();
        let (mut flags, packed, checksum) = self.fill(options, input, &mut into[HEADER..])?;
        let mut body = packed;
        if let Some(checksum) = checksum {
            flags = flags.and(Flags::CHECKED);
            into[HEADER + body..][..CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
            body += CHECKSUM;
        }
        let mut header = Header { flags, generation: 0, counter: 0, body, payload };
        if let Some(sealer) = sealer {
            let ticket = sealer.ticket()?;
            header.flags = flags.and(Flags::SEALED);
            (header.generation, header.counter) = (ticket.generation, ticket.counter);
            let end = HEADER + body;
            let tag = sealer.seal(ticket, &header.bytes(), &mut into[HEADER..end])?;
            into[end..end + TAG].copy_from_slice(&tag);
        }
        into[..HEADER].copy_from_slice(&header.bytes());
        Ok(header.record())
    }

    /// Puts the payload into `body`, compressed if that makes it smaller; gives what was done, the bytes
    /// that it takes there, and the checksum if one is asked for.
    fn fill(
        &mut self,
        options: Options,
        input: &Input<'_>,
        body: &mut [u8],
    ) -> Result<(Flags, usize, Option<u32>), TransformError> {
        let length = input.length();
        if options.compression == Compression::None {
            input.read(body)?;
            let checksum = options.checksum.then(|| crc_fast::crc32_iscsi(&body[..length]));
            return Ok((Flags::default(), length, checksum));
        }
        let mut plain = std::mem::take(&mut self.plain);
        let filled = input.slice(&mut plain).map(|bytes| {
            let checksum = options.checksum.then(|| crc_fast::crc32_iscsi(bytes));
            // Nothing is gained by a body that is not smaller than the payload.
            match self.compress(options.compression, bytes, &mut body[..length - 1]) {
                Some((flags, packed)) => (flags, packed, checksum),
                None => {
                    body[..length].copy_from_slice(bytes);
                    (Flags::default(), length, checksum)
                }
            }
        });
        self.plain = plain;
        Ok(filled?)
    }

    /// None when it does not fit.
    fn compress(&mut self, how: Compression, from: &[u8], to: &mut [u8]) -> Option<(Flags, usize)> {
        let (flags, packed) = match how {
            Compression::None => return None,
            Compression::Lz4 => (Flags::LZ4, self.lz4(from, to)?),
            Compression::Zstd => (Flags::ZSTD, self.zstd()?.0.compress_to_buffer(from, to).ok()?),
        };
        (packed > 0).then_some((flags, packed))
    }

    /// LZ4 wants room for the worst case, which a record does not have.
    fn lz4(&mut self, from: &[u8], to: &mut [u8]) -> Option<usize> {
        if self.packed.is_empty() {
            self.packed.resize(get_maximum_output_size(MAX_PAYLOAD), 0);
        }
        let packed = compress_into_with_table(from, &mut self.packed, &mut self.lz4).ok()?;
        to.get_mut(..packed)?.copy_from_slice(&self.packed[..packed]);
        Some(packed)
    }

    /// Both contexts, made at their first use. None when there is no memory for them.
    fn zstd(&mut self) -> Option<&mut (Compressor<'static>, Decompressor<'static>)> {
        if self.zstd.is_none() {
            self.zstd = Some((Compressor::new(ZSTD_LEVEL).ok()?, Decompressor::new().ok()?));
        }
        self.zstd.as_mut()
    }

    /// Opens `record`, exactly one, in place, and writes its payload to `output`; gives its length. With an
    /// opener the record has to be sealed, without one it must not be. Errors are the peer's doing, but for
    /// [`TransformError::Memory`] and [`TransformError::NoRoom`]; `record` is of no use afterwards.
    ///
    /// # Errors
    /// Any; then nothing is in the output that means anything.
    pub fn open(
        &mut self,
        opener: Option<&mut Opener>,
        record: &mut [u8],
        output: &mut Output<'_>,
    ) -> Result<usize, TransformError> {
        let header = Header::of(record)?;
        if header.flags.has(Flags::SEALED) != opener.is_some() {
            return Err(TransformError::Sealing);
        }
        if output.room() < header.payload {
            return Err(TransformError::NoRoom { input: header.payload, room: output.room() });
        }
        let (raw, body) = record::split(record)?;
        let body: &[u8] = match opener {
            Some(opener) => opener.open(&header, raw, body)?,
            None => body,
        };
        let (packed, checksum) = body.split_at(header.body - header.checksum());
        self.unpack(&header, packed, checksum, output)?;
        Ok(header.payload)
    }

    /// As [`Worker::open`] for a record that lies anywhere.
    ///
    /// # Errors
    /// As for [`Worker::open`].
    pub fn open_from(
        &mut self,
        opener: Option<&mut Opener>,
        input: &Input<'_>,
        output: &mut Output<'_>,
    ) -> Result<usize, TransformError> {
        let there = input.length();
        if there > MAX_RECORD {
            return Err(TransformError::NotWhole { there, record: MAX_RECORD });
        }
        let mut plain = std::mem::take(&mut self.plain);
        let read = input.read(&mut plain);
        let opened = match read {
            Ok(()) => self.open(opener, &mut plain[..there], output),
            Err(fault) => Err(fault.into()),
        };
        self.plain = plain;
        opened
    }

    fn unpack(
        &mut self,
        header: &Header,
        packed: &[u8],
        checksum: &[u8],
        output: &mut Output<'_>,
    ) -> Result<(), TransformError> {
        let mut made = std::mem::take(&mut self.made);
        let plain = match header.flags.is_compressed() {
            false => Ok(packed),
            true => {
                let done = self.decompress(header, packed, &mut made[..header.payload]);
                if done { Ok(&made[..header.payload]) } else { Err(TransformError::Compression) }
            }
        };
        let written = plain.and_then(|plain| {
            let expected = || crc_fast::crc32_iscsi(plain).to_le_bytes();
            if !checksum.is_empty() && checksum != expected() {
                return Err(TransformError::Checksum);
            }
            Ok(output.write(plain)?)
        });
        self.made = made;
        written
    }

    /// Whether `from` fills `to`, exactly.
    fn decompress(&mut self, header: &Header, from: &[u8], to: &mut [u8]) -> bool {
        let length = to.len();
        let done = match header.flags.has(Flags::LZ4) {
            true => decompress_into(from, to).ok(),
            false => self.zstd().and_then(|both| both.1.decompress_to_buffer(from, to).ok()),
        };
        done == Some(length)
    }
}
