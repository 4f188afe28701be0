//! Tests of what containerd asks of containers that run, and hears of them.

use super::*;

impl Shim {
    async fn pids(&self, id: &str) -> Vec<u32> {
        let pids: cd::PidsResponse = self.on("Pids", id).await.unwrap();
        pids.processes.iter().map(|process| process.pid).collect()
    }
}

#[tokio::test]
async fn the_processes_of_a_container_are_its_guests() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    // The daemon or the agent is of an earlier version.
    assert_eq!(shim.pids("one").await, [VMM]);
    shim.daemon.lists(&[17, 19]);
    assert_eq!(shim.pids("one").await, [17, 19]);
    let state: cd::StateResponse = shim.on("State", "one").await.unwrap();
    assert_eq!(state.pid, VMM);
    assert_eq!(shim.pids("pod").await, [VMM]);
    shim.kill("one", 9).await;
    shim.status("one").await;
    assert_eq!(shim.pids("one").await, [VMM]);
}

#[tokio::test]
async fn a_terminal_is_resized_while_its_program_runs() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    for (width, height) in [(120, 40), (80, 24)] {
        let resize = cd::ResizePtyRequest { id: "one".into(), width, height, ..Default::default() };
        shim.call::<cd::Empty>("ResizePty", &resize).await.unwrap();
        let told = format!("resize {}/one {height} {width}", pod.name);
        while !shim.daemon.calls().contains(&told) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn an_end_for_want_of_memory_is_told_before_the_exit() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    shim.daemon.out_of_memory.store(true, Ordering::Relaxed);
    shim.daemon.end(&format!("{}/one", pod.name), 137, 0);
    assert_eq!(shim.status("one").await, 137);
    let events = shim.events().await;
    assert_eq!(events[3..], ["/tasks/oom one", "/tasks/exit one"], "{events:?}");
}

#[tokio::test]
async fn a_pod_has_a_socket_function_by_its_annotation() {
    let shim = Shim::new();
    let mut annotated = annotations("sandbox");
    annotated["dev.slipway.sockets"] = json!("true");
    // The pod's interface is CNI's.
    let refused = shim.create("pod", annotated.clone()).await.unwrap_err();
    assert_eq!(refused.code, Code::InvalidArgument);
    assert!(refused.message.contains("dev.slipway.sockets"), "{refused}");
    shim.create_in("pod", annotated, json!({"type": "network"})).await.unwrap();
    shim.on::<cd::StartResponse>("Start", "pod").await.unwrap();
    let engine = shim.dir.path().join("socket.sock").to_string_lossy().into_owned();
    assert_eq!(shim.daemon.runs()[0].socket_engine, engine);
}

#[tokio::test]
async fn a_container_that_ends_while_its_pod_is_in_a_file_takes_the_pod_with_it() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    shim.daemon.in_file.store(true, std::sync::atomic::Ordering::Relaxed);
    shim.service.tasks.find("one").unwrap().stop(0);
    assert_eq!((shim.status("one").await, shim.status("pod").await), (143, 0));
    let name = &pod.name;
    assert_eq!(shim.daemon.calls(), [format!("stop {name}/one 0"), format!("stop {name} 0")]);
}
