//! Decompression of several formats, with a cap on the result.

use std::io::{self, Read};

/// The compression format, detected by the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Xz,
    Zstd,
    /// LZ4's legacy format, with which kernels are compressed.
    Lz4Legacy,
}

impl Compression {
    /// Detects the format. Returns `None` if it is not known.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        [
            (&b"\x1f\x8b"[..], Self::Gzip),
            (b"\xfd7zXZ\0", Self::Xz),
            (b"\x28\xb5\x2f\xfd", Self::Zstd),
            (b"\x02\x21\x4c\x18", Self::Lz4Legacy),
        ]
        .into_iter()
        .find(|(magic, _)| bytes.starts_with(magic))
        .map(|(_, compression)| compression)
    }

    /// Decompresses the stream at the beginning of `bytes`; bytes after its end are ignored.
    /// Returns an error if the result would be larger than `cap` bytes.
    pub(crate) fn unpack(self, bytes: &[u8], cap: usize) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip => read_capped(flate2::read::GzDecoder::new(bytes), cap),
            Self::Xz => read_capped(lzma_rust2::XzReader::new(bytes, false), cap),
            Self::Zstd => read_capped(zstd::Decoder::new(bytes)?.single_frame(), cap),
            Self::Lz4Legacy => unpack_lz4(bytes, cap),
        }
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it unpacks to more than it may")
}

fn read_capped(reader: impl Read, cap: usize) -> io::Result<Vec<u8>> {
    let mut unpacked = Vec::new();
    reader.take(cap as u64 + 1).read_to_end(&mut unpacked)?;
    if unpacked.len() > cap { Err(too_large()) } else { Ok(unpacked) }
}

/// Unpacks LZ4's legacy format: a magic number, then blocks of at most 8 MiB, each after its
/// compressed size as a 32-bit number. There is no end marker. Kernels append their unpacked size,
/// which looks like a size without a block after it (LZ4, *lz4_Frame_format.md*, Legacy frame).
fn unpack_lz4(bytes: &[u8], cap: usize) -> io::Result<Vec<u8>> {
    const BLOCK: usize = 8 << 20;
    let mut unpacked = Vec::new();
    let mut block = vec![0; BLOCK];
    let mut rest = bytes.get(4..).unwrap_or_default();
    while let Some((size, after)) = rest.split_first_chunk::<4>() {
        if after.is_empty() {
            break;
        }
        let size = u32::from_le_bytes(*size) as usize;
        let packed = after.get(..size).ok_or(io::ErrorKind::UnexpectedEof)?;
        let length = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if unpacked.len() + length > cap {
            return Err(too_large());
        }
        unpacked.extend_from_slice(&block[..length]);
        rest = &after[size..];
    }
    Ok(unpacked)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use super::*;

    /// The uncompressed text of the tests.
    const TEXT: &[u8] = b"all work and no play makes jack a dull boy, all work and no play";

    fn gzip() -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Default::default());
        encoder.write_all(TEXT).unwrap();
        encoder.finish().unwrap()
    }

    /// Makes a legacy stream of one block of literals.
    pub(crate) fn lz4(content: &[u8]) -> Vec<u8> {
        let mut block = vec![0xf0];
        let mut more = content.len() - 15;
        while more >= 255 {
            block.push(255);
            more -= 255;
        }
        block.push(more as u8);
        block.extend_from_slice(content);
        let size = block.len() as u32;
        [b"\x02\x21\x4c\x18", &size.to_le_bytes()[..], &block].concat()
    }

    /// Compresses `TEXT` with `xz --check=crc32`. Returns `None` if xz is not installed.
    fn xz() -> Option<Vec<u8>> {
        let mut child = std::process::Command::new("xz")
            .args(["--check=crc32", "-c"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .ok()?;
        child.stdin.take()?.write_all(TEXT).ok()?;
        Some(child.wait_with_output().ok()?.stdout)
    }

    fn streams() -> Vec<Vec<u8>> {
        let mut streams = vec![gzip(), zstd::encode_all(TEXT, 3).unwrap(), lz4(TEXT)];
        match xz() {
            Some(stream) => streams.push(stream),
            None => println!("SKIPPED: part of unpack::tests: needs xz"),
        }
        streams
    }

    #[test]
    fn every_format_is_known_and_unpacked() {
        for stream in streams() {
            let compression = Compression::of(&stream).unwrap();
            assert_eq!(compression.unpack(&stream, TEXT.len()).unwrap(), TEXT, "{compression:?}");
            // Kernels append their unpacked size.
            let appended = [&stream[..], &(TEXT.len() as u32).to_le_bytes()].concat();
            assert_eq!(compression.unpack(&appended, TEXT.len()).unwrap(), TEXT);
        }
        assert_eq!(Compression::of(TEXT), None);
    }

    #[test]
    fn the_cap_holds() {
        for stream in streams() {
            let compression = Compression::of(&stream).unwrap();
            assert!(compression.unpack(&stream, TEXT.len() - 1).is_err(), "{compression:?}");
        }
    }

    #[test]
    fn no_damage_panics() {
        for stream in streams() {
            let compression = Compression::of(&stream).unwrap();
            for at in 0..stream.len() {
                let _ = compression.unpack(&stream[..at], 1 << 16);
                let mut damaged = stream.clone();
                damaged[at] ^= 0xff;
                let _ = compression.unpack(&damaged, 1 << 16);
            }
        }
    }
}
