//! Tests of files that the host copies out of containers and into them, and of processes that no
//! host attaches to, on this machine's kernel.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use harness::{Sandbox, container, script};
use rustix::fs::{Mode, OFlags};
use slipway_agent_protocol::v1::*;
use slipway_tar_tree::{LeftOut as Left, PIECE, Rules, Source, TOP, find, pack, place, unpack};
use tokio_stream::StreamExt;
use tonic::Status;

fn open(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH, Mode::empty()).unwrap()
}

/// Returns the archive of what is at `path` in a directory.
fn archive(directory: &Path, path: &str) -> Vec<u8> {
    let found = find(open(directory).as_fd(), Path::new(path), false).unwrap();
    let mut archive = Vec::new();
    assert_eq!(pack(&found, Path::new(TOP), &mut archive).unwrap(), Left::default());
    archive
}

fn to(path: &str, directory: bool, name: &str) -> CopyInTo {
    let source = Some(CopySource { directory, contents: false, name: name.into() });
    CopyInTo { container_id: "a".into(), path: path.into(), source, owners: false }
}

/// Sends an archive. Without its `end` it breaks off.
async fn copy_in(
    sandbox: &mut Sandbox,
    to: CopyInTo,
    archive: &[u8],
    end: bool,
) -> Result<LeftOut, Status> {
    let mut kinds = vec![copy_in_request::Kind::To(to)];
    let pieces = archive.chunks(PIECE).map(<[u8]>::to_vec);
    kinds.extend(pieces.map(copy_in_request::Kind::Data));
    kinds.extend(end.then_some(copy_in_request::Kind::End(true)));
    let messages = kinds.into_iter().map(|kind| CopyInRequest { kind: Some(kind) });
    let reply = sandbox.client.copy_in(tokio_stream::iter(messages)).await?;
    Ok(reply.into_inner().left_out.unwrap())
}

/// Returns whether `path` is a directory, its archive, and what was left out.
async fn copy_out(sandbox: &mut Sandbox, path: &str) -> Result<(bool, Vec<u8>, LeftOut), Status> {
    let (container_id, path, name) = ("a".into(), path.into(), TOP.into());
    let request = CopyOutRequest { container_id, path, follow: false, name };
    let mut replies = sandbox.client.copy_out(request).await?.into_inner();
    let (mut directory, mut archive) = (None, Vec::new());
    loop {
        let reply = replies.message().await?.expect("the archive has an end");
        match reply.kind.unwrap() {
            copy_out_reply::Kind::Found(found) => directory = Some(found.directory),
            copy_out_reply::Kind::Data(data) => archive.extend(data),
            copy_out_reply::Kind::End(end) => return Ok((directory.unwrap(), archive, end)),
        }
    }
}

#[tokio::test]
async fn files_are_copied_into_a_container_and_out_of_it() {
    let test = "files_are_copied_into_a_container_and_out_of_it";
    let Some(mut sandbox) = Sandbox::start(test).await else { return };
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    let host = tempfile::tempdir().unwrap();
    let tree = host.path().join("tree");
    std::fs::create_dir_all(tree.join("sub")).unwrap();
    let content: Vec<u8> = (0..4 * PIECE + 5).map(|at| (at * 3) as u8).collect();
    std::fs::write(tree.join("sub/file"), &content).unwrap();
    std::os::unix::fs::symlink("sub/file", tree.join("link")).unwrap();
    let sent = archive(host.path(), "/tree");
    copy_in(&mut sandbox, to("/home", true, "new"), &sent, true).await.unwrap();
    copy_in(&mut sandbox, to("/home/other", true, "new"), &sent, true).await.unwrap();
    let look = "cd /home/new && readlink link && stat -c '%u %s' sub/file; cmp link ../other/link";
    let run = sandbox.exec("a", script(look)).await.unwrap();
    let expected = format!("sub/file\n0 {}\n", content.len());
    assert_eq!((run.stdout, run.stderr), (expected, String::new()));

    // The pipe is left out, and what the container has mounted is there.
    let make = "mkfifo /home/new/pipe; mkdir /dev/shm/d; echo shared >/dev/shm/d/file";
    sandbox.exec("a", script(make)).await.unwrap();
    let (directory, received, left_out) = copy_out(&mut sandbox, "/home/new").await.unwrap();
    assert!(directory && left_out.count == 1 && left_out.first == "top/pipe", "{left_out:?}");
    let source = Source { is_directory: true, is_contents: false, name: OsStr::new("back") };
    let back = place(open(host.path()).as_fd(), Path::new("/"), Some(source)).unwrap();
    unpack(received.as_slice(), &back, Rules::of_guest(false)).unwrap();
    assert_eq!(std::fs::read(host.path().join("back/link")).unwrap(), content);
    let (_, received, _) = copy_out(&mut sandbox, "/dev/shm/d").await.unwrap();
    let has = |text: &[u8]| received.windows(text.len()).any(|part| part == text);
    assert!(has(b"shared\n"));
    let error = copy_out(&mut sandbox, "/home/none").await.unwrap_err();
    assert!(error.message().contains("/home/none: No such file"), "{error}");

    sandbox.remove("a").await;
    assert!(copy_out(&mut sandbox, "/home/new").await.is_err());
}

