//! Hot plug in byte code: a device for each slot, which the guest can eject, and a method that
//! tells the guest which slots have changed (ACPI 6.4, 5.6.6 *Device Object Notifications*, 6.3.3
//! *_EJx*). The registers are those of [`crate::plug`].

use std::ops::Range;

use acpi_tables::aml::{
    And, BufferData, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local,
    Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, Return, Store, ZERO,
};
use acpi_tables::madt::{EnabledStatus, ProcessorLocalApic};

use super::{Named, bytes_of};
use crate::layout;

/// Notifications: *Device Check* and *Eject Request*.
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// The byte code of a bank and its slots: places and names.
pub struct SlotCode {
    /// The scope that holds all of them.
    scope: &'static str,
    region: &'static str,
    port: u16,
    /// Registers: there, plugged, leaving, eject.
    fields: [&'static [u8; 4]; 4],
    /// The method that notifies.
    scan: &'static str,
    /// The name of a slot's device.
    name: fn(u8) -> String,
    /// The device of a slot.
    device: fn(u8) -> Vec<u8>,
}

/// The slots of the bus. All but the call that notifies are in the host bridge.
pub const FUNCTIONS: SlotCode = SlotCode {
    scope: "\\_SB_.PCI0",
    region: "PREG",
    port: layout::FUNCTION_SLOTS.start,
    fields: [b"PTHR", b"PPLG", b"PLEV", b"PEJC"],
    scan: "PSCN",
    name: |device| format!("S{device:02X}_"),
    device: function_slot,
};

/// The CPUs that come and go. All but the call that notifies are in `\_SB`.
pub const CPUS: SlotCode = SlotCode {
    scope: "\\_SB_",
    region: "CREG",
    port: layout::CPU_SLOTS.start,
    fields: [b"CTHR", b"CPLG", b"CLEV", b"CEJC"],
    scan: "CSCN",
    name: |cpu| format!("C{cpu:02X}_"),
    device: cpu,
};

/// Places of registers in [`SlotCode::fields`].
const TAKEN: usize = 0;
const PLUGGED: usize = 1;
const LEAVING: usize = 2;
const EJECT: usize = 3;

impl SlotCode {
    fn path(&self, field: usize) -> Path {
        let name = std::str::from_utf8(self.fields[field]).expect("names are ASCII");
        Path::new(&format!("{}.{name}", self.scope))
    }

    fn registers(&self) -> Vec<u8> {
        let entries = self.fields.map(|name| FieldEntry::Named(*name, 32)).into();
        let (dword, lock) = (FieldAccessType::DWord, FieldLockRule::NoLock);
        let zeroes = FieldUpdateRule::WriteAsZeroes;
        let (start, len) = (u32::from(self.port), u32::from(crate::plug::BANK));
        let space = OpRegionSpace::SystemIO;
        let region = OpRegion::new(self.region.into(), space, &start, &len);
        let field = Field::new(self.region.into(), dword, lock, zeroes, entries);
        [bytes_of(&region), bytes_of(&field)].concat()
    }

    /// Returns the method that notifies the objects of `slots` whose bits are set.
    fn scan(&self, slots: &Range<u8>) -> Vec<u8> {
        let notified = |value: u8| {
            let notify = move |slot: u8| {
                let object = Path::new(&(self.name)(slot));
                let bit = 1u32 << slot;
                bytes_of(&If::new(
                    &And::new(&Local(1), &Local(0), &bit),
                    vec![&Notify::new(&object, &value)],
                ))
            };
            slots.clone().flat_map(notify).collect::<Vec<_>>()
        };
        let code = [
            bytes_of(&Store::new(&Local(0), &self.path(PLUGGED))),
            notified(DEVICE_CHECK),
            bytes_of(&Store::new(&Local(0), &self.path(LEAVING))),
            notified(EJECT_REQUEST),
        ];
        bytes_of(&Method::new(self.scan.into(), 0, true, vec![&Raw(code.concat())]))
    }

    /// Returns the method of `slot` by which the guest ejects it.
    fn eject_method(&self, slot: u8) -> Vec<u8> {
        let bit = 1u32 << slot;
        bytes_of(&Method::new("_EJ0".into(), 1, false, vec![&Store::new(&self.path(EJECT), &bit)]))
    }

    /// Returns the objects of these slots: registers, a device for each, and the method that
    /// notifies them. A slot costs Linux as much as a device at its start, so a machine without
    /// slots has none of this.
    pub fn objects(&self, slots: &Range<u8>) -> Raw {
        if slots.is_empty() {
            return Raw(Vec::new());
        }
        let devices = slots.clone().flat_map(self.device).collect();
        Raw([self.registers(), devices, self.scan(slots)].concat())
    }

    /// Returns the call that notifies these slots.
    pub fn notify(&self, slots: &Range<u8>) -> Raw {
        let scan = Path::new(&format!("{}.{}", self.scope, self.scan));
        Raw(if slots.is_empty() { Vec::new() } else { bytes_of(&MethodCall::new(scan, vec![])) })
    }
}

/// A slot of the bus: its address (ACPI 6.4, 6.1.1) and number, and how to eject the function.
fn function_slot(device: u8) -> Vec<u8> {
    Named(&(FUNCTIONS.name)(device)).with(vec![
        &Name::new("_ADR".into(), &(u32::from(device) << 16)),
        &Name::new("_SUN".into(), &device),
        &Raw(FUNCTIONS.eject_method(device)),
    ])
}

/// A processor device (ACPI 6.4, 8.4): whether it is there, and its local APIC as the MADT has it.
fn cpu(cpu: u8) -> Vec<u8> {
    /// `_STA`: present, enabled, shown and working (ACPI 6.4, 6.3.7).
    const THERE: u8 = 0xf;
    let (bit, taken) = (1u32 << cpu, CPUS.path(TAKEN));
    let apic = bytes_of(&ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    let status = bytes_of(&Method::new(
        "_STA".into(),
        0,
        false,
        vec![
            &And::new(&Local(0), &taken, &bit),
            &If::new(&Local(0), vec![&Return::new(&THERE)]),
            &Return::new(&ZERO),
        ],
    ));
    Named(&(CPUS.name)(cpu)).with(vec![
        &Name::new("_HID".into(), &"ACPI0007"),
        &Name::new("_UID".into(), &cpu),
        &Raw(status),
        &Name::new("_MAT".into(), &BufferData::new(apic)),
        &Raw(CPUS.eject_method(cpu)),
    ])
}

/// Code that is complete.
pub struct Raw(pub Vec<u8>);

impl acpi_tables::Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}
