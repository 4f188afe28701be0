//! Entries of the fuzz targets.

use crate::{Compression, Input, Options, Output, Worker};
use slipway_warp::record::{Header, MAX_PAYLOAD, MAX_RECORD};
use slipway_warp::{Cipher, Opener, Sealer, Secret};

/// Feeds `data` to the parsers as bytes from a peer (headers, plain records, sealed records). Then
/// makes valid records from the same bytes, and damages some of them.
pub fn records(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let mut worker = Worker::new();
    let mut payload = vec![0; MAX_PAYLOAD];
    if let Ok(Some(header)) = Header::parse(data) {
        assert!(header.record() <= MAX_RECORD && header.payload <= MAX_PAYLOAD);
        assert_eq!(Header::parse(&header.bytes()), Ok(Some(header)));
        let mut record = data[..header.record().min(data.len())].to_vec();
        let opened = worker.open(None, &mut record, &mut Output::Bytes(&mut payload));
        assert!(opened.is_err() || opened == Ok(header.payload));
        let secret = Secret::derive(b"fuzz", &[]);
        let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
        let opened = worker.open(Some(&mut opener), &mut record, &mut Output::Bytes(&mut payload));
        assert!(opened.is_err(), "nobody has the key");
    }
    honest(&mut worker, *choice, data);
}

/// Makes a record of `data` with the options that `choice` encodes, and opens it intact and
/// damaged.
fn honest(worker: &mut Worker, choice: u8, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    let compressions = [Compression::None, Compression::Lz4, Compression::Zstd];
    let compression = compressions[usize::from(choice % 3)];
    let options = Options { compression, checksum: choice & 16 != 0 };
    let secret = Secret::derive(b"fuzz", &[b"honest"]);
    let sealed = choice & 32 != 0;
    let pair =
        || (Sealer::new(Cipher::Aes256Gcm, &secret), Opener::new(Cipher::Aes256Gcm, &secret));
    let (mut sealer, mut opener) = pair();
    let mut made = vec![0; data.len() + slipway_warp::record::OVERHEAD];
    let (input, mut output) = (Input::Bytes(data), Output::Bytes(&mut made));
    let length = worker.seal(sealed.then_some(&mut sealer), options, &input, &mut output);
    let Ok(length) = length else { return assert!(data.len() > MAX_PAYLOAD) };
    let mut payload = vec![0; data.len()];
    let mut damaged = made[..length].to_vec();
    let bit =
        data.iter().fold(usize::from(choice), |sum, byte| sum * 31 % 9973 + usize::from(*byte));
    damaged[bit / 8 % length] ^= 1 << (bit % 8);
    let opened = {
        let mut output = Output::Bytes(&mut payload);
        worker.open(sealed.then_some(&mut opener), &mut damaged, &mut output)
    };
    assert!(!sealed || opened.is_err(), "a bit that does not count");
    let opened = {
        let mut output = Output::Bytes(&mut payload);
        worker.open(sealed.then_some(&mut opener), &mut made[..length], &mut output)
    };
    assert_eq!((opened, payload.as_slice()), (Ok(data.len()), data));
}
