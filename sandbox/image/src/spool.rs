//! Writes one layer to disk, uncompressed and in an unnamed file, with both of its digests checked
//! and every limit enforced on the way. A part of the disk stays free for others.
//!
//! A new compression is a variant of `Compression`, found by its first bytes, with a decoder for
//! layers and one for whole archives (`decoder`, `uncompress_archive`); how much memory
//! it takes must not be the layer's choice. `check_layer_type` (`manifest`) has the media types.
//! Its crate is in the root `Cargo.toml` and the head of this crate, and its licence among those of
//! `make check`. Of the tests, `support` makes blobs, and `fetch` and `registry` read them. A lazy
//! pull is of eStargz alone, which is gzip (`lazy`).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_space::Allowance;

use crate::digest::{DigestReader, DigestWriter};
use crate::manifest::Layer;
use crate::{Error, Limits, Result};

const CHUNK: usize = 256 << 10;

/// The state that the layers of one image share.
#[derive(Debug)]
pub(crate) struct Spooler<'a> {
    /// The folder for the unnamed files.
    pub dir: &'a Path,
    pub limits: &'a Limits,
    /// The uncompressed bytes of all layers so far.
    pub total: &'a AtomicU64,
}

impl Spooler<'_> {
    /// Reads the blob of `layer` from `blob`, and returns the uncompressed archive in an unnamed
    /// file. The file disappears with its last handle, even after `kill -9`.
    ///
    /// `progress` is called with the bytes of the blob read so far.
    pub(crate) fn spool(
        &self,
        blob: impl Read,
        layer: &Layer,
        progress: &mut dyn FnMut(u64),
    ) -> Result<File> {
        // One byte more than announced is read, to detect a longer blob.
        let mut blob = DigestReader::new(blob.take(layer.size.saturating_add(1)));
        let result = self.decompress(&mut blob, layer, progress);
        // The blob is not to blame, or is known to be too large, so the rest is not read.
        if let Err(Error::TooLarge { .. } | Error::NoSpace { .. } | Error::Io { .. }) = result {
            return result.map(|(file, _)| file);
        }
        // The bytes that a decompressor leaves unread also count for the digest. A wrong digest
        // explains a failed decompression, so it is checked first.
        let rest = io::copy(&mut blob, &mut io::sink());
        check_blob(&blob, rest, layer)?;
        let (file, actual) = result?;
        if actual != layer.diff_id {
            return Err(Error::DigestMismatch {
                what: format!("layer {} (uncompressed)", layer.digest),
                expected: layer.diff_id,
                actual,
            });
        }
        Ok(file)
    }

    fn decompress(
        &self,
        blob: &mut DigestReader<impl Read>,
        layer: &Layer,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(File, crate::Digest)> {
        let unreadable = |e: io::Error| Error::bad_layer(layer.digest, e);
        let (magic, have) = first_bytes(blob).map_err(unreadable)?;
        let meter = Meter { inner: blob, progress };
        let input = BufReader::with_capacity(CHUNK, magic[..have].chain(meter));
        let mut decoder = decoder(compression(&magic), input).map_err(unreadable)?;
        let file =
            tempfile::tempfile_in(self.dir).map_err(|e| Error::io("write to", self.dir, e))?;
        let unwritten = |e: io::Error| Error::io("write to", self.dir, e);
        let folder = File::open(self.dir).map_err(unwritten)?;
        let mut space = Allowance::of(&folder).map_err(unwritten)?;
        let mut out = DigestWriter::new(file);
        let allowed = self.limits.layer_bytes(layer.size);
        let mut buffer = vec![0; CHUNK];
        let mut done = 0;
        loop {
            let n = match decoder.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(unreadable(e)),
            };
            done += n as u64;
            self.check(done, n as u64, allowed, layer)?;
            space.take(&folder, n as u64).map_err(unwritten)?;
            out.write_all(&buffer[..n]).map_err(unwritten)?;
        }
        let (file, digest, _) = out.finish();
        Ok((file, digest))
    }

    fn check(&self, done: u64, more: u64, allowed: u64, layer: &Layer) -> Result<()> {
        let what = || format!("layer {}", layer.digest);
        if done > allowed {
            return Err(Error::too_large(
                what(),
                format!("{} compressed bytes grow to more than {allowed}", layer.size),
            ));
        }
        let total = self.total.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        if total > self.limits.image_uncompressed {
            return Err(Error::too_large(
                what(),
                format!(
                    "the image's layers hold more than {} bytes",
                    self.limits.image_uncompressed
                ),
            ));
        }
        Ok(())
    }
}

