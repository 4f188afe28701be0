//! Tests of the sandbox service against a daemon that runs nothing: a pod without a pause
//! container, its containers, and what is left after a refusal.

use serde_json::json;

use super::calls::Calls;
use super::fake::VMM;
use super::pods::Shim;
use super::*;
use crate::task::RESOLVER;

/// Calls a method of the sandbox service.
async fn call<R: Message + Default>(
    shim: &Shim,
    method: &str,
    message: &impl Message,
) -> Result<R, Failure> {
    let (handler, payload) = (Arc::clone(&shim.service), message.encode_to_vec());
    let answer = handler.call(sandbox::SERVICE.to_owned(), method.to_owned(), payload).await?;
    Ok(R::decode(answer.as_slice()).unwrap())
}

/// Calls a method of the sandbox service that names the sandbox "pod" only.
async fn on<R: Message + Default>(shim: &Shim, method: &str) -> Result<R, Failure> {
    call(shim, method, &cd::SandboxRequest { sandbox_id: "pod".into() }).await
}

fn config() -> cd::PodSandboxConfig {
    let resources =
        cd::LinuxContainerResources { memory_limit_in_bytes: 512 << 20, ..Default::default() };
    let linux = cd::LinuxPodSandboxConfig { resources: Some(resources), ..Default::default() };
    let dns = cd::DnsConfig { servers: vec!["10.96.0.10".into()], ..Default::default() };
    cd::PodSandboxConfig {
        hostname: "web".into(),
        dns_config: Some(dns),
        linux: Some(linux),
        ..Default::default()
    }
}

/// The request for the sandbox "pod" of a shim. No configuration is in its bundle.
fn request_of(config: &cd::PodSandboxConfig) -> cd::CreateSandboxRequest {
    let type_url = "runtime.v1.PodSandboxConfig".to_owned();
    cd::CreateSandboxRequest {
        sandbox_id: "pod".into(),
        bundle_path: "/no/such/bundle".into(),
        options: Some(cd::Any { type_url, value: config.encode_to_vec() }),
        netns_path: "/run/netns/cni-1".into(),
        ..Default::default()
    }
}

/// Creates and starts the sandbox.
async fn started(shim: &Shim) -> Arc<Task> {
    call::<cd::Empty>(shim, "CreateSandbox", &request_of(&config())).await.unwrap();
    on::<cd::StartSandboxResponse>(shim, "StartSandbox").await.unwrap();
    shim.service.tasks.find("pod").unwrap()
}

async fn status(shim: &Shim) -> cd::SandboxStatusResponse {
    let request = cd::SandboxStatusRequest { sandbox_id: "pod".into(), verbose: true };
    call(shim, "SandboxStatus", &request).await.unwrap()
}

#[tokio::test]
async fn a_pod_is_a_sandbox_without_a_pause_container() {
    let shim = Shim::new();
    call::<cd::Empty>(&shim, "CreateSandbox", &request_of(&config())).await.unwrap();
    assert!(shim.daemon.runs().is_empty());
    let created = status(&shim).await;
    assert_eq!(created.state, "SANDBOX_NOTREADY");
    let again = call::<cd::Empty>(&shim, "CreateSandbox", &request_of(&config())).await;
    assert_eq!(again.unwrap_err().code, Code::AlreadyExists);
    let started: cd::StartSandboxResponse = on(&shim, "StartSandbox").await.unwrap();
    assert_eq!(started.pid, VMM);
    assert!(started.created_at.is_some() && started.created_at == created.created_at);
    let pod = shim.service.tasks.find("pod").unwrap();
    let runs = shim.daemon.runs();
    assert!(runs.len() == 1 && runs[0].makes_pod && runs[0].image.is_empty(), "{runs:?}");
    assert_eq!((runs[0].name.as_str(), runs[0].hostname.as_str()), (pod.name.as_str(), "web"));
    assert_eq!(runs[0].memory_bytes, (512 + 128) << 20);
    assert_eq!(runs[0].network_namespace, "/run/netns/cni-1");
    let running = status(&shim).await;
    assert_eq!((running.state.as_str(), running.pid), ("SANDBOX_READY", VMM));
    assert_eq!((running.exited_at, running.info["slipway"].as_str()), (None, pod.name.as_str()));
    on::<cd::Empty>(&shim, "PingSandbox").await.unwrap();
    let platform: cd::PlatformResponse = on(&shim, "Platform").await.unwrap();
    let platform = platform.platform.unwrap();
    assert_eq!((platform.os.as_str(), platform.architecture.is_empty()), ("linux", false));
    let metrics: cd::SandboxMetricsResponse = on(&shim, "SandboxMetrics").await.unwrap();
    let data = metrics.metrics.unwrap().data.unwrap();
    let metrics = cd::Metrics::decode(data.value.as_slice()).unwrap();
    assert_eq!(metrics.cpu.unwrap().usage.unwrap().total, 2000);
}

