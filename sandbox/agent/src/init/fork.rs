//! Forks of a container's zygote, by this program in a process of its own that traces the zygote.
//!
//! The zygote has stopped itself by a system call. Before the address at which it stands is the
//! instruction of that call, so it is made to do other calls without a change to its program: a
//! clone, whose child has the agent as its parent, as the zygote has. The child is made to do the
//! rest: it makes a socket pair, of which this process takes one end and sends the streams, and
//! puts these at its descriptors 0 to 3; then it has a session of its own, as processes have that
//! are started anew. At the end zygote and child have the registers, blocked signals and memory
//! that the zygote had, and both are stopped. The child's first SIGCONT has it go on behind its
//! zygote's signal.
//!
//! Others may share the zygote's memory and change its program meanwhile. So a child is reported
//! only if it is a process of its own and a child of the agent: the agent is told of the end of no
//! other process, and would send signals to whatever has its id by then.
//!
//! Nothing that the zygote does holds up the agent: it waits for a report of this process, which
//! ends at the latest after [`DEADLINE`] seconds. What this process traces then ends with it.
//!
//! Not implemented: what the C library's fork does beside the system call, such as the handlers of
//! pthread_atfork(3).

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, getppid, kill_process, pidfd_getfd, pidfd_open,
};

use super::channel::{Channel, Report};
use super::tracee::{Registers, Tracee};
use super::user::User;
use super::{InitSpec, terminal, variables};
use crate::stopped::Status;

/// The longest life of this process, seconds. A fork takes a millisecond, or much longer in a guest
/// under emulation.
const DEADLINE: u32 = 25;
/// The longest time in which a zygote stops again after its last fork: the CPUs of its container
/// may be busy.
const STILL: Duration = Duration::from_secs(20);
/// The time between two looks at it.
const LOOK: Duration = Duration::from_millis(1);
/// The bytes below a stack pointer that belong to the function that runs (System V ABI for x86-64,
/// section 3.2.2).
const RED_ZONE: u64 = 128;
/// The descriptors that a fork gets: its streams and the file of its variables.
const FILES: usize = 4;

/// Forks the zygote of `spec`, and gives the child the standard streams of this process and its
/// variables. Reports the child's id, and then that it waits for SIGCONT.
///
/// # Errors
/// The zygote cannot be forked. It may have ended, and no child is left.
pub fn run(channel: &Channel, spec: &InitSpec) -> Result<()> {
    // SAFETY: the call has no memory effects; the signal's action is the default one, which ends
    // this process.
    unsafe { libc::alarm(DEADLINE) };
    let zygote = Pid::from_raw(spec.fork).context("no process to fork")?;
    let variables = variables::file(spec.variables.as_deref().unwrap_or_default())?;
    let status = await_still(spec.fork)?;
    let user = User { uid: status.uid, gid: status.gid, groups: Vec::new(), home: String::new() };
    terminal::give_streams(&user)?;
    let zygote = Tracee::seize(zygote)?;
    let own = zygote.own_registers()?;
    let blocked = zygote.block(u64::MAX)?;
    let child = zygote.fork(&own)?;
    check_child(child)?;
    channel.report(&Report::Pid(child.as_raw_nonzero().get()))?;
    put_back(&zygote, &own, blocked)?;
    zygote.detach()?;
    let child = Tracee::born(child)?;
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let [stdin, stdout, stderr] = streams;
    hand_over(&child, &own, [stdin, stdout, stderr, variables.as_fd()])?;
    put_back(&child, &own, blocked)?;
    kill_process(child.pid(), Signal::STOP)?;
    child.detach()?;
    channel.ready(None)
}

/// Waits until a process is stopped.
fn await_still(pid: i32) -> Result<Status> {
    let deadline = Instant::now() + STILL;
    let agent = agent()?;
    loop {
        let status = Status::read(pid).context("it has ended")?;
        if status.parent != agent {
            bail!("it has ended, and another process has its id");
        }
        if status.threads != 1 {
            bail!("it has {} threads", status.threads);
        }
        if status.is_stopped() {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            bail!("it does not stand still");
        }
        std::thread::sleep(LOOK);
    }
}

