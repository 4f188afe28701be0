//! Tests of directories that containers share by name, on this machine's kernel.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use harness::{FORMATTED, Output, Sandbox, container, device, script};
use slipway_agent_protocol::v1::*;

/// A directory as kubelet makes one for a pod whose group is 2000.
fn dir(name: &str, path: &str) -> EmptyDir {
    let (name, path) = (name.into(), path.into());
    EmptyDir { name, path, mode: 0o2777, gid: 2000, ..EmptyDir::default() }
}

fn with(id: &str, text: &str, empty_dirs: Vec<EmptyDir>) -> CreateContainerRequest {
    let empty_dirs_disk = device(FORMATTED);
    CreateContainerRequest { empty_dirs, empty_dirs_disk, ..container(id, script(text)) }
}

fn in_memory(name: &str, path: &str) -> EmptyDir {
    EmptyDir { in_memory: true, size_bytes: 1 << 20, ..dir(name, path) }
}

fn said(text: &str) -> Output {
    Output { stdout: text.into(), ..Output::default() }
}

#[tokio::test]
async fn containers_share_a_directory_by_its_name() {
    let Some(mut sandbox) = Sandbox::start("containers_share_a_directory_by_its_name").await else {
        return;
    };
    let text = "stat -c '%a %u %g' /cache /memory; mkdir /cache/sub; echo disk >/cache/sub/file; \
        echo memory >/memory/file; grep -c ' /cache ext4 rw' /proc/mounts; \
        dd if=/dev/zero of=/memory/big bs=1M count=2 2>&1 | grep -o 'No space left'";
    let both = vec![dir("cache", "/cache"), in_memory("memory", "/memory")];
    let run = sandbox.run(with("a", text, both)).await.unwrap();
    assert_eq!(run, said("2777 0 2000\n2777 0 2000\n1\nNo space left\n"));
    // The second container finds the first one's files at other places. Its own mode and medium do
    // not count any more.
    let text = "cat /x/sub/file /m/file /x/in/file; ls -A /x/in/other; echo x >/x/in/file; true";
    let dirs = vec![
        EmptyDir { sub_path: "sub".into(), read_only: true, ..dir("cache", "/x/in") },
        EmptyDir { mode: 0o700, in_memory: true, ..dir("cache", "/x") },
        dir("memory", "/m"),
        dir("other", "/x/in/other"),
    ];
    sandbox.create(with("b", "mkdir -p /x/sub/other; sleep 1000", vec![dir("cache", "/x")])).await;
    sandbox.start_container("b").await;
    let made = sandbox.exec("b", script("until [ -d /x/sub/other ]; do sleep 0.01; done"));
    assert_eq!(made.await.unwrap().status, 0);
    let run = sandbox.run(with("c", text, dirs)).await.unwrap();
    assert_eq!(run.stdout, "disk\nmemory\ndisk\n");
    assert!(run.stderr.contains("/x/in/file: Read-only file system"), "{}", run.stderr);
    sandbox.remove("b").await;
}

#[tokio::test]
async fn a_path_below_a_directory_is_one_below_it() {
    let Some(mut sandbox) = Sandbox::start("a_path_below_a_directory_is_one_below_it").await else {
        return;
    };
    let below = |path: &str| EmptyDir { sub_path: path.into(), ..dir("cache", "/below") };
    let text = "ln -s / /cache/link; echo single >/cache/file";
    let run = sandbox.run(with("a", text, vec![dir("cache", "/cache")])).await.unwrap();
    assert_eq!(run, said(""));
    for (path, why) in
        [("link", "symbolic link"), ("link/etc", "symbolic link"), ("../x", "no path")]
    {
        let error = sandbox.run(with("a", "true", vec![below(path)])).await.unwrap_err();
        assert!(error.message().contains(why), "{path}: {error}");
    }
    let run = sandbox.run(with("a", "cat /below", vec![below("file")])).await.unwrap();
    assert_eq!(run, said("single\n"));
    // A directory that is missing is made, with the mode and the group of the one above.
    let run = sandbox.run(with("a", "stat -c '%a %g' /below", vec![below("new/sub")])).await;
    assert_eq!(run.unwrap(), said("2777 2000\n"));
    let mut diskless = with("a", "true", vec![dir("new", "/new")]);
    diskless.empty_dirs_disk = None;
    let error = sandbox.run(diskless).await.unwrap_err();
    assert!(error.message().contains("making the directory new: no disk given"), "{error}");
}
