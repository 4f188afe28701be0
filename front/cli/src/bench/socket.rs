//! `slipway bench socket`: measures ways between two programs.

use std::ffi::OsString;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_bench::block::native::Cpus;
use slipway_bench::socket::drf::{DrfPlan, DrfReport, DrfSubject, Executors, drf_plot, drf_table};
use slipway_bench::socket::peer::OpenSsl;
use slipway_bench::socket::{
    App, AppRun, Build, Certificate, Engines, Net, SocketLoad, SocketPlan, SocketReport,
    SocketSubject, Way, measure_apps, socket_table,
};
use slipway_bench::{Times, Turns};

use super::reports::{self, View};
use super::subjects;
use crate::args::{SocketArgs, SocketLoadArgs};
use crate::progress;

/// The subjects to measure, with descriptions. The first is the one that others are compared with.
const SUBJECTS: [(&str, &str); 8] = [
    (
        "tcp-veth",
        "kernel TCP between two network namespaces, with veth pairs to a Linux bridge, as root",
    ),
    (
        "slipway",
        "the same programs with libslipway.so: memory that both share, and the engine that \
         introduces them",
    ),
    (
        "slipway-netns",
        "the same in the namespaces of tcp-veth, with a policy that lets one side connect to the \
         other",
    ),
    ("tcp-loopback", "kernel TCP on the loopback interface"),
    ("tls-veth", "TLS 1.3 by the system's OpenSSL (AES-128-GCM) on tcp-veth"),
    ("tls-loopback", "TLS 1.3 by the system's OpenSSL (AES-128-GCM) on tcp-loopback"),
    (
        "slipway-encrypted",
        "libslipway.so in the namespaces of tcp-veth, each with an engine: TLS 1.3 with \
         certificates on both sides, then AES-128-GCM, over TCP between the engines",
    ),
    ("ipsec-veth", "tcp-veth with IPsec: ESP in transport mode (AES-128-GCM)"),
];
/// Bandwidth, latency, messages, increasing numbers of sockets, idle sockets.
const LOADS: [&str; 14] = [
    "stream-128k-c1",
    "stream-128k-c16",
    "stream-64b-c1",
    "pingpong-64b-busy",
    "pingpong-64b-block",
    "pingpong-64b-asleep",
    "pingpong-4k-busy",
    "pingpong-4k-block",
    "pingpong-4k-asleep",
    "window-4k-c1",
    "window-4k-c16",
    "window-4k-c256",
    "window-4k-c4096",
    "idle-c4096",
];
/// The loads of a quick run.
const QUICK: [&str; 5] =
    ["stream-128k-c1", "stream-64b-c1", "pingpong-64b-busy", "window-4k-c16", "idle-c16"];

