//! Tests of containers on this machine's kernel. They need root, loop devices, EROFS, overlayfs and
//! cgroup2.
//!
//! Over 500 lines: tests that share the set-up of a container.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used)] // a failed unwrap is the failure report

mod harness;

use std::time::Duration;

use harness::*;
use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::v1::*;
use slipway_agent_protocol::{EXIT_STATUS_METADATA, PROTOCOL};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

macro_rules! sandbox {
    ($name:literal) => {
        match Sandbox::start($name).await {
            Some(sandbox) => sandbox,
            None => return,
        }
    };
}

mod security;

fn exit_status(status: &Status) -> &str {
    status.metadata().get(EXIT_STATUS_METADATA).map_or("", |value| value.to_str().unwrap())
}

fn with(
    id: &str,
    spec: ProcessSpec,
    change: impl FnOnce(&mut CreateContainerRequest),
) -> CreateContainerRequest {
    let mut request = container(id, spec);
    change(&mut request);
    request
}

#[tokio::test]
async fn hello_checks_the_version() {
    let mut sandbox = sandbox!("hello_checks_the_version");
    let hello =
        sandbox.client.hello(HelloRequest { protocol: PROTOCOL }).await.unwrap().into_inner();
    assert_eq!(hello.protocol, PROTOCOL);
    assert_eq!(hello.stages[0].name, "kernel");
    assert!(hello.boottime_ns >= hello.stages[0].end_ns);
    let error = sandbox.client.hello(HelloRequest { protocol: PROTOCOL + 1 }).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn streams_and_exit_status() {
    let mut sandbox = sandbox!("streams_and_exit_status");
    let run = sandbox.run(container("a", script("echo out; echo err >&2; exit 3"))).await.unwrap();
    assert_eq!(run, Output { status: 3, stdout: "out\n".into(), stderr: "err\n".into() });
    let run = sandbox.run(container("a", script("kill -9 $$"))).await.unwrap();
    assert_eq!(run.status, 0, "a container's first process is safe from itself");
}

#[tokio::test]
async fn a_missing_program_is_127_and_a_useless_one_126() {
    let mut sandbox = sandbox!("a_missing_program_is_127_and_a_useless_one_126");
    for (args, code, status, said) in [
        (["nothing"], Code::NotFound, "127", "executable file not found in $PATH"),
        (["/no/such"], Code::NotFound, "127", "no such file or directory"),
        (["data"], Code::PermissionDenied, "126", "permission denied"),
        (["/etc"], Code::PermissionDenied, "126", "is a directory"),
        (["unknown"], Code::PermissionDenied, "126", "exec format error"),
        (["foreign"], Code::PermissionDenied, "126", "/bin/foreign in the image is a program for"),
        (["foreign-script"], Code::PermissionDenied, "126", "/bin/foreign in the image is a"),
    ] {
        sandbox.create(container("a", process(&args))).await;
        let request = StartContainerRequest { id: "a".into() };
        let error = sandbox.client.start_container(request).await.unwrap_err();
        assert_eq!((error.code(), exit_status(&error)), (code, status), "{args:?}");
        assert!(error.message().contains(said), "{error}");
        assert_eq!(sandbox.wait(&main("a")).await.exit_status.to_string(), status);
        sandbox.remove("a").await;
    }
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    let error = sandbox.exec("a", process(&["nothing"])).await.unwrap_err();
    assert_eq!((error.code(), exit_status(&error)), (Code::NotFound, "127"));
    sandbox.remove("a").await;
}

#[tokio::test]
async fn signals_reach_their_process() {
    let mut sandbox = sandbox!("signals_reach_their_process");
    let trap = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    sandbox.create(container("a", script(trap))).await;
    let mut stream = sandbox.attach(&main("a"), vec![]).await.unwrap();
    sandbox.start_container("a").await;
    while !matches!(stream.message().await.unwrap().unwrap().kind, Some(stdio_out::Kind::Stdout(_)))
    {
    }
    sandbox.signal(&main("a"), libc::SIGTERM, false).await;
    drain(&mut stream).await;
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 7);
    sandbox.remove("a").await;

    sandbox.create(container("b", script("sleep 1000 & sleep 1000"))).await;
    sandbox.start_container("b").await;
    sandbox.signal(&main("b"), libc::SIGKILL, true).await;
    assert_eq!(sandbox.wait(&main("b")).await.exit_status, 137);
    let request = SignalRequest { process: Some(main("b")), signal: 77, all: false };
    let error = sandbox.client.signal(request).await;
    assert!(error.is_ok(), "a process that has ended takes any signal");
    sandbox.remove("b").await;
}

