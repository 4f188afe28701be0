//! Tests of roots: which images are found, pulled or made for them.

use super::*;

#[tokio::test]
async fn layers_that_are_not_on_the_host_are_found_or_pulled() {
    let digest = format!("sha256:{}", "ab".repeat(32));
    let reference = format!("registry.test/app@{digest}");
    let layers = Image { reference: reference.clone(), digest, whole: true };
    // It is there under its name and digest.
    let (image, found) = find_or_pull(&Tool::stand_in("/bin/echo"), &layers, None).await.unwrap();
    assert_eq!(image, reference);
    assert_eq!(found, format!("image touch {reference} --run-dir /run/x --data-dir /data"));
    // It is for another container's image: that one is pulled.
    let (image, found) =
        find_or_pull(&Tool::stand_in("/bin/echo"), &layers, Some("other:1")).await.unwrap();
    assert_eq!(image, "other:1");
    assert_eq!(found, "image pull --lazy other:1 --run-dir /run/x --data-dir /data");
    // It is not there, and not pulled either.
    let failed = find_or_pull(&Tool::stand_in("/bin/true"), &layers, None).await.unwrap_err();
    assert!(failed.contains("printed no digest"), "{failed}");
}

#[tokio::test]
async fn an_image_that_is_there_waits_for_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let lock = dir.path().join("ab.lock");
    let _held = Lock::try_take(&lock).unwrap();
    let input = Input::Named("dir:/s".to_owned());
    let tool = Tool::stand_in("/bin/echo");
    let found = find_or_import(&tool, &input, "containerd/ab:1", Path::new("/b"), lock.clone());
    assert!(found.await.unwrap().starts_with("image touch"));
    assert!(lock.exists(), "another one's");
}

#[tokio::test]
async fn a_lock_is_one_images_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join("containerd").join(name);
    let first = ImageLock::take(path("ab.lock")).await.unwrap();
    let other = ImageLock::take(path("ab0.lock")).await.unwrap();
    assert!(Lock::try_take(&path("ab.lock")).is_err());
    drop((first, other));
    assert_eq!(std::fs::read_dir(dir.path().join("containerd")).unwrap().count(), 0);
    // An import that fails leaves none either.
    let input = Input::Named("dir:/s".to_owned());
    let tool = Tool::stand_in("/bin/true");
    let made = find_or_import(&tool, &input, "a:1", Path::new("/b"), path("c.lock"));
    assert!(made.await.is_err());
    assert!(!path("c.lock").exists());
}
