//! Tests of calls of the program that makes images.

use std::os::unix::ffi::OsStrExt;

use super::*;

#[tokio::test]
async fn one_image_is_asked_for_by_its_name() {
    let found = Tool::stand_in("/bin/echo").find("containerd/ab:1").await.unwrap().unwrap();
    assert_eq!(found, "image touch containerd/ab:1 --run-dir /run/x --data-dir /data");
    assert_eq!(Tool::stand_in("/bin/true").find("containerd/ab:1").await, Ok(None));
    let failed = Tool::stand_in("/bin/false").find("containerd/ab:1").await.unwrap_err();
    assert!(failed.contains("it printed nothing"), "{failed}");
}

#[tokio::test]
async fn a_program_that_prints_without_end_ends() {
    for script in ["exec yes", "exec yes >&2"] {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let run = Tool::stand_in("/bin/sh").run(command, &[]).await;
        assert!(run.is_err(), "{script}");
    }
}

#[tokio::test]
async fn layers_that_are_files_are_read_by_the_importer() {
    let layers = ["/s/2/layer.erofs", "/s/1/layer.erofs"].map(PathBuf::from);
    let input = Input::Named(layer_source(&layers).unwrap());
    let tool = Tool::stand_in("/bin/echo");
    let said = tool.import(&input, "containerd/ab:1", Path::new("/b")).await;
    let words = "image import layers:/s/2/layer.erofs:/s/1/layer.erofs containerd/ab:1 --replace";
    assert_eq!(said.unwrap(), format!("{words} --run-dir /run/x --data-dir /data"));
    let odd = PathBuf::from(std::ffi::OsStr::from_bytes(b"/s\xff"));
    for (source, reason) in [
        (layer_source(&["/s:/layer.erofs".into()]), "colon"),
        (layer_source(&["s/layer.erofs".into()]), "not absolute"),
        (layer_source(std::slice::from_ref(&odd)), "not UTF-8"),
        (folder_source(&odd), "not UTF-8"),
    ] {
        let refused = source.unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[tokio::test]
async fn a_program_that_does_not_end_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let mut command = Command::new("/bin/sh");
    // The pid is whole when the file is at its path.
    let script = "echo $$ > \"$0.new\" && mv \"$0.new\" \"$0\" && exec sleep 1000";
    command.args(["-c", script]).arg(&pid);
    let tool = Tool::stand_in("/bin/slipway");
    let limit = Duration::from_secs(2);
    let error = tool.run_within(limit, command, &[], Command::spawn).await.unwrap_err();
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
    let tool = Tool::stand_in("/no/slipway");
    let error = tool.find("a:1").await.unwrap_err();
    assert!(error.starts_with("cannot run /no/slipway: ") && error.contains(PROGRAM), "{error}");
    let error = tool.run(Command::new("/no/shim"), &[]).await.unwrap_err();
    assert!(error.starts_with("cannot run /no/shim: ") && !error.contains(PROGRAM), "{error}");
}
