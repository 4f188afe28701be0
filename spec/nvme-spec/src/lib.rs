//! NVM Express wire formats: registers, queue entries, Identify structures, logs, features, PRPs,
//! SGLs.
//!
//! Everything follows *NVM Express Base Specification, Revision 1.4* (10 June 2019), called "the
//! specification" below; items name their section. The crate covers a PCI controller with the NVM
//! command set only: no fabrics, no metadata or protection information, no zoned or key-value
//! command sets.
//!
//! Modules:
//! - [`registers`]: the register file in BAR0 as plain bit views;
//! - [`command`]: queue entries, [`command::SubmissionEntry`] and [`command::CompletionEntry`], and
//!   views of the command dwords;
//! - [`opcode`], [`status`], [`feature`], [`log`], [`event`]: numbers, as open enums: a peer may
//!   send any value, so every value has a representation;
//! - [`identify`], [`log`]: data structures that a controller returns, exact bytes;
//! - [`prp`]: the arithmetic of PRP entries; [`sgl`]: SGL descriptors.
//!
//! All structures are byte arrays with little-endian fields: they may be read from and written to
//! any memory, at any alignment, on any machine.
//!
//! Dependency: `zerocopy` for checked casts between structures and bytes.
#![no_std]

/// A number on the wire with known names: any value is valid; known ones print their name.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident($repr:ty) {
        $($(#[$item:meta])* $variant:ident = $value:expr,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        #[allow(non_upper_case_globals, reason = "open enums read like enums")]
        impl $name {
            $($(#[$item])* pub const $variant: Self = Self($value);)*
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match *self {
                    $(Self::$variant => f.write_str(stringify!($variant)),)*
                    Self(other) => write!(f, concat!(stringify!($name), "({:#x})"), other),
                }
            }
        }
    };
}

pub mod command;
pub mod event;
pub mod feature;
pub mod identify;
pub mod log;
pub mod opcode;
pub mod prp;
pub mod registers;
pub mod sgl;
pub mod status;

/// The namespace identifier that means all namespaces (section 6.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

#[cfg(test)]
mod tests {
    extern crate std;
    use std::format;

    use zerocopy::{FromBytes, IntoBytes};

    use crate::command::{CompletionEntry, SubmissionEntry};
    use crate::event::Event;
    use crate::opcode::{AdminOpcode, NvmOpcode};
    use crate::registers::{AdminQueueAttributes, Capabilities, Configuration, ControllerStatus};
    use crate::status::Status;

    #[test]
    fn open_enums_print_names_and_numbers() {
        assert_eq!(format!("{:?}", AdminOpcode::Identify), "Identify");
        assert_eq!(format!("{:?}", NvmOpcode(0x42)), "NvmOpcode(0x42)");
        assert_eq!(format!("{:?}", Status::LBA_OUT_OF_RANGE.dnr()), "LBA_OUT_OF_RANGE|DNR");
        assert_eq!(format!("{:?}", Status(0x7ff)), "Status(0x7ff)");
    }

    #[test]
    fn capabilities_hold_what_they_were_made_of() {
        let capabilities = Capabilities::new(1024, 60, 4);
        assert_eq!(capabilities.queue_entries(), 1024);
        assert_eq!((capabilities.timeout(), capabilities.doorbell_stride()), (60, 0));
        assert_eq!((capabilities.page_min(), capabilities.page_max()), (0, 4));
        assert!(capabilities.contiguous_queues() && capabilities.nvm_commands());
        assert_eq!(Capabilities::new(65_536, 0, 0).queue_entries(), 65_536);
    }

    #[test]
    fn configuration_and_status_have_their_fields() {
        let enable = Configuration::ENABLE;
        assert_eq!((enable.submission_entry_shift(), enable.completion_entry_shift()), (6, 4));
        assert!(enable.enabled());
        assert_eq!(enable.with_shutdown(2).shutdown(), 2);
        assert_eq!(enable.with_shutdown(2).with_shutdown(0), enable);
        assert!(ControllerStatus(0b1011).ready() && ControllerStatus(0b1011).fatal());
        assert!(ControllerStatus(0b1011).shutdown_complete());
        let queues = AdminQueueAttributes::new(4096);
        assert_eq!((queues.submission_entries(), queues.completion_entries()), (4096, 4096));
    }

    #[test]
    fn entries_lie_where_the_specification_says() {
        let mut entry = SubmissionEntry::new(2, 0x11);
        entry.id.set(0xabcd);
        entry.prp1.set(0x1122_3344_5566_7788);
        let entry = entry.with_dword(10, 5).with_dword(11, 1).with_dword(12, 1 << 30 | 7);
        let bytes = entry.as_bytes();
        assert_eq!(bytes[..8], [2, 0, 0xcd, 0xab, 0x11, 0, 0, 0]);
        assert_eq!(bytes[24..32], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(bytes[40..48], 0x1_0000_0005u64.to_le_bytes());
        assert_eq!(entry.starting_lba(), 0x1_0000_0005);
        assert_eq!(entry.block_count(), 8);
        assert!(entry.force_unit_access() && !entry.deallocate());
        assert_eq!((entry.dword(9), entry.dword(16)), (0, 0));
        assert_eq!(SubmissionEntry::read_from_bytes(bytes), Ok(entry));
    }

    #[test]
    fn the_last_dword_of_a_completion_is_id_phase_and_status() {
        let mut entry = CompletionEntry { id: 0x1234.into(), ..CompletionEntry::default() };
        entry.set_status(Status::INVALID_FIELD.dnr(), true);
        assert_eq!(entry.as_bytes()[12..], entry.phase_dword().to_le_bytes());
        assert_eq!(entry.phase_dword(), 0x8005_1234);
        assert!(entry.phase());
        assert_eq!(entry.status(), Status::INVALID_FIELD.dnr());
    }

    #[test]
    fn events_survive_their_dword() {
        for event in [Event::INVALID_DOORBELL_VALUE, Event::TEMPERATURE, Event::NAMESPACE_CHANGED] {
            assert_eq!(Event::from_dword(event.dword()), event);
        }
        assert_eq!(Event::NAMESPACE_CHANGED.dword(), 0x0004_0002);
    }
}
