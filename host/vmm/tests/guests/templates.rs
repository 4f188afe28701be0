//! CPU templates: a guest reads the leaves that were made for it.

use kvm_ioctls::Kvm;
use slipway_machine::Host;
use slipway_vmm::board::End;
use slipway_vmm::{Config, Machine, Template};

use crate::common::{self, Guest, has_kvm};

/// The guest-physical address of the number of leaves, which the leaf and the index of each follow.
const ASKED: u64 = 0x9000;
/// The address of the answers, four words each.
const ANSWERS: u64 = 0xb000;

// Executes CPUID for each leaf that is asked for, and powers off.
guest!(reads_cpuid:
    "mov esi, 0x9004"
    "mov edi, 0xb000"
    "2: mov eax, [esi]"
    "mov ecx, [esi + 4]"
    "cpuid"
    "mov [edi], eax"
    "mov [edi + 4], ebx"
    "mov [edi + 8], ecx"
    "mov [edi + 12], edx"
    "add esi, 8"
    "add edi, 16"
    "dec dword ptr [0x9000]"
    "jnz 2b"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "hlt"
);

/// Returns the bits of a leaf that follow the guest's control registers, or the order of requests.
fn changing(function: u32, index: u32) -> [u32; 4] {
    match (function, index) {
        // The local APIC is on; XSAVE is on.
        (1, _) => [0, 0, 1 << 27, 1 << 9],
        // The size of the components that are on.
        (0x0d, 0 | 1) => [0, u32::MAX, 0, 0],
        // Protection keys are on.
        (7, 0) => [0, 0, 1 << 4, 0],
        _ => [0; 4],
    }
}

/// Has a guest with this configuration read its leaves, and compares them.
fn check(config: Config, console: std::fs::File, expected: &[kvm_bindings::kvm_cpuid_entry2]) {
    let template = config.template;
    let machine = Machine::new(config).unwrap();
    let asked = expected.iter().flat_map(|leaf| [leaf.function, leaf.index]);
    let words = [expected.len() as u32].into_iter().chain(asked);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    machine.chassis.ram.memory().write(ASKED, &bytes).unwrap();
    let guest = Guest { running: machine.start(|| ()).unwrap(), console };
    guest.running.cpus.resume();
    assert_eq!(guest.end(), End::PowerOff);
    for (number, leaf) in (0..).zip(expected) {
        let mut bytes = [0; 16];
        let memory = guest.running.chassis.ram.memory();
        memory.read(ANSWERS + number * 16, &mut bytes).unwrap();
        let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let read: Vec<u32> = words.collect();
        let shown = [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx];
        for (at, changing) in changing(leaf.function, leaf.index).into_iter().enumerate() {
            let (function, index) = (leaf.function, leaf.index);
            let [read, shown] = [read[at], shown[at]].map(|word| word & !changing);
            assert_eq!(read, shown, "{template}: {function:#x}.{index}, word {at}");
        }
    }
}

/// Returns whether this machine's processor runs guests. A KVM without that lets a guest's CPUID
/// through to the processor.
fn has_hardware() -> bool {
    let vmx = std::arch::x86_64::__cpuid(1).ecx & 1 << 5;
    let svm = std::arch::x86_64::__cpuid(0x8000_0001).ecx & 1 << 2;
    vmx | svm != 0
}

#[test]
fn a_template_that_the_host_cannot_give_is_refused() {
    if !has_kvm("a_template_that_the_host_cannot_give_is_refused") {
        return;
    }
    let host = Host::of(&Kvm::new().unwrap()).unwrap();
    for template in Template::ALL {
        let (config, _console) = common::config(reads_cpuid(), 1);
        let made = Machine::new(Config { template, ..config });
        let reason = host.check(template).err().map(|error| error.to_string());
        assert_eq!(made.err().map(|error| error.to_string()), reason);
    }
}

#[test]
fn a_guest_reads_the_leaves_of_its_template() {
    if !has_kvm("a_guest_reads_the_leaves_of_its_template") {
        return;
    }
    if !has_hardware() {
        let needs = "a processor that runs guests: lab/tiny with this test's program";
        println!("SKIPPED: a_guest_reads_the_leaves_of_its_template: needs {needs}");
        return;
    }
    let host = Host::of(&Kvm::new().unwrap()).unwrap();
    for template in Template::ALL {
        let Ok(features) = host.features(template, 0, 1) else { continue };
        let (config, console) = common::config(reads_cpuid(), 1);
        check(Config { template, ..config }, console, features.as_slice());
        println!("lab: a guest has read the leaves of {template}");
    }
}
