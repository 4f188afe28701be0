//! Requests of a fetcher, their data in the image's file, and copies of files.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slipway_lazy_spec::Extent;

use super::parts::{CHUNK, anonymous, extent, noise, pulled};
use super::support::*;
use crate::lazy::budget::{Budget, Urgency};
use crate::lazy::map::{Map, Span};
use crate::lazy::partial::have_dir;
use crate::lazy::serve::{Fetcher, Opened};
use crate::{Access, Digest, Error, Image, Reference};

#[tokio::test]
async fn wanted_members_come_before_the_prefetch_part_and_that_before_the_rest() {
    let pulled = pulled().await;
    let partial = pulled.partial();
    let ahead = partial.next_ahead().unwrap();
    let spans = |members: &[u32]| -> Vec<&Span> {
        let numbers = members.iter().flat_map(|member| partial.members.spans(*member));
        numbers.map(|span| &pulled.map.spans[*span as usize]).collect()
    };
    let prefetch = |span: &Span| span.stream < pulled.map.layers[span.layer as usize].prefetch;
    assert!(spans(&ahead).into_iter().all(prefetch), "the marked part is first");
    let wanted = pulled.span(CHUNK);
    let mut want = Box::pin(partial.want(extent(wanted)));
    tokio::select! {
        biased;
        found = &mut want => panic!("{found:?}"),
        () = std::future::ready(()) => {}
    }
    assert!(partial.is_wanted(), "nothing else begins");
    let batch = partial.next_wanted().unwrap();
    assert_eq!(spans(&batch), [wanted], "no more is fetched than is wanted");
    assert!(partial.next_wanted().is_none());
    let rest = partial.next_ahead().unwrap();
    assert!(!rest.iter().any(|member| batch.contains(member) || ahead.contains(member)));
    partial.clone().fetch(batch, Urgency::Wanted).await.unwrap();
    let found = want.await.unwrap();
    assert!(found.offset <= wanted.image && found.end() >= wanted.image + wanted.bytes);
    pulled.assert_written(wanted);
}

#[tokio::test]
async fn what_nobody_waits_for_any_more_is_not_fetched() {
    let pulled = pulled().await;
    let partial = pulled.partial();
    let mut want = Box::pin(partial.want(extent(pulled.span(CHUNK))));
    tokio::select! {
        biased;
        _ = &mut want => panic!("it is there"),
        () = std::future::ready(()) => {}
    }
    drop(want);
    assert!(partial.next_wanted().is_none() && !partial.is_wanted());
    // Without anybody who fetches, nothing can be had.
    partial.close();
    assert_eq!(partial.want(extent(pulled.span(CHUNK))).await, None);
}

#[tokio::test]
async fn a_range_that_is_there_reaches_up_to_what_is_missing() {
    let pulled = pulled().await;
    let partial = pulled.partial();
    let spans = &pulled.map.spans;
    let metadata = Extent { offset: 0, bytes: 4096 };
    let found = partial.want(metadata).await.unwrap();
    assert_eq!((found.offset, found.end()), (0, spans[0].image));
    let all: Vec<u32> = (0..partial.members.len()).collect();
    let left = partial.members.of_span(1);
    let others: Vec<u32> = all.iter().copied().filter(|member| *member != left).collect();
    partial.fetch_all(&others).await.unwrap();
    let missing: Vec<usize> =
        partial.members.spans(left).iter().map(|span| *span as usize).collect();
    let last = *missing.iter().max().unwrap();
    let after = spans[last].image + spans[last].bytes;
    let found = partial.want(Extent { offset: pulled.map.bytes - 1, bytes: 1 }).await.unwrap();
    assert_eq!((found.offset, found.end()), (after, pulled.map.bytes));
    partial.fetch_all(&all).await.unwrap();
    let found = partial.want(metadata).await.unwrap();
    assert_eq!((found.offset, found.end()), (0, pulled.map.bytes));
    assert!(partial.is_complete());
    spans.iter().for_each(|span| pulled.assert_written(span));
}

