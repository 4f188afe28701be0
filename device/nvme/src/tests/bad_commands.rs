//! Every bad command has its status (section 4.6.1).

use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;

use super::rig::{MEMORY, ReadOnly, Rig, Setup, ram};
use crate::driver::{admin, io};

type Case = (&'static str, SubmissionEntry, Status);

fn check(rig: &mut Rig, queue: u16, cases: impl IntoIterator<Item = Case>) {
    for (name, command, status) in cases {
        assert_eq!(rig.status(queue, command), status, "{name}");
    }
    // The controller goes on as if nothing had happened.
    rig.driver.identify_controller().unwrap();
}

fn prp1(command: SubmissionEntry, address: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: address.into(), ..command }
}

fn prps(command: SubmissionEntry, first: u64, second: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: first.into(), prp2: second.into(), ..command }
}

fn flags(command: SubmissionEntry, flags: u8) -> SubmissionEntry {
    SubmissionEntry { flags, ..command }
}

#[test]
fn of_the_nvm_set() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    let read = io(NvmOpcode::Read, 1, 0, 8);
    let bad = |opcode: u8| SubmissionEntry::new(opcode, 1);
    let out = MEMORY as u64;
    let invalid_field = Status::INVALID_FIELD.dnr();
    let bad_prp = Status::PRP_OFFSET_INVALID.dnr();
    let range = Status::LBA_OUT_OF_RANGE.dnr();
    let namespace = Status::INVALID_NAMESPACE.dnr();
    check(
        &mut rig,
        1,
        [
            ("a good one", prp1(read, page), Status::SUCCESS),
            ("write uncorrectable", bad(0x04), Status::INVALID_OPCODE.dnr()),
            ("vendor specific", bad(0xff), Status::INVALID_OPCODE.dnr()),
            ("fused with nothing", flags(prp1(read, page), 1), Status::FUSED_MISSING.dnr()),
            ("fused to nothing", flags(prp1(read, page), 2), Status::FUSED_MISSING.dnr()),
            ("FUSE 3", flags(prp1(read, page), 3), invalid_field),
            ("compare over MDTS", prp1(io(NvmOpcode::Compare, 1, 0, 2049), page), invalid_field),
            ("compare over the end", io(NvmOpcode::Compare, 1, 32767, 2), range),
            (
                "compare with nothing",
                prp1(io(NvmOpcode::Compare, 1, 0, 1), out),
                Status::DATA_TRANSFER_ERROR,
            ),
            ("verify over the end", io(NvmOpcode::Verify, 1, 32767, 2), range),
            ("verify of namespace 2", io(NvmOpcode::Verify, 2, 0, 1), namespace),
            ("copy in namespace 2", SubmissionEntry::new(0x19, 2), namespace),
            ("copy of format 1", bad(0x19).with_dword(12, 1 << 8), invalid_field),
            ("copy of 129 ranges", bad(0x19).with_dword(12, 128), Status::COPY_SIZE_EXCEEDED.dnr()),
            ("copy from nowhere", prp1(bad(0x19), out), Status::DATA_TRANSFER_ERROR),
            ("copy over the end", prp1(bad(0x19).with_dword(10, 32768), page), range),
            ("PSDT 3", flags(prp1(read, page), 0xc0), invalid_field),
            ("namespace 0", io(NvmOpcode::Read, 0, 0, 1), namespace),
            ("namespace 2", io(NvmOpcode::Read, 2, 0, 1), namespace),
            ("all namespaces", io(NvmOpcode::Write, NSID_ALL, 0, 1), namespace),
            ("flush of namespace 9", SubmissionEntry::new(0, 9), namespace),
            ("past the end", io(NvmOpcode::Read, 1, 32768, 1), range),
            ("over the end", io(NvmOpcode::Read, 1, 32767, 2), range),
            ("LBA wraps", io(NvmOpcode::Write, 1, u64::MAX, 2), range),
            ("zeroes over the end", io(NvmOpcode::WriteZeroes, 1, 32767, 2), range),
            ("over MDTS", prp1(io(NvmOpcode::Read, 1, 0, 2049), page), invalid_field),
            ("PRP1 not dword aligned", prp1(read, page + 2), bad_prp),
            ("PRP2 has an offset", prps(io(NvmOpcode::Read, 1, 0, 16), page, page + 512), bad_prp),
            (
                "list pointer unaligned",
                prps(io(NvmOpcode::Read, 1, 0, 32), page, page + 4),
                bad_prp,
            ),
            ("PRP1 is nowhere", prp1(read, out), Status::DATA_TRANSFER_ERROR),
            ("PRP1 at the top", prp1(read, !0xfff), Status::DATA_TRANSFER_ERROR),
            (
                "list is nowhere",
                prps(io(NvmOpcode::Read, 1, 0, 32), page, out),
                Status::DATA_TRANSFER_ERROR,
            ),
            (
                "discard without data",
                prp1(bad(9).with_dword(11, 4), out),
                Status::DATA_TRANSFER_ERROR,
            ),
            ("discard of namespace 7", SubmissionEntry::new(9, 7).with_dword(11, 4), namespace),
        ],
    );
}