#[tokio::test]
async fn identity_environment_and_place() {
    let mut sandbox = sandbox!("identity_environment_and_place");
    let text = "id -u; id -g; id -G; pwd; echo $HOME $TERM $A; hostname; ulimit -n; \
        cat /etc/hostname; echo x > /dev/stdout; echo $$; cat /proc/self/oom_score_adj";
    let spec = ProcessSpec {
        user: "ada".into(),
        cwd: "/made/here".into(),
        env: vec!["A=b c".into()],
        limits: vec![ResourceLimit { name: "nofile".into(), soft: 77, hard: 88 }],
        oom_score_adj: 1000,
        ..script(text)
    };
    let request = with("a", spec, |request| request.hostname = "box".into());
    let run = sandbox.run(request).await.unwrap();
    let expected = "1000\n1000\n1000 29\n/made/here\n/home/ada b c\nbox\n77\nbox\nx\n1\n1000\n";
    assert_eq!((run.stderr.as_str(), run.stdout.as_str()), ("", expected));
    let spec = ProcessSpec { user: "eve".into(), ..script("true") };
    let error = sandbox.run(container("a", spec)).await.unwrap_err();
    assert!(error.message().contains("unable to find user eve"), "{error}");
    assert_eq!(exit_status(&error), "");
    let run = sandbox.run(container("a", script("true"))).await.unwrap();
    assert_eq!(run.status, 0, "the name is free again after a failure");
}

#[tokio::test]
async fn a_hundred_megabytes_arrive_whole_and_in_order() {
    let mut sandbox = sandbox!("a_hundred_megabytes_arrive_whole_and_in_order");
    const LAST: u64 = 12_000_000;
    sandbox.create(container("a", script(&format!("seq 1 {LAST}")))).await;
    let mut stream = sandbox.attach(&main("a"), vec![]).await.unwrap();
    sandbox.start_container("a").await;
    let (mut total, mut next, mut rest) = (0, 1u64, Vec::new());
    while let Some(message) = stream.message().await.unwrap() {
        let Some(stdio_out::Kind::Stdout(bytes)) = message.kind else { continue };
        assert!(bytes.len() <= 64 * 1024);
        total += bytes.len();
        rest.extend(bytes);
        let end = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in std::str::from_utf8(&rest[..end]).unwrap().lines() {
            assert_eq!(line.parse::<u64>().unwrap(), next);
            next += 1;
        }
        rest.drain(..end);
    }
    assert_eq!((next, rest.len()), (LAST + 1, 0));
    assert!(total > 90_000_000, "{total}");
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 0);
    sandbox.remove("a").await;
}

#[tokio::test]
async fn a_host_that_does_not_read_stops_the_process() {
    let mut sandbox = sandbox!("a_host_that_does_not_read_stops_the_process");
    sandbox.create(container("a", script("dd if=/dev/zero bs=1M count=8 2>/dev/null"))).await;
    let mut stream = sandbox.attach(&main("a"), vec![]).await.unwrap();
    sandbox.start_container("a").await;
    let mut waiter = sandbox.client.clone();
    let wait = waiter.wait(WaitRequest { process: Some(main("a")) });
    let early = tokio::time::timeout(Duration::from_millis(300), wait).await;
    assert!(early.is_err(), "8 MiB fit nowhere on the way");
    assert_eq!(drain(&mut stream).await.stdout.len(), 8 << 20);
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 0);
    sandbox.remove("a").await;
}