#[tokio::test]
async fn a_registry_that_fails_twice_is_asked_again_and_one_that_lies_is_given_up() {
    let pulled = pulled().await;
    let (partial, state) = (pulled.partial(), &pulled.registry.state);
    let member = |span: &Span| {
        let at = pulled.map.spans.iter().position(|other| other == span).unwrap();
        partial.members.of_span(at)
    };
    let wanted = pulled.span(CHUNK);
    state.failures.store(2, Ordering::SeqCst);
    partial.fetch_all(&[member(wanted)]).await.unwrap();
    assert_eq!(pulled.registry.asked(&pulled.map, wanted), 3);
    pulled.assert_written(wanted);
    // A request ahead is made once.
    let other = pulled.map.spans.iter().find(|span| span.layer == 1).unwrap();
    state.failures.store(1, Ordering::SeqCst);
    let ahead = partial.clone().fetch(vec![member(other)], Urgency::Ahead).await;
    assert!(matches!(ahead, Err(Error::Registry { .. })));
    state.corrupts.store(true, Ordering::SeqCst);
    let error = partial.fetch_all(&[member(other)]).await.unwrap_err();
    assert!(matches!(error, Error::BadLayer { .. } | Error::DigestMismatch { .. }), "{error}");
    assert_eq!(pulled.registry.asked(&pulled.map, other), 5);
    state.corrupts.store(false, Ordering::SeqCst);
    partial.fetch_all(&[member(other)]).await.unwrap();
    pulled.assert_written(other);
}

/// The registry sends a gzip member that is good, and of another chunk.
#[tokio::test]
async fn a_chunk_of_another_digest_is_refused() {
    let mut pulled = pulled().await;
    let at = pulled.map.spans.iter().position(|span| span.bytes >= CHUNK as u64).unwrap();
    let expected = Digest::of(b"another chunk");
    pulled.map.spans[at].digest = expected;
    pulled.map.write(&pulled.cache.map_path(&pulled.image.digest)).unwrap();
    let partial = pulled.partial();
    let error = partial.fetch_all(&[partial.members.of_span(at)]).await.unwrap_err();
    let Span { image, bytes, .. } = pulled.map.spans[at];
    let mut found = vec![1; bytes as usize];
    let file = std::fs::File::open(&pulled.image.erofs_path).unwrap();
    file.read_exact_at(&mut found, image).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "bytes are checked before they are written");
    assert!(matches!(error, Error::DigestMismatch { expected: e, .. } if e == expected), "{error}");
    assert!(!partial.is_complete());
}

/// Otherwise a hostile layer could have the rest of an answer uncompressed once for each member.
#[tokio::test]
async fn a_member_is_not_looked_for_in_the_bytes_of_the_next_one() {
    let mut pulled = pulled().await;
    let spans = &mut pulled.map.spans;
    let at = spans.iter().position(|span| span.bytes == CHUNK as u64).unwrap();
    let next = spans[at + 1];
    assert_eq!((spans[at].inner, next.inner, next.bytes), (0, 0, CHUNK as u64));
    (spans[at].inner, spans[at].digest) = (CHUNK as u64, next.digest);
    pulled.map.write(&pulled.cache.map_path(&pulled.image.digest)).unwrap();
    let partial = pulled.partial();
    let members = [at, at + 1].map(|span| partial.members.of_span(span));
    let error = partial.fetch_all(&members).await.unwrap_err();
    assert!(matches!(error, Error::BadLayer { .. }), "{error}");
    assert_eq!(partial.missing(), pulled.map.spans.len() - 1);
    pulled.assert_written(&next);
}

#[tokio::test]
async fn nothing_is_uncompressed_for_nobody() {
    let pulled = pulled().await;
    let partial = pulled.partial();
    let from = partial.members.get(0).stream;
    // The members are not in these bytes, which is noticed only if somebody waits.
    assert!(partial.unpack(&[0], from, b"", || false).is_ok());
    let error = partial.unpack(&[0], from, b"", || true).unwrap_err();
    assert!(error.to_string().contains("too little"), "{error}");
}

