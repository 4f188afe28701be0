use super::*;
use crate::{OpenError, SharedDisk};

#[test]
fn a_lost_connection_is_made_again_and_asked_anew() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    let first = submit(&mut disk, 1, 0..2);
    let second = submit(&mut disk, 2, 4..5);
    assert_eq!(fetcher.wants(), [(0, 2), (4, 1)]);
    fetcher.fill(0..1);
    assert!(polled(&mut disk).is_empty());
    drop(fetcher);
    assert!(is_awake(&disk, NOW));
    assert!(polled(&mut disk).is_empty());
    rig.clock.advance(AGAIN - MILLISECOND);
    assert!(polled(&mut disk).is_empty() && rig.accept().is_none());
    rig.clock.advance(MILLISECOND);
    assert!(polled(&mut disk).is_empty());
    let fetcher = rig.welcome(&mut disk);
    assert_eq!(fetcher.wants(), [(1, 1), (4, 1)], "what came before is there");
    fetcher.fill(1..5);
    assert_eq!(ends(&mut disk, 2), [(1, Ok(())), (2, Ok(()))]);
    check(&first, 0);
    check(&second, 4);
}

#[test]
fn without_reads_that_wait_nothing_is_connected() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    fetcher.fill(0..1);
    drop(fetcher);
    assert!(polled(&mut disk).is_empty());
    rig.clock.advance(Duration::from_secs(60));
    assert!(polled(&mut disk).is_empty() && rig.accept().is_none());
    submit(&mut disk, 1, 0..1);
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
    assert!(rig.accept().is_none(), "its block is there");
    submit(&mut disk, 2, 1..2);
    let fetcher = rig.welcome(&mut disk);
    assert_eq!(fetcher.wants(), [(1, 1)]);
}

#[test]
fn a_fetcher_may_start_later() {
    let mut rig = Rig::new(64 * BLOCK);
    std::fs::remove_file(rig.socket()).unwrap();
    let mut disk = rig.disk();
    let span = submit(&mut disk, 1, 0..1);
    rig.clock.advance(AGAIN);
    assert!(polled(&mut disk).is_empty());
    rig.listener = listen(&rig.socket());
    rig.clock.advance(AGAIN);
    assert!(polled(&mut disk).is_empty());
    let fetcher = rig.welcome(&mut disk);
    assert_eq!(fetcher.wants(), [(0, 1)]);
    fetcher.fill(0..1);
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
    check(&span, 0);
}

/// Has a fetcher send `messages`, after [`Answer::Open`] if it `opens`, to a disk with a read of
/// block 0. The connection ends, and nothing else comes of them.
fn ends_the_connection(opens: bool, messages: &[Vec<u8>]) {
    let rig = Rig::new(64 * BLOCK);
    let mut disk = rig.disk();
    let fetcher = rig.accept().unwrap();
    if opens {
        fetcher.say(&Answer::Open);
    }
    submit(&mut disk, 1, 0..1);
    messages.iter().for_each(|message| fetcher.send(message));
    assert!(polled(&mut disk).is_empty(), "{messages:?}");
    while fetcher.hear().is_some() {}
    assert!(fetcher.is_over(), "{messages:?}");
    rig.clock.advance(AGAIN);
    assert!(polled(&mut disk).is_empty());
    let fetcher = rig.welcome(&mut disk);
    assert_eq!(fetcher.wants(), [(0, 1)], "{messages:?}");
    // The disk is dropped with the read, which is its owner's fault and no disaster.
}

#[test]
fn messages_that_break_the_protocol_end_the_connection() {
    let have = Answer::Have(extent(0..1)).encode();
    let failed = Answer::Failed(extent(0..1)).encode();
    let open = Answer::Open.encode();
    let refused = Answer::Refused(b"no such image").encode();
    ends_the_connection(false, std::slice::from_ref(&have));
    ends_the_connection(false, std::slice::from_ref(&failed));
    ends_the_connection(false, &[refused.clone(), have.clone()]);
    ends_the_connection(true, std::slice::from_ref(&refused));
    ends_the_connection(true, &[open.clone(), have.clone()]);
    let beyond = Extent { offset: 0, bytes: 64 * BLOCK + 1 };
    ends_the_connection(true, &[Answer::Have(beyond).encode()]);
    ends_the_connection(true, &[Answer::Failed(beyond).encode()]);
    // A message that is too long, whose beginning would be valid, and some of no form.
    ends_the_connection(true, &[[&refused[..], &[b'a'; MOST]].concat()]);
    ends_the_connection(false, &[[&open[..], &[0; MOST]].concat()]);
    for junk in [&b"x"[..], &[0; 24], &[0xff; 24], &[0; MOST]] {
        ends_the_connection(true, &[junk.to_vec(), have.clone()]);
        ends_the_connection(false, &[junk.to_vec(), open.clone()]);
    }
    ends_the_connection(true, &[Want(extent(0..1)).encode()]);
}

