//! Records that are sealed and opened in place. [`Header`] has their layout.

use crate::error::TransformError;
pub use crate::header::{
    CHECKSUM, Flags, HEADER, Header, HeaderError, MAX_BODY, MAX_PAYLOAD, MAX_RECORD, OVERHEAD, TAG,
};
use crate::key::{Opener, Sealer, Ticket};

/// Seals a record in place. The caller has put the payload behind [`HEADER`] bytes and leaves
/// [`TAG`] bytes behind it. The record is neither compressed nor checked.
///
/// # Errors
/// [`TransformError::NoRoom`] if the payload is empty or too large, [`TransformError::Key`] if the
/// key is used up.
pub fn seal(sealer: &mut Sealer, record: &mut [u8]) -> Result<(), TransformError> {
    let room = record.len();
    let payload = room.saturating_sub(HEADER + TAG);
    if !(1..=MAX_PAYLOAD).contains(&payload) {
        return Err(TransformError::NoRoom { input: payload, room });
    }
    let Ticket { generation, counter } = sealer.ticket()?;
    let header = Header { flags: Flags::SEALED, generation, counter, body: payload, payload };
    let (head, rest) = record.split_at_mut(HEADER);
    let (body, tag) = rest.split_at_mut(payload);
    head.copy_from_slice(&header.bytes());
    tag.copy_from_slice(&sealer.seal(Ticket { generation, counter }, &header.bytes(), body)?);
    Ok(())
}

/// Reads the header of `record`, which must be exactly one record.
pub(crate) fn header_of(record: &[u8]) -> Result<Header, TransformError> {
    let there = record.len();
    let header =
        Header::parse(record)?.ok_or(TransformError::NotWhole { there, record: HEADER })?;
    match header.record() {
        whole if whole == there => Ok(header),
        record => Err(TransformError::NotWhole { there, record }),
    }
}

/// Splits a record into its header as received and the rest.
pub(crate) fn split(record: &mut [u8]) -> Result<(&mut [u8; HEADER], &mut [u8]), TransformError> {
    let there = record.len();
    record.split_first_chunk_mut().ok_or(TransformError::NotWhole { there, record: HEADER })
}

/// Opens `record`, exactly one that [`seal`] made, in place, and returns its payload.
///
/// # Errors
/// All are the peer's fault; the contents of `record` are undefined afterwards.
pub fn open<'a>(opener: &mut Opener, record: &'a mut [u8]) -> Result<&'a [u8], TransformError> {
    let header = header_of(record)?;
    if header.flags != Flags::SEALED {
        return Err(TransformError::Sealing);
    }
    let (raw, body) = split(record)?;
    Ok(opener.open(&header, raw, body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_sealed_and_opened_in_place() {
        use crate::{Cipher, Secret};

        let secret = Secret::derive(&[1; 32], &[b"a"]);
        let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
        let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
        let mut record = vec![7; HEADER + 100 + TAG];
        for _ in 0..2 {
            record[HEADER..HEADER + 100].fill(7);
            seal(&mut sealer, &mut record).unwrap();
            for at in 0..record.len() {
                let mut damaged = record.clone();
                damaged[at] ^= 1;
                assert!(open(&mut opener, &mut damaged).is_err(), "byte {at}");
            }
            assert!(open(&mut opener, &mut record[..139]).is_err());
            let mut replayed = record.clone();
            assert_eq!(open(&mut opener, &mut record), Ok(&[7; 100][..]));
            assert!(open(&mut opener, &mut replayed).is_err());
        }
        assert!(seal(&mut sealer, &mut record[..HEADER + TAG]).is_err(), "no payload");
        assert!(seal(&mut sealer, &mut vec![0; HEADER + TAG + MAX_PAYLOAD + 1]).is_err());
    }
}
