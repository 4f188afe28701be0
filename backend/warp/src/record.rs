//! Records that are sealed and opened in place. [`Header`] has their layout.

use crate::error::RecordError;
pub use crate::header::{
    CHECKSUM, Flags, HEADER, Header, HeaderError, MAX_BODY, MAX_PAYLOAD, MAX_RECORD, OVERHEAD, TAG,
};
use crate::key::{Opener, Sealer, Ticket};

/// Seals a record in place. The caller has put the payload behind [`HEADER`] bytes and leaves
/// [`TAG`] bytes behind it. The record is neither compressed nor checked.
///
/// # Errors
/// [`RecordError::NoRoom`] if the payload is empty or too large, [`RecordError::Key`] if the
/// key is used up.
pub fn seal(sealer: &mut Sealer, record: &mut [u8]) -> Result<(), RecordError> {
    let room = record.len();
    let payload = room.saturating_sub(HEADER + TAG);
    if !(1..=MAX_PAYLOAD).contains(&payload) {
        return Err(RecordError::NoRoom { input: payload, room });
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
///
/// # Errors
/// [`RecordError::Header`], [`RecordError::NotWhole`].
pub fn header_of(record: &[u8]) -> Result<Header, RecordError> {
    let there = record.len();
    let header = Header::parse(record)?.ok_or(RecordError::NotWhole { there, record: HEADER })?;
    match header.record() {
        whole if whole == there => Ok(header),
        record => Err(RecordError::NotWhole { there, record }),
    }
}

/// Splits a record into its header as received and the rest.
///
/// # Errors
/// [`RecordError::NotWhole`] if there is no whole header.
pub fn split(record: &mut [u8]) -> Result<(&mut [u8; HEADER], &mut [u8]), RecordError> {
    let there = record.len();
    record.split_first_chunk_mut().ok_or(RecordError::NotWhole { there, record: HEADER })
}

/// Opens `record`, exactly one that [`seal`] made, in place, and returns its payload.
///
/// # Errors
/// All are the peer's fault; the contents of `record` are undefined afterwards.
pub fn open<'a>(opener: &mut Opener, record: &'a mut [u8]) -> Result<&'a [u8], RecordError> {
    let header = header_of(record)?;
    if header.flags != Flags::SEALED {
        return Err(RecordError::Sealing);
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

    #[test]
    fn after_the_last_record_of_the_last_generation_every_attempt_fails() {
        use crate::{Cipher, KeyError, Secret};

        let sealer = Sealer::new(Cipher::Aes128Gcm, &Secret::derive(&[1; 32], &[]));
        let mut last = sealer.with_limit(1).at_generation(u32::MAX);
        let mut record = vec![7; HEADER + 40 + TAG];
        seal(&mut last, &mut record).unwrap();
        for _ in 0..3 {
            assert_eq!(seal(&mut last, &mut record), Err(RecordError::Key(KeyError::UsedUp)));
        }
    }
}
