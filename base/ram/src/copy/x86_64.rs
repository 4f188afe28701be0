//! Copies that survive a fault without a system call.
//!
//! All instructions that touch guest memory lie between two labels. A missing page of a client's
//! file raises SIGBUS at one of them; the handler finds the program counter in that range, moves it
//! to the landing pad behind the range, and returns. The landing pad returns "gone" to the caller
//! of the routine: the routines are leaves, they keep nothing on the stack and change no register
//! that a caller relies on, so that is a proper return at each of their instructions. An operating
//! system's kernel copies from user memory in the same way (its exception table); here one landing
//! pad serves all.
//!
//! Any other SIGBUS goes to the handler that was installed before [`prepare`], or to the default,
//! which ends the process as if there were no handler here. That includes broken memory
//! (`BUS_MCEERR_AR`) and signals sent by a process, wherever the program counter is. Code that
//! replaces the handler later must forward every SIGBUS that is not its own, and no thread that
//! touches guest memory may block SIGBUS: the kernel ends a process that faults with the signal
//! blocked.
//!
//! The handler allocates nothing, takes no lock, makes no system call for a fault of these
//! routines, and does not touch `errno`.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::addr_of;
use std::sync::OnceLock;

// Copies by length: below 16 in at most three accesses; 16 to 64 in two or four; 65 to 511 in
// pieces of 16 bytes, of which the last may overlap the one before; from 512 on `rep movsb`, which
// the processors of the last ten years run at the speed of the memory (measured here for 4 KiB from
// and to random places: as quick as AVX-512, without its state to save).
std::arch::global_asm!(
    ".pushsection .text.slipway_ram_guest,\"ax\",@progbits",
    ".p2align 6",
    ".globl slipway_ram_guest_first",
    ".hidden slipway_ram_guest_first",
    "slipway_ram_guest_first:",
    // slipway_ram_copy(rdi: to, rsi: from, rdx: bytes) -> rax: 0, or 1 when memory is gone.
    ".globl slipway_ram_copy",
    ".hidden slipway_ram_copy",
    ".type slipway_ram_copy,@function",
    "slipway_ram_copy:",
    ".cfi_startproc",
    "cmp rdx, 512",
    "jae 50f",
    "cmp rdx, 16",
    "jb 20f",
    "cmp rdx, 64",
    "ja 9f",
    "cmp rdx, 32",
    "jbe 7f",
    // 33 to 64 bytes: the first 32 and the last 32.
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + rdx - 32]",
    "movdqu xmm3, [rsi + rdx - 16]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + 16], xmm1",
    "movdqu [rdi + rdx - 32], xmm2",
    "movdqu [rdi + rdx - 16], xmm3",
    "xor eax, eax",
    "ret",
    // 16 to 32 bytes.
    "7:",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + rdx - 16]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "9:",
    "movdqu xmm1, [rsi + rdx - 16]",
    "lea r8, [rdi + rdx - 16]",
    "cmp rdi, r8",
    "jae 15f",
    "10:",
    "movdqu xmm0, [rsi]",
    "movdqu [rdi], xmm0",
    "add rsi, 16",
    "add rdi, 16",
    "cmp rdi, r8",
    "jb 10b",
    "15:",
    "movdqu [r8], xmm1",
    "xor eax, eax",
    "ret",
    // Below 16 bytes.
    "20:",
    "cmp edx, 8",
    "jae 30f",
    "cmp edx, 4",
    "jae 40f",
    "test edx, edx",
    "je 25f",
    // The first, the middle and the last of up to three bytes.
    "movzx eax, byte ptr [rsi]",
    "movzx ecx, byte ptr [rsi + rdx - 1]",
    "mov r8, rdx",
    "shr r8, 1",
    "movzx r9d, byte ptr [rsi + r8]",
    "mov [rdi], al",
    "mov [rdi + r8], r9b",
    "mov [rdi + rdx - 1], cl",
    "25:",
    "xor eax, eax",
    "ret",
    // 8 to 15 bytes.
    "30:",
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    // 4 to 7 bytes.
    "40:",
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    "50:",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_copy, . - slipway_ram_copy",
    // slipway_ram_zero(rdi: to, rsi: bytes) -> rax: 0 or 1.
    ".p2align 4",
    ".globl slipway_ram_zero",
    ".hidden slipway_ram_zero",
    ".type slipway_ram_zero,@function",
    "slipway_ram_zero:",
    ".cfi_startproc",
    "mov rcx, rsi",
    "xor eax, eax",
    "rep stosb",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_zero, . - slipway_ram_zero",
    // slipway_ram_load(rdi: from) -> rax: 0 or 1, rdx: the 32-bit word.
    ".p2align 4",
    ".globl slipway_ram_load",
    ".hidden slipway_ram_load",
    ".type slipway_ram_load,@function",
    "slipway_ram_load:",
    ".cfi_startproc",
    "mov edx, [rdi]",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_load, . - slipway_ram_load",
    // slipway_ram_store(rdi: to, esi: word) -> rax: 0 or 1.
    ".p2align 4",
    ".globl slipway_ram_store",
    ".hidden slipway_ram_store",
    ".type slipway_ram_store,@function",
    "slipway_ram_store:",
    ".cfi_startproc",
    "mov [rdi], esi",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_store, . - slipway_ram_store",
    // slipway_ram_load_half(rdi: from) -> rax: 0 or 1, rdx: the 16-bit word.
    ".p2align 4",
    ".globl slipway_ram_load_half",
    ".hidden slipway_ram_load_half",
    ".type slipway_ram_load_half,@function",
    "slipway_ram_load_half:",
    ".cfi_startproc",
    "movzx edx, word ptr [rdi]",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_load_half, . - slipway_ram_load_half",
    // slipway_ram_store_half(rdi: to, esi: word) -> rax: 0 or 1.
    ".p2align 4",
    ".globl slipway_ram_store_half",
    ".hidden slipway_ram_store_half",
    ".type slipway_ram_store_half,@function",
    "slipway_ram_store_half:",
    ".cfi_startproc",
    "mov [rdi], si",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_store_half, . - slipway_ram_store_half",
    // slipway_ram_publish(rdi: to, rsi: first 8 bytes, rdx: last 8 bytes) -> rax: 0 or 1.
    ".p2align 4",
    ".globl slipway_ram_publish",
    ".hidden slipway_ram_publish",
    ".type slipway_ram_publish,@function",
    "slipway_ram_publish:",
    ".cfi_startproc",
    "mov [rdi], rsi",
    "mov [rdi + 8], rdx",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_publish, . - slipway_ram_publish",
    // The landing pad, and the end of the range.
    ".p2align 4",
    ".globl slipway_ram_guest_gone",
    ".hidden slipway_ram_guest_gone",
    ".type slipway_ram_guest_gone,@function",
    "slipway_ram_guest_gone:",
    ".cfi_startproc",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size slipway_ram_guest_gone, . - slipway_ram_guest_gone",
    ".popsection",
);