#[test]
fn of_a_read_only_namespace() {
    let mut rig = Setup::new().disk(Box::new(ReadOnly(ram(1 << 20, 4096)))).rig();
    let page = rig.buffer(4096);
    let protected = Status::WRITE_PROTECTED.dnr();
    check(
        &mut rig,
        1,
        [
            ("read", prp1(io(NvmOpcode::Read, 1, 0, 1), page), Status::SUCCESS),
            ("write", prp1(io(NvmOpcode::Write, 1, 0, 1), page), protected),
            ("zeroes", io(NvmOpcode::WriteZeroes, 1, 0, 1), protected),
            ("copy", prp1(SubmissionEntry::new(0x19, 1), page), protected),
            ("compare", prp1(io(NvmOpcode::Compare, 1, 0, 1), page), Status::SUCCESS),
            ("verify", io(NvmOpcode::Verify, 1, 0, 256), Status::SUCCESS),
            ("discard", prp1(SubmissionEntry::new(9, 1).with_dword(11, 4), page), protected),
            ("flush", SubmissionEntry::new(0, 1), Status::SUCCESS),
        ],
    );
    assert_eq!(rig.driver.identify_namespace(1).unwrap().attributes, 1);
}

#[test]
fn of_the_admin_queue() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    let identify = |cns: u32, nsid: u32| {
        prp1(SubmissionEntry::new(AdminOpcode::Identify.0, nsid).with_dword(10, cns), page)
    };
    let get = |cdw10: u32| prp1(admin(AdminOpcode::GetFeatures).with_dword(10, cdw10), page);
    let set = |cdw10: u32, cdw11: u32| {
        prp1(admin(AdminOpcode::SetFeatures).with_dword(10, cdw10).with_dword(11, cdw11), page)
    };
    let log = |id: u32, dwords: u32| {
        prp1(admin(AdminOpcode::GetLogPage).with_dword(10, id | (dwords - 1) << 16), page)
    };
    let invalid_field = Status::INVALID_FIELD.dnr();
    let namespace = Status::INVALID_NAMESPACE.dnr();
    let opcode = |opcode: AdminOpcode| admin(opcode);
    check(
        &mut rig,
        0,
        [
            ("format", opcode(AdminOpcode::FormatNvm), Status::INVALID_OPCODE.dnr()),
            ("MI send", SubmissionEntry::new(0x1d, 0), Status::INVALID_OPCODE.dnr()),
            ("SGL", flags(identify(1, 0), 0x40), invalid_field),
            ("fused", flags(identify(1, 0), 1), invalid_field),
            ("CNS 4", identify(4, 1), invalid_field),
            ("CNS ff", identify(0xff, 1), invalid_field),
            ("identify namespace 0", identify(0, 0), namespace),
            ("identify namespace 1025", identify(0, 1025), namespace),
            ("identify all namespaces", identify(0, NSID_ALL), namespace),
            ("list after fffffffe", identify(2, 0xffff_fffe), namespace),
            ("descriptors of 2", identify(3, 2), namespace),
            (
                "identify unaligned",
                prp1(identify(1, 0), page + 1),
                Status::PRP_OFFSET_INVALID.dnr(),
            ),
            (
                "identify to nowhere",
                prp1(identify(1, 0), MEMORY as u64),
                Status::DATA_TRANSFER_ERROR,
            ),
            ("get feature 0", get(0), invalid_field),
            ("get feature 0c", get(0x0c), invalid_field),
            ("select 4", get(1 | 4 << 8), invalid_field),
            ("vector 65", get(9).with_dword(11, 65), invalid_field),
            ("error recovery of any namespace", get(5), Status::SUCCESS),
            (
                "error recovery of namespace 2",
                SubmissionEntry { nsid: 2.into(), ..get(5) },
                namespace,
            ),
            ("setting it for no namespace", set(5, 1), namespace),
            (
                "arbitration of a namespace",
                SubmissionEntry { nsid: 1.into(), ..set(1, 6) },
                Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr(),
            ),
            (
                "arbitration of all namespaces",
                SubmissionEntry { nsid: NSID_ALL.into(), ..set(1, 6) },
                Status::SUCCESS,
            ),
            (
                "host behavior from nowhere",
                prp1(set(0x16, 0), MEMORY as u64),
                Status::DATA_TRANSFER_ERROR,
            ),
            ("save", set(1 | 1 << 31, 0), Status::FEATURE_NOT_SAVEABLE.dnr()),
            ("set feature 3", set(3, 0), invalid_field),
            ("power state 1", set(2, 1), invalid_field),
            ("temperature of sensor 1", set(4, 1 << 16 | 300), invalid_field),
            ("DULBE", SubmissionEntry { nsid: 1.into(), ..set(5, 1 << 16) }, invalid_field),
            ("queues twice", set(7, 0), Status::COMMAND_SEQUENCE_ERROR.dnr()),
            ("65536 queues", set(7, 0xffff), invalid_field),
            ("log 0", log(0, 4), Status::INVALID_LOG_PAGE.dnr()),
            ("log 6", log(6, 4), Status::INVALID_LOG_PAGE.dnr()),
            ("log offset 2", log(1, 4).with_dword(12, 2), invalid_field),
            ("log offset past", log(2, 4).with_dword(12, 516), invalid_field),
            ("log offset far", log(2, 4).with_dword(13, u32::MAX), invalid_field),
            ("log length", log(2, 4).with_dword(11, 0xffff), invalid_field),
            (
                "SMART of a namespace",
                SubmissionEntry { nsid: 1.into(), ..log(2, 128) },
                invalid_field,
            ),
            ("abort in queue 9", opcode(AdminOpcode::Abort).with_dword(10, 9), invalid_field),
        ],
    );
}

