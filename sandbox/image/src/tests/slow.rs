//! Registries that keep pulls waiting, or send nothing of use.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::estargz::Stargz;
use super::parts::{Registry, pulled};
use super::support::*;
use crate::lazy::budget::{Budget, Urgency};
use crate::{Access, Cache, Limits, Silent};

/// The time after which a test counts as waiting for the registry.
const FOR_EVER: Duration = Duration::from_secs(45);

/// Returns a registry with the same image as every other one.
fn registry() -> Registry {
    let registry = Registry::start();
    registry.put("1", &[Stargz::new().file("x", "content", 100).end()]);
    registry
}

#[tokio::test]
async fn an_image_whose_indexes_do_not_come_in_time_is_not_pulled_lazily() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { indexes_time: Duration::from_millis(100), ..Limits::default() };
    let (cache, registry) = (Cache::open(dir.path(), limits).unwrap(), registry());
    registry.hold(true);
    let (name, access) = (registry.reference("1"), Access::default());
    let pull = cache.pull_lazy(&name, &access, Arc::new(Silent));
    let pulled = tokio::time::timeout(FOR_EVER, pull).await.expect("it waits for the registry");
    assert!(pulled.unwrap().is_none());
    assert!(tree_of(&dir.path().join("work")).is_empty());
}

#[tokio::test]
async fn a_repository_whose_pull_does_not_end_keeps_no_other_one_waiting() {
    for whole in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), Limits::default()).unwrap();
        let (slow, good) = (registry(), registry());
        slow.hold(true);
        let (slow_name, name, access) =
            (slow.reference("1"), good.reference("1"), Access::default());
        let held = cache.pull_lazy(&slow_name, &access, Arc::new(Silent));
        let other = async {
            while slow.state.asked.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let pull = async {
                match whole {
                    true => cache.pull(&name, &access, Arc::new(Silent)).await.map(Some),
                    false => cache.pull_lazy(&name, &access, Arc::new(Silent)).await,
                }
            };
            let pulled = tokio::time::timeout(FOR_EVER, pull).await;
            slow.hold(false);
            pulled.expect("it waits for the other registry").unwrap().unwrap()
        };
        let (found, image) = tokio::join!(held, other);
        assert_eq!((image.lazy, &image.references[..]), (!whole, std::slice::from_ref(&name)));
        // The other pull finds the image.
        let found = found.unwrap().unwrap();
        assert_eq!((found.digest, found.lazy), (image.digest, !whole));
        assert_eq!(found.references.len(), 2);
        assert!(tree_of(&dir.path().join("work")).is_empty());
    }
}

#[tokio::test]
async fn pulls_from_one_repository_fetch_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), Limits::default()).unwrap();
    let (registry, access) = (registry(), Access::default());
    let name = registry.reference("1");
    let pull = || cache.pull_lazy(&name, &access, Arc::new(Silent));
    let (one, two) = tokio::join!(pull(), pull());
    let (one, two) = (one.unwrap().unwrap(), two.unwrap().unwrap());
    assert_eq!(one.digest, two.digest);
    // A footer and an index.
    assert_eq!(registry.state.asked.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_repository_that_pulls_an_image_later_is_asked_for_it_too() {
    let pulled = pulled().await;
    let (first, second) = (&pulled.registry, pulled.registry.copy());
    let before = pulled.partial();
    let (name, access) = (first.reference("1"), Access::default());
    pulled.cache.pull_lazy(&name, &access, Arc::new(Silent)).await.unwrap();
    assert!(before.has_all_origins(), "it is known");
    let again = pulled.cache.pull_lazy(&second.reference("1"), &access, Arc::new(Silent)).await;
    assert!(again.unwrap().unwrap().lazy);
    assert!(!before.has_all_origins());
    drop(before);
    let partial = pulled.partial();
    assert!(partial.has_all_origins());
    // The newest is asked first, and its data is wrong.
    second.state.corrupts.store(true, Ordering::SeqCst);
    let members: Vec<u32> = (0..partial.members.len()).collect();
    partial.fetch_all(&members).await.unwrap();
    assert!(partial.is_complete());
    let asked = |registry: &Registry| registry.state.asked.lock().unwrap().len();
    assert!(asked(&second) > 0 && asked(first) > 0);
    // After one more pull, the image is opened again, and goes on with the one that has its data.
    let third = pulled.registry.copy();
    pulled.cache.pull_lazy(&third.reference("1"), &access, Arc::new(Silent)).await.unwrap();
    let next = pulled.partial();
    assert_eq!(next.origins.turn().0, 0, "the newest is the first");
    next.origins.go_on(&partial.origins.good().unwrap());
    assert_eq!(next.origins.turn().0, 2, "the oldest");
    partial.finish().await.unwrap();
    let origins = pulled.cache.origins_path(&pulled.image.digest);
    assert!(!origins.exists(), "a whole image needs no registry");
}

#[tokio::test]
async fn a_registry_whose_requests_do_not_end_keeps_no_image_waiting_that_another_one_has() {
    const REQUEST: u64 = 8 << 20;
    let pulled = pulled().await;
    let (second, access) = (pulled.registry.copy(), Access::default());
    let name = second.reference("1");
    let pull = pulled.cache.pull_lazy(&name, &access, Arc::new(Silent));
    assert!(pull.await.unwrap().unwrap().lazy);
    let budget = Budget::new();
    let partial = pulled.partial_with(Arc::clone(&budget));
    // The room of the newest registry goes to two other images.
    let others = [0; 2].map(|_| budget.share(&[name.registry()]));
    let mut held = Vec::new();
    for share in others.iter().cycle().take(4) {
        let mut room = share.room(REQUEST, Urgency::Wanted).await;
        room.of_registry(0).await;
        held.push(room);
    }
    // The time is the test's: it goes on when all tasks wait.
    tokio::time::pause();
    let (number, room) = partial.room(REQUEST, Urgency::Wanted).await;
    assert_eq!(number, 1, "the first one has room");
    drop((room, held));
}