/// Result of the load routines, in two registers.
#[repr(C)]
struct Loaded {
    gone: u64,
    word: u64,
}

unsafe extern "C" {
    static slipway_ram_guest_first: u8;
    static slipway_ram_guest_gone: u8;
    fn slipway_ram_copy(to: *mut u8, from: *const u8, len: usize) -> u64;
    fn slipway_ram_zero(to: *mut u8, len: usize) -> u64;
    fn slipway_ram_load(from: *const u8) -> Loaded;
    fn slipway_ram_store(to: *mut u8, word: u32) -> u64;
    fn slipway_ram_load_half(from: *const u8) -> Loaded;
    fn slipway_ram_store_half(to: *mut u8, word: u32) -> u64;
    fn slipway_ram_publish(to: *mut u8, first: u64, last: u64) -> u64;
}

/// Copies `into.len()` bytes from guest memory. Returns `false` if any of it is gone.
///
/// # Safety
/// `guest` points to as many readable bytes of one mapping, which stays mapped during the call. If
/// its pages may go, [`prepare`] has succeeded.
#[inline]
pub(crate) unsafe fn read(guest: *const u8, into: &mut [u8], _guarded: bool) -> bool {
    // SAFETY: `into` is exclusively borrowed and cannot overlap a guest's mapping; `guest` is
    // readable by this function's contract; a fault at a missing page ends at the landing pad. By
    // the C calling convention the routine changes nothing else.
    unsafe { slipway_ram_copy(into.as_mut_ptr(), guest, into.len()) == 0 }
}

