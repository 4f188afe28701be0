//! Measures a few figures of the server on this machine: the cost of idle endpoints, and the
//! duration of a register access: `cargo run --release -p slipway-vfio-user --features testing
//! --example figures`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Scratch};
use slipway_vfio_user::{Config, DoorbellMode, Endpoint, EndpointParts};
use slipway_vfio_user_client::Client;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let directory = std::env::temp_dir().join(format!("slipway-figures-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let outcome = figures(&directory);
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn figures(directory: &std::path::Path) -> Outcome<()> {
    for (mode, name) in [(DoorbellMode::Trapped, "trapped"), (DoorbellMode::Mapped, "mapped")] {
        let reactor = Reactor::spawn(Settings::default())?;
        let mut clients = Vec::new();
        for index in 0..200 {
            let mut config = Config::at(directory.join(format!("{name}-{index}")));
            config.doorbells = mode;
            clients.push(connect(config, &reactor)?);
        }
        std::thread::sleep(Duration::from_millis(200));
        let (cpu, time) = (cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let share = (cpu_time() - cpu).as_secs_f64() / time.elapsed().as_secs_f64();
        println!("200 idle clients, {name} doorbells: {:.2} % of a CPU", share * 100.0);
        let client = &mut clients[0];
        let mut times: Vec<_> = (0..20_000).map(|_| read_time(client)).collect::<Outcome<_>>()?;
        times.sort();
        println!("register read, p50 {:?}, p99 {:?}", times[10_000], times[19_800]);
    }
    Ok(())
}

fn connect(config: Config, reactor: &Reactor) -> Outcome<Client> {
    let path = config.location.socket();
    let mut parts = EndpointParts::new(&config);
    let doorbells = parts.doorbells(DOORBELLS)?;
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
    let endpoint = Endpoint::new(config, parts, Box::new(function), Vec::new(), &reactor.handle())?;
    reactor.handle().add(Box::new(endpoint))?;
    Ok(Client::connect(&path, Duration::from_secs(10))?)
}

fn read_time(client: &mut Client) -> Outcome<Duration> {
    let start = Instant::now();
    client.read_u32(0, 0)?;
    Ok(start.elapsed())
}

/// Returns the CPU time of the whole process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
