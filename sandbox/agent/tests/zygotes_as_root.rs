//! Tests of forks of a process that has stopped itself.
#![allow(clippy::unwrap_used, dead_code)] // a failed unwrap is the failure report
#![allow(missing_docs)]

mod harness;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use harness::{Output, Sandbox, container, drain, script};
use rustix::process::{Pid, Signal, kill_process};
use slipway_agent_protocol::v1::*;
use tonic::Streaming;

/// The time within which what the kernel does at once is seen.
const SOON: Duration = Duration::from_secs(100);
/// The number of processes of a container with a zygote and no forks: its first one, the zygote.
const WITH_ZYGOTE: usize = 2;

/// Starts the container "a", which sleeps.
async fn sleeper(test: &str) -> Option<Sandbox> {
    let mut sandbox = Sandbox::start(test).await?;
    sandbox.create(container("a", script("exec sleep 100000"))).await;
    sandbox.start_container("a").await;
    Some(sandbox)
}

fn reference(exec_id: &str) -> ProcessRef {
    ProcessRef { container_id: "a".into(), exec_id: exec_id.into() }
}

/// Makes a request for a fork of a zygote of `spec` that has the variable `N`.
fn request(exec_id: &str, spec: &ProcessSpec) -> ExecRequest {
    let variables = vec![format!("N={exec_id}")];
    ExecRequest {
        process: Some(reference(exec_id)),
        spec: Some(ProcessSpec { stdin: true, ..spec.clone() }),
        zygote: Some(Zygote { ready_ms: 100_000, variables, ..Zygote::default() }),
        ..ExecRequest::default()
    }
}

/// Runs a fork of a zygote of `spec` to its end, with `input`.
async fn fork(
    sandbox: &mut Sandbox,
    exec_id: &str,
    spec: &ProcessSpec,
    input: &str,
) -> (ExecReply, Output) {
    let reply = sandbox.client.exec(request(exec_id, spec)).await.unwrap().into_inner();
    let process = reference(exec_id);
    let mut stream = sandbox.attach(&process, vec![input.as_bytes().to_vec()]).await.unwrap();
    let mut output = drain(&mut stream).await;
    output.status = sandbox.wait(&process).await.exit_status;
    (reply, output)
}

