//! Parts that do not fit together, and namespaces with gaps between their numbers.

use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_nvme_spec::identify::Cns;
use slipway_pci::{DoorbellRegisters, FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_telemetry::ManualClock;

use super::rig::{MEMORY, ram};
use crate::driver::{Arena, Direct, Driver, DriverError};
use crate::{Controller, Identity, Limits, Namespace, Parts, PartsError};

fn parts() -> Parts {
    let sink = FifoSink::new();
    Parts {
        memory: Memory::heap(4096),
        interrupts: vec![Interrupt::new(sink, 0)],
        doorbells: Doorbells::trapped(1024),
        namespaces: Vec::new(),
        clock: Arc::new(ManualClock::new()),
        identity: Identity::new("1"),
        limits: Limits::default(),
        journal: None,
    }
}

fn namespaces(numbers: &[u32]) -> Vec<Namespace> {
    numbers.iter().map(|nsid| Namespace::new(*nsid, ram(1 << 16, 512), [9; 16])).collect()
}

#[test]
fn wrong_parts_are_refused() {
    let refused = |change: fn(&mut Parts)| {
        let mut parts = parts();
        change(&mut parts);
        Controller::new(parts).err()
    };
    assert_eq!(refused(|_| {}), None);
    let text = |name, most| Some(PartsError::Text(name, most));
    assert_eq!(refused(|parts| parts.identity.serial.clear()), text("serial", 20));
    assert_eq!(refused(|parts| parts.identity.serial = "x".repeat(21)), text("serial", 20));
    assert_eq!(refused(|parts| parts.identity.model = "ü".into()), text("model", 40));
    assert_eq!(refused(|parts| parts.identity.firmware = "123456789".into()), text("firmware", 8));
    assert_eq!(refused(|parts| parts.identity.nqn = "n".repeat(224)), text("nqn", 223));
    let limit = |name| Some(PartsError::Limit(name));
    assert_eq!(refused(|parts| parts.limits.queue_pairs = 0), limit("queue_pairs"));
    assert_eq!(refused(|parts| parts.limits.queue_pairs = 65), limit("queue_pairs"));
    assert_eq!(refused(|parts| parts.limits.queue_entries = 1), limit("queue_entries"));
    assert_eq!(refused(|parts| parts.limits.queue_entries = 1025), limit("queue_entries"));
    assert_eq!(refused(|parts| parts.limits.transfer = 5000), limit("transfer"));
    assert_eq!(refused(|parts| parts.limits.transfer = 2048), limit("transfer"));
    assert_eq!(refused(|parts| parts.limits.in_flight = 0), limit("in_flight"));
    assert_eq!(refused(|parts| parts.interrupts.clear()), Some(PartsError::Interrupts));
    let few = Some(PartsError::Doorbells(130));
    assert_eq!(refused(|parts| parts.doorbells = Doorbells::trapped(129)), few);
    for numbers in [&[0][..], &[1, 1], &[1025]] {
        let parts = Parts { namespaces: namespaces(numbers), ..parts() };
        assert!(matches!(Controller::new(parts).err(), Some(PartsError::NamespaceId(_))));
    }
}

#[test]
fn the_function_is_an_nvme_controller() {
    let mut controller = Controller::new(parts()).unwrap();
    let mut class = [0; 4];
    controller.config_read(8, &mut class);
    assert_eq!(class[1..], [2, 8, 1]);
    let bar = controller.description().bars[0].clone();
    let doorbells = DoorbellRegisters::Page(0x1000..0x2000);
    assert_eq!((bar.index, bar.size, bar.doorbells), (0, 0x4000, Some(doorbells)));
}

#[test]
fn namespace_numbers_may_have_gaps() {
    let memory = Memory::heap(MEMORY);
    let parts = Parts { memory: memory.clone(), namespaces: namespaces(&[900, 2, 5]), ..parts() };
    let direct = Direct::new(Controller::new(parts).unwrap());
    let mut driver = Driver::new(direct, Arena::new(memory, 0, MEMORY as u64), 8).unwrap();
    assert_eq!(driver.identify_controller().unwrap().namespaces.get(), 1024);
    let list = driver.identify(Cns::ActiveNamespaces, 0).unwrap();
    assert_eq!(list[..16], [2, 0, 0, 0, 5, 0, 0, 0, 0x84, 3, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.identify_namespace(3).unwrap().size.get(), 0, "could be, and is not");
    assert_eq!(driver.identify_namespace(900).unwrap().size.get(), 128);
    assert!(matches!(driver.identify_namespace(1025), Err(DriverError::Command(_))));
    assert!(driver.identify(Cns::NamespaceDescriptors, 3).is_err());
}
