//! Tests of pulls: their places, and the memory of all of them.

use super::*;
use crate::pulls::{LARGE, LAZILY, WHOLE};

fn image_in(registry: &str, number: u8) -> Reference {
    format!("{registry}/app@{}", digest(number)).parse().unwrap()
}

fn lazy_pulls() -> (Arc<Shelf>, Arc<Pulls>) {
    let shelf = Arc::new(Shelf::default());
    shelf.is_lazy.store(true, Ordering::SeqCst);
    let pulls = Pulls::new(Arc::clone(&shelf) as Arc<dyn Images>);
    (shelf, Arc::new(pulls))
}

/// Begins a pull, and waits until it waits.
async fn begin(pulls: &Arc<Pulls>, image: Reference, whole: bool) -> tokio::task::JoinHandle<()> {
    let pulls = Arc::clone(pulls);
    let task = tokio::spawn(async move { drop(pulls.pull(&image, whole).await) });
    // The time is the test's: it goes on when all tasks wait.
    tokio::time::sleep(Duration::from_millis(1)).await;
    task
}

#[tokio::test]
async fn calls_for_one_image_share_a_pull() {
    let (shelf, pulls) = lazy_pulls();
    let reference = image_in("registry.test", 1);
    let both = tokio::join!(pulls.pull(&reference, false), pulls.pull(&reference, false));
    assert!(both.0.is_ok() && both.0 == both.1);
    pulls.pull(&reference, false).await.unwrap();
    assert_eq!(shelf.asked().len(), 1);
    pulls.forget(&reference);
    pulls.pull(&reference, false).await.unwrap();
    assert_eq!(shelf.asked().len(), 1);
}

#[tokio::test]
async fn pulls_have_memory_for_images_of_each_kind_and_a_large_one() {
    let (shelf, pulls) = lazy_pulls();
    shelf.needs_memory.store(true, Ordering::SeqCst);
    let tasks: Vec<_> = (0..18)
        .map(|number| {
            let pulls = Arc::clone(&pulls);
            let reference = image_in(&format!("registry-{number}.test"), number);
            tokio::spawn(async move { pulls.pull(&reference, number % 2 == 0).await })
        })
        .collect();
    for task in tasks {
        assert!(task.await.unwrap().unwrap().is_some());
    }
    assert_eq!(shelf.asked().len(), 36, "each is tried as a usual one first");
    let most = [0, 1].map(|kind| shelf.most[kind].load(Ordering::SeqCst));
    assert_eq!(most, [LAZILY + WHOLE, LARGE]);
}

#[tokio::test]
async fn a_pull_that_nobody_waits_for_keeps_its_place() {
    let (shelf, pulls) = lazy_pulls();
    let references = (0..9).map(|number| image_in(&format!("registry-{number}.test"), number));
    let references: Vec<_> = references.collect();
    for reference in &references {
        tokio::select! {
            biased;
            _ = pulls.pull(reference, false) => panic!("it cannot be done yet"),
            () = tokio::task::yield_now() => {}
        }
    }
    for reference in &references {
        pulls.pull(reference, false).await.unwrap();
    }
    assert_eq!(shelf.asked().len(), 9, "the pull that was begun is waited for");
    assert_eq!(shelf.most[0].load(Ordering::SeqCst), LAZILY);
}

#[tokio::test(start_paused = true)]
async fn a_registry_has_half_of_the_places() {
    for (whole, places) in [(false, LAZILY), (true, WHOLE)] {
        let (shelf, pulls) = lazy_pulls();
        shelf.stick(&["slow.test"]);
        for number in 0..8 {
            begin(&pulls, image_in("slow.test", number), whole).await;
        }
        assert_eq!(shelf.asked().len(), places / 2);
        let app = image_in("registry.test", 0);
        let pulled = tokio::time::timeout(Duration::from_secs(1), pulls.pull(&app, whole)).await;
        assert!(pulled.expect("a place").unwrap().is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_has_its_place_until_it_ends_and_others_wait_for_a_minute() {
    let (shelf, pulls) = lazy_pulls();
    let slow: Vec<_> = (0..LAZILY).map(|number| format!("slow-{number}.test")).collect();
    let names: Vec<_> = slow.iter().map(String::as_str).collect();
    shelf.stick(&names);
    for name in &names {
        // Nobody waits for it any more.
        begin(&pulls, image_in(name, 0), false).await.abort();
    }
    assert_eq!(shelf.asked().len(), LAZILY);
    let (app, begun) = (image_in("registry.test", 0), tokio::time::Instant::now());
    let why = pulls.pull(&app, false).await.unwrap_err();
    assert!(why.contains("have not ended within 60 s"), "{why}");
    assert!(begun.elapsed() >= Duration::from_secs(60));
    assert!(shelf.asked().is_empty());
    assert!(pulls.pull(&app, true).await.unwrap().is_some(), "places of their own");
    assert!(pulls.remove(&image_in(names[0], 0)).is_none(), "a pull holds it");
    shelf.stick(&[]);
    pulls.forget(&app);
    assert!(pulls.pull(&app, false).await.unwrap().is_some());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(pulls.remove(&image_in(names[0], 0)).is_some(), "no pull holds it any more");
}

#[tokio::test(start_paused = true)]
async fn a_large_image_keeps_no_usual_one_waiting_and_others_of_its_size_for_a_minute() {
    let (shelf, pulls) = lazy_pulls();
    shelf.needs_memory.store(true, Ordering::SeqCst);
    shelf.stick(&["slow.test"]);
    for number in 0..8 {
        begin(&pulls, image_in("slow.test", number), false).await;
    }
    assert_eq!(shelf.asked().len(), 8 + LARGE);
    let (app, begun) = (image_in("registry.test", 0), tokio::time::Instant::now());
    let why = pulls.pull(&app, false).await.unwrap_err();
    assert!(why.contains("have not ended within 60 s"), "{why}");
    assert!(begun.elapsed() >= Duration::from_secs(60));
    shelf.needs_memory.store(false, Ordering::SeqCst);
    let other = image_in("registry.test", 1);
    let pulled = tokio::time::timeout(Duration::from_secs(1), pulls.pull(&other, false)).await;
    assert!(pulled.expect("a place").unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn files_of_few_images_are_copied_at_once() {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(&root.path().join("root")).unwrap());
    let shelf = Arc::new(Shelf::default());
    shelf.stick(&["slow.test"]);
    let staging = Arc::new(Staging::new(store, Arc::clone(&shelf) as Arc<dyn Images>));
    let stage = |registry: &str, number: u8| {
        let (staging, reference) = (Arc::clone(&staging), image_in(registry, number));
        let pulled = Pulled { digest: digest(number), volumes: Vec::new() };
        let remote = RemoteImage {
            reference: reference.to_string(),
            digest: pulled.digest.to_string(),
            layers: vec![digest(number).to_string()],
            is_top: true,
        };
        async move { staging.stage(&remote, &reference, &pulled).await.map(drop) }
    };
    for number in 0..8 {
        let task = tokio::spawn(stage("slow.test", number));
        tokio::time::sleep(Duration::from_millis(1)).await;
        // Nobody waits for it any more, and it has its place even so.
        task.abort();
    }
    assert_eq!(shelf.asked().len(), 2);
    let other = tokio::time::timeout(Duration::from_secs(1), stage("registry.test", 9)).await;
    other.expect("a place").unwrap();
    let why = stage("slow.test", 9).await.unwrap_err();
    assert!(why.contains("have not ended within 60 s"), "{why}");
}
