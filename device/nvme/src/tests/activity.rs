//! The figures of I/O commands, as other threads see them.

use slipway_nvme_spec::opcode::NvmOpcode;

use super::rig::Setup;
use crate::Io;
use crate::driver::io;

#[test]
fn other_threads_see_what_commands_have_moved() {
    let mut rig = Setup::new().rig();
    rig.driver.create_pair(2, 64, Some(2)).unwrap();
    let activity = rig.controller().activity();
    assert_eq!(activity.get(), Io::default());
    let buffer = rig.buffer(4096);
    // With lanes the queues are those of different threads.
    for queue in [1, 2] {
        rig.driver.transfer(queue, io(NvmOpcode::Write, 1, 0, 8), (buffer, 4096)).unwrap();
        rig.driver.transfer(queue, io(NvmOpcode::Read, 1, 0, 2), (buffer, 1024)).unwrap();
    }
    rig.settle();
    let moved = Io { reads: 2, read_bytes: 2048, writes: 2, written_bytes: 8192, media_errors: 0 };
    assert_eq!(activity.get(), moved);
}
