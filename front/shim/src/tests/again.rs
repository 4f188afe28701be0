//! Tests of what the next serving process makes of what one has left that was killed.

use super::calls::Calls;
use super::pods::Shim;
use super::*;
use crate::process::ProcessExit;
use crate::store;

/// The next serving process of a shim.
struct Next(Arc<Service>);

impl Calls for Next {
    fn service(&self) -> &Arc<Service> {
        &self.0
    }
}

impl Next {
    /// Repeats a call of a task that was under way.
    async fn again(&self, method: &str, id: &str) -> Result<Vec<u8>, Failure> {
        let request = cd::ProcessRequest { id: id.into(), exec_id: String::new() };
        self.repeat(method, &request).await
    }

    async fn repeat(&self, method: &str, message: &impl Message) -> Result<Vec<u8>, Failure> {
        let (handler, payload) = (Arc::clone(&self.0), message.encode_to_vec());
        handler.repeat(SERVICE.to_owned(), method.to_owned(), payload).await
    }

    async fn state(&self, id: &str, exec_id: &str) -> cd::StateResponse {
        let request = cd::ProcessRequest { id: id.into(), exec_id: exec_id.into() };
        self.call("State", &request).await.unwrap()
    }
}

/// Puts a container into the pod that is not started.
async fn create(shim: &Shim, pod: &Arc<Task>, id: &str) -> Arc<Task> {
    let place = shim.service.tasks.reserve(id).unwrap();
    shim.service.enter(place, Shim::made(pod, id, Paths::default())).await.unwrap();
    shim.service.tasks.find(id).unwrap()
}

#[tokio::test]
async fn what_runs_is_joined_again_and_its_end_is_told() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.begin(Shim::made(&pod, "one", Paths::default())).await;
    let next = Next(shim.next());
    for id in ["pod", "one"] {
        assert_eq!(next.state(id, "").await.status(), cd::Status::Running, "{id}");
    }
    let name = format!("{}/one", pod.name);
    while !shim.daemon.calls().contains(&format!("rejoin {name} 0")) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Start was answered by what became of it, and a call that waits waits.
    assert!(next.again("Start", "one").await.is_ok());
    let end = async { shim.daemon.end(&name, 3, 0) };
    let (ended, ()) = tokio::join!(next.again("Wait", "one"), end);
    assert_eq!(cd::WaitResponse::decode(ended.unwrap().as_slice()).unwrap().exit_status, 3);
    next.again("Delete", "one").await.unwrap();
    assert!(shim.daemon.calls().contains(&format!("remove {name}")));
    let last = Next(shim.next());
    assert_eq!(last.again("State", "one").await.unwrap_err().code, Code::NotFound);
    assert_eq!(last.state("pod", "").await.status(), cd::Status::Running);
}

#[tokio::test]
async fn what_was_created_can_be_started() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    create(&shim, &pod, "one").await;
    let next = Next(shim.next());
    assert_eq!(next.state("one", "").await.status(), cd::Status::Created);
    // The call had been taken, and nothing more.
    next.again("Start", "one").await.unwrap();
    assert_eq!(next.state("one", "").await.status(), cd::Status::Running);
    let runs = shim.daemon.runs();
    assert_eq!((runs.len(), runs[1].name.as_str()), (2, "one"));
}

#[tokio::test]
async fn nothing_is_left_of_what_was_being_started_or_created() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let one = create(&shim, &pod, "one").await;
    assert!(one.init.step(&Phase::Created, Phase::Starting));
    let next = Next(shim.next());
    let failed = next.again("Start", "one").await.unwrap_err();
    assert_eq!(failed.code, Code::Unavailable);
    assert!(failed.message.contains("nothing is left") && !failed.message.contains('\n'));
    assert!(shim.daemon.calls().contains(&format!("remove {}/one", pod.name)));
    let state = next.state("one", "").await;
    assert_eq!((state.status(), state.exit_status), (cd::Status::Stopped, 255));
    let create = |id: &str| cd::CreateTaskRequest { id: id.into(), ..Default::default() };
    assert!(next.repeat("Create", &create("one")).await.is_ok());
    let failed = next.repeat("Create", &create("two")).await.unwrap_err();
    assert_eq!(failed.code, Code::Unavailable);
    let failed = next.again("Pause", "pod").await.unwrap_err();
    assert_eq!(failed.code, Code::Unavailable);
    assert!(shim.daemon.calls().contains(&format!("resume {}", pod.name)));
}