#[tokio::test]
async fn standard_input_goes_in_and_ends() {
    let mut sandbox = sandbox!("standard_input_goes_in_and_ends");
    let spec = ProcessSpec { stdin: true, ..script("cat; echo end") };
    sandbox.create(container("a", spec)).await;
    let input: Vec<Vec<u8>> = (0..50u8).map(|n| vec![b'a' + n % 26; 100_000]).collect();
    let mut stream = sandbox.attach(&main("a"), input.clone()).await.unwrap();
    sandbox.start_container("a").await;
    let output = drain(&mut stream).await;
    let expected = [input.concat(), b"end\n".to_vec()].concat();
    assert!(output.stdout.as_bytes() == expected, "{} bytes", output.stdout.len());
    sandbox.remove("a").await;
    let run = sandbox.run(container("a", script("cat; echo closed"))).await.unwrap();
    assert_eq!(run.stdout, "closed\n", "without stdin it is /dev/null");
}

/// The input is far larger than every window between host and process, and is sent before the
/// process runs.
#[tokio::test]
async fn input_that_nobody_reads_holds_up_no_other_call() {
    let mut sandbox = sandbox!("input_that_nobody_reads_holds_up_no_other_call");
    let spec = ProcessSpec { stdin: true, ..script("sleep 1000") };
    sandbox.create(container("a", spec)).await;
    let input = vec![vec![b'x'; 1 << 20]; 32];
    let _stream = sandbox.attach(&main("a"), input).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    sandbox.start_container("a").await;
    let run = sandbox.exec("a", script("echo beside")).await.unwrap();
    assert_eq!(run.stdout, "beside\n");
    sandbox.remove("a").await;
}

#[tokio::test]
async fn a_terminal_has_a_size_and_echoes() {
    let mut sandbox = sandbox!("a_terminal_has_a_size_and_echoes");
    let text = "tty; stty size; echo $TERM; read line; echo got $line; stty size; exit 5";
    let spec = ProcessSpec { terminal: true, stdin: true, rows: 24, columns: 80, ..script(text) };
    sandbox.create(container("a", spec)).await;
    let (sender, mut stream) = sandbox.attach_interactively(&main("a")).await;
    sandbox.start_container("a").await;
    let mut seen = String::new();
    while !seen.contains("xterm") {
        let message = stream.message().await.unwrap().unwrap();
        if let Some(stdio_out::Kind::Stdout(bytes)) = message.kind {
            seen += std::str::from_utf8(&bytes).unwrap();
        }
    }
    assert!(seen.starts_with("/dev/pts/0\r\n24 80\r\n"), "{seen:?}");
    let resize = ResizeRequest { process: Some(main("a")), rows: 50, columns: 132 };
    sandbox.client.resize(resize).await.unwrap();
    let kind = Some(stdio_in::Kind::Stdin(b"hello\n".to_vec()));
    sender.send(StdioIn { kind }).await.unwrap();
    let rest = drain(&mut stream).await.stdout;
    assert!(rest.contains("got hello\r\n50 132\r\n"), "{rest:?}");
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 5);
    sandbox.remove("a").await;
}

