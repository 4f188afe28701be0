//! `slipway socket engine`: the engine itself, in the foreground.

use anyhow::{Context, Result};
use slipway_sgiov::{Engine, Settings, Stop};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::SocketEngineArgs;

/// Serves until it is interrupted or, if so asked, idle.
pub fn serve(args: &SocketEngineArgs) -> Result<i32> {
    if let Some(dir) = args.socket.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let settings = Settings {
        socket: args.socket.clone(),
        ends_when_idle: args.ends_when_idle,
        ..Settings::default()
    };
    let mut engine = Engine::bind(settings)?;
    end_on_signals(engine.stop())?;
    tracing::info!(socket = %args.socket.display(), "the socket engine serves");
    engine.run()?;
    Ok(0)
}

/// The first of the usual signals ends it in order: nobody finds its socket afterwards.
fn end_on_signals(stop: Stop) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let (mut end, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    drop(guard);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = end.recv() => {}
                _ = interrupt.recv() => {}
            }
        });
        stop.stop();
    })?;
    Ok(())
}