#[tokio::test]
async fn a_sandbox_ends_with_its_containers_and_tells_it_by_its_wait_alone() {
    for (timeout_secs, stopped) in [(0, 0), (7, 7)] {
        let shim = Shim::new();
        let pod = started(&shim).await;
        let mut member = Shim::made(&pod, "one", Paths::default());
        member.events = Arc::clone(&shim.service.events);
        shim.begin(member).await;
        let wait = {
            let handler = Arc::clone(&shim.service);
            let payload = cd::SandboxRequest { sandbox_id: "pod".into() }.encode_to_vec();
            let call = handler.call(sandbox::SERVICE.into(), "WaitSandbox".into(), payload);
            tokio::spawn(call)
        };
        let stop = cd::StopSandboxRequest { sandbox_id: "pod".into(), timeout_secs };
        call::<cd::Empty>(&shim, "StopSandbox", &stop).await.unwrap();
        let end = wait.await.unwrap().unwrap();
        let end = cd::WaitSandboxResponse::decode(end.as_slice()).unwrap();
        assert_eq!(end.exit_status, 0);
        let ended = status(&shim).await;
        assert_eq!(ended.state, "SANDBOX_NOTREADY");
        assert!(ended.exited_at.is_some() && ended.exited_at == end.exited_at);
        assert_eq!(shim.status("one").await, 143);
        // Again, as containerd stops a sandbox before it removes it.
        call::<cd::Empty>(&shim, "StopSandbox", &stop).await.unwrap();
        shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
        on::<cd::Empty>(&shim, "ShutdownSandbox").await.unwrap();
        shim.service.end.notified().await;
        assert!(shim.service.tasks.find("pod").is_err());
        let name = &pod.name;
        let calls = [
            format!("stop {name} {stopped}"),
            format!("remove {name}/one"),
            format!("remove {name}"),
        ];
        assert_eq!(shim.daemon.calls(), calls);
        let topics = ["start", "exit", "delete"];
        assert_eq!(shim.events().await, topics.map(|topic| format!("/tasks/{topic} one")));
    }
}

#[tokio::test]
async fn a_container_of_a_sandbox_has_the_pods_resolver_unless_it_has_its_own() {
    let shim = Shim::new();
    // In place of the program that makes images: it prints its arguments as the digest.
    std::os::unix::fs::symlink("/bin/echo", shim.dir.path().join("slipway")).unwrap();
    started(&shim).await;
    let own = shim.dir.path().join("resolv.conf");
    std::fs::write(&own, "nameserver 192.0.2.1\n").unwrap();
    let own = json!([{
        "destination": RESOLVER, "type": "bind", "source": own, "options": ["rbind", "ro"]
    }]);
    let cases = [("one", json!([]), "10.96.0.10"), ("two", own, "192.0.2.1")];
    for (id, mounts, server) in cases {
        let bundle = shim.dir.path().join(id);
        std::fs::create_dir_all(bundle.join("rootfs")).unwrap();
        let network = format!("/proc/{VMM}/ns/net");
        let config = json!({
            "process": {"args": ["top"], "cwd": "/"}, "root": {"path": "rootfs"}, "mounts": mounts,
            "annotations": {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.sandbox-id": "pod"
            },
            "linux": {"namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "network", "path": network}
            ]}
        });
        std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        let bundle = bundle.to_string_lossy().into_owned();
        let create = cd::CreateTaskRequest { id: id.into(), bundle, ..Default::default() };
        shim.call::<cd::CreateTaskResponse>("Create", &create).await.unwrap();
        shim.on::<cd::StartResponse>("Start", id).await.unwrap();
        let run = shim.daemon.runs().pop().unwrap();
        let files: Vec<_> = run.files.iter().filter(|file| file.path == RESOLVER).collect();
        assert_eq!(files.len(), 1, "{id}");
        let expected = format!("nameserver {server}\n");
        assert_eq!(files[0].content, expected.as_bytes(), "{id}");
    }
}

