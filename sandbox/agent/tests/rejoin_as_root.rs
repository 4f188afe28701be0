//! Tests of a container that goes on as that of another sandbox, as in a fork of a machine that was
//! saved. Here the same agent goes on: it sees the old host leave and a new one come.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use harness::{Sandbox, container, main, script};
use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::v1::*;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

/// Requests the output of container "a" from `position` on.
async fn resume(client: &mut AgentClient<Channel>, position: u64) -> Streaming<StdioOut> {
    let resume = stdio_in::Kind::Resume(Resume { process: Some(main("a")), position });
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(StdioIn { kind: Some(resume) }).await.unwrap();
    let stream = client.stdio(tokio_stream::wrappers::ReceiverStream::new(receiver));
    stream.await.unwrap().into_inner()
}

/// Returns the position at which a stream begins, and its first output.
async fn first(stream: &mut Streaming<StdioOut>) -> (u64, String) {
    let mut position = 0;
    loop {
        match stream.message().await.unwrap().unwrap().kind.unwrap() {
            stdio_out::Kind::Attached(attached) => position = attached.position,
            stdio_out::Kind::Stdout(bytes) => return (position, String::from_utf8(bytes).unwrap()),
            stdio_out::Kind::Stderr(bytes) => panic!("{}", String::from_utf8_lossy(&bytes)),
        }
    }
}

fn names(server: &str, address: &str) -> Option<Names> {
    Some(Names { servers: vec![server.into()], addresses: vec![address.into()] })
}

/// A request for container "a" as that of the sandbox "fork".
fn as_fork(frozen: bool) -> RejoinRequest {
    let names = names("10.1.0.1", "10.1.0.2");
    RejoinRequest { id: "a".into(), hostname: "fork".into(), names, frozen }
}

async fn freeze(sandbox: &mut Sandbox) {
    sandbox.client.freeze(FreezeRequest { id: "a".into(), frozen: true }).await.unwrap();
}

fn is_frozen(sandbox: &Sandbox) -> bool {
    let events = sandbox.cgroup.join("containers/a/cgroup.events");
    std::fs::read_to_string(events).unwrap().contains("frozen 1")
}

#[tokio::test]
async fn a_container_goes_on_with_other_names_and_another_host() {
    let Some(mut sandbox) = Sandbox::start("a_container_goes_on_with_other_names").await else {
        return;
    };
    let spec = ProcessSpec { stdin: true, ..script("echo one; cat; echo ended; sleep 1000") };
    let mut request = container("a", spec);
    request.hostname = "saved".into();
    request.names = names("10.0.0.1", "10.0.0.2");
    sandbox.create(request).await;
    sandbox.start_container("a").await;
    let mut old = sandbox.reconnect().await;
    let mut stream = resume(&mut old, 0).await;
    assert_eq!(first(&mut stream).await, (0, "one\n".to_owned()));
    // A process of the old host's, which nobody asks for again.
    let exec = ProcessRef { container_id: "a".into(), exec_id: "shell".into() };
    let spec = Some(ProcessSpec { stdin: true, ..script("cat; sleep 1000") });
    let request = ExecRequest { process: Some(exec.clone()), spec, ..Default::default() };
    old.exec(request).await.unwrap();
    drop((stream, old));
    // Output that waits in the pipe.
    let run = sandbox.exec("a", script("echo two >/proc/1/fd/1")).await.unwrap();
    assert_eq!((run.status, run.stderr.as_str()), (0, ""));
    freeze(&mut sandbox).await;

    let mut client = sandbox.reconnect().await;
    let mut positions = Vec::new();
    for frozen in [true, true, false, false] {
        positions.push(client.rejoin(as_fork(frozen)).await.unwrap().into_inner().position);
        assert_eq!(is_frozen(&sandbox), frozen);
    }
    assert_eq!(positions, [0; 4], "output is counted anew");
    let wait = client.wait(WaitRequest { process: Some(exec) }).await.unwrap_err();
    assert_eq!(wait.code(), Code::NotFound);
    let mut stream = resume(&mut client, 0).await;
    let ended = (0, "ended\n".to_owned());
    assert_eq!(first(&mut stream).await, ended, "its input is closed");

    let look = "hostname; cat /etc/hostname /etc/resolv.conf; grep -F 10. /etc/hosts";
    let run = sandbox.exec("a", script(look)).await.unwrap();
    let files = "fork\nnameserver 10.1.0.1\noptions ndots:0\n10.1.0.2\tfork\n";
    assert_eq!(run.stdout, format!("fork\n{files}"), "{run:?}");
    let attached = client.rejoin(as_fork(false)).await.unwrap_err();
    assert_eq!(attached.code(), Code::AlreadyExists, "another host has its output");
    sandbox.remove("a").await;
    assert_eq!(client.rejoin(as_fork(false)).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn files_that_are_not_the_agents_stay() {
    let Some(mut sandbox) = Sandbox::start("files_that_are_not_the_agents_stay").await else {
        return;
    };
    let text = "rm /etc/resolv.conf; ln -s /tmp/x /etc/resolv.conf; echo ready; sleep 1000";
    let mut request = container("a", script(text));
    request.hostname = "saved".into();
    let (path, content) = ("/etc/hosts".to_owned(), b"given\n".to_vec());
    request.files = vec![File { path, content, mode: 0o644, ..File::default() }];
    sandbox.create(request).await;
    sandbox.start_container("a").await;
    let mut client = sandbox.reconnect().await;
    let mut stream = resume(&mut client, 0).await;
    assert_eq!(first(&mut stream).await.1, "ready\n");
    drop((stream, client));
    // It was not frozen, and its host name stays.
    let request = RejoinRequest { hostname: String::new(), ..as_fork(false) };
    let mut client = sandbox.reconnect().await;
    assert_eq!(client.rejoin(request).await.unwrap().into_inner().position, 6);
    let look = "hostname; cat /etc/hosts; readlink /etc/resolv.conf; ls /tmp/x";
    let run = sandbox.exec("a", script(look)).await.unwrap();
    assert_eq!(run.stdout, "saved\ngiven\n/tmp/x\n");
    sandbox.remove("a").await;
}