#[test]
fn a_refused_image_is_asked_for_with_longer_pauses_and_its_read_fails_in_time() {
    let rig = Rig::new(64 * BLOCK);
    let mut disk = rig.disk();
    submit(&mut disk, 1, 0..1);
    let refuse = || rig.accept().unwrap().say(&Answer::Refused(b"no such image"));
    for doublings in 0..7 {
        refuse();
        assert!(polled(&mut disk).is_empty());
        let pause = AGAIN * 2_u32.pow(doublings);
        rig.clock.advance(pause - MILLISECOND);
        assert!(polled(&mut disk).is_empty() && rig.accept().is_none(), "{pause:?}");
        rig.clock.advance(MILLISECOND);
        assert!(polled(&mut disk).is_empty());
    }
    refuse();
    assert!(polled(&mut disk).is_empty());
    // The pauses so far were 12.7 s, and the next one is 10 s.
    rig.clock.advance(Duration::from_millis(7300) - MILLISECOND);
    assert!(polled(&mut disk).is_empty());
    rig.clock.advance(MILLISECOND);
    assert_eq!(polled(&mut disk), [(1, Err(DiskError::Io(libc::ETIMEDOUT)))]);
    submit(&mut disk, 2, 0..1);
    rig.clock.advance(Duration::from_millis(2700) - MILLISECOND);
    assert!(polled(&mut disk).is_empty() && rig.accept().is_none());
    rig.clock.advance(MILLISECOND);
    assert!(polled(&mut disk).is_empty());
    let fetcher = rig.welcome(&mut disk);
    assert_eq!(fetcher.wants(), [(0, 1)]);
    // A fetcher that had the image is asked again soon.
    drop(fetcher);
    assert!(polled(&mut disk).is_empty());
    rig.clock.advance(AGAIN);
    assert!(polled(&mut disk).is_empty() && rig.accept().is_some());
}

/// With the machine's own clock: a thread that sleeps is woken to connect.
#[test]
fn a_sleeping_thread_is_woken_to_connect() {
    let mut rig = Rig::new(64 * BLOCK);
    std::fs::remove_file(rig.socket()).unwrap();
    let options = FileOptions { block_size: 4096, ..FileOptions::default() };
    let mut disk = LazyDisk::open(&rig.image(), DIGEST, rig.socket(), &options).unwrap();
    let span = submit(&mut disk, 1, 5..6);
    rig.listener = listen(&rig.socket());
    let fetcher = loop {
        assert!(is_awake(&disk, LONG));
        assert!(polled(&mut disk).is_empty());
        if let Some(fetcher) = rig.accept() {
            break fetcher;
        }
    };
    fetcher.say(&Answer::Open);
    assert!(is_awake(&disk, LONG));
    assert!(polled(&mut disk).is_empty());
    assert_eq!(fetcher.wants(), [(5, 1)]);
    fetcher.fill(0..64);
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
    check(&span, 5);
}

#[test]
fn disks_of_one_image_know_each_for_itself_what_is_there() {
    let rig = Rig::new(64 * BLOCK);
    let options = FileOptions::default();
    let shared = SharedDisk::lazy(&rig.image(), DIGEST, rig.socket(), &options).unwrap();
    let mut one = shared.open(false).unwrap();
    let first = rig.welcome(&mut one);
    let mut two = shared.open(true).unwrap();
    let second = rig.welcome(&mut two);
    assert!(one.geometry().read_only && shared.geometry() == one.geometry());
    let spans = [submit(&mut one, 1, 3..4), submit(&mut two, 2, 3..4)];
    first.fill(3..4);
    assert_eq!(ends(&mut one, 1), [(1, Ok(()))]);
    assert!(polled(&mut two).is_empty());
    assert_eq!(second.wants(), [(3, 1)]);
    second.fill(3..4);
    assert_eq!(ends(&mut two, 1), [(2, Ok(()))]);
    spans.iter().for_each(|span| check(span, 3));
    shared.resize(None).unwrap();
    shared.trim().unwrap();
    let refused = shared.resize(Some(BLOCK)).unwrap_err().to_string();
    assert!(refused.contains("an image keeps its size"), "{refused}");
    assert_eq!(one.refresh(), shared.geometry());
}

#[test]
fn what_cannot_be_an_image_is_refused() {
    let rig = Rig::new(64 * BLOCK);
    let open = |socket: PathBuf| {
        let options = FileOptions::default();
        LazyDisk::open(&rig.image(), DIGEST, socket, &options).err().unwrap()
    };
    let long = rig.folder.path().join("x".repeat(200));
    assert!(open(long).to_string().starts_with("cannot connect to "));
    let image = File::options().write(true).open(rig.image()).unwrap();
    image.set_len(64 * BLOCK + 100).unwrap();
    assert!(
        matches!(open(rig.socket()), OpenError::Size { bytes, .. } if bytes == 64 * BLOCK + 100)
    );
    if image.set_len(1 << 41).is_ok() {
        assert!(open(rig.socket()).to_string().contains("too large"));
    }
}
