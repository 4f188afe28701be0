//! Executors: order, time, keys.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_ram::Span;
use slipway_telemetry::ManualClock;

use crate::{Core, Executor, Job, JobEnd, Options, Simulated, Stretch, TransformError, Work};
use slipway_warp::{Cipher, Class, Sealer, Secret};

fn job(tag: u64, bytes: usize) -> Job {
    let source = JobEnd::Ring(Span::heap(65_536), Stretch::new(0, bytes as u64, 65_536).unwrap());
    Job { tag, work: Work::Pass, source, sink: JobEnd::Buffer(Vec::new()) }
}

#[test]
fn an_accelerator_keeps_its_rate_and_its_depth() {
    let clock = ManualClock::new();
    let core = Core::new(Class::Z, Arc::new(clock.clone()));
    // The accelerator does a byte each nanosecond.
    let mut accelerator = Simulated::new(core, Class::M, 1_000_000_000, 2, Arc::new(clock.clone()));
    let mut jobs: VecDeque<Job> = (0..3).map(|tag| job(tag, 1000)).collect();
    let mut ended = Vec::new();
    accelerator.submit(&mut jobs, &mut ended);
    assert_eq!((jobs.len(), accelerator.room(), ended.len()), (1, 0, 0));
    assert_eq!(accelerator.due(), Some(Duration::from_nanos(1000)));
    clock.advance(Duration::from_nanos(999));
    accelerator.poll(&mut ended);
    assert!(ended.is_empty());
    clock.advance(Duration::from_nanos(1));
    accelerator.poll(&mut ended);
    assert_eq!((ended.len(), ended[0].job.tag), (1, 0));
    assert_eq!(ended[0].busy, Duration::from_nanos(1000));
    accelerator.submit(&mut jobs, &mut ended);
    clock.advance(Duration::from_nanos(2000));
    accelerator.poll(&mut ended);
    let tags: Vec<_> = ended.iter().map(|completion| completion.job.tag).collect();
    assert_eq!((tags, accelerator.due()), (vec![0, 1, 2], None));
}

#[test]
fn a_key_serves_for_what_it_was_given_and_until_it_is_taken_away() {
    let mut core = Core::new(Class::A, Arc::new(ManualClock::new()));
    let secret = Secret::derive(&[1; 32], &[]);
    let key = core.add_sealer(Sealer::new(Cipher::Aes128Gcm, &secret));
    let seal = Work::Seal(Some(key), Options::default());
    let run = |core: &mut Core, work| {
        let (source, sink) = (JobEnd::Buffer(vec![1; 100]), JobEnd::Buffer(vec![0; 200]));
        let (mut jobs, mut ended) =
            (VecDeque::from([Job { tag: 1, work, source, sink }]), Vec::new());
        core.submit(&mut jobs, &mut ended);
        ended.pop().unwrap().result
    };
    let moved = run(&mut core, seal).unwrap();
    assert_eq!((moved.consumed, moved.produced), (100, 140));
    assert_eq!(run(&mut core, Work::Open(Some(key))), Err(TransformError::NoKey));
    core.remove_key(key);
    assert_eq!(run(&mut core, seal), Err(TransformError::NoKey));
    assert_eq!(core.add_sealer(Sealer::new(Cipher::Aes256Gcm, &secret)), key);
    assert!(run(&mut core, seal).is_ok());
    assert!(run(&mut core, Work::Seal(None, Options::default())).is_ok());
}
