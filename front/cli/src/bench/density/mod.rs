//! `slipway bench density`: measures what sandboxes take of the host, more and more of them, while
//! they idle.

mod deployed;
mod fleet;

use std::cell::Cell;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::density::{
    DensityExtra, DensityLoad, DensityPlan, DensityReport, DensitySubject, Unit,
    density_differences, density_plot, density_table,
};
use slipway_runtime::{Config, v1};
use tokio::sync::Mutex;

use self::deployed::Deployed;
use self::fleet::{Clients, Fleet};
use super::interruptible::Interruptible;
use super::reports::{self, View};
use super::subjects;
use crate::args::{DensityArgs, DensityEngine, NodeArgs, Pull, Switched};
use crate::client::{answer, connect, connect_plane, connect_templates};
use crate::image;
use crate::out::FAILURE;
use crate::size::CpuCount;

/// Measures, or shows an earlier report.
pub fn density(node: &NodeArgs, config: &Config, args: &DensityArgs) -> Result<i32> {
    let is_left = Cell::new(false);
    let report = reports::show(&VIEW, &args.report, || {
        let image = args.image.as_deref().context("which image")?;
        measure(node, config, args, image, &is_left)
    })?;
    if is_left.get() { Ok(FAILURE) } else { reports::complete(&report) }
}

/// The view of these reports.
const VIEW: View<DensityReport> = View {
    title: |report| {
        let hollow = if report.is_hollow() { ", hollow" } else { "" };
        let begun = if report.extra.forks { "forks of a template" } else { "each booted" };
        let memory = crate::size::show(report.extra.memory_bytes);
        let engine = report.subjects.first().map(|one| one.name.as_str()).unwrap_or_default();
        let what = format!("Idle sandboxes{hollow} of {memory} on {engine}, {begun}");
        let lines = "thin lines: from the least to the greatest sandbox, or round of starts";
        let medians = format!("medians of {} rounds of starts; {lines}", report.plan.rounds);
        format!("{what}\n{}\n{medians}", report.environment.line())
    },
    picture: density_plot,
    table: density_table,
    differences: |before, now, _| density_differences(before, now),
};

/// Measures, and removes everything that was made for that, whatever happens. Sets `is_left` if
/// something is left, which an error has been printed about.
fn measure(
    node: &NodeArgs,
    config: &Config,
    args: &DensityArgs,
    image: &str,
    is_left: &Cell<bool>,
) -> Result<DensityReport> {
    let calls = Rc::new(Interruptible::new()?);
    let (clients, status, digest) = calls.wait(async {
        let digest = image::ensure(config, image, Pull::Missing).await?.digest.to_string();
        let mut clients = Clients {
            sandboxes: connect(node, config).await?,
            plane: connect_plane(node, config).await?,
            templates: connect_templates(node, config).await?,
        };
        let status = answer(clients.sandboxes.status(v1::Empty {}).await)?;
        anyhow::Ok((clients, status, digest))
    })?;
    let spec = spec(args, image, &digest)?;
    let memory_bytes = if spec.memory_bytes > 0 { spec.memory_bytes } else { status.memory_bytes };
    let fleet = Rc::new(Mutex::new(Fleet::new(clients, status.pid, spec)));
    // The daemon saves a machine to the end even if nobody waits, so a signal does not end this.
    let begun = match args.fork {
        true => calls.wait_to_end(async { fleet.lock().await.make_template().await }),
        false => Ok(()),
    };
    let measured = begun.and_then(|()| take(&calls, &fleet, args, memory_bytes));
    let measured = calls.check().and(measured);
    let fleet = Rc::into_inner(fleet).context("a measurement goes on after its turns")?;
    if let Err(error) = calls.wait_to_end(fleet.into_inner().end()) {
        crate::complain(&error);
        is_left.set(true);
    }
    let mut report = measured?;
    report.extra = DensityExtra { image: image.to_owned(), forks: args.fork, memory_bytes };
    Ok(report)
}

/// Takes all turns.
fn take(
    calls: &Rc<Interruptible>,
    fleet: &Rc<Mutex<Fleet>>,
    args: &DensityArgs,
    memory_bytes: u64,
) -> Result<DensityReport> {
    let subject = Deployed::begin(calls, fleet, args, memory_bytes)?;
    let subjects: Vec<Box<DensitySubject>> = vec![Box::new(subject)];
    let plan = DensityPlan { gate_rounds: Some(1), ..DensityPlan::new(loads(args), args.rounds) };
    subjects::report_telling(subjects, plan, accelerator(args), |turn| {
        // Once for all rounds.
        if !args.report.json && turn.round == 0 {
            eprintln!("{}", turn.load);
        }
    })
}

