//! Two tenants that send as much as they can, over one link between two engines. The checks are of
//! ratios, so that they hold on a loaded machine. The shared resource is the engine's time, where
//! nothing else is scarce: a tenant whose bytes cost more has fewer.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;

/// Returns the parts of two tenants in the bytes that their programs read, up to `total` and after
/// its first quarter. Tenant `blue` has `streams[0]` streams, `red` has `streams[1]`.
fn shares(left: &mut Engine, right: &mut Engine, streams: [usize; 2], total: u64) -> [f64; 2] {
    let tenants = ["blue", "red"].into_iter().zip(streams);
    let pairs: Vec<Vec<(Joined, Joined)>> = tenants
        .map(|(tenant, count)| (0..count).map(|_| joined_for(left, right, tenant)).collect())
        .collect();
    let message = vec![1; 256 << 10];
    let mut buffer = vec![0; 512 << 10];
    let (mut got, mut before) = ([0u64; 2], None);
    until(left, right, |left, right| {
        for (pairs, got) in pairs.iter().zip(&mut got) {
            for (here, there) in pairs {
                here.0.write(&message, || left.links.stir(here.1)).unwrap();
                *got += there.0.read(&mut buffer, || right.links.stir(there.1)).unwrap() as u64;
            }
        }
        let sum = got[0] + got[1];
        if before.is_none() && sum > total / 4 {
            before = Some(got);
        }
        sum > total
    });
    let before = before.unwrap();
    let [blue, red] = [got[0] - before[0], got[1] - before[1]].map(|bytes| bytes as f64);
    [blue / (blue + red), red / (blue + red)]
}

/// Starts two engines; `rate` is the capacity of the way from left to right, in megabits per
/// second.
fn engines(dir: &std::path::Path, rate: Option<u64>) -> (Engine, Engine) {
    let right = Engine::new(right(dir, "127.0.0.1:1"));
    let mut settings = left(dir, &right.at());
    settings.engine[0].rate_mbit = rate;
    (Engine::new(settings), right)
}

#[test]
fn a_flood_of_streams_is_no_more_than_one() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    for streams in [[1, 1], [64, 1]] {
        let (mut left, mut right) = engines(dir.path(), None);
        let [_, red] = shares(&mut left, &mut right, streams, 160 << 20);
        let view = left.links.shares(std::time::Instant::now());
        let [mine, theirs] = [&view.tenants[1], &view.tenants[0]].map(|tenant| tenant.resources[0]);
        let core = mine / (mine + theirs);
        println!("{streams:?}: red has {core:.3} of the core's time and {red:.3} of the bytes");
        assert!((0.4..0.6).contains(&core), "{streams:?}: {core}");
    }
}

#[test]
fn a_way_of_a_set_rate_is_shared_by_weight_whatever_the_number_of_streams() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    for (streams, weight, share) in [([1, 1], 1.0, 0.5), ([64, 1], 1.0, 0.5), ([1, 1], 3.0, 0.25)] {
        let (mut left, mut right) = engines(dir.path(), Some(160));
        left.links.set_weight("blue", weight);
        let begin = std::time::Instant::now();
        let total = 20_000_000;
        let [_, red] = shares(&mut left, &mut right, streams, total);
        let rate = total as f64 / begin.elapsed().as_secs_f64();
        println!("{streams:?}, weight {weight}: red has {red:.3} of {:.1} MB/s", rate / 1e6);
        assert!((red / share - 1.0).abs() < 0.1, "{streams:?}, weight {weight}: {red}");
        assert!(rate < 24e6, "{rate} bytes per second");
        let view = left.links.shares(std::time::Instant::now());
        let tenants: Vec<_> = view.tenants.iter().map(|tenant| tenant.tenant.as_str()).collect();
        assert_eq!(tenants, ["blue", "red"]);
        let way = &view.resources[1];
        assert_eq!((way.name.as_str(), way.rate), ("right", Some(20_000_000)));
        assert!(view.tenants.iter().all(|tenant| tenant.dominant == tenant.resources[1]));
    }
}
