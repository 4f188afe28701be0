//! NUMA nodes: which memory and which CPUs are in which (ACPI 6.4, 5.2.16 *System Resource Affinity
//! Table*). Linux has only nodes that this table names, and puts memory that is plugged later into
//! the node of its range.

use acpi_tables::sdt::Sdt;
use acpi_tables::srat::MemoryAffinity;
use slipway_virtio_mem::Geometry;

use super::{OEM, REVISION, TABLE, bytes_of};
use crate::memory::GuestRam;

/// Lengths of the table's head, with 12 reserved bytes behind the header of all tables.
const HEAD: u32 = 36;

/// A range of memory of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// The guest-physical address of the first byte.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The node: a proximity domain.
    pub node: u16,
    /// The guest has only those blocks of it that it has plugged.
    pub hot_pluggable: bool,
}

/// Returns the ranges of a machine with hot-plug memory: its RAM, which is in node 0, and the
/// regions. Returns none for another machine, which needs no nodes.
pub fn ranges(ram: &GuestRam) -> Vec<NodeRange> {
    let hot = ram.hot_memory().iter().map(|hot| {
        let Geometry { address: start, bytes, node, .. } = hot.geometry();
        NodeRange { start, bytes, node, hot_pluggable: true }
    });
    let hot: Vec<_> = hot.collect();
    let parts = ram.parts().iter().filter(|_| !hot.is_empty());
    let range = |start, bytes| NodeRange { start, bytes, node: 0, hot_pluggable: false };
    parts.map(|part| range(part.start, part.len)).chain(hot.iter().copied()).collect()
}

/// Returns the table of a machine of at most `cpus` CPUs, all of them in node 0.
pub(super) fn srat(cpus: u32, ranges: &[NodeRange]) -> Vec<u8> {
    let mut table = Sdt::new(*b"SRAT", HEAD, 3, OEM, TABLE, REVISION);
    // Reserved: 1, and eight zeros.
    table.append_slice(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for cpu in 0..cpus as u8 {
        // *Processor Local APIC Affinity*: type, length, node, CPU, and the flag that it counts.
        table.append_slice(&[0, 16, 0, cpu, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    for range in ranges {
        table.append_slice(&memory(range));
    }
    table.as_slice().to_vec()
}

fn memory(range: &NodeRange) -> Vec<u8> {
    let affinity = MemoryAffinity::new(range.node.into(), range.start, range.bytes).enabled();
    bytes_of(&if range.hot_pluggable { affinity.hotpluggable() } else { affinity })
}

#[cfg(test)]
mod tests {
    use slipway_machine::HotRegion;

    use super::*;
    use crate::layout::{GIB, MIB};
    use crate::memory::tests::sealed;

    #[test]
    fn the_table_has_all_cpus_and_all_memory() {
        let region = HotRegion { bytes: 128 * MIB, node: 3 };
        let ram = GuestRam::with_hot_memory(sealed(192 * MIB), &[region]).unwrap();
        let ranges = ranges(&ram);
        let hot = NodeRange { start: 68 * GIB, bytes: 128 * MIB, node: 3, hot_pluggable: true };
        let all = NodeRange { start: 0, bytes: 64 * MIB, node: 0, hot_pluggable: false };
        assert_eq!(ranges, [all, hot]);
        let table = srat(2, &ranges);
        assert_eq!(table.len(), 48 + 2 * 16 + 2 * 40);
        assert_eq!(table[4..8], (table.len() as u32).to_le_bytes());
        assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(table[64..72], [0, 16, 0, 1, 1, 0, 0, 0], "CPU 1");
        let last = &table[table.len() - 40..];
        assert_eq!(last[..6], [1, 40, 3, 0, 0, 0]);
        assert_eq!(last[8..16], (68 * GIB).to_le_bytes());
        assert_eq!(last[16..24], (128 * MIB).to_le_bytes());
        assert_eq!(last[28..32], [3, 0, 0, 0]);
    }

    #[test]
    fn a_machine_without_hot_plug_memory_has_no_nodes() {
        assert_eq!(ranges(&GuestRam::new(sealed(64 * MIB)).unwrap()), []);
    }
}