#[tokio::test]
async fn exec_joins_the_container() {
    let mut sandbox = sandbox!("exec_joins_the_container");
    let request = with("a", script("echo made > /file; sleep 1000"), |request| {
        request.hostname = "box".into()
    });
    sandbox.create(request).await;
    sandbox.start_container("a").await;
    let text = "until [ -s /file ]; do sleep 0.01; done; cat /file; hostname; id -u; \
        grep CapEff /proc/self/status; cat /proc/1/cmdline | tr '\\0' ' '; exit 9";
    let spec = ProcessSpec { user: "1000".into(), ..script(text) };
    let run = sandbox.exec("a", spec).await.unwrap();
    let caps = "CapEff:\t0000000000000000\n";
    assert!(run.stdout.starts_with(&format!("made\nbox\n1000\n{caps}sleep")), "{run:?}");
    assert_eq!(run.status, 9);
    let spec = ProcessSpec { terminal: true, ..script("tty") };
    assert!(sandbox.exec("a", spec).await.unwrap().stdout.starts_with("/dev/pts/"));
    // An exec that leaves a child behind ends, too.
    let run = sandbox.exec("a", script("sleep 1000 & echo done")).await.unwrap();
    assert_eq!(run.stdout, "done\n");
    sandbox.remove("a").await;
}

#[tokio::test]
async fn calls_at_once_with_one_id_have_one_result() {
    let mut sandbox = sandbox!("calls_at_once_with_one_id_have_one_result");
    sandbox.create(container("a", script("sleep 1000"))).await;
    sandbox.start_container("a").await;
    let mut execs = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let mut client = sandbox.client.clone();
        let process = ProcessRef { container_id: "a".into(), exec_id: "one".into() };
        let (process, spec) = (Some(process), Some(script("true")));
        let request = ExecRequest { process, spec, ..Default::default() };
        execs.spawn(async move { client.exec(request).await.map(drop) });
    }
    let ended = execs.join_all().await;
    let refused: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
    assert_eq!(refused.len(), 3, "{refused:?}");
    assert!(refused.iter().all(|error| error.code() == Code::AlreadyExists), "{refused:?}");
    // Of two removals one does it, and both succeed or the later one finds nothing.
    let request = || RemoveContainerRequest { id: "a".into() };
    let (mut one, mut other) = (sandbox.client.clone(), sandbox.client.clone());
    let both = tokio::join!(one.remove_container(request()), other.remove_container(request()));
    let failed = [both.0, both.1].into_iter().filter_map(Result::err);
    assert!(failed.map(|error| error.code()).all(|code| code == Code::NotFound));
    let run = sandbox.run(container("a", script("exit 5"))).await.unwrap();
    assert_eq!(run.status, 5);
}

#[tokio::test]
async fn containers_live_side_by_side_and_leave_nothing() {
    let mut sandbox = sandbox!("containers_live_side_by_side_and_leave_nothing");
    for id in ["a", "b", "c"] {
        let text = format!("echo {id} > /mine; sleep 1000");
        sandbox.create(container(id, script(&text))).await;
        sandbox.start_container(id).await;
    }
    let wait = "until [ -s /mine ]; do sleep 0.01; done; cat /mine; ps | grep -c sleep\\ 1000";
    for id in ["a", "b", "c"] {
        let run = sandbox.exec(id, script(wait)).await.unwrap();
        assert!(run.stdout.starts_with(&format!("{id}\n")), "{run:?}");
    }
    let stats = StatsRequest { container_id: "a".into() };
    let stats = sandbox.client.stats(stats).await.unwrap().into_inner();
    assert!(stats.group.unwrap().cpu.unwrap().usage_usec > 0);
    let listed = ProcessesRequest { container_id: "a".into() };
    let listed = sandbox.client.processes(listed).await.unwrap().into_inner();
    // The first process has become `sleep`, or is a shell that waits for it.
    assert!(!listed.pids.is_empty() && listed.pids.iter().all(|pid| *pid > 1), "{listed:?}");
    let error = sandbox.client.create_container(container("a", script("true"))).await;
    assert_eq!(error.unwrap_err().code(), Code::AlreadyExists);
    assert!(
        sandbox.client.stats(StatsRequest::default()).await.unwrap().into_inner().processes >= 3
    );
    for id in ["a", "b", "c"] {
        sandbox.remove(id).await;
    }
    let request = StartContainerRequest { id: "a".into() };
    let error = sandbox.client.start_container(request).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    let left = std::fs::read_dir(sandbox.cgroup.join("containers")).unwrap();
    let left = left.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count();
    assert_eq!(left, 0, "cgroups");
    let agent = sandbox.agent.id();
    let children = std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap();
    assert_eq!(children.trim(), "", "zombies");
}

