//! The transforms of a host core: copy, checksum, compress, seal, and back.

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use slipway_ram::Fault;
use slipway_warp::record::{
    CHECKSUM, Flags, HEADER, Header, MAX_PAYLOAD, MAX_RECORD, TAG, header_of, split,
};
use slipway_warp::{Opener, RecordError, Sealer};
use zstd::bulk::{Compressor, Decompressor};

use crate::error::TransformError;
use crate::memory::{Input, Output, copy_rings};
use crate::{Needs, Rule, Sizes};

/// zstd's compression level: its fastest except for the negative ones.
const ZSTD_LEVEL: i32 = 1;
/// Bytes of a ring that are copied at once for a checksum: they stay in the L1 cache.
const PART: usize = 8 * 1024;

/// The compression of a payload. A payload that does not get smaller is sent uncompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4: fast.
    Lz4,
    /// zstd, level 1: smaller than LZ4.
    Zstd,
}

/// Transforms of a payload other than sealing.
///
/// Compression is off by default: an attacker who chooses part of a payload and sees the record's
/// length learns something about the rest of a payload that is compressed before it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Options {
    /// The compression, which is applied first.
    pub compression: Compression,
    /// Adds a CRC32C of the payload. A sealed record is protected without it.
    pub checksum: bool,
}

/// Returns the [`Rule`] for making records of up to `most` bytes of payload, `sealed` or not. No
/// record of less than `least` bytes is made just to avoid a copy. `needs` are the executor's.
pub fn records(most: usize, least: usize, sealed: bool, options: Options, needs: Needs) -> Rule {
    let tag = if sealed { TAG } else { 0 };
    let checksum = if options.checksum { CHECKSUM } else { 0 };
    let exact = options.compression == Compression::None;
    let (most, overhead) = (most.clamp(1, MAX_PAYLOAD), HEADER + tag + checksum);
    Rule { sizes: Sizes::Record { most, overhead, exact }, needs, least }
}

/// The transforms of one host core, with the staging buffers that they use. Allocates nothing once
/// each transform has been used.
pub struct Worker {
    /// Staging for bytes read from a ring.
    plain: Vec<u8>,
    /// Staging for a record that goes to a ring, or for a decompressed payload.
    made: Vec<u8>,
    /// The output of LZ4; empty until its first use.
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
    /// Creates a worker with its buffers, which hold two records.
    pub fn new() -> Self {
        let (plain, made) = (vec![0; MAX_RECORD], vec![0; MAX_RECORD]);
        Self { plain, made, packed: Vec::new(), lz4: CompressTable::large(), zstd: None }
    }

    /// Copies as much of `input` as `output` has room for, and returns the number of bytes.
    ///
    /// # Errors
    /// If the memory of a ring is gone.
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

    /// Copies as [`Worker::copy`] does, and also returns the CRC32C of the copied bytes. The
    /// checksum is taken over a copy that no peer can change any more.
    ///
    /// # Errors
    /// If the memory of a ring is gone.
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

    /// Makes one record of all of `input` (1 to [`MAX_PAYLOAD`] bytes), sealed if there is a
    /// sealer, and returns the record's length. An output that is
    /// [`OVERHEAD`](slipway_warp::record::OVERHEAD) bytes longer than the input is always large
    /// enough.
    ///
    /// # Errors
    /// [`RecordError::NoRoom`], [`TransformError::Memory`], or [`RecordError::Key`] if the key is
    /// used up. The output's contents are then undefined.
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
            return Err(RecordError::NoRoom { input: length, room }.into());
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

    /// Makes a record in `into`, which must have room for it.
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

    /// Writes the payload to `body`, compressed if that makes it smaller. Returns the flags, the
    /// number of bytes written, and the checksum if `options` ask for one.
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
            // A compressed body must be smaller than the payload (`Header::lengths_fit` checks
            // that).
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

    /// Compresses `from` into `to`. Returns `None` if the result does not fit.
    fn compress(&mut self, how: Compression, from: &[u8], to: &mut [u8]) -> Option<(Flags, usize)> {
        let (flags, packed) = match how {
            Compression::None => return None,
            Compression::Lz4 => (Flags::LZ4, self.lz4(from, to)?),
            Compression::Zstd => (Flags::ZSTD, self.zstd()?.0.compress_to_buffer(from, to).ok()?),
        };
        (packed > 0).then_some((flags, packed))
    }

    /// Compresses by way of a buffer: LZ4 wants room for its worst case, which a record does not
    /// have.
    fn lz4(&mut self, from: &[u8], to: &mut [u8]) -> Option<usize> {
        if self.packed.is_empty() {
            self.packed.resize(get_maximum_output_size(MAX_PAYLOAD), 0);
        }
        let packed = compress_into_with_table(from, &mut self.packed, &mut self.lz4).ok()?;
        to.get_mut(..packed)?.copy_from_slice(&self.packed[..packed]);
        Some(packed)
    }

    /// Returns both zstd contexts, made at their first use, or `None` if there is no memory for
    /// them.
    fn zstd(&mut self) -> Option<&mut (Compressor<'static>, Decompressor<'static>)> {
        if self.zstd.is_none() {
            self.zstd = Some((Compressor::new(ZSTD_LEVEL).ok()?, Decompressor::new().ok()?));
        }
        self.zstd.as_mut()
    }

    /// Opens `record`, which is exactly one record, in place, writes its payload to `output` and
    /// returns the payload's length. With an opener the record must be sealed; without one it must
    /// not be. All errors but [`TransformError::Memory`] and [`RecordError::NoRoom`] are the
    /// peer's fault. The contents of `record` are undefined afterwards.
    ///
    /// # Errors
    /// Any [`TransformError`]; the output's contents are then undefined.
    pub fn open(
        &mut self,
        opener: Option<&mut Opener>,
        record: &mut [u8],
        output: &mut Output<'_>,
    ) -> Result<usize, TransformError> {
        let header = header_of(record)?;
        if header.flags.has(Flags::SEALED) != opener.is_some() {
            return Err(RecordError::Sealing.into());
        }
        if output.room() < header.payload {
            let (input, room) = (header.payload, output.room());
            return Err(RecordError::NoRoom { input, room }.into());
        }
        let (raw, body) = split(record)?;
        let body: &[u8] = match opener {
            Some(opener) => opener.open(&header, raw, body)?,
            None => body,
        };
        let (packed, checksum) = body.split_at(header.body - header.checksum());
        self.unpack(&header, packed, checksum, output)?;
        Ok(header.payload)
    }

    /// Opens a record that may lie in a ring, as [`Worker::open`] does, by way of a copy.
    ///
    /// # Errors
    /// The errors of [`Worker::open`].
    pub fn open_from(
        &mut self,
        opener: Option<&mut Opener>,
        input: &Input<'_>,
        output: &mut Output<'_>,
    ) -> Result<usize, TransformError> {
        let there = input.length();
        if there > MAX_RECORD {
            return Err(RecordError::NotWhole { there, record: MAX_RECORD }.into());
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

    /// Decompresses `from` into `to`. Returns whether it filled `to` exactly.
    fn decompress(&mut self, header: &Header, from: &[u8], to: &mut [u8]) -> bool {
        let length = to.len();
        let done = match header.flags.has(Flags::LZ4) {
            true => decompress_into(from, to).ok(),
            false => self.zstd().and_then(|both| both.1.decompress_to_buffer(from, to).ok()),
        };
        done == Some(length)
    }
}