/// Copies `len` bytes from guest memory to `into`, which others may change meanwhile and which
/// therefore is no Rust slice. Returns `false` if any of the guest memory is gone.
///
/// # Safety
/// As for [`read`]; `into` is writable for `len` bytes and does not overlap the guest memory.
#[inline]
pub(crate) unsafe fn read_raw(guest: *const u8, into: *mut u8, len: usize, _: bool) -> bool {
    // SAFETY: as for `read`.
    unsafe { slipway_ram_copy(into, guest, len) == 0 }
}

/// Copies `len` bytes to guest memory from `from`, which others may change meanwhile and which
/// therefore is no Rust slice. Returns `false` if any of the guest memory is gone.
///
/// # Safety
/// As for [`write`]; `from` is readable for `len` bytes and does not overlap the guest memory.
#[inline]
pub(crate) unsafe fn write_raw(guest: *mut u8, from: *const u8, len: usize, _: bool) -> bool {
    // SAFETY: as for `write`.
    unsafe { slipway_ram_copy(guest, from, len) == 0 }
}

/// Copies between two mappings. Returns `false` if any of either is gone.
///
/// # Safety
/// As for [`read`] of `from` and for [`write`] of `to`.
#[inline]
pub(crate) unsafe fn between(to: *mut u8, from: *const u8, len: usize, _: bool) -> bool {
    // SAFETY: as for `read` and `write`; a fault at a missing page of either side ends at the
    // landing pad.
    unsafe { slipway_ram_copy(to, from, len) == 0 }
}

/// Copies `from` to guest memory. Returns `false` if any of it is gone.
///
/// # Safety
/// As for [`read`], with writable bytes.
#[inline]
pub(crate) unsafe fn write(guest: *mut u8, from: &[u8], _guarded: bool) -> bool {
    // SAFETY: as for `read`, with the roles exchanged.
    unsafe { slipway_ram_copy(guest, from.as_ptr(), from.len()) == 0 }
}

/// Writes `len` zeros to guest memory, in one instruction, with which processors do not read what
/// they overwrite. Returns `false` if any of it is gone.
///
/// # Safety
/// As for [`write`].
#[inline]
pub(crate) unsafe fn zero(guest: *mut u8, len: usize, _guarded: bool) -> bool {
    // SAFETY: as for `write`.
    unsafe { slipway_ram_zero(guest, len) == 0 }
}

/// Loads a 32-bit word in one access, with acquire ordering: x86-64 does not reorder a load with
/// later accesses. Returns `None` if the memory is gone.
///
/// # Safety
/// As for [`read`], for four bytes.
pub(crate) unsafe fn load_u32(guest: *const u8, _guarded: bool) -> Option<u32> {
    // SAFETY: as for `read`. The compiler moves no access across the call: it may touch any memory.
    let loaded = unsafe { slipway_ram_load(guest) };
    (loaded.gone == 0).then_some(loaded.word as u32)
}

/// Stores a 32-bit word in one access, with release ordering: x86-64 does not reorder a store with
/// earlier accesses. Returns `false` if the memory is gone.
///
/// # Safety
/// As for [`write`], for four bytes.
pub(crate) unsafe fn store_u32(guest: *mut u8, word: u32, _guarded: bool) -> bool {
    // SAFETY: as for `write`; not moved by the compiler, as for `load_u32`.
    unsafe { slipway_ram_store(guest, word) == 0 }
}