/// Returns the processes of the container, once they are `count`.
async fn processes(sandbox: &mut Sandbox, count: usize) -> Vec<u32> {
    let deadline = Instant::now() + SOON;
    loop {
        let request = ProcessesRequest { container_id: "a".into() };
        let pids = sandbox.client.processes(request).await.unwrap().into_inner().pids;
        if pids.len() == count {
            return pids;
        }
        assert!(Instant::now() < deadline, "{pids:?}, and not {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for a zygote that has stopped itself, and returns its process id.
async fn ready_zygote(sandbox: &mut Sandbox) -> u32 {
    let deadline = Instant::now() + SOON;
    loop {
        let is_stopped = |pid: &u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
            status.is_ok_and(|status| status.contains("\nState:\tT"))
        };
        if let Some(pid) = processes(sandbox, WITH_ZYGOTE).await.into_iter().find(is_stopped) {
            return pid;
        }
        assert!(Instant::now() < deadline, "nothing has stopped itself");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns where a process that is stopped stands: its system call, stack and instruction.
fn stands_at(pid: u32) -> (String, Vec<u8>) {
    let place = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
    let words: Vec<_> = place.split_whitespace().collect();
    let address = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let [.., stack, instruction] = words.as_slice() else { panic!("{place}") };
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut bytes = vec![0; 1024];
    let (below, around) = bytes.split_at_mut(960);
    memory.read_exact_at(below, address(stack) - 960).unwrap();
    memory.read_exact_at(around, address(instruction) - 32).unwrap();
    (place, bytes)
}

/// Returns the number of control groups below that of the container.
fn groups(sandbox: &Sandbox) -> usize {
    let entries = std::fs::read_dir(sandbox.cgroup.join("containers/a")).unwrap();
    entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).count()
}

/// Returns the first output of a stream.
async fn first(stream: &mut Streaming<StdioOut>) -> String {
    loop {
        match stream.message().await.unwrap().unwrap().kind.unwrap() {
            stdio_out::Kind::Attached(_) => {}
            stdio_out::Kind::Stdout(bytes) => return String::from_utf8(bytes).unwrap(),
            stdio_out::Kind::Stderr(bytes) => panic!("{}", String::from_utf8_lossy(&bytes)),
        }
    }
}

#[tokio::test]
async fn a_hundred_forks_leave_their_zygote_as_it_was() {
    let test = "a_hundred_forks_leave_their_zygote_as_it_was";
    let Some(mut sandbox) = sleeper(test).await else { return };
    let text = "made=once; kill -STOP $$; cat <&3; read -r line; echo \"$made $line\"; \
        echo err >&2; test -z \"$N\" || exit 1; exit 7";
    let spec = script(text);
    let mut before = None;
    for number in 0..100 {
        let (name, input) = (format!("n{number}"), format!("input {number}\nmore\n"));
        let (reply, output) = fork(&mut sandbox, &name, &spec, &input).await;
        assert!(reply.forked && reply.pid > 0 && reply.refused.is_empty(), "{reply:?}");
        let stdout = format!("N={name}\nonce input {number}\n");
        assert_eq!(output, Output { status: 7, stdout, stderr: "err\n".into() });
        let pid = ready_zygote(&mut sandbox).await;
        let now = (pid, stands_at(pid));
        assert!(*before.get_or_insert_with(|| now.clone()) == now, "after {number} forks");
    }
    let dead = script("grep -l '^State:.Z' /proc/[0-9]*/status");
    let seen = sandbox.exec("a", dead).await.unwrap();
    assert_eq!(seen.stdout, "", "{seen:?}");
    let deadline = Instant::now() + SOON;
    // The zygote has one, too.
    while groups(&sandbox) > 1 {
        assert!(Instant::now() < deadline, "a control group of a fork is left");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    sandbox.remove("a").await;
}

#[tokio::test]
async fn all_that_comes_of_a_fork_ends_with_it() {
    let Some(mut sandbox) = sleeper("all_that_comes_of_a_fork_ends_with_it").await else { return };
    let spec = script("kill -STOP $$; sleep 100000 <&- >&- 2>&- & read -r go; echo $go; $go");
    // It ends by itself.
    let (reply, output) = fork(&mut sandbox, "ends", &spec, "true\n").await;
    assert!(reply.forked, "{reply:?}");
    assert_eq!((output.status, output.stdout.as_str()), (0, "true\n"));
    processes(&mut sandbox, WITH_ZYGOTE).await;
    // Its host leaves.
    sandbox.client.exec(request("left", &spec)).await.unwrap();
    let process = reference("left");
    let (sender, mut stream) = sandbox.attach_interactively(&process).await;
    let input = Some(stdio_in::Kind::Stdin(b"cat\n".to_vec()));
    sender.send(StdioIn { kind: input }).await.unwrap();
    assert_eq!(first(&mut stream).await, "cat\n");
    drop((sender, stream));
    processes(&mut sandbox, WITH_ZYGOTE).await;
    // It lasts too long, and nobody takes part in it.
    let mut short = request("lasts", &spec);
    short.zygote.as_mut().unwrap().longest_ms = 1;
    sandbox.client.exec(short).await.unwrap();
    assert_eq!(sandbox.wait(&reference("lasts")).await.exit_status, 137);
    processes(&mut sandbox, WITH_ZYGOTE).await;
    // It is killed before it begins.
    sandbox.client.exec(request("stillborn", &spec)).await.unwrap();
    sandbox.signal(&reference("stillborn"), libc::SIGKILL, false).await;
    assert_eq!(sandbox.wait(&reference("stillborn")).await.exit_status, 137);
    processes(&mut sandbox, WITH_ZYGOTE).await;
    // Removing the container does not wait for a fork that was not started, either.
    sandbox.client.exec(request("waits", &spec)).await.unwrap();
    sandbox.remove("a").await;
}

#[tokio::test]
async fn the_status_of_a_fork_is_kept_until_its_host_has_it() {
    let test = "the_status_of_a_fork_is_kept_until_its_host_has_it";
    let Some(mut sandbox) = sleeper(test).await else { return };
    let spec = script("kill -STOP $$; read -r status; exit $status");
    sandbox.client.exec(request("first", &spec)).await.unwrap();
    let first = reference("first");
    let mut stream = sandbox.attach(&first, vec![b"7\n".to_vec()]).await.unwrap();
    assert_eq!(drain(&mut stream).await.stderr, "");
    // More than the agent keeps of those whose hosts have the status.
    for number in 0..70 {
        let (reply, output) = fork(&mut sandbox, &format!("n{number}"), &spec, "3\n").await;
        assert!(reply.forked && output.status == 3, "{reply:?} {output:?}");
    }
    assert_eq!(sandbox.wait(&first).await.exit_status, 7);
    sandbox.remove("a").await;
}

#[tokio::test]
async fn another_command_is_no_fork_of_the_zygote() {
    let Some(mut sandbox) = sleeper("another_command_is_no_fork_of_the_zygote").await else {
        return;
    };
    let spec = script("kill -STOP $$; cat");
    assert!(fork(&mut sandbox, "one", &spec, "").await.0.forked);
    let other = script("echo other; cat");
    let (reply, output) = fork(&mut sandbox, "other", &other, "input").await;
    assert_eq!((reply.forked, output.stdout.as_str()), (false, "other\ninput"));
    assert_eq!(reply.refused, "it has another command, environment or rights");
    let (reply, output) = fork(&mut sandbox, "two", &spec, "input").await;
    assert_eq!((reply.forked, output.stdout.as_str()), (true, "input"));
    sandbox.remove("a").await;
}

#[tokio::test]
async fn a_program_that_cannot_be_forked_is_started_anew() {
    let test = "a_program_that_cannot_be_forked_is_started_anew";
    let Some(mut sandbox) = sleeper(test).await else { return };
    let left = "sleep 100000 <&- >&- 2>&- &";
    let spec = script(&format!("{left} echo \"$N\"; cat <&3; cat"));
    for name in ["one", "two"] {
        let (reply, output) = fork(&mut sandbox, name, &spec, "input").await;
        assert_eq!((reply.forked, output.status), (false, 0));
        assert_eq!(reply.refused, "it ended with status 0 before it stopped itself");
        assert_eq!(output.stdout, format!("{name}\nN={name}\ninput"));
        // The zygote and the process that it left in the background are gone, too.
        processes(&mut sandbox, WITH_ZYGOTE - 1).await;
    }
    sandbox.remove("a").await;
}

#[tokio::test]
async fn a_zygote_that_has_gone_is_not_waited_for() {
    let test = "a_zygote_that_has_gone_is_not_waited_for";
    let Some(mut sandbox) = sleeper(test).await else { return };
    let spec = script("kill -STOP $$; cat");
    let prepare = |name: &str| {
        let mut request = request(name, &spec);
        request.zygote.as_mut().unwrap().prepare = true;
        request
    };
    let reply = sandbox.client.exec(prepare("prepare")).await.unwrap().into_inner();
    assert_eq!(reply, ExecReply::default());
    let zygote = ready_zygote(&mut sandbox).await;
    assert_eq!(sandbox.client.exec(prepare("again")).await.unwrap().into_inner().refused, "");
    assert_eq!(ready_zygote(&mut sandbox).await, zygote);
    kill_process(Pid::from_raw(zygote as i32).unwrap(), Signal::KILL).unwrap();
    processes(&mut sandbox, WITH_ZYGOTE - 1).await;
    // The program stops itself here too, and is told to go on.
    let (reply, output) = fork(&mut sandbox, "anew", &spec, "input").await;
    assert!(!reply.forked && reply.refused.contains("it has ended"), "{reply:?}");
    assert_eq!((output.status, output.stdout.as_str()), (0, "input"));
    sandbox.remove("a").await;
}

#[tokio::test]
async fn a_filter_of_system_calls_can_forbid_forks() {
    let test = "a_filter_of_system_calls_can_forbid_forks";
    let Some(mut sandbox) = sleeper(test).await else { return };
    let number = libc::SYS_socketpair as u8;
    // The call's number; is it this one: EPERM; else it is allowed.
    let filter = [
        [0x20, 0, 0, 0, 0, 0, 0, 0],
        [0x15, 0, 0, 1, number, 0, 0, 0],
        [6, 0, 0, 0, 1, 0, 5, 0],
        [6, 0, 0, 0, 0, 0, 0xff, 0x7f],
    ];
    let security = Security { seccomp: filter.concat(), ..Security::default() };
    let spec = ProcessSpec { security: Some(security), ..script("kill -STOP $$; cat") };
    let (reply, output) = fork(&mut sandbox, "one", &spec, "input").await;
    assert!(!reply.forked && reply.refused.contains("Operation not permitted"), "{reply:?}");
    assert_eq!((output.status, output.stdout.as_str()), (0, "input"));
    // Neither the child of that attempt nor its zygote is left.
    processes(&mut sandbox, WITH_ZYGOTE - 1).await;
    sandbox.remove("a").await;
}
