//! A program that the kernel can load.

use std::io;

use libc::sock_filter;

/// A program of classic BPF for seccomp(2).
#[derive(Clone, Debug)]
pub struct Program(pub(crate) Vec<sock_filter>);

impl Program {
    /// Returns the instructions.
    pub fn instructions(&self) -> &[sock_filter] {
        &self.0
    }

    /// Returns 8 bytes for each instruction: the kernel's `sock_filter`, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let bytes = |one: &sock_filter| {
            let ([c0, c1], [k0, k1, k2, k3]) = (one.code.to_le_bytes(), one.k.to_le_bytes());
            [c0, c1, one.jt, one.jf, k0, k1, k2, k3]
        };
        self.0.iter().flat_map(bytes).collect()
    }

    /// Applies the filter to the calling thread for good; threads and processes that it starts
    /// later have it as well. The thread must have set `no_new_privs`, unless it has CAP_SYS_ADMIN.
    /// Makes one system call and does not allocate, as code between fork and exec must.
    ///
    /// # Errors
    /// The kernel refuses: it has no filters, or the program has more than
    /// [`MOST_INSTRUCTIONS`](crate::MOST_INSTRUCTIONS).
    pub fn apply(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(self.0.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            // The kernel copies the program and does not write to it.
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: `program` describes the whole vector, which the kernel only reads.
        let applied = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if applied < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Runs the program on a call, as the kernel does. Returns the action and the number of
    /// instructions that were executed.
    ///
    /// # Panics
    /// If the kernel would refuse the program.
    #[cfg(any(test, feature = "interpreter"))]
    pub fn run(&self, arch: u32, number: u32, args: &[u64; 6]) -> (crate::Action, usize) {
        let call = [u64::from(number) | u64::from(arch) << 32, 0].into_iter().chain(*args);
        let data: Vec<u32> = call.flat_map(|word| [word as u32, (word >> 32) as u32]).collect();
        let (mut at, mut loaded, mut steps) = (0, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = self.0[at];
            (at, steps) = (at + 1, steps + 1);
            let mut branch = |holds: bool| at += usize::from(if holds { jt } else { jf });
            match u32::from(code) {
                crate::assemble::LOAD => loaded = data[k as usize / 4],
                crate::assemble::AND => loaded &= k,
                crate::assemble::JUMP => at += k as usize,
                crate::assemble::JUMP_EQUAL => branch(loaded == k),
                crate::assemble::JUMP_GREATER => branch(loaded > k),
                crate::assemble::JUMP_GREATER_OR_EQUAL => branch(loaded >= k),
                crate::assemble::RETURN => return (crate::Action(k), steps),
                other => panic!("instruction {other:#x}"),
            }
        }
    }
}