/// Returns the numbers of sandboxes, in ascending order, each with the starts beside them; then the
/// numbers of containers of one pod, an empty pod first.
fn loads(args: &DensityArgs) -> Vec<DensityLoad> {
    let ascending = |counts: &[u32]| {
        let mut counts = counts.to_vec();
        counts.sort_unstable();
        counts.dedup();
        counts
    };
    let bursts = ascending(&args.burst);
    let of = |count| {
        let starts = [0].into_iter().chain(bursts.iter().copied());
        starts.map(move |more| DensityLoad { unit: Unit::Sandbox, count, more })
    };
    let mut loads: Vec<DensityLoad> = ascending(&args.deployed).into_iter().flat_map(of).collect();
    if !args.replicas.is_empty() {
        let counts = ascending(&[&[0][..], &args.replicas[..]].concat());
        let load = |count| DensityLoad { unit: Unit::Replica, count, more: 0 };
        loads.extend(counts.into_iter().map(load));
    }
    loads
}

fn accelerator(args: &DensityArgs) -> String {
    match args.engine {
        Some(DensityEngine::Hollow) => "hollow".to_owned(),
        _ => super::accelerator(args.machine.accel.as_deref()),
    }
}

/// Returns what each sandbox is started with, but for its name.
fn spec(args: &DensityArgs, image: &str, digest: &str) -> Result<v1::RunSpec> {
    let machine = &args.machine;
    let is_hollow = args.engine == Some(DensityEngine::Hollow);
    let forks_what = args.engine.is_some_and(|engine| engine != DensityEngine::Vmm);
    ensure!(!(args.fork && forks_what), "only slipway-vmm begins with a template: --engine vmm");
    let accelerator = match (is_hollow, &machine.accel) {
        (true, Some(_)) => bail!("--engine hollow has no processor: leave --accel out"),
        (true, None) => "hollow".to_owned(),
        (false, accel) => accel.clone().unwrap_or_default(),
    };
    let kernel = machine.kernel.as_deref().map(crate::spec::absolute).transpose()?;
    Ok(v1::RunSpec {
        image: image.to_owned(),
        image_digest: digest.to_owned(),
        memory_bytes: machine.memory.unwrap_or(0),
        max_memory_bytes: machine.max_memory.unwrap_or(0),
        layers_bytes: machine.layers.unwrap_or(0),
        cpus: machine.cpus.map(CpuCount::whole).transpose()?.unwrap_or(0),
        max_cpus: machine.max_cpus.unwrap_or(0),
        free_page_reporting: machine.free_page_reporting.map(Switched::is_on),
        kernel: kernel.unwrap_or_default(),
        accelerator,
        network: args.network.clone(),
        command: vec!["sleep".to_owned(), "1000000".to_owned()],
        // No entry point, whatever the image's is.
        entrypoint: Some(String::new()),
        boots: true,
        detach: true,
        ..v1::RunSpec::default()
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn args(words: &[&str]) -> DensityArgs {
        let all = ["slipway-bench", "density"].iter().chain(words);
        match BenchCli::try_parse_from(all).unwrap().command {
            BenchCommand::Density(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sandboxes_are_what_the_user_asked_for() {
        let asked = args(&["debian:12", "--engine", "hollow", "--memory", "128M"]);
        let of = spec(&asked, "debian:12", "sha256:1").unwrap();
        assert_eq!((of.accelerator.as_str(), of.memory_bytes), ("hollow", 128 << 20));
        assert_eq!((of.network.as_str(), of.detach), ("none", true));
        assert_eq!((asked.deployed, asked.burst), (vec![1, 2, 4, 8], vec![1]));
        let both = args(&["x", "--engine", "hollow", "--accel", "kvm"]);
        assert!(spec(&both, "x", "").unwrap_err().to_string().contains("leave --accel out"));
        for engine in ["hollow", "qemu"] {
            let forked = args(&["x", "--engine", engine, "--fork"]);
            assert!(spec(&forked, "x", "").unwrap_err().to_string().contains("slipway-vmm"));
        }
        assert!(spec(&args(&["x", "--engine", "vmm", "--fork"]), "x", "").is_ok());
    }

    #[test]
    fn loads_are_in_ascending_order_with_their_starts() {
        let of = |words: &[&str]| -> Vec<(Unit, u32, u32)> {
            loads(&args(words)).iter().map(|load| (load.unit, load.count, load.more)).collect()
        };
        let deployed = |count, more| (Unit::Sandbox, count, more);
        let zero_and_two = [deployed(0, 0), deployed(0, 1), deployed(2, 0), deployed(2, 1)];
        assert_eq!(of(&["x", "--deployed", "2,0,2"]), zero_and_two);
        let replicas = of(&["x", "--deployed", "1", "--burst", "10,1,10", "--replicas", "4,2"]);
        let expected = [0, 2, 4].map(|count| (Unit::Replica, count, 0));
        assert_eq!((replicas.len(), &replicas[3..]), (6, &expected[..]));
    }

    #[test]
    fn an_image_or_a_report_is_needed() {
        let parsed = |words: &[&str]| {
            BenchCli::try_parse_from(["slipway-bench", "density"].iter().chain(words)).is_ok()
        };
        assert!(!parsed(&[]) && parsed(&["--report", "a.json"]) && parsed(&["x"]));
        assert!(parsed(&["x", "--deployed", "0,1000"]) && !parsed(&["x", "--deployed", "5000"]));
        assert!(!parsed(&["x", "--replicas", "100"]));
    }
}