#[tokio::test]
async fn a_returning_host_finds_the_rest_of_the_output() {
    let mut sandbox = sandbox!("a_returning_host_finds_the_rest_of_the_output");
    let spec = ProcessSpec { stdin: true, ..script("echo one; read x; echo two $x; exit 4") };
    sandbox.create(container("a", spec)).await;
    let (sender, mut stream) = sandbox.attach_interactively(&main("a")).await;
    sandbox.start_container("a").await;
    while !matches!(
        stream.message().await.unwrap().unwrap().kind,
        Some(stdio_out::Kind::Stdout(bytes)) if bytes == b"one\n"
    ) {}
    let (second, mut refused) = (sandbox.client.clone(), sandbox.reconnect().await);
    drop((second, sender, stream));
    std::mem::swap(&mut sandbox.client, &mut refused);
    drop(refused);
    let mut stream = sandbox.attach(&main("a"), vec![b"more\n".to_vec()]).await.unwrap();
    assert_eq!(drain(&mut stream).await.stdout, "two more\n");
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 4);
    sandbox.remove("a").await;
}

/// Requests the output of container "a" from `position` on.
async fn resume(client: &mut AgentClient<Channel>, position: u64) -> Streaming<StdioOut> {
    let resume = stdio_in::Kind::Resume(Resume { process: Some(main("a")), position });
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(StdioIn { kind: Some(resume) }).await.unwrap();
    let stream = client.stdio(tokio_stream::wrappers::ReceiverStream::new(receiver));
    stream.await.unwrap().into_inner()
}

/// Hosts die at any point between receiving and recording. The next host resumes at the end of the
/// last one's record, whatever the agent was told.
#[tokio::test]
async fn hosts_that_die_lose_no_byte_and_get_none_twice() {
    let mut sandbox = sandbox!("hosts_that_die_lose_no_byte_and_get_none_twice");
    const LAST: usize = 400_000;
    let text = format!("seq 1 {LAST} | tee /dev/stderr; exit 6");
    sandbox.create(container("a", script(&text))).await;
    sandbox.start_container("a").await;
    // The host's record: the position up to which it has everything, and the bytes of each stream.
    let (mut position, mut streams) = (0, [Vec::new(), Vec::new()]);
    for host in 0.. {
        let mut client = sandbox.reconnect().await;
        let mut stream = resume(&mut client, position).await;
        let mut ended = false;
        for message in 0..host * 3 + 2 {
            let Some(message_of) = stream.message().await.unwrap() else {
                ended = true;
                break;
            };
            let (stream, bytes) = match message_of.kind.unwrap() {
                stdio_out::Kind::Attached(at) => {
                    assert_eq!(at.position, position);
                    continue;
                }
                stdio_out::Kind::Stdout(bytes) => (0, bytes),
                stdio_out::Kind::Stderr(bytes) => (1, bytes),
            };
            // Some hosts die with a message that they have not recorded, some before they report
            // what they recorded.
            if message == host * 3 + 1 && host % 3 == 0 {
                break;
            }
            position += bytes.len() as u64;
            streams[stream].extend(bytes);
            if (host + message) % 2 == 0 {
                let request = RecordedRequest { process: Some(main("a")), position };
                client.recorded(request).await.unwrap();
            }
        }
        if ended {
            assert!(host > 3, "one host got it all");
            break;
        }
    }
    let expected: String = (1..=LAST).map(|number| format!("{number}\n")).collect();
    for stream in streams {
        assert!(stream == expected.as_bytes(), "{} of {} bytes", stream.len(), expected.len());
    }
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 6);
    sandbox.remove("a").await;
}

