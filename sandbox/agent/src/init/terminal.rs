//! The process's standard streams: a terminal of the container's own, or pipes.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::fs::{FileType, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, open};
use rustix::process::ioctl_tiocsctty;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::user::User;

/// Returns a window size. Values beyond the kernel's 16 bits are cut to its largest.
pub fn size(rows: u32, columns: u32) -> Winsize {
    let cut = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    Winsize { ws_row: cut(rows), ws_col: cut(columns), ws_xpixel: 0, ws_ypixel: 0 }
}

/// Opens a terminal in the container's own devpts, and makes it the controlling terminal and all
/// three standard streams; if `console` is set, also the container's `/dev/console`. Returns the
/// master side.
pub fn open_terminal(size: Winsize, owner: u32, console: bool) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = open("/dev/pts/ptmx", flags, Mode::empty())
        .context("opening a terminal (/dev/pts/ptmx)")?;
    unlockpt(&master).context("unlocking the terminal")?;
    let peer = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = ioctl_tiocgptpeer(&master, peer).context("opening the terminal's other side")?;
    if size.ws_row != 0 || size.ws_col != 0 {
        tcsetwinsize(&master, size).context("setting the terminal's size")?;
    }
    fchown(&slave, Some(Uid::from_raw(owner)), None).context("giving the terminal to its user")?;
    fchmod(&slave, Mode::from_raw_mode(0o620)).context("setting the terminal's mode")?;
    if console {
        make_console(&master)?;
    }
    rustix::stdio::dup2_stdin(&slave)?;
    rustix::stdio::dup2_stdout(&slave)?;
    rustix::stdio::dup2_stderr(&slave)?;
    ioctl_tiocsctty(&slave).context("taking the controlling terminal")?;
    Ok(master)
}

fn make_console(master: &OwnedFd) -> Result<()> {
    let name = rustix::pty::ptsname(master, Vec::new())?;
    open_file("/dev/console", OFlags::CREATE | OFlags::WRONLY)?;
    rustix::mount::mount_bind(name.as_c_str(), "/dev/console").context("mounting /dev/console")
}

fn open_file(path: &str, flags: OFlags) -> Result<OwnedFd> {
    open(path, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::from_raw_mode(0o600))
        .with_context(|| path.to_owned())
}

/// Gives the pipes to the process's user, who may then open `/dev/stdout` and the like.
pub fn give_streams(user: &User) -> Result<()> {
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    for stream in streams {
        let kind = FileType::from_raw_mode(fstat(stream.as_fd())?.st_mode);
        if kind == FileType::Fifo {
            fchown(stream, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))
                .context("giving the standard streams to the user")?;
        }
    }
    Ok(())
}