#[test]
fn of_queue_creation_and_deletion() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    let create = |opcode: AdminOpcode, id: u32, size: u32, cdw11: u32| {
        let command = admin(opcode).with_dword(10, (size - 1) << 16 | id).with_dword(11, cdw11);
        prp1(command, page)
    };
    let cq = |id, size, cdw11| create(AdminOpcode::CreateCompletionQueue, id, size, cdw11);
    let sq = |id, size, cdw11| create(AdminOpcode::CreateSubmissionQueue, id, size, cdw11);
    let delete_sq = |id| admin(AdminOpcode::DeleteSubmissionQueue).with_dword(10, id);
    let delete_cq = |id| admin(AdminOpcode::DeleteCompletionQueue).with_dword(10, id);
    let bad_id = Status::INVALID_QUEUE_ID.dnr();
    let bad_size = Status::INVALID_QUEUE_SIZE.dnr();
    check(
        &mut rig,
        0,
        [
            ("CQ 0", cq(0, 16, 1), bad_id),
            ("CQ 1 again", cq(1, 16, 1), bad_id),
            ("CQ 65", cq(65, 16, 1), bad_id),
            ("CQ of 1", cq(2, 1, 1), bad_size),
            ("CQ of 1025", cq(2, 1025, 1), bad_size),
            ("CQ in pieces", cq(2, 16, 0), Status::INVALID_FIELD.dnr()),
            ("CQ unaligned", prp1(cq(2, 16, 1), page + 64), Status::PRP_OFFSET_INVALID.dnr()),
            ("CQ vector 65", cq(2, 16, 65 << 16 | 3), Status::INVALID_INTERRUPT_VECTOR.dnr()),
            ("CQ vector ffff", cq(2, 16, 0xffff << 16 | 3), Status::INVALID_INTERRUPT_VECTOR.dnr()),
            ("CQ 2", cq(2, 16, 3), Status::SUCCESS),
            ("SQ 0", sq(0, 16, 1 << 16 | 1), bad_id),
            ("SQ 1 again", sq(1, 16, 1 << 16 | 1), bad_id),
            ("SQ 99", sq(99, 16, 1 << 16 | 1), bad_id),
            ("SQ on CQ 0", sq(2, 16, 1), bad_id),
            ("SQ on CQ 3", sq(2, 16, 3 << 16 | 1), Status::COMPLETION_QUEUE_INVALID.dnr()),
            ("SQ on CQ 99", sq(2, 16, 99 << 16 | 1), bad_id),
            ("SQ of 1", sq(2, 1, 2 << 16 | 1), bad_size),
            ("SQ of 65536", sq(2, 65536, 2 << 16 | 1), bad_size),
            ("SQ in pieces", sq(2, 16, 2 << 16), Status::INVALID_FIELD.dnr()),
            (
                "SQ unaligned",
                prp1(sq(2, 16, 2 << 16 | 1), page + 1),
                Status::PRP_OFFSET_INVALID.dnr(),
            ),
            ("SQ 2 on CQ 1", sq(2, 16, 1 << 16 | 1), Status::SUCCESS),
            ("delete CQ in use", delete_cq(1), Status::INVALID_QUEUE_DELETION.dnr()),
            ("delete CQ 0", delete_cq(0), bad_id),
            ("delete CQ 7", delete_cq(7), bad_id),
            ("delete SQ 0", delete_sq(0), bad_id),
            ("delete SQ 7", delete_sq(7), bad_id),
            ("delete SQ 1", delete_sq(1), Status::SUCCESS),
            ("delete SQ 1 again", delete_sq(1), bad_id),
            ("delete CQ still in use", delete_cq(1), Status::INVALID_QUEUE_DELETION.dnr()),
            ("delete SQ 2", delete_sq(2), Status::SUCCESS),
            ("delete CQ 1", delete_cq(1), Status::SUCCESS),
            ("delete CQ 2", delete_cq(2), Status::SUCCESS),
            ("delete CQ 2 again", delete_cq(2), bad_id),
        ],
    );
}

#[test]
fn errors_are_logged_with_more() {
    let mut rig = Setup::new().rig();
    let ended = rig.run(1, io(NvmOpcode::Read, 9, 0x1234, 1));
    assert!(ended.status().has_more());
    let command = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
    let entry = rig.driver.admin_read(command, 64).unwrap();
    assert_eq!(entry[0..8], 1u64.to_le_bytes());
    assert_eq!(entry[8..10], 1u16.to_le_bytes());
    assert_eq!(entry[10..12], ended.id.get().to_le_bytes());
    assert_eq!(entry[12..14], (ended.status.get() & !1).to_le_bytes());
    assert_eq!(entry[16..24], 0x1234u64.to_le_bytes());
    assert_eq!(entry[24..28], 9u32.to_le_bytes());
}
