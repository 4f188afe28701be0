//! `containerd-shim-slipway-v2`: containerd asks for a container, and it runs in a microVM of
//! Slipway's. `docs/containerd.md` says how to use it, and what differs from runc.
//!
//! containerd runs this program three times for a container: `start` makes a socket and starts the
//! process that serves it (`start`, `options`); that process serves containerd's task service,
//! versions 2 and 3, which have the same messages, and its sandbox service (`service`), until the
//! container or the sandbox is deleted; `delete` cleans up after one that died (`delete`).
//! Where no daemon serves in time, a fourth process carries that on. Beside the serving process is
//! a holder (`hold`), which starts the next one if that is killed; what that one needs to know is
//! in a `store` (`rebuild`, `cursor`). A container is a `task` with
//! its `process`es; each has a `session` with the node's `daemon`, which carries its streams (`io`,
//! `logger`). What containerd asks for is translated in `spec` and `create`, its root (`content`,
//! `layers`; of the EROFS snapshotter `erofs`, of lazily pulled images `lazy`) is made an image in
//! `rootfs`, `tool` and `mount`, and what happens is told in `events`. `refresh` keeps the
//! container's `copies` of the host's files up to date; `empty_dirs` has Kubernetes' `emptyDir`
//! volumes be directories of the guest. `hooks` runs OCI hooks, which may make a container's
//! interface in a namespace of `netns`; `foreign` has what they and loggers begin with.
//!
//! | call of containerd's | becomes |
//! |---|---|
//! | Create | a task with the request for its sandbox (`create`): the image is made, and nothing runs but hooks |
//! | Start | a session with the daemon (`session`): its call `Run` for a pod or a container, which creates the sandbox unless the container is in a pod; `Exec` for a further process |
//! | Exec | an entry among the task's further processes, until its Start |
//! | ResizePty, CloseIO | a message of the process's session |
//! | Kill | the call `Signal` for a container's first process, a message of its session for a further one; `Stop` for a pod, and where SIGKILL ends no process |
//! | Pause, Resume | the calls `Pause` and `Resume` |
//! | Update | the call `Update` |
//! | Stats | the call `Stats`, of a task that runs (`stats`) |
//! | State | what the shim knows of the process |
//! | Wait | a wait in the shim, until the session has reported the process's end |
//! | Pids | the call `Pids` for a container that runs: its processes as the guest numbers them; else as Connect |
//! | Connect | the process id of the VMM (before the start the shim's), and the shim's: a container's processes are in the guest |
//! | Delete | the call `Remove`; of a further process, only its entry goes |
//! | Shutdown | the end of this program, once it has no task |
//! | Checkpoint | `Create`, `Export` and `Remove` of a snapshot, of a container with a sandbox of its own (`checkpoint`). A Create with a checkpoint calls `Import`, and its Start `Remove` |
//! | CreateSandbox, StartSandbox | as Create and Start of a pod; its configuration is made of the CRI's (`spec`) |
//! | StopSandbox | the call `Stop` |
//! | ShutdownSandbox | the call `Remove`, and the end of this program |
//! | WaitSandbox, SandboxStatus, SandboxMetrics | as Wait, State and Stats |
//! | PingSandbox, Platform | what the shim knows |
//!
//! If the serving process is killed, the next one goes on with its connections, tasks and output.
//! If its holder is killed with it, containerd runs the command `delete`, which calls `Remove` for
//! the container, or for the pod with its containers.
//!
//! A container has a sandbox of its own, or it runs in a pod: its `role` follows from annotations.
//! A pod's sandbox is a task too, without a process; one shim serves all `tasks` of a pod. With
//! containerd's Sandbox API the sandbox service makes that task, and there is no pause container.
//!
//! The shim serves no device, and parses nothing of a guest's but messages of the daemon's: a guest
//! that misbehaves can fill a FIFO, and its container waits then.
//!
//! Not implemented: checkpoints of pods, the host's namespaces and devices, mounts of a container
//! that appear on the host. `spec` refuses what it cannot honour; `docs/containerd.md` lists that.
//!
//! Feature: `fuzz` has the body of the fuzz target.
//!
//! Dependencies: `prost` for messages, `tonic` and `tonic-prost` to call the daemon and containerd,
//! `tokio` to wait; `slipway-keeper` to know of a keeper; `serde_json` for the container's
//! configuration, `slipway-seccomp` for its profile of system calls; `sha2` for names. ttrpc is a
//! header of ten bytes before a protobuf message, so `ttrpc` is this crate's own: the library of
//! that name brings a second protobuf implementation and a dozen further crates into every
//! container's shim, and `containerd-shim` speaks either version 2 or 3 of the service. For the
//! same reason the container's configuration has structures of the fields that are used.

