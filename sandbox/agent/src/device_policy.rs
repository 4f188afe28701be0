//! The devices that a container may open, enforced by a BPF_PROG_TYPE_CGROUP_DEVICE program on its
//! cgroup.
//!
//! Containers keep CAP_MKNOD, as in other runtimes, so the absence of a node protects nothing:
//! without this program, root in a container could create a node for the agent's port, another
//! container's volume or the image. The program allows creating any node, but opening only the
//! listed ones. It is a chain of comparisons assembled here; the instruction format is that of the
//! kernel's "BPF Instruction Set".

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::init::VolumeSpec;

// uapi/linux/bpf.h
const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;
const PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const ATTACH_CGROUP_DEVICE: u32 = 6;
const BLOCK: u16 = 1;
const CHARACTER: u16 = 2;
const ACCESS_MKNOD: i32 = 1;
const ACCESS_WRITE: i32 = 4;

/// A device that may be opened, or without a minor number all devices of one major number.
struct Rule {
    kind: u16,
    major: u32,
    minor: Option<u32>,
    read_only: bool,
}

const fn character(major: u32, minor: Option<u32>) -> Rule {
    Rule { kind: CHARACTER, major, minor, read_only: false }
}

/// The standard devices: null, zero, full, random, urandom; tty, console, ptmx; terminals.
const STANDARD: [Rule; 9] = [
    character(1, Some(3)),
    character(1, Some(5)),
    character(1, Some(7)),
    character(1, Some(8)),
    character(1, Some(9)),
    character(5, Some(0)),
    character(5, Some(1)),
    character(5, Some(2)),
    character(136, None),
];

