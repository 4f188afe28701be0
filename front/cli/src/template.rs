//! `slipway template`: machines whose guests have booted, with which sandboxes begin.

mod container;

use anyhow::Result;
use slipway_runtime::{BOUND_CONTAINERS, Config, v1};

use crate::args::{NodeArgs, TemplateCommand, TemplateCreateArgs};
use crate::client::{answer, connect_templates, refused};
use crate::table::{self, ago};
use crate::{progress, spec};

/// Runs a command about templates. Returns the exit status.
pub async fn command(node: &NodeArgs, config: &Config, command: &TemplateCommand) -> Result<i32> {
    match command {
        TemplateCommand::Create(args) => create(node, config, args).await?,
        TemplateCommand::Ls { json } => list(node, config, *json).await?,
        TemplateCommand::Rm { names } => {
            let mut client = connect_templates(node, config).await?;
            for name in names {
                let request = v1::Name { name: name.clone() };
                client.remove(request).await.map_err(refused)?;
                crate::say!("{name}");
            }
        }
    }
    Ok(0)
}

async fn create(node: &NodeArgs, config: &Config, args: &TemplateCreateArgs) -> Result<()> {
    if let Some(image) = &args.container.image {
        return container::create(node, config, args, image).await;
    }
    let machine = v1::RunSpec {
        // 0 stands for "not given", so an explicit 0 becomes 1.
        bound_memory_bytes: args.bind_memory.map_or(0, |bytes| bytes.max(1)),
        ..spec::machine(&args.machine, &args.network, &config.run_dir)?
    };
    let mut client = connect_templates(node, config).await?;
    let (name, mtu) = (args.name.clone(), args.mtu.unwrap_or(0));
    let request = v1::CreateTemplateRequest { name, machine: Some(machine), mtu };
    let spinner = progress::waiting("booting a machine to save it");
    let made = client.create(request).await;
    spinner.finish_and_clear();
    let template = answer(made)?;
    crate::say!("{}", template.name);
    Ok(())
}

async fn list(node: &NodeArgs, config: &Config, json: bool) -> Result<()> {
    let mut client = connect_templates(node, config).await?;
    let all = answer(client.list(v1::Empty {}).await)?.templates;
    let header = ["TEMPLATE", "MEMORY", "ON DISK", "CPUS", "INTERFACE", "CREATED"];
    table::list(&all, json, as_json, header, row)
}

fn row(template: &v1::Template) -> [String; 6] {
    let interface = match template.nic.as_str() {
        "" => "none".to_owned(),
        nic => format!("{nic}, MTU {}", template.mtu),
    };
    let cpus = match template.max_cpus > template.cpus {
        true => format!("{} of {}", template.cpus, template.max_cpus),
        false => template.cpus.to_string(),
    };
    let (memory, most) = (template.memory_bytes >> 20, template.max_memory_bytes >> 20);
    let memory = match template.bound_memory_bytes >> 20 {
        0 if most > memory => format!("{memory} of {most} MiB"),
        0 => format!("{memory} MiB"),
        own => format!("{memory} + {BOUND_CONTAINERS} x {own} MiB"),
    };
    [
        template.name.clone(),
        memory,
        format!("{} MiB", template.touched_bytes >> 20),
        cpus,
        interface,
        ago(template.created_ns),
    ]
}

fn as_json(template: &v1::Template) -> serde_json::Value {
    serde_json::json!({
        "name": template.name,
        "created_ns": template.created_ns,
        "memory_bytes": template.memory_bytes,
        "max_memory_bytes": template.max_memory_bytes,
        "bound_memory_bytes": template.bound_memory_bytes,
        "touched_bytes": template.touched_bytes,
        "cpus": template.cpus,
        "max_cpus": template.max_cpus,
        "kernel": template.kernel,
        "nic": template.nic,
        "queues": template.queues,
        "mtu": template.mtu,
        "sockets": template.sockets,
    })
}