/// Checks that a fork is a process of its own and a child of the agent.
fn check_child(child: Pid) -> Result<()> {
    let status = Status::read(child.as_raw_nonzero().get()).context("its fork has ended")?;
    if (status.threads, status.parent) != (1, agent()?) {
        bail!("its program was changed while it was made to fork");
    }
    Ok(())
}

/// Returns the id of the agent, whose children this process, the zygote and its forks are.
fn agent() -> Result<i32> {
    Ok(getppid().context("the agent is gone")?.as_raw_nonzero().get())
}

fn put_back(tracee: &Tracee, own: &Registers, blocked: u64) -> Result<()> {
    tracee.set_registers(own)?;
    tracee.block(blocked)?;
    Ok(())
}

/// Puts `files` at the descriptors of `child` from 0 on, and gives it a session of its own.
fn hand_over(child: &Tracee, own: &Registers, files: [BorrowedFd<'_>; FILES]) -> Result<()> {
    let scratch = own.rsp.wrapping_sub(RED_ZONE + Message::SIZE as u64) & !15;
    let mut kept = [0; Message::SIZE];
    child.read(scratch, &mut kept).context("reading its stack")?;
    let [near, far] = socket_pair(child, own, scratch)?;
    let socket = take(child, far)?;
    send(&socket, &files)?;
    let message = Message { address: scratch };
    child.write(scratch, &message.bytes()).context("writing its stack")?;
    let flags = libc::MSG_DONTWAIT as u64;
    child.call(own, libc::SYS_recvmsg, [descriptor(near), scratch, flags, 0])?;
    let mut control = [0; Message::CONTROL];
    child.read(scratch + Message::CONTROL_AT as u64, &mut control)?;
    let received = descriptors(&control)?;
    for number in [near, far] {
        child.call(own, libc::SYS_close, [descriptor(number), 0, 0, 0])?;
    }
    // They ascend, so each is at its place before a later one is put over it.
    for (place, number) in (0..).zip(received) {
        child.call(own, libc::SYS_dup2, [descriptor(number), place, 0, 0])?;
    }
    for number in received.into_iter().filter(|number| *number >= FILES as i32) {
        child.call(own, libc::SYS_close, [descriptor(number), 0, 0, 0])?;
    }
    child.call(own, libc::SYS_setsid, [0; 4])?;
    child.write(scratch, &kept).context("writing its stack")
}

/// Has a process make a pair of sockets that keep the borders of messages.
fn socket_pair(child: &Tracee, own: &Registers, scratch: u64) -> Result<[i32; 2]> {
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
    let arguments = [libc::AF_UNIX as u64, kind, 0, scratch];
    child.call(own, libc::SYS_socketpair, arguments)?;
    let mut pair = [0; 8];
    child.read(scratch, &mut pair)?;
    let [a, b, c, d, e, f, g, h] = pair;
    Ok([i32::from_ne_bytes([a, b, c, d]), i32::from_ne_bytes([e, f, g, h])])
}

/// Returns a duplicate of a descriptor of another process.
fn take(child: &Tracee, number: i32) -> Result<OwnedFd> {
    let process = pidfd_open(child.pid(), PidfdFlags::empty())?;
    let taken = pidfd_getfd(&process, number, PidfdGetfdFlags::empty());
    taken.context("taking its socket")
}

fn send(socket: &OwnedFd, files: &[BorrowedFd<'_>; FILES]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(files));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(b"F")], &mut control, flags).context("sending it files")?;
    Ok(())
}

/// Returns a descriptor as an argument of a system call.
fn descriptor(number: i32) -> u64 {
    i64::from(number) as u64
}

/// Room for a message with [`FILES`] descriptors, in the memory of the process that receives it:
/// the structures `msghdr` and `iovec` of recvmsg(2), a byte of data, and `cmsghdr` of cmsg(3).
struct Message {
    /// The address of the room.
    address: u64,
}

impl Message {
    /// The place of the `iovec`, behind the `msghdr`.
    const VECTOR_AT: usize = 56;
    /// The place of the data, behind the `iovec`.
    const DATA_AT: usize = Self::VECTOR_AT + 16;
    /// The place of the descriptors with their header, aligned for that.
    const CONTROL_AT: usize = Self::DATA_AT + 8;
    /// The size of the descriptors with their header, of 16 bytes.
    const CONTROL: usize = 16 + 4 * FILES;
    /// The size of the room.
    const SIZE: usize = Self::CONTROL_AT + Self::CONTROL;

    fn bytes(&self) -> [u8; Self::SIZE] {
        let address = |place: usize| self.address + place as u64;
        let mut bytes = [0; Self::SIZE];
        let mut put = |place: usize, value: u64| {
            bytes[place..place + 8].copy_from_slice(&value.to_ne_bytes());
        };
        // msg_iov, msg_iovlen, msg_control, msg_controllen; no name, and flags are for the kernel.
        put(16, address(Self::VECTOR_AT));
        put(24, 1);
        put(32, address(Self::CONTROL_AT));
        put(40, Self::CONTROL as u64);
        // iov_base, iov_len.
        put(Self::VECTOR_AT, address(Self::DATA_AT));
        put(Self::VECTOR_AT + 8, 1);
        bytes
    }
}

/// Returns the descriptors that were received.
///
/// # Errors
/// They are too few, or do not ascend.
fn descriptors(control: &[u8; Message::CONTROL]) -> Result<[i32; FILES]> {
    let (words, _) = control.as_chunks::<4>();
    let mut words = words.iter().map(|word| i32::from_ne_bytes(*word));
    let mut next = || words.next().unwrap_or(-1);
    // The length takes two words.
    let header = [next(), next(), next(), next()];
    if header != [Message::CONTROL as i32, 0, libc::SOL_SOCKET, libc::SCM_RIGHTS] {
        bail!("it did not receive its streams");
    }
    let received = [next(), next(), next(), next()];
    if received[0] < 0 || !received.is_sorted_by(|one, other| one < other) {
        bail!("it did not receive its streams in order");
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(words: [i32; 8]) -> [u8; Message::CONTROL] {
        words.map(i32::to_ne_bytes).concat().try_into().unwrap()
    }

    #[test]
    fn a_message_has_the_kernels_form() {
        assert_eq!(Message::VECTOR_AT, size_of::<libc::msghdr>());
        assert_eq!(Message::CONTROL_AT % align_of::<libc::cmsghdr>(), 0);
        // SAFETY: the function computes with its argument only.
        let length = unsafe { libc::CMSG_LEN(4 * FILES as u32) };
        assert_eq!(Message::CONTROL, length as usize);
        let bytes = Message { address: 0x1000 }.bytes();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let place = |at: usize| 0x1000 + at as u64;
        assert_eq!([word(0), word(8), word(48)], [0; 3]);
        assert_eq!([word(16), word(24)], [place(Message::VECTOR_AT), 1]);
        assert_eq!([word(32), word(40)], [place(Message::CONTROL_AT), 32]);
        let vector = [word(Message::VECTOR_AT), word(Message::VECTOR_AT + 8)];
        assert_eq!(vector, [place(Message::DATA_AT), 1]);
    }

    #[test]
    fn descriptors_are_taken_if_all_have_come() {
        let header = [32, 0, libc::SOL_SOCKET, libc::SCM_RIGHTS];
        let with = |header: [i32; 4], numbers: [i32; 4]| {
            let [a, b, c, d] = header;
            let [e, f, g, h] = numbers;
            descriptors(&control([a, b, c, d, e, f, g, h]))
        };
        assert_eq!(with(header, [5, 6, 9, 10]).unwrap(), [5, 6, 9, 10]);
        for bad in [[-1, 5, 6, 7], [5, 6, 6, 7], [5, 4, 6, 7]] {
            assert!(with(header, bad).is_err(), "{bad:?}");
        }
        for bad in [[28, 0, libc::SOL_SOCKET, libc::SCM_RIGHTS], [32, 0, 0, 1], [0; 4]] {
            assert!(with(bad, [5, 6, 7, 8]).is_err(), "{bad:?}");
        }
    }
}