/// Loads the program for `volumes` and attaches it to the cgroup at `directory`.
///
/// # Errors
/// The kernel lacks CONFIG_CGROUP_BPF or refuses the program.
pub fn attach(directory: &Path, volumes: &[VolumeSpec]) -> io::Result<()> {
    let volumes = volumes.iter().filter_map(|volume| {
        let device = volume.device?;
        let (major, minor) = (device.major, Some(device.minor));
        Some(Rule { kind: BLOCK, major, minor, read_only: volume.read_only })
    });
    let program = load(&assemble(STANDARD.into_iter().chain(volumes)))?;
    let cgroup = rustix::fs::open(directory, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut attributes = AttachAttributes {
        target_fd: cgroup.as_raw_fd() as u32,
        attach_bpf_fd: program.as_raw_fd() as u32,
        attach_type: ATTACH_CGROUP_DEVICE,
        attach_flags: 0,
    };
    bpf(PROG_ATTACH, &mut attributes).map(drop)
}

/// Returns whether the kernel supports such programs.
pub fn is_supported() -> bool {
    load(&assemble(STANDARD.into_iter())).is_ok()
}

#[repr(C)]
struct AttachAttributes {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

#[repr(C)]
struct LoadAttributes {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let license: &CStr = c"Apache-2.0";
    let mut attributes = LoadAttributes {
        prog_type: PROG_TYPE_CGROUP_DEVICE,
        insn_cnt: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
    };
    // The kernel's verifier gives up with EAGAIN if a signal is pending, and the end of any child
    // sends one.
    let fd = without_signals(|| bpf(PROG_LOAD, &mut attributes))?;
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `work` with all signals of this thread blocked until it returns.
fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are this function's own; the previous mask is put back as it was.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let result = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}

fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: `attributes` is a prefix of the kernel's union bpf_attr of the size told; the
    // pointers in it refer to memory that the callers keep alive over the call.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, attributes as *mut T, std::mem::size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// `struct bpf_insn`: opcode, registers (source in the high half), offset, immediate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers, offset, immediate }
}

const LOAD_WORD: u8 = 0x61;
const MOVE_REGISTER: u8 = 0xbf;
const MOVE: u8 = 0xb7;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_IF_NOT_EQUAL: u8 = 0x55;
const JUMP_IF_SET: u8 = 0x45;
const EXIT: u8 = 0x95;

/// Assembles the program. Its context is `struct bpf_cgroup_dev_ctx`: access << 16 | kind, major,
/// minor. After the prologue, r2 is the kind, r3 the access, r4 the major and r5 the minor number.
fn assemble(rules: impl Iterator<Item = Rule>) -> Vec<Instruction> {
    let mut program = vec![
        instruction(LOAD_WORD, 0x12, 0, 0),
        instruction(MOVE_REGISTER, 0x23, 0, 0),
        instruction(AND, 2, 0, 0xffff),
        instruction(SHIFT_RIGHT, 3, 0, 16),
        instruction(LOAD_WORD, 0x14, 4, 0),
        instruction(LOAD_WORD, 0x15, 8, 0),
        // Only creating a node is allowed here.
        instruction(JUMP_IF_NOT_EQUAL, 3, 2, ACCESS_MKNOD),
        instruction(MOVE, 0, 0, 1),
        instruction(EXIT, 0, 0, 0),
    ];
    for rule in rules {
        let mut tests = vec![
            (JUMP_IF_NOT_EQUAL, 2, i32::from(rule.kind)),
            (JUMP_IF_NOT_EQUAL, 4, rule.major as i32),
        ];
        tests.extend(rule.minor.map(|minor| (JUMP_IF_NOT_EQUAL, 5, minor as i32)));
        tests.extend(rule.read_only.then_some((JUMP_IF_SET, 3, ACCESS_WRITE)));
        let count = tests.len();
        for (index, (code, register, immediate)) in tests.into_iter().enumerate() {
            // Jumps past the remaining tests and the two instructions that allow the access.
            let skip = (count - index - 1 + 2) as i16;
            program.push(instruction(code, register, skip, immediate));
        }
        program.push(instruction(MOVE, 0, 0, 1));
        program.push(instruction(EXIT, 0, 0, 0));
    }
    program.push(instruction(MOVE, 0, 0, 0));
    program.push(instruction(EXIT, 0, 0, 0));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel would. Supports only instructions of `assemble`.
    fn allows(program: &[Instruction], kind: u16, access: i32, major: i64, minor: i64) -> bool {
        let mut registers = [0i64; 16];
        let mut at = 0;
        loop {
            let step = program[at];
            let (to, from) = ((step.registers & 15) as usize, (step.registers >> 4) as usize);
            let immediate = i64::from(step.immediate);
            let jump = match step.code {
                LOAD_WORD => {
                    registers[to] = match step.offset {
                        0 => i64::from(kind) | i64::from(access) << 16,
                        4 => major,
                        8 => minor,
                        _ => panic!("outside the context"),
                    };
                    false
                }
                MOVE_REGISTER => {
                    registers[to] = registers[from];
                    false
                }
                MOVE => {
                    registers[to] = immediate;
                    false
                }
                AND => {
                    registers[to] &= immediate;
                    false
                }
                SHIFT_RIGHT => {
                    registers[to] >>= immediate;
                    false
                }
                JUMP_IF_NOT_EQUAL => registers[to] != immediate,
                JUMP_IF_SET => registers[to] & immediate != 0,
                EXIT => return registers[0] != 0,
                other => panic!("opcode {other:#x}"),
            };
            at += 1 + if jump { step.offset as usize } else { 0 };
        }
    }

    extern "C" fn ignore(_: i32) {}

    #[test]
    fn signals_do_not_keep_a_program_from_loading() {
        if let Err(error) = load(&assemble(STANDARD.into_iter())) {
            eprintln!("SKIPPED: signals_do_not_keep_a_program_from_loading: no BPF here: {error}");
            return;
        }
        // SAFETY: the handler does nothing, and SIGUSR1 is nobody else's in this program.
        unsafe { libc::signal(libc::SIGUSR1, ignore as *const () as libc::sighandler_t) };
        // SAFETY: always succeeds.
        let this = unsafe { libc::pthread_self() };
        let done = std::sync::atomic::AtomicBool::new(false);
        let at = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(at) {
                    // SAFETY: the scope's owner outlives this thread.
                    unsafe { libc::pthread_kill(this, libc::SIGUSR1) };
                }
            });
            let failed = (0..500).find_map(|_| load(&assemble(STANDARD.into_iter())).err());
            done.store(true, at);
            assert!(failed.is_none(), "{failed:?}");
        });
    }

    #[test]
    fn the_list_decides() {
        let volume = |minor, read_only| Rule { kind: BLOCK, major: 259, minor, read_only };
        let volumes = [volume(Some(3), false), volume(Some(4), true)];
        let program = assemble(STANDARD.into_iter().chain(volumes));
        let (read, write) = (2, ACCESS_WRITE);
        assert!(allows(&program, CHARACTER, read | write, 1, 3), "null");
        assert!(allows(&program, CHARACTER, read | write, 136, 77), "any terminal");
        assert!(!allows(&program, CHARACTER, read, 1, 1), "mem");
        assert!(!allows(&program, CHARACTER, read, 241, 1), "the agent's port");
        assert!(allows(&program, CHARACTER, ACCESS_MKNOD, 241, 1), "but its node");
        assert!(!allows(&program, CHARACTER, ACCESS_MKNOD | read, 241, 1));
        assert!(allows(&program, BLOCK, read | write, 259, 3));
        assert!(allows(&program, BLOCK, read, 259, 4));
        assert!(!allows(&program, BLOCK, write, 259, 4), "read-only volume");
        assert!(!allows(&program, BLOCK, read, 259, 5), "another's volume");
        assert!(!allows(&program, BLOCK, read, 1, 3), "null's numbers as a block device");
    }
}
