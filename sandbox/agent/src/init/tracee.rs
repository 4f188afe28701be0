//! A traced process that is made to do system calls (ptrace(2)), on x86-64.
//!
//! The process is not trusted: it may end, share its memory with others that change it, or never
//! stop again. Then calls fail, or last until this process ends, which kills what it traces.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use libc::{c_int, c_long};
use rustix::process::Pid;

/// The registers of a process.
pub use libc::user_regs_struct as Registers;

// The C libraries do not agree on the types of these (include/uapi/linux/ptrace.h).
const GETREGS: c_long = 12;
const SETREGS: c_long = 13;
const DETACH: c_long = 17;
const SYSCALL: c_long = 24;
const GETEVENTMSG: c_long = 0x4201;
const SEIZE: c_long = 0x4206;
const GETSIGMASK: c_long = 0x420a;
const SETSIGMASK: c_long = 0x420b;
const EVENT_FORK: c_int = 1;
const EVENT_STOP: c_int = 128;
/// TRACESYSGOOD, TRACEFORK and EXITKILL: a process whose tracer dies half-way has registers that
/// are not its own.
const OPTIONS: usize = 0x1 | 0x2 | 0x10_0000;
/// The bit that tells a stop at a system call from the signal SIGTRAP.
const AT_SYSTEM_CALL: c_int = 0x80;
/// The size of a set of signals, bytes.
const SIGNALS: usize = 8;
/// The code segment of 64-bit programs.
const LONG_MODE: u64 = 0x33;
/// The instruction `syscall`.
const INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// The results of system calls that the kernel would do again, negated (include/linux/errno.h).
const AGAIN: std::ops::RangeInclusive<i64> = 512..=516;

/// A stop of a traced process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// At the beginning or the end of a system call.
    SystemCall,
    /// In a clone, when the new process exists.
    Fork,
    /// A group-stop, or the first stop of a new process.
    Stopped,
}

/// A traced process.
pub struct Tracee {
    pid: Pid,
    memory: File,
}

impl Tracee {
    /// Traces a process that is stopped by a signal.
    ///
    /// # Errors
    /// It is not stopped, or another process traces it.
    pub fn seize(pid: Pid) -> Result<Self> {
        let tracee = Self::open(pid)?;
        // SAFETY: the request has no pointers.
        unsafe { ptrace(SEIZE, pid, 0, OPTIONS) }.context("tracing it")?;
        // A process that was stopped is in its trap when the request returns.
        match wait(pid, libc::WNOHANG)? {
            Some(Stop::Stopped) => Ok(tracee),
            _ => bail!("it does not stand still"),
        }
    }

    /// Waits for the first stop of a process that is traced since its parent was made to fork.
    ///
    /// # Errors
    /// It has ended.
    pub fn born(pid: Pid) -> Result<Self> {
        let tracee = Self::open(pid)?;
        tracee.expect(Stop::Stopped)?;
        Ok(tracee)
    }

    fn open(pid: Pid) -> Result<Self> {
        let path = format!("/proc/{}/mem", pid.as_raw_nonzero());
        let memory = File::options().read(true).write(true).open(path);
        Ok(Self { pid, memory: memory.context("opening its memory")? })
    }

    /// Returns the process's id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the registers of a process that has stopped itself by a system call: the one that
    /// [`Tracee::call`] uses again.
    ///
    /// # Errors
    /// It is no 64-bit program, or stands elsewhere.
    pub fn own_registers(&self) -> Result<Registers> {
        let registers = self.registers()?;
        if registers.cs != LONG_MODE {
            bail!("it is no 64-bit program");
        }
        let mut before = [0; INSTRUCTION.len()];
        self.read(instruction(&registers), &mut before).context("reading its program")?;
        let repeated = AGAIN.contains(&(registers.rax as i64).wrapping_neg());
        if before != INSTRUCTION || repeated {
            bail!("it has not stopped itself by a system call");
        }
        Ok(registers)
    }

    fn registers(&self) -> io::Result<Registers> {
        // SAFETY: registers are integers, for which zero is a value.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one such structure to the address, which outlives the call.
        unsafe { ptrace(GETREGS, self.pid, 0, &raw mut registers as usize) }?;
        Ok(registers)
    }

