//! KVM alone: the time that every VMM needs, whatever it does.

use std::ptr::{NonNull, copy_nonoverlapping};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags};

use super::stub::{BYTE, CODE, ENTRY, SERIAL_PORT};
use super::{VmmLoad, VmmMeasured};
use crate::measurement::Subject;

/// The end of low memory, and the begin of the rest: between them PCs have device registers.
const HOLE: (u64, u64) = (3 << 30, 4 << 30);

/// KVM without a VMM: within this process a VM, its memory slots and a virtual processor are made,
/// and the guest runs up to its byte.
pub struct Bare;

impl Subject for Bare {
    type Load = VmmLoad;
    type Measured = VmmMeasured;

    fn name(&self) -> &str {
        "bare"
    }

    fn about(&self) -> String {
        "KVM alone, in the benchmark's own process: a VM, its memory slots, a processor; no \
         interrupt controller"
            .to_owned()
    }

    fn run(&mut self, load: &VmmLoad) -> Result<VmmMeasured> {
        let begun = Instant::now();
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = kvm.create_vm().context("a VM")?;
        let memory = Pages::new(load.memory)?;
        memory.write(ENTRY, &CODE)?;
        let placing = Instant::now();
        let slots = place(&vm, &memory)?;
        let slot_ns = placing.elapsed().as_nanos() as u64;
        let mut processor = vm.create_vcpu(0).context("a virtual processor")?;
        enter_at(&processor, ENTRY)?;
        run_to_byte(&mut processor)?;
        let byte_ns = begun.elapsed().as_nanos() as u64;
        let ending = Instant::now();
        drop((processor, vm, kvm, slots, memory));
        let end_ns = ending.elapsed().as_nanos() as u64;
        Ok(VmmMeasured {
            byte_ns,
            end_ns,
            private_bytes: None,
            cpu_ns: None,
            slot_ns: Some(slot_ns),
        })
    }
}

/// Gives a VM its memory, below and above the hole. Returns the number of slots.
fn place(vm: &VmFd, memory: &Pages) -> Result<u32> {
    let low = memory.len.min(HOLE.0);
    let parts = [(0, 0, low), (HOLE.1, low, memory.len - low)];
    let mut slot = 0;
    for (guest_phys_addr, offset, memory_size) in parts.into_iter().filter(|part| part.2 > 0) {
        let userspace_addr = memory.start.as_ptr() as u64 + offset;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr,
            memory_size,
            userspace_addr,
        };
        #[allow(unsafe_code)] // the kernel lets the guest write to the range
        // SAFETY: the range lies within the mapping of `memory`, which outlives the VM: `run` drops
        // the VM first. Nothing else reads or writes it through references.
        unsafe { vm.set_user_memory_region(region) }.context("a memory slot")?;
        slot += 1;
    }
    Ok(slot)
}

/// Sets a processor to the PVH entry state: 32-bit protected mode with flat segments, no paging.
fn enter_at(processor: &VcpuFd, address: u64) -> Result<()> {
    let mut special = processor.get_sregs().context("a processor's registers")?;
    let flat = |kind: u8, selector: u16| kvm_bindings::kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..Default::default()
    };
    // Types (*Intel SDM*, volume 3, section 3.4.5.1): code, execute and read; data, read and write.
    special.cs = flat(0xb, 0x8);
    for segment in [&mut special.ds, &mut special.es, &mut special.ss] {
        *segment = flat(0x3, 0x10);
    }
    special.cr0 |= 1;
    processor.set_sregs(&special).context("a processor's registers")?;
    let mut general = processor.get_regs().context("a processor's registers")?;
    general.rip = address;
    // The bit that is always set.
    general.rflags = 2;
    processor.set_regs(&general).context("a processor's registers")
}

fn run_to_byte(processor: &mut VcpuFd) -> Result<()> {
    match processor.run().context("running the guest")? {
        VcpuExit::IoOut(SERIAL_PORT, [BYTE]) => Ok(()),
        other => bail!("the guest did something else: {other:?}"),
    }
}

/// Anonymous memory that is a guest's.
struct Pages {
    start: NonNull<u8>,
    len: u64,
}

impl Pages {
    fn new(len: u64) -> Result<Self> {
        let bytes = usize::try_from(len)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        #[allow(unsafe_code)]
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, flags)
        };
        let start = start.with_context(|| format!("cannot map {len} bytes"))?;
        let start = NonNull::new(start.cast()).context("a mapping at address zero")?;
        Ok(Self { start, len })
    }

    /// Writes before there is a guest.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= self.len);
        end.context("beyond the guest's memory")?;
        #[allow(unsafe_code)]
        // SAFETY: the range was just found to lie within the mapping, which is readable and
        // writable and has no references into it.
        unsafe {
            copy_nonoverlapping(
                bytes.as_ptr(),
                self.start.as_ptr().add(offset as usize),
                bytes.len(),
            );
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[allow(unsafe_code)]
        // SAFETY: the mapping is this value's own, and nothing uses it any more: a VM with it as
        // memory has been dropped. Pages of a mapping of whole MiB are whole.
        unsafe {
            slipway_ram::unmap(self.start.as_ptr(), self.len as usize)
        };
    }
}
