//! KVM's table of interrupt routes: the message behind each global system interrupt (GSI).
//!
//! The first [`PINS`] GSIs are the IOAPIC's pins. KVM delivers nothing by them (the IOAPIC sends
//! its messages itself), but reports the end of an interrupt of their vectors. The GSIs behind
//! these belong to MSI-X vectors of functions whose server raises an eventfd: KVM sends the message
//! without an exit.
//!
//! Changing the table makes KVM wait for all CPUs (milliseconds at worst), so it is changed only
//! when an entry is really another one.

use std::sync::{Arc, Mutex};

use kvm_bindings::{
    KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_msi, kvm_msi,
};
use kvm_ioctls::VmFd;
use slipway_pci::Message;
use vmm_sys_util::eventfd::EventFd;

use crate::layout::PINS;
use crate::lock::lock;
use crate::{Error, Result};

/// The most GSIs of vectors. KVM has 4096 routes.
const MAX_VECTORS: usize = 4000;

/// The routes of a machine.
pub struct Routes {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

struct Table {
    /// The messages of all GSIs, in their order.
    messages: Vec<Option<Message>>,
    /// GSIs that were reserved once and are no longer.
    free: Vec<u32>,
    /// KVM is told of no change until [`Routes::tell`].
    collects: bool,
}

impl Routes {
    /// Makes the table of `vm`, with no message behind any pin.
    pub fn new(vm: Arc<VmFd>) -> Self {
        let table = Table { messages: vec![None; PINS], free: Vec::new(), collects: false };
        Self { vm, table: Mutex::new(table) }
    }

    /// Reserves a GSI for a vector. Returns `None` if there is none left.
    pub fn reserve(&self) -> Option<u32> {
        let mut table = lock(&self.table);
        if let Some(gsi) = table.free.pop() {
            return Some(gsi);
        }
        if table.messages.len() >= PINS + MAX_VECTORS {
            return None;
        }
        table.messages.push(None);
        Some(table.messages.len() as u32 - 1)
    }

    /// Gives back a GSI to which nothing is attached. If KVM keeps its route, it is not used again.
    pub fn release(&self, gsi: u32) {
        if self.set(gsi, None).is_ok() {
            lock(&self.table).free.push(gsi);
        }
    }

    /// Sets the message behind `gsi`, or removes it.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn set(&self, gsi: u32, message: Option<Message>) -> Result<()> {
        let mut table = lock(&self.table);
        let entry = table.messages.get_mut(gsi as usize).filter(|entry| **entry != message);
        let Some(entry) = entry else { return Ok(()) };
        *entry = message;
        if table.collects { Ok(()) } else { self.give(&table) }
    }

    /// Collects changes until [`Routes::tell`], so that many of them are one request. Nothing may
    /// interrupt meanwhile.
    pub fn collect(&self) {
        lock(&self.table).collects = true;
    }

    /// Tells KVM of the changes since [`Routes::collect`].
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn tell(&self) -> Result<()> {
        let mut table = lock(&self.table);
        table.collects = false;
        self.give(&table)
    }

    fn give(&self, table: &Table) -> Result<()> {
        let entries = table.messages.iter().zip(0..).filter_map(|(message, gsi)| {
            message.map(|message| kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                u: kvm_bindings::kvm_irq_routing_entry__bindgen_ty_1 { msi: msi(message) },
                ..Default::default()
            })
        });
        let entries: Vec<_> = entries.collect();
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| Error::Config("too many interrupt routes".into()))?;
        self.vm.set_gsi_routing(&routing).map_err(Error::kvm("route interrupts"))
    }

    /// Lets each count of `eventfd` send the message behind `gsi`.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn attach(&self, eventfd: &EventFd, gsi: u32) -> Result<()> {
        self.vm.register_irqfd(eventfd, gsi).map_err(Error::kvm("attach an interrupt"))
    }

    /// Ends [`Routes::attach`]. A count that comes later stays in the eventfd.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn detach(&self, eventfd: &EventFd, gsi: u32) -> Result<()> {
        self.vm.unregister_irqfd(eventfd, gsi).map_err(Error::kvm("detach an interrupt"))
    }

    /// Sends a message to the local APICs now. A message that no APIC accepts is lost, as it is on
    /// a real bus.
    pub fn send(&self, message: Message) {
        let kvm_irq_routing_msi { address_lo, address_hi, data, .. } = msi(message);
        let message = kvm_msi { address_lo, address_hi, data, ..Default::default() };
        let _ = self.vm.signal_msi(message);
    }
}

fn msi(message: Message) -> kvm_irq_routing_msi {
    kvm_irq_routing_msi {
        address_lo: message.address as u32,
        address_hi: (message.address >> 32) as u32,
        data: message.data,
        ..Default::default()
    }
}