#[tokio::test]
async fn images_without_disks_make_room_for_others() {
    let pulled = pulled().await;
    let other = pulled.another().await;
    // None of the two becomes whole.
    pulled.registry.hold(true);
    let map = std::fs::metadata(pulled.cache.map_path(&pulled.image.digest)).unwrap();
    let chunks = Map::most_spans(map.len());
    let budget = Budget::of_chunks(chunks);
    let _half = budget.try_chunks(chunks).unwrap();
    let have_dir = have_dir(&pulled.run_dir());
    slipway_private::make_folder(&have_dir).unwrap();
    let fetcher = Fetcher::new(pulled.cache.clone(), have_dir, Box::new(anonymous), budget);
    let fetcher = Arc::new(fetcher);
    let open = async |image: &Image| {
        let file = std::fs::metadata(&image.erofs_path).unwrap();
        fetcher.open(image.digest, (file.dev(), file.ino())).await
    };
    let Ok(Opened::Lazy(used)) = open(&pulled.image).await else { panic!("it is refused") };
    let refused = open(&other).await.map(|_| ());
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
    drop(used);
    assert!(matches!(open(&other).await, Ok(Opened::Lazy(_))));
    pulled.registry.hold(false);
}

#[tokio::test]
async fn nothing_is_kept_of_images_that_were_removed() {
    let pulled = pulled().await;
    pulled.registry.hold(true);
    let have_dir = have_dir(&pulled.run_dir());
    slipway_private::make_folder(&have_dir).unwrap();
    let names = [Digest::of(b"removed"), pulled.image.digest].map(|digest| digest.hex());
    let [removed, kept] = names.map(|hex| have_dir.join(format!("{hex}.have")));
    let other = have_dir.join("other");
    for path in [&removed, &other] {
        std::fs::write(path, "").unwrap();
    }
    let (cache, budget) = (pulled.cache.clone(), Budget::new());
    let fetcher = Arc::new(Fetcher::new(cache, have_dir, Box::new(anonymous), budget));
    let file = std::fs::metadata(&pulled.image.erofs_path).unwrap();
    for _ in 0..2 {
        let opened = fetcher.open(pulled.image.digest, (file.dev(), file.ino())).await;
        assert!(matches!(opened, Ok(Opened::Lazy(_))));
        assert!(kept.exists() && other.exists() && !removed.exists());
    }
    pulled.registry.hold(false);
}

#[tokio::test]
async fn a_fetcher_goes_on_where_the_last_one_was_killed() {
    let pulled = pulled().await;
    let partial = pulled.partial();
    let all = pulled.map.spans.len();
    assert_eq!(partial.missing(), all);
    partial.fetch_all(&[0]).await.unwrap();
    let fetched = partial.members.spans(0).len();
    drop(partial);
    let partial = pulled.partial();
    assert_eq!(partial.missing(), all - fetched);
    assert!(partial.done().iter().sum::<u64>() > 0);
    let there = pulled.cache.fetched_bytes(&pulled.image, &pulled.run_dir()).unwrap();
    let absent = pulled.map.spans.iter().map(|span| span.bytes).sum::<u64>();
    assert!(there > pulled.image.size_bytes - absent && there < pulled.image.size_bytes);
    // The same image, pulled again: nothing of it is there.
    let path = pulled.cache.map_path(&pulled.image.digest);
    std::fs::remove_file(&path).unwrap();
    pulled.map.write(&path).unwrap();
    let file = std::fs::File::options().append(true).open(&path).unwrap();
    let later = std::time::SystemTime::now() + Duration::from_secs(10);
    file.set_modified(later).unwrap();
    assert_eq!(pulled.partial().missing(), all);
    // The disk has failed.
    let partial = pulled.partial();
    partial.fetch_all(&[0]).await.unwrap();
    partial.forget();
    assert_eq!((partial.missing(), pulled.partial().missing()), (all, all));
}

#[tokio::test]
async fn the_rest_is_fetched_without_a_fetcher() {
    let pulled = pulled().await;
    pulled.partial().fetch_all(&[0]).await.unwrap();
    let (log, run_dir) = (Log::new(), pulled.run_dir());
    let fetched = |image: &Image| pulled.cache.fetched_bytes(image, &run_dir).unwrap();
    let digest = &pulled.image.digest;
    let rest = pulled.cache.fetch_rest(digest, &run_dir, anonymous, log.clone());
    let image = rest.await.unwrap();
    assert!(!image.lazy && !pulled.is_lazy());
    assert_eq!(fetched(&image), image.size_bytes);
    for event in ["Layers", "LayerStarted", "LayerBytes", "LayerFinished", "Finished"] {
        assert!(log.has(event), "{event}");
    }
    assert!(pulled.map.spans.iter().all(|span| pulled.registry.asked(&pulled.map, span) == 1));
    pulled.map.spans.iter().for_each(|span| pulled.assert_written(span));
    let again = pulled.cache.fetch_rest(digest, &run_dir, anonymous, log.clone());
    assert_eq!(again.await.unwrap(), image);
    let other = Digest::of(b"x");
    let unknown = pulled.cache.fetch_rest(&other, &run_dir, anonymous, log);
    assert!(matches!(unknown.await, Err(Error::Unknown(_))));
}