/// A host had recorded everything that it received, and died before it reported that. The next
/// host, which has nothing to record yet, gets the rest and the end.
#[tokio::test]
async fn what_precedes_a_resumed_position_is_recorded() {
    let mut sandbox = sandbox!("what_precedes_a_resumed_position_is_recorded");
    const LEN: u64 = 300_000;
    let text = format!("head -c {LEN} /dev/zero; exit 8");
    sandbox.create(container("a", script(&text))).await;
    sandbox.start_container("a").await;
    let mut position = 0;
    // The agent keeps 256 KiB, and sends no more before the host reports what is recorded.
    for (host, upto) in [(0, 192 << 10), (1, LEN)] {
        let mut client = sandbox.reconnect().await;
        let mut stream = resume(&mut client, position).await;
        while position < upto {
            let message = tokio::time::timeout(Duration::from_secs(60), stream.message()).await;
            let message = message.unwrap_or_else(|_| panic!("host {host} waits at {position}"));
            if let Some(stdio_out::Kind::Stdout(bytes)) = message.unwrap().unwrap().kind {
                position += bytes.len() as u64;
            }
        }
    }
    assert_eq!(position, LEN);
    assert_eq!(sandbox.wait(&main("a")).await.exit_status, 8);
    sandbox.remove("a").await;
}

#[tokio::test]
async fn one_stream_at_a_time() {
    let mut sandbox = sandbox!("one_stream_at_a_time");
    sandbox.create(container("a", script("true"))).await;
    let _first = sandbox.attach(&main("a"), vec![]).await.unwrap();
    let error = sandbox.attach(&main("a"), vec![]).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    sandbox.remove("a").await;
}

fn volume(name: &str, nsid: u32, read_only: bool, mount_point: &str) -> Volume {
    let mount_point = mount_point.into();
    let device_path = String::new();
    Volume { name: name.into(), device: device(nsid), read_only, mount_point, device_path }
}

#[tokio::test]
async fn volumes_are_devices_and_mounts() {
    let mut sandbox = sandbox!("volumes_are_devices_and_mounts");
    let text = "test -b /dev/slipway/raw && echo bytes | dd of=/dev/slipway/raw conv=sync,fsync \
        2>/dev/null && head -c 5 /dev/slipway/raw && echo && echo kept > /data/file && \
        grep -c ' /data ext4 rw' /proc/mounts";
    let request = with("a", script(text), |request| {
        request.volumes =
            vec![volume("raw", BLANK, false, ""), volume("data", FORMATTED, false, "/data")];
    });
    let run = sandbox.run(request).await.unwrap();
    assert_eq!(run, Output { stdout: "bytes\n1\n".into(), ..Default::default() });
    let text = "cat /data/file; echo x > /data/file; echo x > /dev/slipway/data; true";
    let request = with("a", script(text), |request| {
        request.volumes = vec![volume("data", FORMATTED, true, "/data")];
    });
    let run = sandbox.run(request).await.unwrap();
    assert_eq!(run.stdout, "kept\n");
    assert!(run.stderr.contains("/data/file: Read-only file system"), "{}", run.stderr);
    assert!(run.stderr.contains("/dev/slipway/data: Operation not permitted"), "{}", run.stderr);
    let request = with("a", script("true"), |request| {
        request.volumes = vec![volume("raw", BLANK, false, "/data")];
    });
    let error = sandbox.run(request).await.unwrap_err();
    assert!(error.message().contains("holds no ext4 file system"), "{error}");
}

#[tokio::test]
async fn the_root_is_writable_unless_asked() {
    let mut sandbox = sandbox!("the_root_is_writable_unless_asked");
    let text = "echo x > /file && cat /file; rm /bin/data; ls /bin/data";
    for volatile_layer in [None, device(VOLATILE)] {
        let request = with("a", script(text), |request| {
            request.root.as_mut().unwrap().volatile_layer = volatile_layer;
        });
        let run = sandbox.run(request).await.unwrap();
        assert_eq!(run.stdout, "x\n");
        assert!(run.stderr.contains("No such file"), "{}", run.stderr);
    }
    let request = with("a", script("echo x > /file"), |request| {
        request.root.as_mut().unwrap().read_only = true;
    });
    let run = sandbox.run(request).await.unwrap();
    assert!(run.stderr.contains("Read-only file system"), "{}", run.stderr);
}

