//! Tests of the service without a daemon: which calls are refused, and how.

use super::*;

fn service(id: &str) -> Arc<Service> {
    let args = Args { namespace: "ns".into(), id: id.into(), ..Args::default() };
    Arc::new(Service::new(args, Events::new("ns", None), RestartStore::default()))
}

async fn call(
    service: &Arc<Service>,
    method: &str,
    message: &impl Message,
) -> Result<Vec<u8>, Failure> {
    let handler = Arc::clone(service);
    handler.call(SERVICE.to_owned(), method.to_owned(), message.encode_to_vec()).await
}

#[tokio::test]
async fn without_a_container_there_is_nothing_to_act_on() {
    let service = service("one");
    let one = cd::ProcessRequest { id: "one".into(), exec_id: String::new() };
    for method in [
        "Start",
        "Delete",
        "State",
        "Wait",
        "Kill",
        "Pids",
        "Stats",
        "CloseIO",
        "Exec",
        "Checkpoint",
    ] {
        let failed = call(&service, method, &one).await.unwrap_err();
        assert_eq!(failed.code, Code::NotFound, "{method}");
    }
    let connected = call(&service, "Connect", &one).await.unwrap();
    let connected = cd::ConnectResponse::decode(connected.as_slice()).unwrap();
    assert_eq!((connected.shim_pid, connected.task_pid), (std::process::id(), 0));
    call(&service, "Shutdown", &cd::Empty {}).await.unwrap();
    service.end.notified().await;
}

#[tokio::test]
async fn other_services_and_methods_are_refused_in_one_line() {
    let service = service("one");
    let failed = call(&service, "Nothing", &cd::Empty {}).await.unwrap_err();
    assert_eq!(failed.code, Code::Unimplemented);
    assert!(!failed.message.contains('\n'));
    let handler = Arc::clone(&service);
    let earlier = "containerd.task.v1.Task".to_owned();
    let failed = handler.call(earlier, "Create".into(), Vec::new()).await.unwrap_err();
    assert_eq!(failed.code, Code::Unimplemented);
    let failed = Arc::clone(&service).call(SERVICE.into(), "Create".into(), vec![0xff]).await;
    assert_eq!(failed.unwrap_err().code, Code::InvalidArgument);
}

#[tokio::test]
async fn a_create_that_failed_leaves_room_for_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let service = service("one");
    let bundle = dir.path().to_string_lossy().into_owned();
    let mut create = cd::CreateTaskRequest { id: "two".into(), bundle, ..Default::default() };
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    for (id, reason) in [("two", "this shim serves one"), ("../one", "no container's id")] {
        create.id = id.to_owned();
        let failed = call(&service, "Create", &create).await.unwrap_err();
        assert_eq!(failed.code, Code::InvalidArgument, "{failed}");
        assert!(failed.message.contains(reason), "{failed}");
    }
    create.id = "one".into();
    let type_url = "io.containerd.runsc.v1.options".to_owned();
    create.options = Some(cd::Any { type_url, value: Vec::new() });
    let failed = call(&service, "Create", &create).await.unwrap_err();
    assert_eq!(failed.code, Code::InvalidArgument, "{failed}");
    assert!(failed.message.contains("io.containerd.runsc.v1.options"), "{failed}");
    create.options = None;
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    for config in [None, Some("{"), Some("{}")] {
        if let Some(json) = config {
            std::fs::write(dir.path().join("config.json"), json).unwrap();
        }
        let failed = call(&service, "Create", &create).await.unwrap_err();
        assert_eq!(failed.code, Code::InvalidArgument, "{failed}");
    }
}

#[tokio::test]
async fn a_created_task_can_be_killed_and_not_started_then() {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let service = service("one");
    service.tasks.reserve("one").unwrap().fill(Arc::new(task()));
    tokio::spawn(crate::ttrpc::server::serve(theirs, Arc::clone(&service)));
    let mut client = crate::ttrpc::client::Client::over(ours);
    let one = cd::ProcessRequest { id: "one".into(), exec_id: String::new() }.encode_to_vec();
    let state = client.call(SERVICE, "State", one.clone()).await.unwrap();
    let state = cd::StateResponse::decode(state.as_slice()).unwrap();
    assert_eq!(state.status(), cd::Status::Created);
    let kill = cd::KillRequest { id: "one".into(), signal: 9, ..Default::default() };
    client.call(SERVICE, "Kill", kill.encode_to_vec()).await.unwrap();
    let end = client.call(SERVICE, "Wait", one.clone()).await.unwrap();
    assert_eq!(cd::WaitResponse::decode(end.as_slice()).unwrap().exit_status, 137);
    let failed = client.call(SERVICE, "Start", one).await.unwrap_err();
    assert!(failed.to_string().contains("started before"), "{failed}");
}

#[tokio::test]
async fn a_task_that_is_being_deleted_is_not_started() {
    let service = service("one");
    service.tasks.reserve("one").unwrap().fill(Arc::new(task()));
    let one = cd::ProcessRequest { id: "one".into(), exec_id: String::new() };
    // No daemon serves, so the deletion fails, and can be asked for again.
    for _ in 0..2 {
        let failed = call(&service, "Delete", &one).await.unwrap_err();
        assert_eq!(failed.code, Code::Unavailable, "{failed}");
        let failed = call(&service, "Start", &one).await.unwrap_err();
        assert!(failed.message.contains("started before"), "{failed}");
        let end = call(&service, "Wait", &one).await.unwrap();
        assert_eq!(cd::WaitResponse::decode(end.as_slice()).unwrap().exit_status, 0);
    }
}

fn task() -> Task {
    let first = run_in::Kind::Run(v1::RunSpec::default());
    Task {
        id: "one".into(),
        bundle: "/".into(),
        name: "one-0".into(),
        kind: TaskKind::Alone,
        daemon: Daemon::at(std::path::Path::new("/no/such/directory")),
        events: Arc::new(Events::new("ns", None)),
        init: Arc::new(Process::new(String::new(), Paths::default(), first)),
        execs: std::sync::Mutex::default(),
        vmm: Default::default(),
        paused: Default::default(),
        private: None,
        copies: std::sync::Mutex::default(),
        copied: 0,
        snapshot: Default::default(),
        message: None,
        kept: Default::default(),
        deleting: Default::default(),
    }
}