#[tokio::test]
async fn files_are_copied_out_of_an_image() {
    if !rustix::process::geteuid().is_root() {
        return skip("files_are_copied_out_of_an_image", "root: files get their owners");
    }
    let pulled = pulled().await;
    let copy = async |paths: &[&str]| {
        let into = tempfile::tempdir().unwrap();
        let digest = &pulled.image.digest;
        pulled.cache.extract(digest, paths, into.path(), anonymous).await.unwrap();
        tree_of(into.path())
    };
    let tree = copy(&["/etc/passwd", "missing/x", "etc/passwd/x", "data/pipe"]).await;
    let passwd = "root:x:0:0:root:/root:/bin/sh\n";
    let expected = [("data", "dir"), ("etc", "dir"), ("etc/passwd", passwd)];
    let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(tree, BTreeMap::from(expected));
    let big = pulled.span(CHUNK);
    assert_eq!(pulled.registry.asked(&pulled.map, big), 0, "only what is copied is fetched");
    // A folder by a link to it; a link in it stays one, and does not lead out of it.
    let tree = copy(&["way"]).await;
    assert_eq!(tree["way"], "-> data");
    assert_eq!((&*tree["data/one"], &*tree["data/two"]), ("1", "22"));
    assert_eq!(tree["data/deep/three"], noise(CHUNK - 1, 2));
    assert_eq!(tree["data/out"], "-> /etc/passwd");
    assert!(!tree.contains_key("etc") && !tree.contains_key("data/pipe"));
    // A path through the link has its end within the image.
    let tree = copy(&["way/out"]).await;
    assert_eq!(tree["etc/passwd"], passwd);
    let asked = pulled.registry.state.asked.lock().unwrap().len();
    copy(&["etc/passwd", "way"]).await;
    let now = pulled.registry.state.asked.lock().unwrap().len();
    assert_eq!(asked, now, "what is there is not fetched again");
}

#[tokio::test]
async fn a_copy_uses_the_login_of_the_registry_that_it_asks() {
    let pulled = pulled().await;
    let (into, asked) = (tempfile::tempdir().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let log = Arc::clone(&asked);
    let access = move |reference: &Reference| {
        log.lock().unwrap().push(reference.clone());
        Access::default()
    };
    // Files get their owners only if root copies them.
    let _ = pulled.cache.extract(&pulled.image.digest, &["etc/passwd"], into.path(), access).await;
    assert_eq!(*asked.lock().unwrap(), [pulled.registry.reference("1")]);
}

#[tokio::test]
async fn copies_follow_no_link_of_the_host_and_replace_files() {
    if !rustix::process::geteuid().is_root() {
        let test = "copies_follow_no_link_of_the_host_and_replace_files";
        return skip(test, "root: files get their owners");
    }
    let pulled = pulled().await;
    let (into, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let digest = pulled.image.digest;
    std::os::unix::fs::symlink(elsewhere.path(), into.path().join("etc")).unwrap();
    let copied = pulled.cache.extract(&digest, &["etc/passwd"], into.path(), anonymous).await;
    assert!(matches!(copied, Err(Error::Io { .. })));
    assert!(tree_of(elsewhere.path()).is_empty());
    let target = elsewhere.path().join("target");
    std::fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, into.path().join("first")).unwrap();
    pulled.cache.extract(&digest, &["first"], into.path(), anonymous).await.unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    let copy = into.path().join("first");
    let meta = std::fs::symlink_metadata(&copy).unwrap();
    assert_eq!((meta.mode(), meta.uid(), meta.gid()), (0o100_644, 0, 0));
    assert_eq!(std::fs::read(copy).unwrap(), b"needed soon");
}
