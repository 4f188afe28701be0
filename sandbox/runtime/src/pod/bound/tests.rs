use super::*;
use crate::adopt::tests::{added_of, record_of, sandbox_of};
use crate::record::Added;

const MIB: u64 = 1 << 20;

fn of_new(spec: &RunSpec) -> Result<BoundMemory> {
    super::of_new(spec, 1 << 40)
}

fn asked(mib: u64) -> RunSpec {
    RunSpec { makes_pod: true, bound_memory_bytes: mib * MIB, ..RunSpec::default() }
}

/// Makes the record of a pod with regions for limits of up to 124 MiB, and a container in each
/// of these regions that has this state.
fn pod(containers: &[(u32, SandboxState)]) -> Record {
    let added = |(region, state): &(u32, SandboxState)| {
        let limits = Limits { memory_bytes: 64 * MIB, ..Limits::default() };
        Added { region: Some(*region), limits, ..added_of(&format!("c{region}"), *state) }
    };
    Record {
        pod: true,
        bound: of_new(&asked(100)).unwrap(),
        added: containers.iter().map(added).collect(),
        ..record_of(SandboxState::Running)
    }
}

#[test]
fn regions_are_whole_units_with_room_for_the_limit() {
    assert_eq!(of_new(&RunSpec::default()).unwrap(), BoundMemory::default());
    let region = |mib| of_new(&asked(mib)).unwrap().region_bytes / MIB;
    assert_eq!([1, 124, 125, 32764].map(region), [128, 128, 256, 32768]);
    assert_eq!(of_new(&asked(100)).unwrap().room(), 1024 * MIB);
    let refused = |spec: RunSpec| of_new(&spec).unwrap_err().to_string();
    assert!(refused(asked(32765)).contains("32765 MiB is too much for a container"));
    assert!(refused(RunSpec { makes_pod: false, ..asked(1) }).contains("is for pods"));
    let fork = RunSpec { template: "web".to_owned(), ..asked(100) };
    let regions = of_new(&fork).unwrap();
    assert_eq!(regions, of_new(&asked(100)).unwrap(), "its template has them, too");
    assert_eq!((regions.most_limit(), BoundMemory::default().most_limit()), (124 * MIB, 0));
    // A request for the largest limit gets the same regions.
    assert_eq!(of_new(&asked(124)).unwrap(), regions);
    let grows = RunSpec { max_memory_bytes: 1, ..asked(1) };
    assert!(refused(grows).contains("and --max-memory"));
}

#[test]
fn a_pod_has_no_more_than_the_host() {
    let small = super::of_new(&asked(1024), 1023 * MIB).unwrap_err().to_string();
    assert!(small.contains("1024 MiB is more than this host has, 1023 MiB"), "{small}");
    super::of_new(&asked(1024), 1024 * MIB).unwrap();
    let mut record = Record { memory_bytes: 256 * MIB, ..pod(&[]) };
    record.bound.granted_bytes[0] = 68 * MIB;
    check_host(&record, 68 * MIB, 392 * MIB).unwrap();
    let refused = check_host(&record, 70 * MIB, 392 * MIB).unwrap_err().to_string();
    assert!(refused.contains("would have 394 MiB, and this host has 392 MiB"), "{refused}");
    assert!(check_host(&record, u64::MAX, 392 * MIB).is_err());
}

#[test]
fn a_region_has_the_limit_and_a_margin_in_whole_blocks() {
    let size = |limit, block| size(128 * MIB, limit * MIB, block * MIB) / MIB;
    assert_eq!((size(0, 2), size(64, 2), size(63, 2)), (0, 68, 68));
    assert_eq!((size(64, 8), size(124, 2), size(u64::MAX / MIB, 2)), (72, 128, 128));
}

#[test]
fn a_container_gets_a_region_that_no_live_one_has() {
    use SandboxState::{Created, Exited, Running};
    let mut record = pod(&[(0, Running), (1, Exited), (2, Created)]);
    assert_eq!(choose(&record).unwrap(), 1);
    record.bound.granted_bytes[1] = 68 * MIB;
    assert_eq!(choose(&record).unwrap(), 3, "one with nothing plugged is better");
    let live: Vec<_> = (0..8).map(|region| (region, Running)).collect();
    let refused = choose(&pod(&live)).unwrap_err().to_string();
    assert!(refused.contains("has 8 containers with memory of their own"), "{refused}");
    let mut last = pod(&live);
    last.bound.granted_bytes = vec![68 * MIB; 8];
    last.added[5].state = Exited;
    assert_eq!(choose(&last).unwrap(), 5, "what is plugged still will do");
    assert!(choose(&record_of(Running)).is_err(), "no region");
}

#[test]
fn regions_go_back_whose_containers_have_ended() {
    use SandboxState::{Exited, Running};
    let mut record = pod(&[(0, Running), (1, Exited), (2, Exited)]);
    record.bound.granted_bytes[..2].fill(68 * MIB);
    record.bound.granted_bytes[7] = 68 * MIB;
    assert_eq!(spare(&record), [1, 7]);
    assert_eq!(record.guest_bytes(), record.memory_bytes + 204 * MIB);
}

#[test]
fn a_limit_is_within_the_region_and_no_matter_of_the_others() {
    let record = pod(&[(0, SandboxState::Running)]);
    let of_others = |name, memory_bytes| {
        let asked = Limits { memory_bytes, pids: 9, ..Limits::default() };
        of_others(&record, name, asked).map_err(|error| error.to_string())
    };
    let others = Limits { pids: 9, ..Limits::default() };
    assert_eq!(of_others("c0", 124 * MIB), Ok(others));
    let unbound = of_others("none", 999 * MIB).unwrap();
    assert_eq!(unbound.memory_bytes, 999 * MIB, "it has no region");
    let refused = of_others("c0", 125 * MIB).unwrap_err();
    assert!(refused.contains("125 MiB is more than the 124 MiB"), "{refused}");
    assert!(of_others("c0", u64::MAX).unwrap_err().contains("one/c0 has memory of its own"));
}

#[tokio::test]
async fn one_task_waits_however_many_containers_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut record = pod(&[(0, SandboxState::Exited)]);
    record.bound.granted_bytes[0] = 68 * MIB;
    let sandbox = sandbox_of(record, dir.path());
    let guests = Guests::start().unwrap();
    // The guest has not followed an earlier change.
    let _turn = sandbox.wait_to_change_size().await;
    (0..100).for_each(|_| leave_to(&guests, &sandbox));
    assert!(Arc::strong_count(&sandbox) <= 3, "the test's, and those of two tasks");
}
