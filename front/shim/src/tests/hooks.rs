//! Tests of the hooks' runner, with programs of the host's.

use serde_json::{Value, json};

use super::*;
use crate::hold::{raise_descriptor_limit, tests::ends};

/// Returns a hook that is a shell's script.
fn script(text: &str, timeout: Option<i64>) -> Hook {
    let (path, env) = ("/bin/sh".to_owned(), vec!["PATH=/usr/bin:/bin".into(), "A=of it".into()]);
    let args = ["its-name", "-c", text].map(str::to_owned).to_vec();
    Hook { path, args, env, timeout }
}

async fn run_in(dir: &Path, hook: &Hook) -> Result<(), String> {
    run(hook, dir, None, b"{}").await
}

#[tokio::test]
async fn a_hook_reads_the_state_and_has_its_words_and_environment() {
    let dir = tempfile::tempdir().unwrap();
    let oci: Oci = serde_json::from_value(json!({
        "ociVersion": "1.1.0",
        "annotations": {"nerdctl/name": "one"},
        "hooks": {"poststop": [{
            "path": "/bin/sh",
            "args": ["its-name", "-c", "cat >state; echo \"$0 $A $B\" >words"],
            "env": ["PATH=/usr/bin:/bin", "A=of it"]
        }]}
    }))
    .unwrap();
    let subject = Subject { id: "one", bundle: dir.path(), oci: &oci, holder: None };
    subject.run_all(ENDED, "running", Some(17)).await;
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let state: Value = serde_json::from_str(&read("state")).unwrap();
    let expected = json!({
        "ociVersion": "1.1.0", "id": "one", "status": "running", "pid": 17,
        "bundle": dir.path(), "annotations": {"nerdctl/name": "one"}
    });
    assert_eq!(state, expected);
    assert_eq!(read("words"), "its-name of it \n");
    subject.end().await;
    let state: Value = serde_json::from_str(&read("state")).unwrap();
    assert_eq!((state["status"].as_str(), state.get("pid")), (Some("stopped"), None));
}

#[tokio::test]
async fn a_failure_says_what_the_hook_said() {
    let dir = tempfile::tempdir().unwrap();
    let hook = script("echo out; echo one >&2; echo two >&2; exit 3", None);
    let failed = run_in(dir.path(), &hook).await.unwrap_err();
    assert_eq!(failed, "/bin/sh failed: exit status: 3: one; two");
    let long = "i=0; while [ $i -lt 2000 ]; do echo \"line $i\" >&2; i=$((i + 1)); done; exit 1";
    let failed = run_in(dir.path(), &script(long, None)).await.unwrap_err();
    assert!(failed.len() < 3 * MOST_TOLD && failed.ends_with("line 1999"), "{failed}");
    assert!(!failed.contains("line 1;"), "{failed}");
    let absent = Hook { path: "/no/such/program".into(), ..Hook::default() };
    let failed = run_in(dir.path(), &absent).await.unwrap_err();
    assert!(failed.starts_with("/no/such/program cannot be run: "), "{failed}");
    assert_eq!(run_in(dir.path(), &script("exit 0", None)).await, Ok(()));
}

#[tokio::test]
async fn a_hook_that_does_not_end_is_killed_with_what_it_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let hook = |seconds| script("sleep 600 & echo $! >child; wait", Some(seconds));
    let mut seconds = 1;
    let child = loop {
        let failed = run_in(dir.path(), &hook(seconds)).await.unwrap_err();
        match std::fs::read_to_string(dir.path().join("child")) {
            Ok(text) if text.ends_with('\n') => {
                assert_eq!(failed, format!("/bin/sh was killed after {seconds} s"));
                break text;
            }
            // It was killed before it had begun: the machine is busy.
            _ => seconds *= 2,
        }
    };
    let stat = format!("/proc/{}/stat", child.trim());
    // Gone, or a zombie until the test's init reaps it.
    let runs = || {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['S', 'R', 'D']))
    };
    while runs() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn what_a_hook_leaves_behind_keeps_nobody() {
    let dir = tempfile::tempdir().unwrap();
    // It reads nothing, and its child has its outputs open.
    let hook = script("sleep 600 & echo $! >child; exit 0", None);
    let state = vec![b' '; 1 << 20];
    assert_eq!(run(&hook, dir.path(), None, &state).await, Ok(()));
    let child = std::fs::read_to_string(dir.path().join("child")).unwrap();
    let pid = Pid::from_raw(child.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_hook_begins_with_the_usual_mask_and_limit_of_descriptors() {
    raise_descriptor_limit();
    let dir = tempfile::tempdir().unwrap();
    let hook = script("umask >begun; ulimit -n >>begun", None);
    assert_eq!(run_in(dir.path(), &hook).await, Ok(()));
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let least = most.map_or(1024, |most| most.min(1024));
    let begun = std::fs::read_to_string(dir.path().join("begun")).unwrap();
    assert_eq!(begun, format!("0022\n{least}\n"));
}

#[tokio::test]
async fn the_holder_has_a_hook_as_long_as_it_runs() {
    let (dir, (holder, _theirs)) = (tempfile::tempdir().unwrap(), ends());
    let hook = script("until [ -e end ]; do sleep 0.01; done", None);
    let runs = run(&hook, dir.path(), Some(&holder), b"{}");
    let ends = async {
        while holder.names(RUNS).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::write(dir.path().join("end"), "").unwrap();
    };
    let (outcome, ()) = tokio::join!(runs, ends);
    assert_eq!((outcome, holder.names("")), (Ok(()), Vec::new()));
}

#[tokio::test]
async fn a_hook_that_a_killed_process_was_running_is_ended_with_what_it_has_started() {
    let (holder, _theirs) = ends();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "sleep 600 & wait"]).process_group(0).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).unwrap();
    // A process that is killed drops nothing.
    std::mem::forget(keep(&holder, pid).unwrap());
    end_left(&holder).await;
    assert!(holder.names("").is_empty());
    // Its output ends with the last process that has it.
    let mut output = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut output).await.unwrap();
    assert!(!child.wait().await.unwrap().success());
}

#[test]
fn every_hook_has_a_limit() {
    let of = |timeout| limit(&Hook { timeout, ..Hook::default() });
    assert_eq!([None, Some(0), Some(-1)].map(of), [USUAL; 3]);
    assert_eq!([Some(5), Some(i64::MAX)].map(of), [Duration::from_secs(5), LONGEST]);
}

#[test]
fn only_hooks_before_the_start_need_a_namespace() {
    let begins = |hooks: Value| {
        let oci: Oci = serde_json::from_value(json!({ "hooks": hooks })).unwrap();
        Subject { id: "one", bundle: Path::new("/"), oci: &oci, holder: None }.begins()
    };
    assert!(begins(json!({"createRuntime": [{"path": "/bin/x"}]})));
    assert!(!begins(json!({"prestart": [], "poststop": [{"path": "/bin/x"}]})));
}
