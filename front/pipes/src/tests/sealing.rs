//! Records that are made, opened and damaged.

use slipway_ram::Span;

use super::random::Random;
use crate::{Compression, Input, Options, Output, Stretch, TransformError, Worker};
use slipway_warp::record::{Flags, HEADER, Header, MAX_PAYLOAD, MAX_RECORD, OVERHEAD};
use slipway_warp::{Cipher, KeyError, Opener, RecordError, Sealer, Secret};

fn secret() -> Secret {
    Secret::derive(&[3; 32], &[b"tenant", b"link", b"there"])
}

fn pair(cipher: Cipher) -> (Sealer, Opener) {
    (Sealer::new(cipher, &secret()), Opener::new(cipher, &secret()))
}

fn all_options() -> impl Iterator<Item = Options> {
    [Compression::None, Compression::Lz4, Compression::Zstd]
        .into_iter()
        .flat_map(|compression| [false, true].map(|checksum| Options { compression, checksum }))
}

/// Makes one record of `payload`.
fn record(
    worker: &mut Worker,
    sealer: Option<&mut Sealer>,
    options: Options,
    payload: &[u8],
) -> Vec<u8> {
    let mut made = vec![0; payload.len() + OVERHEAD];
    let length = worker
        .seal(sealer, options, &Input::Bytes(payload), &mut Output::Bytes(&mut made))
        .unwrap();
    made.truncate(length);
    made
}

fn open(
    worker: &mut Worker,
    opener: Option<&mut Opener>,
    record: &[u8],
) -> Result<Vec<u8>, TransformError> {
    let (mut record, mut payload) = (record.to_vec(), vec![0; MAX_PAYLOAD]);
    let length = worker.open(opener, &mut record, &mut Output::Bytes(&mut payload))?;
    payload.truncate(length);
    Ok(payload)
}

#[test]
fn what_is_sealed_opens() {
    let (mut worker, mut random) = (Worker::new(), Random::new(2));
    for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm] {
        let (mut sealer, mut opener) = pair(cipher);
        for options in all_options() {
            for length in [1, 2, 15, 16, 17, 1000, 16 * 1024, 65_535, 65_536, MAX_PAYLOAD] {
                for payload in [random.bytes(length), random.text(length)] {
                    let sealed = record(&mut worker, Some(&mut sealer), options, &payload);
                    assert!(sealed.len() <= length + OVERHEAD && sealed.len() <= MAX_RECORD);
                    let header = Header::parse(&sealed).unwrap().unwrap();
                    assert_eq!((header.record(), header.payload), (sealed.len(), length));
                    assert!(length < 32 || !sealed.windows(32).any(|part| part == &payload[..32]));
                    assert_eq!(open(&mut worker, Some(&mut opener), &sealed).unwrap(), payload);
                    let plain = record(&mut worker, None, options, &payload);
                    assert_eq!(open(&mut worker, None, &plain).unwrap(), payload);
                }
            }
        }
    }
}

#[test]
fn compression_pays_or_is_left_out() {
    let (mut worker, mut random) = (Worker::new(), Random::new(3));
    for (compression, flag) in [(Compression::Lz4, Flags::LZ4), (Compression::Zstd, Flags::ZSTD)] {
        let options = Options { compression, checksum: true };
        let text = record(&mut worker, None, options, &random.text(10_000));
        assert!(text.len() < 8_000 && Header::parse(&text).unwrap().unwrap().flags.has(flag));
        let noise = record(&mut worker, None, options, &random.bytes(10_000));
        assert!(!Header::parse(&noise).unwrap().unwrap().flags.is_compressed());
    }
}

