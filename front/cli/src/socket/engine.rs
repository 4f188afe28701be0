//! `slipway socket engine`: runs the engine in the foreground.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use slipway_sgiov::{
    Engine, LinkSettings, NodeCarrier, Policy, Reload, Renewal, Settings, Stop, ends_within,
    raise_descriptor_limit,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{LINKS, POLICY, SocketEngineArgs};

/// The number of descriptors that the engine needs beside one for each socket.
const OWN_DESCRIPTORS: u64 = 1000;

/// Serves until it is interrupted or, if `ends_when_idle` is set, idle.
pub fn serve(args: &SocketEngineArgs, socket: &Path) -> Result<i32> {
    for (file, usual) in [(&args.policy, POLICY), (&args.links, LINKS)] {
        if let Err(error) = is_there_if_named(file, usual) {
            tracing::warn!("{error}");
        }
    }
    let policy = Policy::read(&args.policy)?;
    if let Some(dir) = socket.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let limit = raise_descriptor_limit(args.sockets.saturating_add(OWN_DESCRIPTORS));
    let sockets = ends_within(limit);
    if sockets < args.sockets {
        tracing::warn!("the descriptor limit is {limit}: more than {sockets} sockets get ENOBUFS");
    }
    let (rules, tenants) = (policy.rules(), policy.tenants().len());
    let carrier = NodeCarrier::read(&args.links, &policy)?;
    let files = Files {
        policy: args.policy.clone(),
        path: args.links.clone(),
        links: carrier.as_ref().map(|carrier| carrier.goes_by().clone()),
    };
    let settings = Settings {
        socket: socket.to_owned(),
        ends_when_idle: args.ends_when_idle,
        proof: !args.no_proof,
        remote: carrier.map(|carrier| Box::new(carrier) as Box<_>),
        policy,
        guests: true,
    };
    let mut engine = Engine::bind(settings)?;
    heed_signals(engine.stop(), engine.reload(), files)?;
    tracing::info!(socket = %socket.display(), tenants, rules, "the socket engine serves");
    crate::systemd::ready();
    engine.run()?;
    Ok(0)
}

/// Fails if `file` was named by the user and does not exist. The usual file may be missing.
fn is_there_if_named(file: &Path, usual: &str) -> Result<()> {
    let folder = file.with_extension("d");
    if file != Path::new(usual) && !file.exists() && !folder.is_dir() {
        bail!("there is no file {}", file.display());
    }
    Ok(())
}

/// The files that the engine reads its settings from.
struct Files {
    policy: PathBuf,
    path: PathBuf,
    /// The contents of the links file when it was last read, or `None` without one.
    links: Option<LinkSettings>,
}

impl Files {
    /// Reads both files anew. Fails if either is invalid.
    fn read(&mut self) -> Result<Renewal> {
        let policy = Policy::read(&self.policy)?;
        let links = match &self.links {
            Some(links) => Some(NodeCarrier::renewal(&self.path, &policy, links)?),
            None if self.path.exists() => {
                bail!(
                    "{}: an engine that started without links has none until it is started anew",
                    self.path.display()
                )
            }
            None => None,
        };
        self.links = links.as_ref().map(|links| links.settings().clone());
        Ok(Renewal { policy, links })
    }

    fn reload(&mut self, reload: &Reload) {
        let renewal = self.read().map_err(|error| error.to_string());
        match &renewal {
            Ok(Renewal { policy, .. }) => {
                let (rules, tenants) = (policy.rules(), policy.tenants().len());
                tracing::info!(tenants, rules, "policy and links were read anew");
            }
            Err(error) => tracing::error!("policy and links stay as they were: {error}"),
        }
        reload.renew(renewal);
    }
}

/// Ends the engine in order at the first SIGTERM or SIGINT, which removes its socket. SIGHUP
/// reloads the files.
fn heed_signals(stop: Stop, reload: Reload, mut files: Files) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let (mut end, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut hangup = signal(SignalKind::hangup())?;
    drop(guard);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = end.recv() => return,
                    _ = interrupt.recv() => return,
                    _ = hangup.recv() => files.reload(&reload),
                }
            }
        });
        stop.stop();
    })?;
    Ok(())
}

/// Prints a summary of a policy, or what is wrong with it.
pub fn check(file: &Path) -> Result<i32> {
    is_there_if_named(file, POLICY)?;
    let policy = Policy::read(file)?;
    for tenant in policy.tenants() {
        if !tenant.netns.exists() {
            let (name, netns) = (&tenant.name, tenant.netns.display());
            eprintln!("slipway: there is no network namespace {netns} of tenant \"{name}\" now");
        }
    }
    crate::say!("{} tenants, {} rules", policy.tenants().len(), policy.rules());
    Ok(0)
}