#[tokio::test]
async fn a_further_process_that_ran_has_ended_and_one_that_did_not_can_be_started() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.begin(Shim::made(&pod, "one", Paths::default())).await;
    let one = shim.service.tasks.find("one").unwrap();
    for id in ["ran", "waits"] {
        let exec = run_in::Kind::Exec(v1::ExecSpec { cwd: id.into(), ..Default::default() });
        let process = Arc::new(Process::new(id.into(), Paths::default(), exec));
        process.keep_in(&shim.service.keep, "one").unwrap();
        if id == "ran" {
            assert!(process.step(&Phase::Created, Phase::Starting));
            assert!(process.take_first().is_some());
            assert!(process.step(&Phase::Starting, Phase::Running));
        }
        one.execs().insert(id.into(), process);
    }
    let next = Next(shim.next());
    let task = next.0.tasks.find("one").unwrap();
    let mut again =
        cd::ExecProcessRequest { id: "one".into(), exec_id: "waits".into(), ..Default::default() };
    assert!(next.repeat("Exec", &again).await.is_ok());
    again.exec_id = "other".into();
    let value = br#"{"args": ["true"]}"#.to_vec();
    again.spec = Some(cd::Any { type_url: String::new(), value });
    assert!(next.repeat("Exec", &again).await.is_ok());
    assert!(task.process("other").is_ok());
    let ended = task.process("ran").unwrap().ended().await;
    assert_eq!((ended.status, ended.ran), (255, true));
    let waits = task.process("waits").unwrap();
    assert_eq!(waits.phase(), Phase::Created);
    let Some(run_in::Kind::Exec(exec)) = waits.take_first() else { panic!("no process") };
    assert_eq!(exec.cwd, "waits");
}

#[tokio::test]
async fn a_container_whose_pod_was_deleted_is_deleted_and_the_shim_ends_then() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let one = create(&shim, &pod, "one").await;
    assert!(one.init.stop(ProcessExit::now(7, ""), |_| ()));
    shim.daemon.end(&pod.name, 0, 0);
    shim.status("pod").await;
    shim.on::<cd::DeleteResponse>("Delete", "pod").await.unwrap();
    shim.call::<cd::Empty>("Shutdown", &cd::Empty {}).await.unwrap();
    let next = Next(shim.next());
    assert!(next.0.tasks.find("pod").is_err());
    let response = next.again("Delete", "one").await.unwrap();
    assert_eq!(cd::DeleteResponse::decode(response.as_slice()).unwrap().exit_status, 7);
    next.0.end.notified().await;
}

#[tokio::test]
async fn without_room_for_its_record_nothing_is_created_started_or_added() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let one = create(&shim, &pod, "one").await;
    // The next record by this name finds no room, and the one after it does.
    let fill = |kind: &str, parts: &[&str]| {
        let new = format!("state/.{}", store::name(kind, parts));
        std::os::unix::fs::symlink("/dev/full", shim.dir.path().join(new)).unwrap();
    };
    fill("process", &["one", ""]);
    let failed = shim.on::<cd::StartResponse>("Start", "one").await.unwrap_err();
    assert_eq!(failed.code, Code::ResourceExhausted);
    assert!(failed.message.contains("a record of the start: No space left"), "{failed}");
    assert_eq!((one.init.phase(), shim.daemon.runs().len()), (Phase::Created, 1));
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    fill("first", &["one", "more"]);
    let value = br#"{"args": ["true"]}"#.to_vec();
    let spec = Some(cd::Any { type_url: String::new(), value });
    let (id, exec_id) = ("one".into(), "more".into());
    let exec = cd::ExecProcessRequest { id, exec_id, spec, ..Default::default() };
    let failed = shim.call::<cd::Empty>("Exec", &exec).await.unwrap_err();
    assert!(failed.message.contains("the process more: No space left"), "{failed}");
    assert!(one.process("more").is_err());
    fill("task", &["two"]);
    let place = shim.service.tasks.reserve("two").unwrap();
    let two = Shim::made(&pod, "two", Paths::default());
    let failed = shim.service.enter(place, two).await.unwrap_err();
    assert!(failed.message.contains("the container two: No space left"), "{failed}");
    let left = shim.service.keep.store.names("process-");
    assert!(!left.contains(&store::name("process", &["two", ""])), "{left:?}");
    create(&shim, &pod, "two").await;
}

#[tokio::test]
async fn records_without_a_task_are_removed() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let keep = &shim.service.keep;
    let records = || -> Vec<_> {
        let kinds = ["task-", "process-", "first-", "cursor-", "copy-"];
        kinds.iter().flat_map(|kind| keep.store.names(kind)).collect()
    };
    let before = records();
    create(&shim, &pod, "one").await;
    let exec = run_in::Kind::Exec(v1::ExecSpec::default());
    let more = Process::new("more".into(), Paths::default(), exec);
    more.keep_in(keep, "one").unwrap();
    keep.store.put(&(crate::copies::Copy::files("one") + "of-1"), b"{}");
    // The container's Delete goes on with this, and is killed then.
    keep.store.remove(&store::name("task", &["one"]));
    assert!(records().len() > before.len());
    let next = Next(shim.next());
    assert_eq!(next.again("State", "one").await.unwrap_err().code, Code::NotFound);
    assert_eq!(records(), before);
}
