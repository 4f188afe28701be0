//! The ACPI tables of the machine: hardware-reduced ACPI (ACPI 6.4, 4.1), so that the guest looks
//! for none of a PC's old timers, interrupt controllers and ports.
//!
//! The byte code (AML) only names devices, and reads registers when the generic event device
//! interrupts: which event it was, and which slots it concerns ([`crate::plug`]).

mod numa;
mod plug;

use std::ops::Range;

use acpi_tables::Aml;
use acpi_tables::aml::{
    self, AddressSpace, AddressSpaceCacheable, And, Device, EISAName, Equal, Field,
    FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local,
    Memory32Fixed, Method, Name, Notify, OpRegion, OpRegionSpace, Package, PackageBuilder, Path,
    ResourceTemplate, Scope, Store,
};
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use slipway_ram::Memory;

use crate::layout::{self, EVENT_PIN, SERIAL_PIN};
use crate::loader::put;
use crate::plug::FIRST_FUNCTION;
use crate::{Error, Result, power};

pub use numa::{NodeRange, ranges};

const OEM: [u8; 6] = *b"SLIPWY";
const TABLE: [u8; 8] = *b"SLIPWVMM";
const REVISION: u32 = 1;

/// PCI devices of a bus.
const DEVICES: u8 = 32;

/// The parts of the machine that the tables describe, as far as they differ from one to another.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The number of CPUs that are there from the start.
    pub cpus: u32,
    /// The largest number of CPUs: those behind the first can be plugged and removed while the
    /// guest runs.
    pub max_cpus: u32,
    /// The number of PCI devices, from [`crate::plug::FIRST_FUNCTION`] on, that can be plugged and
    /// removed while the guest runs.
    pub slots: u8,
    /// The VM generation ID.
    pub generation: [u8; 16],
    /// The memory of each NUMA node; empty for a machine without nodes.
    pub nodes: Vec<NodeRange>,
}

/// `IAPC_BOOT_ARCH` (ACPI 6.4, table 5.10): there is no VGA, no real-time clock.
const BOOT_FLAGS: u16 = 1 << 2 | 1 << 5;

/// Writes all tables. Returns the guest-physical address of the first, the RSDP.
///
/// # Errors
/// [`Error::Memory`] if the tables do not fit, which no supported configuration makes happen.
pub fn write_tables(memory: &Memory, parts: &Parts) -> Result<u64> {
    let mut writer = Writer { memory, next: layout::ACPI.start + 64 };
    let dsdt = writer.append(&dsdt(parts))?;
    let fadt = writer.append(&bytes_of(&fadt(dsdt)))?;
    let madt = writer.append(&bytes_of(&madt(parts)))?;
    let mcfg = writer.append(&bytes_of(&mcfg()))?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    for table in [fadt, madt, mcfg] {
        xsdt.add_entry(table);
    }
    if !parts.nodes.is_empty() {
        xsdt.add_entry(writer.append(&numa::srat(parts.max_cpus, &parts.nodes))?);
    }
    let xsdt = writer.append(&bytes_of(&xsdt))?;
    put(memory, layout::GENERATION_ID, &parts.generation)?;
    put(memory, layout::ACPI.start, &bytes_of(&Rsdp::new(OEM, xsdt)))?;
    Ok(layout::ACPI.start)
}

impl Parts {
    /// Returns the CPUs that can be plugged and removed.
    fn hot_cpus(&self) -> Range<u8> {
        self.cpus as u8..self.max_cpus as u8
    }

    /// Returns the PCI devices that come and go.
    fn hot_functions(&self) -> Range<u8> {
        FIRST_FUNCTION..FIRST_FUNCTION + self.slots
    }
}

struct Writer<'a> {
    memory: &'a Memory,
    next: u64,
}

impl Writer<'_> {
    /// Writes a table behind the last one and returns its address.
    fn append(&mut self, table: &[u8]) -> Result<u64> {
        let at = self.next;
        self.next = (at + table.len() as u64).next_multiple_of(16);
        if self.next > layout::GENERATION_ID {
            return Err(Error::Memory("the ACPI tables do not fit".into()));
        }
        put(self.memory, at, table)?;
        Ok(at)
    }
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// The name of a device in the byte code.
struct Named<'a>(&'a str);

impl Named<'_> {
    /// Returns the device with these objects.
    fn with(&self, objects: Vec<&dyn Aml>) -> Vec<u8> {
        bytes_of(&Device::new(self.0.into(), objects))
    }
}

/// Returns the resources of a device, its object `_CRS`.
fn resources(all: Vec<&dyn Aml>) -> Name {
    Name::new("_CRS".into(), &ResourceTemplate::new(all))
}

fn port(port: u16) -> GAS {
    GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into())
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.reset_reg = port(layout::POWER.start + power::RESET);
    fadt.reset_value = power::RESET_VALUE;
    fadt.sleep_control_reg = port(layout::POWER.start + power::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(layout::POWER.start + power::SLEEP_STATUS);
    fadt.iapc_boot_arch = BOOT_FLAGS.into();
    fadt.finalize()
}

fn madt(parts: &Parts) -> MADT {
    let apic = LocalInterruptController::Address(layout::LOCAL_APIC as u32);
    let mut madt = MADT::new(OEM, TABLE, REVISION, apic);
    for cpu in 0..parts.max_cpus as u8 {
        let is_there = u32::from(cpu) < parts.cpus;
        let status = EnabledStatus::DisabledOnlineCapable;
        let status = if is_there { EnabledStatus::Enabled } else { status };
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, status));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC.start as u32, 0));
    madt
}

fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM, TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM.start, 0, 0, 0);
    mcfg
}

