//! Ports of a pod for programs of the host in its network namespace.
//!
//! containerd forwards a port of a pod (`kubectl port-forward`) by a connection to 127.0.0.1 from
//! within the pod's network namespace, where runc's containers listen. A microVM's programs do not,
//! so such connections are redirected to a listener of the shim's in that namespace, which carries
//! them to the same port of the guest's loopback interface.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use slipway_netns::Namespace;
use slipway_sandbox_api::forward::carry;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::task::{Task, TaskKind};

/// The most connections at once.
const MOST: usize = 64;
/// The pause after a connection that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);

/// Redirects the connections to ports of a pod's network namespace to the pod, until the pod ends.
/// If that fails, the log says why, and everything else of the pod goes on.
pub fn serve(task: &Arc<Task>) {
    let TaskKind::Pod { network, .. } = &task.kind else { return };
    if network.is_empty() {
        return;
    }
    let (task, network) = (Arc::clone(task), network.clone());
    tokio::spawn(async move {
        let opened = tokio::task::spawn_blocking(move || listen(Path::new(&network))).await;
        let opened = opened.map_err(|error| error.to_string()).and_then(|opened| opened);
        let served = match opened {
            Ok(listener) => tokio::select! {
                served = accept(&task, listener) => served,
                _ = task.init.ended() => Ok(()),
            },
            Err(reason) => Err(reason),
        };
        if let Err(reason) = served {
            crate::log::warn(&format!("ports of pod {} are not forwarded: {reason}", task.id));
        }
    });
}

/// Makes the listener in the namespace at `path`, and redirects to it what is sent to 127.0.0.0/8
/// there. Both go with the namespace.
fn listen(path: &Path) -> Result<TcpListener, String> {
    let namespace = Namespace::open(path).map_err(|error| error.to_string())?;
    let opened = namespace.run(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        redirect(port)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let failed = |error: std::io::Error| error.to_string();
    opened.map_err(|error| error.to_string())?.map_err(failed)
}

/// Sets the rule, in this thread's namespace.
fn redirect(port: u16) -> std::io::Result<()> {
    let rules = format!(
        "table ip slipway_ports {{}}\ndelete table ip slipway_ports\ntable ip slipway_ports {{\n  \
         chain output {{\n    type nat hook output priority -100\n    \
         ip daddr 127.0.0.0/8 meta l4proto tcp redirect to :{port}\n  }}\n}}\n"
    );
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = nft.stdin.take() {
        stdin.write_all(rules.as_bytes())?;
    }
    let output = nft.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(std::io::Error::other(format!("nft: {}", complaint.lines().next().unwrap_or("failed"))))
}

async fn accept(task: &Arc<Task>, listener: TcpListener) -> Result<(), String> {
    let listener =
        tokio::net::TcpListener::from_std(listener).map_err(|error| error.to_string())?;
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let place = place.map_err(|error| error.to_string())?;
        let Ok((stream, _)) = listener.accept().await else {
            // The shim has no descriptor left for now.
            tokio::time::sleep(AGAIN).await;
            continue;
        };
        let task = Arc::clone(task);
        tokio::spawn(async move {
            // The peer sees that its connection ends; a line for each would be its to ask for.
            let _ = connect(&task, stream).await;
            drop(place);
        });
    }
}

async fn connect(task: &Task, stream: TcpStream) -> Result<(), String> {
    let asked = rustix::net::sockopt::ip_original_dst(&stream);
    let port = asked.map_err(|error| error.to_string())?.port();
    let mut client = task.daemon.connect().await.map_err(|failure| failure.message)?;
    let carried = carry(&mut client, &task.name, port, stream).await;
    carried.map_err(|status| status.message().to_owned())
}