#[test]
fn rings_are_read_and_written_around_their_end() {
    let (mut worker, mut random) = (Worker::new(), Random::new(4));
    let (mut sealer, mut opener) = pair(Cipher::Aes128Gcm);
    let (from, link, to) = (Span::heap(4096), Span::heap(8192), Span::heap(2048));
    for round in 0..500 {
        let options = all_options().nth(round % 6).unwrap();
        let length = 1 + random.below(2000);
        let payload = random.text(length);
        let at = |random: &mut Random, size: usize, length: usize| {
            Stretch::new(random.next(), length as u64, size as u64).unwrap()
        };
        let source = at(&mut random, 4096, payload.len());
        Output::Ring(&from, source).write(&payload).unwrap();
        let sink = at(&mut random, 8192, payload.len() + OVERHEAD);
        let (input, mut output) = (Input::Ring(&from, source), Output::Ring(&link, sink));
        let length = worker.seal(Some(&mut sealer), options, &input, &mut output).unwrap();
        let sink = sink.first(length);
        let back = at(&mut random, 2048, payload.len());
        let (input, mut output) = (Input::Ring(&link, sink), Output::Ring(&to, back));
        assert_eq!(worker.open_from(Some(&mut opener), &input, &mut output), Ok(payload.len()));
        let mut read = vec![0; payload.len()];
        Input::Ring(&to, back).read(&mut read).unwrap();
        assert_eq!(read, payload);
    }
}

#[test]
fn copies_and_their_checksums_agree_wherever_the_bytes_lie() {
    let (mut worker, mut random) = (Worker::new(), Random::new(5));
    let (a, b) = (Span::heap(65_536), Span::heap(32_768));
    for _ in 0..200 {
        let length = 1 + random.below(32_768);
        let bytes = random.bytes(length);
        let source = Stretch::new(random.next(), bytes.len() as u64, 65_536).unwrap();
        let sink = Stretch::new(random.next(), bytes.len() as u64, 32_768).unwrap();
        Output::Ring(&a, source).write(&bytes).unwrap();
        let sum = crc_fast::crc32_iscsi(&bytes);
        let (mut plain, mut back) = (vec![0; bytes.len()], vec![0; bytes.len()]);
        let input = Input::Ring(&a, source);
        let done = worker.copy_checked(&input, &mut Output::Bytes(&mut plain)).unwrap();
        assert_eq!((done, &plain), ((bytes.len(), sum), &bytes));
        let done = worker.copy_checked(&input, &mut Output::Ring(&b, sink)).unwrap();
        assert_eq!(done, (bytes.len(), sum));
        let done = worker.copy_checked(&Input::Bytes(&bytes), &mut Output::Ring(&b, sink)).unwrap();
        assert_eq!(done, (bytes.len(), sum));
        assert_eq!(
            worker.copy(&Input::Ring(&b, sink), &mut Output::Bytes(&mut back)),
            Ok(bytes.len())
        );
        assert_eq!(back, bytes);
        assert_eq!(
            worker.copy(&input, &mut Output::Ring(&b, sink.first(7))),
            Ok(7.min(bytes.len()))
        );
    }
    // The check value of CRC32C, for "123456789".
    assert_eq!(crc_fast::crc32_iscsi(b"123456789"), 0xe306_9283);
}

#[test]
fn every_bit_of_a_sealed_record_counts() {
    let (mut worker, payload) = (Worker::new(), *b"a payload, sealed");
    let (mut sealer, _) = pair(Cipher::Aes256Gcm);
    let sealed = record(&mut worker, Some(&mut sealer), Options::default(), &payload);
    for bit in 0..sealed.len() * 8 {
        let (_, mut opener) = pair(Cipher::Aes256Gcm);
        let mut damaged = sealed.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(open(&mut worker, Some(&mut opener), &damaged).is_err(), "bit {bit}");
        // A record that fails to open leaves the opener unchanged: the intact one still opens.
        assert_eq!(open(&mut worker, Some(&mut opener), &sealed).unwrap(), payload);
    }
}

#[test]
fn records_in_the_open_are_checked_by_their_sum() {
    let (mut worker, mut random) = (Worker::new(), Random::new(6));
    for options in all_options().filter(|options| options.checksum) {
        let payload = random.text(500);
        let plain = record(&mut worker, None, options, &payload);
        for at in HEADER..plain.len() {
            let mut damaged = plain.clone();
            damaged[at] ^= 0x10;
            // A compressed body has bits without effect: the payload may be right all the same.
            match open(&mut worker, None, &damaged) {
                Ok(opened) => assert!(opened == payload && at < plain.len() - 4, "byte {at}"),
                Err(error) => assert_ne!(error, TransformError::from(RecordError::Sealing)),
            }
        }
    }
}