#[tokio::test]
async fn a_copy_stays_in_its_container() {
    let Some(mut sandbox) = Sandbox::start("a_copy_stays_in_its_container").await else { return };
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("secret");
    std::fs::write(&secret, "of the host").unwrap();
    let sent = archive(host.path(), "/secret");
    // Links that a container has made lead to places in it.
    let links = format!("ln -s /../../.. /home/up; ln -s {} /home/secret", secret.display());
    sandbox.exec("a", script(&links)).await.unwrap();
    copy_in(&mut sandbox, to("/home/up/slipway-copied", false, "x"), &sent, true).await.unwrap();
    assert!(!Path::new("/slipway-copied").exists());
    let run = sandbox.exec("a", script("cat /slipway-copied")).await.unwrap();
    assert_eq!(run.stdout, "of the host");
    let (container_id, path) = ("a".to_owned(), "/home/secret".to_owned());
    let request = CopyOutRequest { container_id, path, follow: true, name: TOP.into() };
    let mut replies = sandbox.client.copy_out(request).await.unwrap().into_inner();
    let error = replies.message().await.unwrap_err();
    assert!(error.message().contains("No such file"), "{error}");

    for (place, directory) in [("/none/file", false), ("/bin/sh/x", false), ("/bin/sh", true)] {
        let refused = copy_in(&mut sandbox, to(place, directory, "x"), &sent, true).await;
        assert!(refused.is_err(), "{place}");
    }
    let broken = copy_in(&mut sandbox, to("/home/half", false, "x"), &sent[..600], false).await;
    let error = broken.unwrap_err();
    assert!(error.message().contains("breaks off"), "{error}");
}

/// The host takes nothing of one copy, and sends no more of another. Both end with the container,
/// whose mounts they would keep otherwise.
#[tokio::test]
async fn a_copy_ends_with_its_container() {
    let Some(mut sandbox) = Sandbox::start("a_copy_ends_with_its_container").await else { return };
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    // More than waits on the way to a host that takes nothing.
    let make = "dd if=/dev/zero of=/home/large bs=1 count=0 seek=1073741824 2>/dev/null";
    sandbox.exec("a", script(make)).await.unwrap();
    let (container_id, path) = ("a".to_owned(), "/home/large".to_owned());
    let request = CopyOutRequest { container_id, path, follow: false, name: TOP.into() };
    let mut replies = sandbox.client.copy_out(request).await.unwrap().into_inner();

    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), [1; 4096]).unwrap();
    let sent = archive(host.path(), "/file")[..1024].to_vec();
    let kinds = [
        copy_in_request::Kind::To(to("/home/half", false, "x")),
        copy_in_request::Kind::Data(sent),
    ];
    let messages = kinds.map(|kind| CopyInRequest { kind: Some(kind) });
    let endless = tokio_stream::iter(messages).chain(tokio_stream::pending());
    let mut client = sandbox.client.clone();
    let copying = tokio::spawn(async move { client.copy_in(endless).await });
    let begun = "until [ -e /home/half ]; do sleep 0.01; done";
    sandbox.exec("a", script(begun)).await.unwrap();

    sandbox.remove("a").await;
    let error = copying.await.unwrap().unwrap_err();
    assert!(error.message().contains("the container has ended"), "{error}");
    let error = loop {
        match replies.message().await {
            Ok(reply) => assert!(reply.is_some(), "an end without an error"),
            Err(error) => break error,
        }
    };
    assert!(error.message().contains("the container has ended"), "{error}");
}

#[tokio::test]
async fn a_detached_process_goes_on_without_a_host() {
    let test = "a_detached_process_goes_on_without_a_host";
    let Some(mut sandbox) = Sandbox::start(test).await else { return };
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    let request = |exec_id: &str, spec: ProcessSpec| ExecRequest {
        process: Some(ProcessRef { container_id: "a".into(), exec_id: exec_id.into() }),
        spec: Some(spec),
        detach: true,
        ..ExecRequest::default()
    };
    // More output than a pipe holds.
    let text = "head -c 1000000 /dev/zero; cat; [ -c /proc/$$/fd/1 ] && echo null >/home/said; \
                mv /home/said /home/done; exec sleep 1000";
    let reply = sandbox.client.exec(request("on", script(text))).await.unwrap().into_inner();
    assert!(reply.pid > 0);
    let done = async {
        loop {
            let run = sandbox.exec("a", script("cat /home/done 2>/dev/null")).await.unwrap();
            if !run.stdout.is_empty() {
                return run.stdout;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let said = tokio::time::timeout(Duration::from_secs(100), done).await.unwrap();
    assert_eq!(said, "null\n");

    let missing = ProcessSpec { args: vec!["/no/program".into()], ..ProcessSpec::default() };
    let error = sandbox.client.exec(request("missing", missing)).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::NotFound, "{error}");
    for spec in [
        ProcessSpec { stdin: true, ..script("cat") },
        ProcessSpec { terminal: true, ..script("cat") },
    ] {
        let error = sandbox.client.exec(request("bound", spec)).await.unwrap_err();
        assert!(error.message().contains("no streams"), "{error}");
    }

    // One whose host left before it was set up does not begin.
    let freeze = |frozen: bool| FreezeRequest { id: "a".into(), frozen };
    sandbox.client.freeze(freeze(true)).await.unwrap();
    let left = sandbox.client.exec(request("left", script("exit 3")));
    let left = tokio::time::timeout(Duration::from_millis(500), left).await;
    assert!(left.is_err(), "set up in a container that stands still");
    sandbox.client.freeze(freeze(false)).await.unwrap();
    let process = ProcessRef { container_id: "a".into(), exec_id: "left".into() };
    let ended = async {
        loop {
            let request = WaitRequest { process: Some(process.clone()) };
            match sandbox.client.wait(request).await {
                Ok(reply) => return reply.into_inner().exit_status,
                Err(error) => assert_eq!(error.code(), tonic::Code::NotFound, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(100), ended).await.unwrap();
    assert_ne!(status, 3, "its command ran");
}
