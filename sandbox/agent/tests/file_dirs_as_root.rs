//! Tests of directories of a container's own for files of the host, on this machine's kernel.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use std::time::Duration;

use harness::{Sandbox, container, script};
use slipway_agent_protocol::v1::*;

fn dir(path: &str) -> FileDir {
    FileDir { path: path.into(), mode: 0o755, ..FileDir::default() }
}

fn file(path: &str, text: &str) -> File {
    let (path, content) = (path.into(), format!("{text}\n").into_bytes());
    File { path, content, mode: 0o644, ..File::default() }
}

fn link(path: &str, to: &str) -> File {
    File { path: path.into(), link: to.into(), ..File::default() }
}

/// The image has a directory /home/ada, and a file /bin/data.
fn request() -> CreateContainerRequest {
    let file_dirs = vec![
        FileDir { read_only: true, ..dir("/home") },
        FileDir { mode: 0o1777, gid: 2000, ..dir("/home/tls") },
        FileDir { read_only: true, file: true, ..dir("/bin/data") },
        FileDir { size_bytes: Some(65536), no_exec: true, ..dir("/scratch") },
    ];
    let files = vec![
        file("/home/..1/ada", "one"),
        link("/home/..data", "..1"),
        link("/home/ada", "..data/ada"),
        file("/home/tls/key", "key"),
        file("/bin/data", "single"),
        file("/etc/other", "in the root"),
    ];
    CreateContainerRequest { file_dirs, files, ..container("a", script("sleep 1000")) }
}

#[tokio::test]
async fn a_directory_has_the_place_of_the_images_and_changes_at_once() {
    let test = "a_directory_has_the_place_of_the_images_and_changes_at_once";
    let Some(mut sandbox) = Sandbox::start(test).await else { return };
    sandbox.create(request()).await;
    // A file that the first message has no room for: the first process does not run yet.
    let put = |files, removed| PutFilesRequest { id: "a".into(), files, removed };
    let late = vec![file("/home/..1/late", "late"), link("/home/late", "..data/late")];
    sandbox.client.put_files(put(late, Vec::new())).await.unwrap();
    sandbox.start_container("a").await;
    let look = "ls -A /home; cat /home/ada /home/late /home/tls/key /bin/data /etc/other; \
        stat -c '%a %g' /home/tls; head -c 100000 /dev/zero >/scratch/a 2>/dev/null; \
        stat -c %s /scratch/a; cd /scratch; >a; echo 'echo run' >run; chmod 755 run; \
        ./run 2>/dev/null; echo $?; \
        echo x >/home/x; echo x >/bin/data; echo x >/home/tls/own";
    let run = sandbox.exec("a", script(look)).await.unwrap();
    let names = "..1\n..data\nada\nlate\ntls\n";
    let files = "one\nlate\nkey\nsingle\nin the root\n";
    // A directory with a bound takes no more, and no program in it is executed.
    let expected = format!("{names}{files}1777 2000\n65536\n126\n");
    assert_eq!(run.stdout, expected, "{run:?}");
    for path in ["/home/x", "/bin/data"] {
        assert!(run.stderr.contains(&format!("{path}: Read-only file system")), "{run:?}");
    }
    assert!(!run.stderr.contains("own"), "{run:?}");

    let files = vec![
        file("/home/..2/ada", "two"),
        link("/home/..data", "..2"),
        file("/bin/data", "again"),
        file("/etc/other", "changed"),
    ];
    let removed = ["/home/..1/ada", "/home/..1/late", "/home/late"].map(str::to_owned).to_vec();
    sandbox.client.put_files(put(files, removed)).await.unwrap();
    let look = "ls -A /home; cat /home/ada /bin/data /etc/other; ls /home/tls";
    let run = sandbox.exec("a", script(look)).await.unwrap();
    let expected = "..2\n..data\nada\ntls\ntwo\nagain\nchanged\nkey\nown\n";
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), (expected, ""));

    sandbox.remove("a").await;
    // They go with the container's last user in the agent, which may be the request itself.
    let left = sandbox.directory.path().join("file-dirs");
    let gone = async {
        while std::fs::read_dir(&left).unwrap().count() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
}
