//! A channel to a scripted VMM.

use tokio::io::{DuplexStream, duplex, split};

use super::*;

const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\n";
const LIMIT: Duration = Duration::from_secs(30);

/// Plays QEMU: sends the lines of `script`, and reads one command for each `<`.
async fn play(stream: DuplexStream, script: Vec<String>) -> Vec<String> {
    let (reader, mut writer) = split(stream);
    let mut lines = BufReader::new(reader).lines();
    let mut heard = Vec::new();
    for step in script {
        if step == "<" {
            match lines.next_line().await.unwrap() {
                Some(line) => heard.push(line),
                None => break,
            }
        } else if writer.write_all(step.as_bytes()).await.is_err() {
            break;
        }
    }
    heard
}

fn script(steps: &[&str]) -> Vec<String> {
    steps.iter().map(|step| step.to_string()).collect()
}

/// Returns the script for greeting and capabilities, then `rest`.
fn negotiated(rest: &[&str]) -> Vec<String> {
    let mut steps = script(&[GREETING, "<", "{\"return\": {}, \"id\": 0}\n"]);
    steps.extend(script(rest));
    steps
}

async fn connect(script: Vec<String>) -> (Result<Qmp>, JoinHandle<Vec<String>>) {
    let (ours, theirs) = duplex(256);
    let peer = tokio::spawn(play(theirs, script));
    let (reader, writer) = split(ours);
    let qmp = tokio::time::timeout(LIMIT, Qmp::connect("web-1", reader, writer)).await.unwrap();
    (qmp, peer)
}

#[tokio::test]
async fn answers_find_their_commands_whatever_comes_between() {
    let (qmp, peer) = connect(negotiated(&[
        "<",
        "{\"event\": \"RESUME\", \"timestamp\": {\"seconds\": 1, \"microseconds\": 2}}\n",
        "{\"event\": \"NIC_RX_FILTER_CHANGED\", \"data\": {}}\n",
        "{\"return\": \"somebody else's\", \"id\": 77}\n",
        "{\"return\": {\"status\": \"running\"}, \"id\": 1}\n",
    ]))
    .await;
    let qmp = qmp.unwrap();
    let mut events = qmp.events();
    let status = qmp.execute("query-status", LIMIT).await.unwrap();
    assert_eq!(status["status"], "running");
    assert_eq!(events.recv().await.unwrap(), VmEvent::Resumed);
    let heard = peer.await.unwrap();
    assert_eq!(heard[0], r#"{"execute":"qmp_capabilities","id":0}"#);
    assert_eq!(heard[1], r#"{"execute":"query-status","id":1}"#);
}

#[tokio::test]
async fn refusals_carry_the_reason_on_one_line() {
    let (qmp, _peer) = connect(negotiated(&[
        "<",
        "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\nway\"}, \"id\": 1}\n",
    ]))
    .await;
    let error = qmp.unwrap().execute("system_powerdown", LIMIT).await.unwrap_err();
    assert_eq!(error.to_string(), "the VM refused 'system_powerdown': no\\u000away");
}

#[tokio::test]
async fn a_closed_channel_fails_what_waits_and_what_comes_after() {
    let (qmp, _peer) = connect(negotiated(&[
        "{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-reset\"}}\n",
        "<",
    ]))
    .await;
    let qmp = qmp.unwrap();
    let first = qmp.execute("quit", LIMIT).await.unwrap_err();
    assert!(matches!(first, Error::Control(_)), "{first}");
    qmp.drained().await;
    let second = qmp.execute("quit", LIMIT).await.unwrap_err();
    assert!(matches!(second, Error::Control(_)), "{second}");
    assert_eq!(qmp.last_shutdown(), Some(ShutdownReason::GuestReset));
}

#[tokio::test(start_paused = true)]
async fn silence_is_a_timeout_and_leaves_nothing_waiting() {
    let (ours, _theirs_kept_open) = duplex(4096);
    let (reader, writer) = split(ours);
    let shared = Arc::new(Shared::new("web-1"));
    let reader = tokio::spawn(read_all(BufReader::new(reader), Arc::clone(&shared)));
    let writer = tokio::sync::Mutex::new(Box::new(writer) as Box<_>);
    let qmp = Qmp { socket: None, writer, shared, reader };
    let error = qmp.execute("query-status", Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(qmp.shared.state().waiting.is_empty());
}

#[tokio::test]
async fn hostile_peers_end_the_channel_and_nothing_else() {
    let long = format!("{{\"QMP\": \"{}\"}}\n", "x".repeat(MAX_LINE));
    let hostile_greetings =
        ["", "\n", "hello\n", "[]\n", "{}\n", "{\"event\": 3}\n", "\u{0}\n", "{\"QMP\"", &long];
    for greeting in hostile_greetings {
        let (qmp, _peer) = connect(script(&[greeting])).await;
        let error = qmp.err().unwrap();
        assert!(matches!(error, Error::Control(_)), "{greeting:.20}: {error}");
    }
    let lost = |function: &str| {
        let data = format!("{{\"function\": {function}}}");
        format!("{{\"event\": \"SLIPWAY_FUNCTION_LOST\", \"data\": {data}}}\n")
    };
    let (no_index, large_index) = (lost("\"0\""), lost("24"));
    let lines = ["nonsense\n", "{}\n", "{\"return\": 1}\n", "{\"return\": 1, \"id\": -1}\n"];
    for line in lines.into_iter().chain([&*no_index, &large_index]) {
        let (qmp, _peer) = connect(negotiated(&["<", line])).await;
        let error = qmp.unwrap().execute("query-status", LIMIT).await.unwrap_err();
        assert!(matches!(error, Error::Control(_)), "{line}: {error}");
    }
}

#[tokio::test]
async fn lost_functions_are_told_once_until_the_channel_ends() {
    let lost = |function: u32| {
        let event = "SLIPWAY_FUNCTION_LOST";
        format!("{{\"event\": \"{event}\", \"data\": {{\"function\": {function}}}}}\n")
    };
    let answer = "{\"return\": {}, \"id\": 1}\n";
    let broken = lost(5).replace("}}", ", \"final\": true, \"reason\": \"it lied\"}}");
    let steps = [&lost(2), &lost(0), &broken, &lost(2), "<", answer, "<", &lost(3), "<"];
    let (qmp, _peer) = connect(negotiated(&steps)).await;
    let qmp = qmp.unwrap();
    qmp.execute("query-status", LIMIT).await.unwrap();
    assert_eq!(qmp.lost_functions().await, Some(BTreeSet::from([0, 2])));
    assert_eq!(qmp.take_lost_functions(), Some(BTreeSet::new()));
    assert_eq!(qmp.broken_functions(), BTreeSet::from([5]));
    let (lost, stopped) = tokio::join!(qmp.lost_functions(), async {
        tokio::time::timeout(Duration::from_millis(1), qmp.execute("stop", LIMIT)).await
    });
    assert_eq!(lost, Some(BTreeSet::from([3])));
    assert!(stopped.is_err(), "never answered");
    qmp.execute("quit", LIMIT).await.unwrap_err();
    assert_eq!(qmp.lost_functions().await, None);
}