fn dsdt(parts: &Parts) -> Vec<u8> {
    let mut code = scope(parts);
    // \_S5: the sleep type that powers off.
    let off = power::SLEEP_TYPE_OFF;
    Name::new("_S5_".into(), &Package::new(vec![&off])).to_aml_bytes(&mut code);
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    table.append_slice(&code);
    table.as_slice().to_vec()
}

fn scope(parts: &Parts) -> Vec<u8> {
    let own = [reserved(), serial(), panic(), button(), generation()].concat();
    let cpus = plug::CPUS.objects(&parts.hot_cpus()).0;
    let devices = [host_bridge(parts), own, cpus, events(parts)];
    Scope::raw("_SB_".into(), devices.concat())
}

/// The host bridge: bus 0, the window of BARs, the pins of the devices' INTA#, and the slots.
fn host_bridge(parts: &Parts) -> Vec<u8> {
    let window = layout::PCI_WINDOW;
    let (start, last) = (window.start as u32, window.end as u32 - 1);
    let cache = AddressSpaceCacheable::NotCacheable;
    let memory = AddressSpace::new_memory(cache, true, start, last, None);
    let mut routing = PackageBuilder::new();
    for device in 0..DEVICES {
        let address = u32::from(device) << 16 | 0xffff;
        let gsi = layout::pci_pin(device);
        routing.add_element(&Package::new(vec![&address, &aml::ZERO, &aml::ZERO, &gsi]));
    }
    Named("PCI0").with(vec![
        &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
        &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
        &Name::new("_SEG".into(), &aml::ZERO),
        &Name::new("_BBN".into(), &aml::ZERO),
        &Name::new("_UID".into(), &aml::ZERO),
        &resources(vec![&AddressSpace::new_bus_number(0u16, 0), &memory]),
        &Name::new("_PRT".into(), &routing),
        &plug::FUNCTIONS.objects(&parts.hot_functions()),
    ])
}

/// The configuration space, so that nothing else is placed there (PCI Firmware 3.3, 4.1.2).
fn reserved() -> Vec<u8> {
    let ecam = layout::ECAM;
    let len = (ecam.end - ecam.start) as u32;
    let ecam = Memory32Fixed::new(true, ecam.start as u32, len);
    Named("MBRD").with(vec![
        &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
        &Name::new("_UID".into(), &aml::ZERO),
        &resources(vec![&ecam]),
    ])
}

fn serial() -> Vec<u8> {
    let ports = layout::SERIAL;
    let len = (ports.end - ports.start) as u8;
    Named("COM1").with(vec![
        &Name::new("_HID".into(), &EISAName::new("PNP0501")),
        &Name::new("_UID".into(), &aml::ZERO),
        &resources(vec![&IO::new(ports.start, ports.start, 1, len), &edge(SERIAL_PIN)]),
    ])
}

fn panic() -> Vec<u8> {
    let at = layout::PANIC_PORT;
    Named("PEVT").with(vec![
        &Name::new("_HID".into(), &"QEMU0001"),
        &resources(vec![&IO::new(at, at, 1, 1)]),
    ])
}

/// An interrupt that is triggered by an edge and belongs to one device.
fn edge(pin: u8) -> Interrupt {
    Interrupt::new(true, true, false, false, pin.into())
}

/// Returns code that executes `then` if the pending events, which are in `Local0`, have `event`.
fn on(event: u8, then: &dyn Aml) -> plug::Raw {
    let test = And::new(&Local(1), &Local(0), &event);
    let is_event = Equal::new(&Local(1), &event);
    plug::Raw([bytes_of(&test), bytes_of(&If::new(&is_event, vec![then]))].concat())
}

/// The generic event device: its method reads the pending events and tells the devices concerned.
fn events(parts: &Parts) -> Vec<u8> {
    let register = u32::from(layout::POWER.start + power::EVENTS);
    let (button, generation) = (Path::new("\\_SB_.PWRB"), Path::new("\\_SB_.VGEN"));
    Named("GED_").with(vec![
        &Name::new("_HID".into(), &"ACPI0013"),
        &Name::new("_UID".into(), &aml::ZERO),
        &resources(vec![&edge(EVENT_PIN)]),
        &OpRegion::new("EREG".into(), OpRegionSpace::SystemIO, &register, &aml::ONE),
        &Field::new(
            "EREG".into(),
            FieldAccessType::Byte,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            vec![FieldEntry::Named(*b"EVTS", 8)],
        ),
        &Method::new(
            "_EVT".into(),
            1,
            true,
            vec![
                &Store::new(&Local(0), &Path::new("EVTS")),
                &on(power::EVENT_POWER_BUTTON, &Notify::new(&button, &0x80u8)),
                &on(power::EVENT_GENERATION, &Notify::new(&generation, &0x80u8)),
                &on(power::EVENT_FUNCTIONS, &plug::FUNCTIONS.notify(&parts.hot_functions())),
                &on(power::EVENT_CPUS, &plug::CPUS.notify(&parts.hot_cpus())),
            ],
        ),
    ])
}

fn button() -> Vec<u8> {
    let id = EISAName::new("PNP0C0C");
    Named("PWRB").with(vec![&Name::new("_HID".into(), &id)])
}

/// The VM generation ID (Microsoft, *Virtual Machine Generation ID*): the place of 16 bytes that
/// are others in each copy of a machine.
fn generation() -> Vec<u8> {
    let (low, high) = (layout::GENERATION_ID as u32, aml::ZERO);
    Named("VGEN").with(vec![
        &Name::new("_HID".into(), &"SLPW0001"),
        &Name::new("_CID".into(), &"VM_Gen_Counter"),
        &Name::new("_DDN".into(), &"VM_Gen_Counter"),
        &Name::new("ADDR".into(), &Package::new(vec![&low, &high])),
    ])
}