    /// Sets the registers.
    ///
    /// # Errors
    /// It has ended.
    pub fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        // SAFETY: the kernel reads one such structure from the address, which outlives the call.
        unsafe { ptrace(SETREGS, self.pid, 0, std::ptr::from_ref(registers) as usize) }
    }

    /// Blocks the signals of `mask`, a bit each, and returns those that were blocked.
    ///
    /// # Errors
    /// It has ended.
    pub fn block(&self, mask: u64) -> io::Result<u64> {
        let mut old = 0u64;
        // SAFETY: the kernel writes that many bytes to the address, which outlives the call.
        unsafe { ptrace(GETSIGMASK, self.pid, SIGNALS, &raw mut old as usize) }?;
        // SAFETY: the kernel reads that many bytes from the address, which outlives the call.
        unsafe { ptrace(SETSIGMASK, self.pid, SIGNALS, &raw const mask as usize) }?;
        Ok(old)
    }

    /// Reads memory.
    ///
    /// # Errors
    /// Some of it is not mapped.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(bytes, address)
    }

    /// Writes memory.
    ///
    /// # Errors
    /// Some of it is not mapped.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory.write_all_at(bytes, address)
    }

    /// Has the process do a system call, and returns its result. `own` are its own registers. They
    /// must be set again afterwards.
    ///
    /// # Errors
    /// The call's, or the process has ended.
    pub fn call(&self, own: &Registers, number: c_long, arguments: [u64; 4]) -> Result<u64> {
        self.begin(own, number, arguments)?;
        self.resume()?;
        self.expect(Stop::SystemCall)?;
        self.result().with_context(|| format!("its system call {number}"))
    }

    /// Has the process fork. The child, which is traced, has the same parent. Returns its id, as
    /// this process names it.
    ///
    /// # Errors
    /// The call's, or the process has ended.
    pub fn fork(&self, own: &Registers) -> Result<Pid> {
        let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as u64;
        self.begin(own, libc::SYS_clone, [flags, 0, 0, 0])?;
        self.resume()?;
        if self.wait()? != Stop::Fork {
            self.result().context("its system call clone")?;
            bail!("it did not fork");
        }
        let mut child = 0u64;
        // SAFETY: the kernel writes a long to the address, which outlives the call.
        unsafe { ptrace(GETEVENTMSG, self.pid, 0, &raw mut child as usize) }?;
        self.resume()?;
        self.expect(Stop::SystemCall)?;
        i32::try_from(child).ok().and_then(Pid::from_raw).context("it forked no process")
    }

    /// Lets go of the process: it goes on, or stays stopped if a signal had stopped it.
    ///
    /// # Errors
    /// It has ended.
    pub fn detach(self) -> io::Result<()> {
        // SAFETY: the request has no pointers.
        unsafe { ptrace(DETACH, self.pid, 0, 0) }
    }

    /// Has the process execute its instruction for system calls, up to where the kernel has it.
    fn begin(&self, own: &Registers, number: c_long, arguments: [u64; 4]) -> Result<()> {
        let [rdi, rsi, rdx, r10] = arguments;
        let registers = Registers {
            rip: instruction(own),
            rax: number as u64,
            // Else the kernel might do again the call that the process was in.
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8: 0,
            ..*own
        };
        self.set_registers(&registers)?;
        self.resume()?;
        self.expect(Stop::SystemCall)
    }

    fn result(&self) -> io::Result<u64> {
        let result = self.registers()?.rax as i64;
        match result {
            -4095..0 => Err(io::Error::from_raw_os_error((-result) as i32)),
            _ => Ok(result as u64),
        }
    }

    fn resume(&self) -> io::Result<()> {
        // SAFETY: the request has no pointers.
        unsafe { ptrace(SYSCALL, self.pid, 0, 0) }
    }

    fn expect(&self, wanted: Stop) -> Result<()> {
        match self.wait()? {
            stop if stop == wanted => Ok(()),
            stop => bail!("it stopped elsewhere: {stop:?}"),
        }
    }

    fn wait(&self) -> Result<Stop> {
        wait(self.pid, 0)?.context("it does not stop")
    }
}

/// Returns the address of the instruction that is directly before where a process stands.
fn instruction(own: &Registers) -> u64 {
    own.rip.wrapping_sub(INSTRUCTION.len() as u64)
}

/// Makes a request to the kernel about a process that this one traces.
///
/// # Safety
/// `address` and `data` are as the request wants them: pointers are valid for what it reads and
/// writes.
unsafe fn ptrace(request: c_long, pid: Pid, address: usize, data: usize) -> io::Result<()> {
    let pid = c_long::from(pid.as_raw_nonzero().get());
    // SAFETY: as the caller promises.
    let done = unsafe { libc::syscall(libc::SYS_ptrace, request, pid, address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits for the next stop of a traced process. Returns `None` if there is none and `flags` say not
/// to wait.
fn wait(pid: Pid, flags: c_int) -> Result<Option<Stop>> {
    let mut status = 0;
    let number = pid.as_raw_nonzero().get();
    // SAFETY: the kernel writes an int to the address, which outlives the call.
    match unsafe { libc::waitpid(number, &raw mut status, libc::__WALL | flags) } {
        0 => Ok(None),
        waited if waited < 0 => Err(io::Error::last_os_error()).context("waiting for it"),
        _ => stop(status).map(Some),
    }
}

fn stop(status: c_int) -> Result<Stop> {
    if !libc::WIFSTOPPED(status) {
        bail!("it has ended");
    }
    match (status >> 16, libc::WSTOPSIG(status)) {
        (0, signal) if signal == libc::SIGTRAP | AT_SYSTEM_CALL => Ok(Stop::SystemCall),
        (EVENT_FORK, _) => Ok(Stop::Fork),
        (EVENT_STOP, _) => Ok(Stop::Stopped),
        (_, signal) => bail!("it was stopped by signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_told_from_ends_and_signals() {
        let stopped = |event: c_int, signal: c_int| stop(event << 16 | signal << 8 | 0x7f);
        let trap = libc::SIGTRAP;
        assert_eq!(stopped(0, trap | AT_SYSTEM_CALL).unwrap(), Stop::SystemCall);
        assert_eq!(stopped(EVENT_FORK, trap).unwrap(), Stop::Fork);
        assert_eq!(stopped(EVENT_STOP, libc::SIGSTOP).unwrap(), Stop::Stopped);
        assert_eq!(stopped(EVENT_STOP, trap).unwrap(), Stop::Stopped);
        for other in [stopped(0, trap), stopped(0, libc::SIGSYS), stop(0), stop(libc::SIGKILL)] {
            assert!(other.is_err());
        }
    }
}
