//! Tests of roots: how the program that makes images is called.

use std::os::unix::ffi::OsStrExt;

use super::*;

/// Returns a tool that stands in for `slipway`.
fn tool(program: &str) -> Tool {
    Tool { program: program.into(), run_dir: "/run/x".into(), data_dir: "/data".into() }
}

#[tokio::test]
async fn one_image_is_asked_for_by_its_name() {
    let found = tool("/bin/echo").find("containerd/ab:1").await.unwrap().unwrap();
    assert_eq!(found, "image touch containerd/ab:1 --run-dir /run/x --data-dir /data");
    assert_eq!(tool("/bin/true").find("containerd/ab:1").await, Ok(None));
    let failed = tool("/bin/false").find("containerd/ab:1").await.unwrap_err();
    assert!(failed.contains("it printed nothing"), "{failed}");
}

#[tokio::test]
async fn a_program_that_prints_without_end_ends() {
    for script in ["exec yes", "exec yes >&2"] {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let run = tool("/bin/sh").run(command, &[]).await;
        assert!(run.is_err(), "{script}");
    }
}

#[tokio::test]
async fn layers_that_are_files_are_read_by_the_importer() {
    let layers = ["/s/2/layer.erofs", "/s/1/layer.erofs"].map(PathBuf::from).to_vec();
    let tool = tool("/bin/echo");
    let said = tool.import(&Source::Erofs(layers), "containerd/ab:1", Path::new("/b")).await;
    let words = "image import layers:/s/2/layer.erofs:/s/1/layer.erofs containerd/ab:1 --replace";
    assert_eq!(said.unwrap(), format!("{words} --run-dir /run/x --data-dir /data"));
    let odd = PathBuf::from(std::ffi::OsStr::from_bytes(b"/s\xff"));
    for (source, reason) in [
        (Source::Erofs(vec!["/s:/layer.erofs".into()]), "colon"),
        (Source::Erofs(vec!["s/layer.erofs".into()]), "not absolute"),
        (Source::Erofs(vec![odd.clone()]), "not UTF-8"),
        (Source::Folder(odd), "not UTF-8"),
    ] {
        let refused = tool.import(&source, "containerd/ab:1", Path::new("/b")).await.unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[tokio::test]
async fn layers_that_are_not_on_the_host_are_found_or_pulled() {
    let digest = format!("sha256:{}", "ab".repeat(32));
    let reference = format!("registry.test/app@{digest}");
    let layers = Image { reference: reference.clone(), digest, whole: true };
    // It is there under its name and digest.
    let (image, found) = tool("/bin/echo").lazy(&layers, None).await.unwrap();
    assert_eq!(image, reference);
    assert_eq!(found, format!("image touch {reference} --run-dir /run/x --data-dir /data"));
    // It is for another container's image: that one is pulled.
    let (image, found) = tool("/bin/echo").lazy(&layers, Some("other:1")).await.unwrap();
    assert_eq!(image, "other:1");
    assert_eq!(found, "image pull --lazy other:1 --run-dir /run/x --data-dir /data");
    // It is not there, and not pulled either.
    let failed = tool("/bin/true").lazy(&layers, None).await.unwrap_err();
    assert!(failed.contains("printed no digest"), "{failed}");
}

#[tokio::test]
async fn an_image_that_is_there_waits_for_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let lock = dir.path().join("ab.lock");
    let _held = Lock::try_take(&lock).unwrap();
    let source = Source::Folder("/s".into());
    let tool = tool("/bin/echo");
    let found = tool.find_or_import(&source, "containerd/ab:1", Path::new("/b"), lock.clone());
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
    let source = Source::Folder("/s".into());
    let tool = tool("/bin/true");
    let made = tool.find_or_import(&source, "a:1", Path::new("/b"), path("c.lock"));
    assert!(made.await.is_err());
    assert!(!path("c.lock").exists());
}

#[tokio::test]
async fn a_program_that_does_not_end_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let mut command = Command::new("/bin/sh");
    // The pid is whole when the file is at its path.
    let script = "echo $$ > \"$0.new\" && mv \"$0.new\" \"$0\" && exec sleep 1000";
    command.args(["-c", script]).arg(&pid);
    let tool = tool("/bin/slipway");
    let limit = Duration::from_secs(2);
    let error = tool.run_within(limit, command, &[]).await.unwrap_err();
    assert!(error.contains("/bin/sh was killed after 2 s"), "{error}");
    let Ok(pid) = std::fs::read_to_string(&pid) else { return };
    let stat = format!("/proc/{}/stat", pid.trim());
    // Gone, or a zombie.
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_program_that_cannot_be_run_is_named() {
    let tool = tool("/no/slipway");
    let error = tool.find("a:1").await.unwrap_err();
    assert!(error.starts_with("cannot run /no/slipway: ") && error.contains(PROGRAM), "{error}");
    let error = tool.run(Command::new("/no/shim"), &[]).await.unwrap_err();
    assert!(error.starts_with("cannot run /no/shim: ") && !error.contains(PROGRAM), "{error}");
}
