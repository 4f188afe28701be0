//! An archive as a sequence of messages.

use std::io::{Read, Result, Write};

/// The most bytes of a message.
pub const PIECE: usize = 32 << 10;

/// A writer that gathers data in pieces of [`PIECE`] bytes, and hands each to a function.
pub struct PieceWriter<S> {
    send: S,
    piece: Vec<u8>,
}

impl<S: FnMut(Vec<u8>) -> Result<()>> PieceWriter<S> {
    /// Makes a writer that hands its pieces to `send`. The last piece is handed over by a flush.
    pub fn new(send: S) -> Self {
        Self { send, piece: Vec::with_capacity(PIECE) }
    }
}

impl<S: FnMut(Vec<u8>) -> Result<()>> Write for PieceWriter<S> {
    fn write(&mut self, data: &[u8]) -> Result<usize> {
        let taken = data.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&data[..taken]);
        if self.piece.len() == PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        (self.send)(std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE)))
    }
}

/// A reader of the pieces that a function returns, one after the other.
pub struct PieceReader<N> {
    /// Returns `None` after the last piece.
    next: N,
    piece: Vec<u8>,
    at: usize,
    has_ended: bool,
}

impl<N: FnMut() -> Result<Option<Vec<u8>>>> PieceReader<N> {
    /// Makes a reader of the pieces of `next`, which returns `None` after the last one and an error
    /// if they break off.
    pub fn new(next: N) -> Self {
        Self { next, piece: Vec::new(), at: 0, has_ended: false }
    }
}

impl<N: FnMut() -> Result<Option<Vec<u8>>>> Read for PieceReader<N> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        // A piece may be empty, which is no end.
        while self.at == self.piece.len() && !self.has_ended {
            match (self.next)()? {
                Some(piece) => (self.piece, self.at) = (piece, 0),
                None => self.has_ended = true,
            }
        }
        let read = buffer.len().min(self.piece.len() - self.at);
        buffer[..read].copy_from_slice(&self.piece[self.at..self.at + read]);
        self.at += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_again() {
        let sent: Vec<u8> = (0..3 * PIECE + 7).map(|at| at as u8).collect();
        let mut pieces = Vec::new();
        let mut writer = PieceWriter::new(|piece| {
            pieces.push(piece);
            Ok(())
        });
        for part in sent.chunks(1000) {
            writer.write_all(part).unwrap();
        }
        writer.flush().unwrap();
        writer.flush().unwrap();
        let lengths: Vec<_> = pieces.iter().map(Vec::len).collect();
        assert_eq!(lengths, [PIECE, PIECE, PIECE, 7]);
        pieces.insert(1, Vec::new());
        let mut left = pieces.into_iter();
        let mut reader = PieceReader::new(|| Ok(left.next()));
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, sent);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the end stays the end");
    }

    #[test]
    fn an_archive_that_breaks_off_is_an_error() {
        let mut reader = PieceReader::new(|| Err(std::io::ErrorKind::UnexpectedEof.into()));
        assert!(reader.read(&mut [0]).is_err());
    }
}