/// Loads a 16-bit word in one access, with acquire ordering. Returns `None` if the memory is gone.
///
/// # Safety
/// As for [`read`], for two bytes.
#[inline]
pub(crate) unsafe fn load_u16(guest: *const u8, _guarded: bool) -> Option<u16> {
    // SAFETY: as for `load_u32`.
    let loaded = unsafe { slipway_ram_load_half(guest) };
    (loaded.gone == 0).then_some(loaded.word as u16)
}

/// Stores a 16-bit word in one access, with release ordering. Returns `false` if the memory is
/// gone.
///
/// # Safety
/// As for [`write`], for two bytes.
#[inline]
pub(crate) unsafe fn store_u16(guest: *mut u8, word: u16, _guarded: bool) -> bool {
    // SAFETY: as for `store_u32`.
    unsafe { slipway_ram_store_half(guest, word.into()) == 0 }
}

/// Stores 16 bytes so that a reader that sees any of the last eight sees all of the rest, if
/// `guest` is aligned to 8 bytes (a store across cache lines may be torn). Returns `false` if the
/// memory is gone.
///
/// # Safety
/// As for [`write`], for 16 bytes.
#[inline]
pub(crate) unsafe fn publish(guest: *mut u8, bits: u128, _guarded: bool) -> bool {
    // SAFETY: as for `write`. The two stores of 8 bytes stay in order on x86-64.
    unsafe { slipway_ram_publish(guest, bits as u64, (bits >> 64) as u64) == 0 }
}

/// The action for SIGBUS before [`prepare`].
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, once per process.
///
/// # Errors
/// Errors of sigaction(2): only a system-call filter can forbid it.
pub(crate) fn prepare() -> io::Result<()> {
    static OUTCOME: OnceLock<Result<(), i32>> = OnceLock::new();
    let outcome = OUTCOME
        .get_or_init(|| install().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL)));
    outcome.map_err(io::Error::from_raw_os_error)
}

fn install() -> io::Result<()> {
    // SAFETY: all zeros is a valid `sigaction`.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only queries; `previous` is valid for writes.
    check(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) })?;
    // Before the handler can run: the handler forwards to it.
    let _ = PREVIOUS.set(previous);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
    action.sa_sigaction = handler as usize;
    // On the alternative stack, where a thread has one: the previous handler may need it.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and is async-signal-safe.
    check(unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) })
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both pointers, valid during the handler and used by nothing else.
    let (code, counter) = unsafe {
        let context = &mut *context.cast::<libc::ucontext_t>();
        ((*info).si_code, &mut context.uc_mcontext.gregs[libc::REG_RIP as usize])
    };
    let (first, gone) =
        (addr_of!(slipway_ram_guest_first) as u64, addr_of!(slipway_ram_guest_gone) as u64);
    // A missing page, touched by one of the routines. Excluded are signals sent by a process, and
    // broken memory, which is no client's fault.
    if code == libc::BUS_ADRERR && (first..gone).contains(&(*counter as u64)) {
        *counter = gone as i64;
        return;
    }
    hand_on(signal, info, context);
}

/// Forwards the signal to the previous handler or default.
fn hand_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    type Plain = extern "C" fn(c_int);
    type Informed = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
    let Some(previous) = PREVIOUS.get() else { return };
    match previous.sa_sigaction {
        // A sent signal that is to be ignored. (A fault cannot be ignored.)
        // SAFETY: the kernel's pointer, valid during the handler.
        libc::SIG_IGN if unsafe { (*info).si_code } <= 0 => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction faults again after the return, and the default ends the process; a
            // sent signal is raised anew for that.
            // SAFETY: all zeros is SIG_DFL with no flags; both calls are async-signal-safe.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &default, std::ptr::null_mut());
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: installed with SA_SIGINFO, so it is a function of this type.
            let handler = unsafe { std::mem::transmute::<usize, Informed>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: installed without SA_SIGINFO, so it is a function of this type.
            let handler = unsafe { std::mem::transmute::<usize, Plain>(handler) };
            handler(signal);
        }
    }
}
