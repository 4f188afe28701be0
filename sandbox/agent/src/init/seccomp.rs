//! Filters of system calls (seccomp(2)), compiled by the host and checked by the kernel.

use std::io;

use anyhow::{Context, Result, bail};
use libc::sock_filter;

/// The most instructions of a filter, `BPF_MAXINSNS` of *linux/bpf_common.h*.
const MOST: usize = 4096;
/// The size of an instruction in bytes: code, two jumps, a constant.
const INSTRUCTION: usize = 8;

/// A program of classic BPF.
#[derive(Debug)]
pub struct Filter(Vec<sock_filter>);

impl Filter {
    /// Reads a program. Returns `None` if there is none.
    ///
    /// # Errors
    /// It is no sequence of 1 to [`MOST`] instructions.
    pub fn parse(bytes: &[u8]) -> Result<Option<Filter>> {
        let (instructions, rest) = bytes.as_chunks::<INSTRUCTION>();
        if !rest.is_empty() || instructions.len() > MOST {
            bail!("a filter of system calls of {} bytes: at most {MOST} instructions", bytes.len());
        }
        let read = |&[c0, c1, jt, jf, k @ ..]: &[u8; INSTRUCTION]| sock_filter {
            code: u16::from_le_bytes([c0, c1]),
            jt,
            jf,
            k: u32::from_le_bytes(k),
        };
        let program: Vec<_> = instructions.iter().map(read).collect();
        Ok((!program.is_empty()).then_some(Filter(program)))
    }

    /// Applies the filter to this process for good. It needs `no_new_privs` or CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// The kernel refuses the program, or has no filters.
    pub fn load(&self) -> Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(self.0.len())?,
            // The kernel copies the program and does not write to it.
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: `program` describes the whole vector, which the kernel only reads.
        let loaded = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if loaded < 0 {
            return Err(io::Error::last_os_error()).context("loading the filter of system calls");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_read_whole() {
        let bytes = [0x15, 0, 3, 4, 0x3b, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0xff, 0x7f];
        let Filter(program) = Filter::parse(&bytes).unwrap().unwrap();
        let fields = |one: &sock_filter| (one.code, one.jt, one.jf, one.k);
        assert_eq!(fields(&program[0]), (0x15, 3, 4, 59));
        assert_eq!(fields(&program[1]), (6, 0, 0, libc::SECCOMP_RET_ALLOW));
        assert!(Filter::parse(&[]).unwrap().is_none());
    }

    #[test]
    fn what_is_no_program_is_refused() {
        assert!(Filter::parse(&[0; 7]).is_err());
        assert!(Filter::parse(&vec![0; MOST * INSTRUCTION]).unwrap().is_some());
        assert!(Filter::parse(&vec![0; (MOST + 1) * INSTRUCTION]).is_err());
    }
}