mod args;
mod checkpoint;
mod content;
mod copies;
mod create;
mod cursor;
mod daemon;
mod delete;
mod empty_dirs;
mod erofs;
mod events;
mod foreign;
mod forward;
mod hold;
mod hooks;
mod io;
mod layers;
mod lazy;
mod log;
mod logger;
mod mount;
mod names;
mod netns;
mod network;
mod options;
mod process;
mod reads;
mod rebuild;
mod refresh;
mod role;
mod rootfs;
mod serve;
mod service;
mod session;
mod spec;
mod start;
mod stats;
mod store;
mod target;
mod task;
mod tasks;
mod tool;
mod ttrpc;

/// Messages of containerd.
#[allow(missing_docs)] // generated; the comments are in the .proto file
mod containerd {
    tonic::include_proto!("slipway.shim.containerd");
}

/// containerd's service of its containers.
#[allow(missing_docs)] // generated; the comments are in the .proto file
mod containers {
    tonic::include_proto!("containerd.services.containers.v1");
}

#[cfg(feature = "fuzz")]
pub mod fuzz;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use args::{Args, Command};
use prost::Message;

/// The annotation of a runtime by which containerd from version 2.2 on leaves mounts to it.
const ALLOWED_MOUNTS: &str = "containerd.io/runtime-allow-mounts";

/// Runs the program with the command line of this process.
pub fn main() -> ExitCode {
    match args::parse(std::env::args().skip(1)).and_then(|args| run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // containerd puts the status behind these words: its error is one line.
            let end = if std::io::stderr().is_terminal() { "\n" } else { "" };
            eprint!("containerd-shim-slipway-v2: {reason}{end}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    match args.command {
        Command::Version => print(format!("slipway {}\n", env!("CARGO_PKG_VERSION")).as_bytes()),
        Command::Info => print(&info()),
        Command::Start => print(start::start(args)?.as_bytes()),
        Command::Delete => print(&in_runtime(delete::delete(args))?),
        Command::Remove => in_runtime(delete::carry_on(args)),
        Command::Import => mount::import(),
        Command::Log => logger::exec(),
        Command::Network => netns::hold(),
        Command::Serve => in_runtime(serve::serve(args)),
        Command::Resume => in_runtime(serve::resume(args)),
        Command::Hold => hold::hold(args),
    }
}

/// Returns the message that tells containerd from version 2.0 on what this runtime is.
fn info() -> Vec<u8> {
    let version = Some(containerd::RuntimeVersion { version: env!("CARGO_PKG_VERSION").into() });
    let name = "io.containerd.slipway.v2".to_owned();
    // The type of the OCI runtime specification's features, whose messages are JSON.
    let type_url = "types.containerd.io/opencontainers/runtime-spec/1/features/Features".to_owned();
    let features = Some(containerd::Any { type_url, value: features().to_string().into_bytes() });
    let annotations = [(ALLOWED_MOUNTS.to_owned(), erofs::MOUNT_TYPES.to_owned())].into();
    containerd::RuntimeInfo { name, version, features, annotations }.encode_to_vec()
}

/// Returns the features by the OCI runtime specification (*features.md*): containerd offers
/// recursive read-only mounts of a runtime that knows the mount option `rro`.
fn features() -> serde_json::Value {
    serde_json::json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.0",
        "hooks": spec::hooks::HOSTS,
        "mountOptions": spec::MOUNT_OPTIONS,
    })
}

/// Runs a future on this thread. Returns as soon as the future has its result: other threads may
/// hang in a file system of the host that does not answer, and end with this process.
fn in_runtime<T>(future: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let outcome = runtime.block_on(future);
    // A runtime that is dropped waits for its threads.
    runtime.shutdown_background();
    outcome
}

fn print(bytes: &[u8]) -> Result<(), String> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn containerd_leaves_mounts_of_erofs_to_this_runtime() {
        let info = containerd::RuntimeInfo::decode(info().as_slice()).unwrap();
        let types: Vec<_> = info.annotations[ALLOWED_MOUNTS].split(',').collect();
        assert_eq!(types, ["erofs", "format/*", "mkdir/*", "mkfs/*"]);
    }

    #[test]
    fn a_thread_that_hangs_does_not_keep_the_program() {
        let (_held, hangs) = channel::<()>();
        let over = Arc::new(AtomicBool::new(false));
        let its = Arc::clone(&over);
        let outcome = in_runtime(async {
            let (begun, begins) = tokio::sync::oneshot::channel();
            tokio::task::spawn_blocking(move || {
                let _ = begun.send(());
                let _ = hangs.recv_timeout(Duration::from_secs(600));
                its.store(true, Ordering::SeqCst);
            });
            begins.await.map_err(|error| error.to_string())
        });
        assert_eq!(outcome, Ok(()));
        assert!(!over.load(Ordering::SeqCst), "the program waited for the thread");
    }
}
