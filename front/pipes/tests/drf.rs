//! Compares tenants' shares of simulated executors with the formula and with an independent script.
//! Runs in virtual time: exact, and the same in every run.
#![allow(clippy::unwrap_used)]

mod bench;

use std::io::Write;
use std::process::{Command, Stdio};

use bench::{Bench, Executor, Mix, Random, Tenant};
use serde_json::{Value, json};

/// Bytes per second for one unit of the slides' figures.
const UNIT: f64 = 1e7;
/// The largest relative error of a share.
const MARGIN: f64 = 0.05;

fn talk() -> Mix {
    let executor = |capacity: f64, resource| Executor { capacity: capacity * UNIT, resource };
    Mix {
        executors: vec![executor(100.0, 0), executor(60.0, 1)],
        tenants: vec![Tenant::on(&[0, 1]), Tenant::on(&[0])],
    }
}

/// Makes 2 to 16 tenants on 2 to 5 executors, each a resource of its own, with random chains.
fn random_mix(random: &mut Random) -> Mix {
    let count = 2 + random.below(4);
    let executors: Vec<_> = (0..count)
        .map(|resource| Executor { capacity: (10.0 + random.below(91) as f64) * UNIT, resource })
        .collect();
    let tenants = (0..2 + random.below(15)).map(|_| random_tenant(random, count)).collect();
    Mix { executors, tenants }
}

fn random_tenant(random: &mut Random, executors: usize) -> Tenant {
    let mut all: Vec<usize> = (0..executors).collect();
    for at in (1..executors).rev() {
        all.swap(at, random.below(at + 1));
    }
    all.truncate(1 + random.below(executors));
    let job = 4096 << random.below(4);
    Tenant { job, ..Tenant::on(&all) }
}

/// Returns the script's shares of each mix, or `None` if there is no Python.
fn script(mixes: &[Mix]) -> Option<Vec<Vec<f64>>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/progressive_filling.py");
    let mut command = Command::new("python3");
    command.arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => panic!("python3: {error}"),
    };
    let input = json!({ "mixes": mixes.iter().map(in_json).collect::<Vec<Value>>() });
    child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "the script failed");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

fn in_json(mix: &Mix) -> Value {
    let executor = |executor: &Executor| {
        let Executor { capacity, resource } = executor;
        json!({ "capacity": capacity, "resource": resource })
    };
    let tenant = |tenant: &Tenant| {
        let Tenant { chain, weight, cap, .. } = tenant;
        json!({ "executors": chain, "weight": weight, "cap": cap })
    };
    json!({
        "executors": mix.executors.iter().map(executor).collect::<Vec<Value>>(),
        "tenants": mix.tenants.iter().map(tenant).collect::<Vec<Value>>(),
    })
}

/// Panics unless all are within the margin; returns the largest deviation.
fn compare(what: &str, measured: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(measured.len(), expected.len());
    let off =
        measured.iter().zip(expected).map(|(measured, expected)| (measured / expected - 1.0).abs());
    let worst = off.fold(0.0, f64::max);
    assert!(
        worst <= MARGIN,
        "{what}: {:.1} % off: {measured:.0?} for {expected:.0?}",
        worst * 100.0
    );
    worst
}

/// Compares the measured shares of all mixes with the script's.
fn against_the_script(test: &str, mixes: &[Mix]) {
    let Some(expected) = script(mixes) else {
        println!("SKIPPED: {test}: needs python3");
        return;
    };
    let mut worst = 0.0f64;
    for (number, (mix, expected)) in mixes.iter().zip(&expected).enumerate() {
        let mut bench = Bench::new(mix);
        bench.compare_formula(expected);
        let rates = bench.run();
        worst = worst.max(compare(&format!("mix {number}: {mix:?}"), &rates, expected));
    }
    println!("{test}: {} mixes, at most {:.2} % off", mixes.len(), worst * 100.0);
}

#[test]
fn the_example_of_the_slides_in_measured_shares() {
    let mix = talk();
    let rates = Bench::new(&mix).run();
    compare("the slides' example", &rates, &[37.5 * UNIT, 62.5 * UNIT]);
    println!("A {:.2}, B {:.2}", rates[0] / UNIT, rates[1] / UNIT);
    against_the_script("the_example_of_the_slides_in_measured_shares", &[mix]);
}

#[test]
fn a_hundred_random_mixes_against_progressive_filling_by_python3() {
    let mut random = Random::new(2026);
    let mixes: Vec<Mix> = (0..100).map(|_| random_mix(&mut random)).collect();
    against_the_script("a_hundred_random_mixes_against_progressive_filling_by_python3", &mixes);
}

#[test]
fn weights_caps_and_shared_cores_against_progressive_filling_by_python3() {
    let mut random = Random::new(4);
    let mixes: Vec<Mix> = (0..40)
        .map(|_| {
            let mut mix = random_mix(&mut random);
            for tenant in &mut mix.tenants {
                tenant.weight = [0.5, 1.0, 1.0, 2.0, 4.0][random.below(5)];
                tenant.cap =
                    (random.below(4) == 0).then(|| 1_000_000 + random.next() % 200_000_000);
            }
            let resources = 1 + random.below(mix.executors.len());
            for executor in &mut mix.executors {
                executor.resource %= resources;
            }
            mix
        })
        .collect();
    let test = "weights_caps_and_shared_cores_against_progressive_filling_by_python3";
    against_the_script(test, &mixes);
}

#[test]
fn a_tenant_that_floods_changes_nobodys_share() {
    let mut random = Random::new(9);
    for number in 0..20 {
        let mix = random_mix(&mut random);
        let quiet = Bench::new(&mix).run();
        let mut flooding = mix.clone();
        // A hundred times as many jobs queued, of the largest or of the smallest size.
        flooding.tenants[0].queued *= 100;
        flooding.tenants[0].job = [65_536, 2048][number % 2];
        let loud = Bench::new(&flooding).run();
        compare(&format!("mix {number}: {mix:?}"), &loud[1..], &quiet[1..]);
    }
}

#[test]
fn what_nobody_uses_is_there_for_the_others() {
    let mut mix = talk();
    mix.tenants.push(Tenant::on(&[0]));
    let mut bench = Bench::new(&mix);
    bench.run();
    bench.silence(1);
    compare("one is silent", &bench.run()[..1], &[37.5 * UNIT]);
    bench.silence(2);
    compare("A is alone", &bench.run()[..1], &[60.0 * UNIT]);
    // A tenant that comes back has its share at once and no arrears.
    bench.wake(1);
    compare("B is back", &bench.run()[..2], &[37.5 * UNIT, 62.5 * UNIT]);
}