#[tokio::test]
async fn a_sandbox_that_is_refused_leaves_no_shim() {
    let own = request_of(&config());
    let options = Some(cd::Any { type_url: "a.b.Other".into(), value: Vec::new() });
    let mut host = config();
    let node =
        cd::NamespaceOption { network: cd::NamespaceMode::Node.into(), ..Default::default() };
    let security = cd::LinuxSandboxSecurityContext { namespace_options: Some(node) };
    host.linux.as_mut().unwrap().security_context = Some(security);
    for (request, why) in [
        (cd::CreateSandboxRequest { options, ..own.clone() }, "\"a.b.Other\""),
        (cd::CreateSandboxRequest { options: None, ..own.clone() }, "runtime.v1.PodSandboxConfig"),
        (
            cd::CreateSandboxRequest { sandbox_id: "../pod".into(), ..own.clone() },
            "no container's id",
        ),
        (
            cd::CreateSandboxRequest { sandbox_id: "two".into(), ..own.clone() },
            "this shim serves pod",
        ),
        (request_of(&host), "hostNetwork"),
    ] {
        let shim = Shim::new();
        let failed = call::<cd::Empty>(&shim, "CreateSandbox", &request).await.unwrap_err();
        assert_eq!(failed.code, Code::InvalidArgument, "{failed}");
        assert!(failed.message.contains(why) && !failed.message.contains('\n'), "{failed}");
        for method in ["StartSandbox", "WaitSandbox", "Platform", "PingSandbox", "SandboxMetrics"] {
            let failed = on::<cd::Empty>(&shim, method).await.unwrap_err();
            assert_eq!(failed.code, Code::NotFound, "{method}");
        }
        let other = cd::SandboxRequest { sandbox_id: "two".into() };
        let failed = call::<cd::Empty>(&shim, "ShutdownSandbox", &other).await.unwrap_err();
        assert_eq!(failed.code, Code::NotFound);
        // As containerd cleans up after a refusal.
        on::<cd::Empty>(&shim, "ShutdownSandbox").await.unwrap();
        shim.service.end.notified().await;
        assert!(shim.daemon.runs().is_empty() && shim.daemon.calls().is_empty());
    }
}

#[tokio::test]
async fn a_sandbox_that_never_ran_is_forgotten_without_a_daemon_and_one_that_ran_is_not() {
    let shim = Shim::new();
    let pod = started(&shim).await;
    std::fs::remove_file(shim.dir.path().join("slipway.sock")).unwrap();
    let failed = on::<cd::Empty>(&shim, "ShutdownSandbox").await.unwrap_err();
    assert_eq!(failed.code, Code::Unavailable);
    assert!(shim.service.tasks.find(&pod.id).is_ok());
    let shim = Shim::new();
    call::<cd::Empty>(&shim, "CreateSandbox", &request_of(&config())).await.unwrap();
    std::fs::remove_file(shim.dir.path().join("slipway.sock")).unwrap();
    on::<cd::Empty>(&shim, "ShutdownSandbox").await.unwrap();
    shim.service.end.notified().await;
}

#[tokio::test]
async fn a_pods_pause_container_is_no_sandbox_of_this_service() {
    let shim = Shim::new();
    shim.pod().await;
    for method in ["PingSandbox", "StartSandbox", "SandboxMetrics", "UpdateSandbox"] {
        assert_eq!(on::<cd::Empty>(&shim, method).await.unwrap_err().code, Code::NotFound);
    }
    let failed = on::<cd::Empty>(&shim, "PauseSandbox").await.unwrap_err();
    assert_eq!(failed.code, Code::Unimplemented);
}

#[tokio::test]
async fn a_pod_is_given_the_limits_of_an_update_while_it_runs() {
    let resources = json!({"Resources": {"memory_limit_in_bytes": 1 << 30}}).to_string();
    let any = cd::Any { value: resources.into_bytes(), ..Default::default() };
    let extensions = [("updated-resources".to_owned(), any)].into();
    let update = cd::UpdateSandboxRequest {
        sandbox_id: "pod".into(),
        sandbox: Some(cd::StoredSandbox { extensions }),
        fields: vec!["extensions".into()],
    };
    let labels = cd::UpdateSandboxRequest { fields: vec!["labels".into()], ..update.clone() };
    let shim = Shim::new();
    call::<cd::Empty>(&shim, "CreateSandbox", &request_of(&config())).await.unwrap();
    call::<cd::Empty>(&shim, "UpdateSandbox", &update).await.unwrap();
    assert!(shim.daemon.calls().is_empty(), "it does not run yet");
    on::<cd::StartSandboxResponse>(&shim, "StartSandbox").await.unwrap();
    for update in [&labels, &update] {
        call::<cd::Empty>(&shim, "UpdateSandbox", update).await.unwrap();
    }
    let name = &shim.service.tasks.find("pod").unwrap().name;
    assert_eq!(shim.daemon.calls(), [format!("update {name} 0 {}", 1 << 30)]);
}