#[test]
fn the_order_is_kept_and_nothing_comes_twice() {
    let mut worker = Worker::new();
    let (mut sealer, mut opener) = pair(Cipher::Aes128Gcm);
    let mut next = |n: u8| record(&mut worker, Some(&mut sealer), Options::default(), &[n]);
    let records: Vec<_> = (0..3).map(&mut next).collect();
    let not_next = |counter| TransformError::from(KeyError::NotNext { generation: 0, counter });
    assert_eq!(open(&mut worker, Some(&mut opener), &records[1]), Err(not_next(1)));
    assert_eq!(open(&mut worker, Some(&mut opener), &records[0]), Ok(vec![0]));
    assert_eq!(open(&mut worker, Some(&mut opener), &records[0]), Err(not_next(0)));
    assert_eq!(open(&mut worker, Some(&mut opener), &records[1]), Ok(vec![1]));
    assert_eq!(
        open(&mut worker, None, &records[2]),
        Err(TransformError::from(RecordError::Sealing))
    );
    let plain = record(&mut worker, None, Options::default(), &[9]);
    assert_eq!(
        open(&mut worker, Some(&mut opener), &plain),
        Err(TransformError::from(RecordError::Sealing))
    );
}

#[test]
fn generations_follow_each_other_and_end() {
    let mut worker = Worker::new();
    let (sealer, mut opener) = pair(Cipher::Aes128Gcm);
    let mut sealer = sealer.with_limit(3);
    let payload = [1; 40];
    let mut seen = Vec::new();
    for round in 0..10 {
        if round == 7 {
            sealer.rekey().unwrap();
        }
        let sealed = record(&mut worker, Some(&mut sealer), Options::default(), &payload);
        let header = Header::parse(&sealed).unwrap().unwrap();
        seen.push((header.generation, header.counter));
        assert_eq!(open(&mut worker, Some(&mut opener), &sealed).unwrap(), payload);
        assert_eq!(opener.generation(), sealer.generation());
    }
    let expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1), (3, 2)];
    assert_eq!(seen, expected);
}

#[test]
fn keys_differ_by_context_and_cipher() {
    let mut worker = Worker::new();
    let contexts: [&[&[u8]]; 4] =
        [&[b"tenant", b"link", b"back"], &[b"tenantlink", b"there"], &[b"tenant", b"link"], &[]];
    for context in contexts {
        let mut sealer = Sealer::new(Cipher::Aes128Gcm, &Secret::derive(&[3; 32], context));
        let sealed = record(&mut worker, Some(&mut sealer), Options::default(), b"x");
        let (_, mut opener) = pair(Cipher::Aes128Gcm);
        let forged = Err(TransformError::from(KeyError::Forged));
        assert_eq!(open(&mut worker, Some(&mut opener), &sealed), forged);
    }
    let (mut sealer, _) = pair(Cipher::Aes128Gcm);
    let sealed = record(&mut worker, Some(&mut sealer), Options::default(), b"x");
    let (_, mut opener) = pair(Cipher::Aes256Gcm);
    assert!(open(&mut worker, Some(&mut opener), &sealed).is_err());
}

#[test]
fn room_is_asked_for_before_anything_happens() {
    let mut worker = Worker::new();
    let (mut sealer, mut opener) = pair(Cipher::Aes128Gcm);
    let mut small = [0; 100];
    for length in [0, 61, MAX_PAYLOAD + 1] {
        let payload = vec![0; length];
        let (input, mut output) = (Input::Bytes(&payload), Output::Bytes(&mut small));
        let sealed = worker.seal(Some(&mut sealer), Options::default(), &input, &mut output);
        assert!(matches!(sealed, Err(TransformError::Record(RecordError::NoRoom { .. }))));
    }
    let mut sealed = record(&mut worker, Some(&mut sealer), Options::default(), &[5; 60]);
    let narrow = worker.open(Some(&mut opener), &mut sealed, &mut Output::Bytes(&mut small[..59]));
    let no_room = RecordError::NoRoom { input: 60, room: 59 };
    assert_eq!(narrow, Err(TransformError::from(no_room)));
    assert_eq!(open(&mut worker, Some(&mut opener), &sealed).unwrap(), [5; 60]);
}
