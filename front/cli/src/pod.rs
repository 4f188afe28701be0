//! `slipway pod`: sandboxes with several containers.

use anyhow::{Result, bail};
use slipway_runtime::{Config, v1};

use crate::args::{NodeArgs, PodCommand, PodCreateArgs, PodPsArgs};
use crate::client::connect;
use crate::session::{Plain, SessionSettings};
use crate::{manage, progress, run, spec};

/// Runs a command about pods. Returns the exit status.
pub async fn command(node: &NodeArgs, config: &Config, command: &PodCommand) -> Result<i32> {
    match command {
        PodCommand::Create(args) => create(node, config, args).await,
        PodCommand::Run(args) => {
            let mut run = args.run.clone();
            run.pod = Some(args.pod.clone());
            run::run(node, config, &run).await
        }
        PodCommand::Ps(args) => ps(node, config, args).await,
        PodCommand::Exec(args) => run::exec(node, config, args).await,
        PodCommand::Rm(args) => manage::rm(connect(node, config).await?, args).await,
    }
}

async fn create(node: &NodeArgs, config: &Config, args: &PodCreateArgs) -> Result<i32> {
    let (template, boots) = spec::beginning(args.from.as_deref());
    let asked = v1::RunSpec {
        name: args.name.clone().unwrap_or_default(),
        hostname: args.hostname.clone().unwrap_or_default(),
        labels: spec::labels(&args.label)?,
        template,
        boots,
        detach: true,
        makes_pod: true,
        max_containers: args.max_containers.unwrap_or(0),
        // 0 stands for "not given", so an explicit 0 becomes 1.
        bound_memory_bytes: args.bind_memory.map_or(0, |bytes| bytes.max(1)),
        ..spec::machine(&args.machine, &args.network, &config.run_dir)?
    };
    let client = connect(node, config).await?;
    let wishes = SessionSettings { stdin: false, tty: false };
    let spinner = progress::stage_spinner(1);
    let start = run::start(client, asked, wishes, &mut Plain, spinner).await?;
    match start.exit {
        Some(exit) => Ok(run::status(&start.name, &exit)),
        None => {
            crate::say!("{}", start.name);
            Ok(0)
        }
    }
}

async fn ps(node: &NodeArgs, config: &Config, args: &PodPsArgs) -> Result<i32> {
    let mut client = connect(node, config).await?;
    let mut pods = manage::list(&mut client).await?;
    pods.retain(|one| one.pod && args.name.as_ref().is_none_or(|name| *name == one.name));
    if let Some(name) = args.name.as_ref().filter(|_| pods.is_empty()) {
        bail!("there is no pod {name}; `slipway pod ps` lists pods");
    }
    manage::print_list(&pods, args.json)?;
    Ok(0)
}