/// Checks a blob that was read to its end against its descriptor.
fn check_blob(blob: &DigestReader<impl Read>, rest: io::Result<u64>, layer: &Layer) -> Result<()> {
    let what = || format!("layer {}", layer.digest);
    let (actual, count) = (blob.digest(), blob.count());
    match rest {
        // The source failed, so the missing bytes are its fault.
        Err(e) if count < layer.size => return Err(Error::bad_layer(layer.digest, e)),
        _ => {}
    }
    if count != layer.size {
        return Err(Error::SizeMismatch { what: what(), expected: layer.size, actual: count });
    }
    match actual == layer.digest {
        true => Ok(()),
        false => Err(Error::DigestMismatch { what: what(), expected: layer.digest, actual }),
    }
}

enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Detects the compression by the first bytes (RFC 1952; RFC 8878, with skippable frames), since
/// media types are often wrong.
fn compression(magic: &[u8; 4]) -> Compression {
    match magic {
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Compression::Zstd,
        _ => Compression::None,
    }
}

/// Returns a reader of what was compressed into `input`.
fn decoder<'a>(
    compression: Compression,
    input: impl BufRead + 'a,
) -> io::Result<Box<dyn Read + 'a>> {
    let decoder: Box<dyn Read + 'a> = match compression {
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(input)?),
        Compression::None => Box::new(input),
    };
    Ok(decoder)
}

/// Reads the first bytes of a blob, by which its compression is told. Returns them with their
/// number, which is less than four at the end of a short blob.
fn first_bytes(blob: &mut impl Read) -> io::Result<([u8; 4], usize)> {
    let (mut magic, mut have) = ([0; 4], 0);
    while have < magic.len() {
        match blob.read(&mut magic[have..])? {
            0 => break,
            n => have += n,
        }
    }
    Ok((magic, have))
}

/// Uncompresses an archive of images that was compressed as a whole into an unnamed file in `dir`,
/// of at most `max` bytes. Returns `None` if `input` is not compressed.
pub(crate) fn uncompress_archive(
    input: &File,
    dir: &Path,
    max: u64,
    name: &str,
) -> Result<Option<File>> {
    use std::os::unix::fs::FileExt;
    let mut magic = [0; 4];
    // A file that is too short for a magic number is reported by the archive reader.
    if input.read_exact_at(&mut magic, 0).is_err() {
        return Ok(None);
    }
    let buffered = BufReader::with_capacity(CHUNK, input);
    let unreadable = |e: io::Error| Error::source(name, format!("cannot be uncompressed: {e}"));
    let compression = compression(&magic);
    if matches!(compression, Compression::None) {
        return Ok(None);
    }
    let decoder = decoder(compression, buffered).map_err(unreadable)?;
    let mut decoder = decoder.take(max.saturating_add(1));
    let mut out = tempfile::tempfile_in(dir).map_err(|e| Error::io("write to", dir, e))?;
    let mut buffer = vec![0; CHUNK];
    let mut done = 0;
    loop {
        let n = decoder.read(&mut buffer).map_err(unreadable)?;
        if n == 0 {
            return Ok(Some(out));
        }
        done += n as u64;
        if done > max {
            return Err(Error::too_large(name, format!("it grows to more than {max} bytes")));
        }
        out.write_all(&buffer[..n]).map_err(|e| Error::io("write to", dir, e))?;
    }
}

/// A reader that reports how many bytes passed through it.
struct Meter<'a, R> {
    inner: &'a mut DigestReader<R>,
    progress: &'a mut dyn FnMut(u64),
}

impl<R: Read> Read for Meter<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        (self.progress)(self.inner.count());
        Ok(n)
    }
}