/// Measures, or shows an earlier report.
pub fn socket(args: &SocketArgs) -> Result<i32> {
    if args.turns.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    if args.drf {
        return reports::complete(&reports::show(&SHARES, &args.report, || shares(args))?);
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// Runs one of the two programs of a load.
pub fn load(args: &SocketLoadArgs) -> Result<i32> {
    slipway_bench::socket::peer::serve(&args.specification)?;
    Ok(0)
}

/// The view of these reports.
const VIEW: View<SocketReport> = View::of(SocketReport::picture, socket_table);

/// The view of reports of fair shares.
const SHARES: View<DrfReport> = View {
    title: |report| {
        let (line, time, mixes) =
            (report.environment.line(), report.plan.time(), report.cases().count());
        format!(
            "Fair shares of simulated executors\n{line}\n{mixes} mixes, 1 round of {time:?} of each"
        )
    },
    ..View::of(drf_plot, drf_table)
};

/// Measures the shares of simulated executors.
fn shares(args: &SocketArgs) -> Result<DrfReport> {
    let plan = if args.quick { DrfPlan::quick() } else { DrfPlan::full() };
    let bar = progress::turns();
    let shown = bar.clone();
    let executors = Executors::new(&plan, move |done, all| {
        shown.set_length(all as u64);
        shown.set_position(done as u64);
    })?;
    let subjects: Vec<Box<DrfSubject>> = vec![Box::new(executors)];
    let report = subjects::report_telling(subjects, plan, "none".to_owned(), |_| {});
    bar.finish_and_clear();
    report
}

fn loads(args: &SocketArgs) -> Result<Vec<SocketLoad>> {
    subjects::loads(&args.load, if args.quick { &QUICK } else { &LOADS })
}

/// Resources that several ways share, made when the first needs them.
struct Shared {
    program: Vec<OsString>,
    cpus: Cpus,
    times: Times,
    bridged: Option<Rc<Net>>,
    certificate: Option<Certificate>,
    build: Build,
}

impl Shared {
    fn new(engine: Option<&Path>, times: Times) -> Result<Self> {
        let program = slipway_bench::slipway().context("which program this is")?;
        let engine = engine.unwrap_or(&program).to_owned();
        let build = Build { engine, beside: program.clone() };
        let program = vec![program.into(), "bench".into(), "socket-load".into()];
        let cpus = Cpus::split(1)?;
        Ok(Self { program, cpus, times, bridged: None, certificate: None, build })
    }

    fn bridged(&mut self) -> Result<Rc<Net>> {
        let net = match self.bridged.take() {
            Some(net) => net,
            None => Rc::new(Net::bridged()?),
        };
        Ok(Rc::clone(self.bridged.insert(net)))
    }

    fn certificate(&mut self) -> Result<Certificate> {
        OpenSsl::load().context("OpenSSL 3 is not installed (Debian: apt install libssl3)")?;
        let certificate = match self.certificate.take() {
            Some(certificate) => certificate,
            None => Certificate::make()?,
        };
        Ok(self.certificate.insert(certificate).clone())
    }

    fn way(&mut self, name: &'static str, about: &str) -> Result<Way> {
        let (net, tls) = match name {
            "tcp-loopback" | "slipway" => (Rc::new(Net::here()), None),
            "tls-loopback" => (Rc::new(Net::here()), Some(self.certificate()?)),
            "tls-veth" => (self.bridged()?, Some(self.certificate()?)),
            "ipsec-veth" => (Rc::new(Net::with_ipsec()?), None),
            _ => (self.bridged()?, None),
        };
        let engines = match name {
            "slipway" => Some(Engines::here(&self.build)?),
            "slipway-netns" => Some(Engines::between(&self.build, &net)?),
            "slipway-encrypted" => Some(Engines::linked(&self.build, &net)?),
            _ => None,
        };
        Ok(Way {
            name,
            about: about.to_owned(),
            net,
            tls,
            engines,
            program: self.program.clone(),
            cpus: self.cpus.clone(),
            times: self.times,
        })
    }
}

fn ways(args: &SocketArgs, times: Times) -> Result<Vec<Rc<Way>>> {
    let only = &args.turns.only;
    let chosen = subjects::chosen("subject", only, &SUBJECTS, |(name, _)| name)?;
    let mut shared = Shared::new(args.engine.as_deref(), times)?;
    let mut ways = Vec::new();
    for (name, about) in chosen {
        match shared.way(name, about) {
            Ok(way) => ways.push(Rc::new(way)),
            Err(error) if !only.is_empty() => return Err(error.context(name)),
            Err(error) => eprintln!("Left out: {name} ({error:#})"),
        }
    }
    Ok(ways)
}

fn run(args: &SocketArgs) -> Result<SocketReport> {
    let (warm_up, time) = match args.quick {
        true => (Duration::from_millis(50), Duration::from_millis(200)),
        false => args.turns.durations(),
    };
    let rounds = if args.quick { args.turns.rounds.min(2) } else { args.turns.rounds };
    let loads = if args.apps && args.load.is_empty() { Vec::new() } else { loads(args)? };
    let times = Times { warm_up, time };
    let (plan, ways) = (SocketPlan::timed(loads, rounds, times), ways(args, times)?);
    let subject = |way: &Rc<Way>| -> Box<SocketSubject> { Box::new(Rc::clone(way)) };
    let subjects: Vec<Box<SocketSubject>> = ways.iter().map(subject).collect();
    let mut report: SocketReport = subjects::report(subjects, plan, "none".to_owned())?;
    if args.apps {
        let Turns { runs, faults } = apps(&ways, rounds)?;
        report.extra.apps = runs;
        report.faults.extend(faults);
    }
    Ok(report)
}

/// Measures the installed programs over all ways.
fn apps(ways: &[Rc<Way>], rounds: u32) -> Result<Turns<AppRun>> {
    let able = |app: &App| match app.lacks() {
        None => true,
        Some(program) => {
            eprintln!("Left out: {} (needs {program})", app.names().0);
            false
        }
    };
    let able: Vec<App> = App::ALL.into_iter().filter(able).collect();
    let bar = progress::turns();
    let turns = measure_apps(ways, &able, rounds, |turn| progress::turn(&bar, &turn));
    bar.finish_and_clear();
    subjects::measured(turns)
}