#[tokio::test]
async fn a_container_opens_no_device_of_others() {
    let mut sandbox = sandbox!("a_container_opens_no_device_of_others");
    let text = "ls /dev | tr '\\n' ' '; mknod /b b 7 0; cat /b; mknod /dev/b b 7 0; cat /dev/b; \
        mknod /dev/m c 1 1; cat /dev/m; echo x > /proc/sys/kernel/hostname; \
        mount -t tmpfs t /home";
    let run = sandbox.run(container("a", script(text))).await.unwrap();
    // The root allows no devices at all. In /dev, creating the node of another's device gives no
    // access to it.
    for said in [
        "'/b': Permission denied",
        "'/dev/b': Operation not permitted",
        "'/dev/m': Operation not permitted",
        "mount: permission denied",
    ] {
        assert!(run.stderr.contains(said), "{said}: {}", run.stderr);
    }
    assert!(run.stderr.contains("/proc/sys/kernel/hostname: Read-only"), "{}", run.stderr);
    let names = "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero ";
    assert_eq!(run.stdout, names);
    let privileged = "grep CapEff /proc/self/status; test -c /dev/loop-control && echo all";
    let request = with("a", script(privileged), |request| request.privileged = true);
    let run = sandbox.run(request).await.unwrap();
    assert!(run.stdout.ends_with("all\n") && !run.stdout.contains("a80425fb"), "{run:?}");
    // A volume has its path though the guest has another device there.
    let both = "test -b /dev/loop-control && test -c /dev/full && echo volume";
    let request = with("a", script(both), |request| {
        request.privileged = true;
        let device_path = "/dev/loop-control".into();
        request.volumes = vec![Volume { device_path, ..volume("raw", BLANK, false, "") }];
    });
    assert_eq!(sandbox.run(request).await.unwrap().stdout, "volume\n");
}

#[tokio::test]
async fn absent_devices_and_bad_requests_say_so() {
    let mut sandbox = sandbox!("absent_devices_and_bad_requests_say_so");
    let bad: [(&str, CreateContainerRequest); 4] = [
        ("is not a name", container("a/b", script("true"))),
        ("no command given", container("a", process(&[]))),
        ("no process given", with("a", script(""), |request| request.process = None)),
        ("no root file system", with("a", script(""), |request| request.root = None)),
    ];
    for (said, request) in bad {
        let error = sandbox.client.create_container(request).await.unwrap_err();
        assert!(error.message().contains(said), "{error}");
    }
    let request = with("a", script("true"), |request| {
        request.volumes = vec![volume("v", 77, false, "")];
    });
    let error = sandbox.client.create_container(request).await.unwrap_err();
    assert!(error.message().contains("volume v: namespace 77"), "{error}");
}

#[tokio::test]
async fn shutdown_ends_everything() {
    let mut sandbox = sandbox!("shutdown_ends_everything");
    sandbox.create(container("a", script("sleep 1000"))).await;
    let pid = sandbox.start_container("a").await;
    sandbox.create(container("b", script("sleep 1000"))).await;
    let pids = [pid, sandbox.start_container("b").await];
    sandbox.client.shutdown(ShutdownRequest {}).await.unwrap();
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
    let status = tokio::task::spawn_blocking({
        let pid = sandbox.agent.id();
        move || {
            while std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .is_ok_and(|s| !s.contains(") Z "))
            {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    tokio::time::timeout(Duration::from_secs(100), status).await.unwrap().unwrap();
    assert!(sandbox.agent.wait().unwrap().success());
}
