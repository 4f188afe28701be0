//! The command line, which `slipway-hypervisor` writes. Each value is `fd:N`, a descriptor that the
//! process which starts this one has opened.

use std::ffi::OsString;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use lexopt::Arg::Long;
use rustix::io::FdFlags;

/// The descriptors that the command line names.
#[derive(Debug)]
pub struct Args {
    /// The memory of the guest that there would be: a sealed memfd.
    pub memory: OwnedFd,
    /// The listening socket of the control channel.
    pub control: OwnedFd,
    /// The listening socket of the agent's port.
    pub agent: OwnedFd,
    /// Connections to the vfio-user servers of the functions, in their order on the bus.
    pub functions: Vec<OwnedFd>,
}

/// Parses the command line.
///
/// # Errors
/// The fault in the command line, in one line.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Args, String> {
    let mut parser = lexopt::Parser::from_iter(words);
    let (mut memory, mut control, mut agent, mut functions) = (None, None, None, Vec::new());
    while let Some(arg) = parser.next().map_err(|error| error.to_string())? {
        let Long(name) = arg else { return Err(arg.unexpected().to_string()) };
        let name = name.to_owned();
        let place = match name.as_str() {
            "memory" => &mut memory,
            "control" => &mut control,
            "agent" => &mut agent,
            "function" => {
                functions.push(None);
                functions.last_mut().ok_or("no room")?
            }
            _ => {
                return Err(format!("there is no option --{name}; the daemon starts this program"));
            }
        };
        if place.is_some() {
            return Err(format!("--{name} is given more than once"));
        }
        let value = parser.value().map_err(|error| error.to_string())?;
        *place = Some(inherited(&value)?);
    }
    let needed = |given: Option<OwnedFd>, name: &str| {
        given.ok_or_else(|| format!("--{name} is missing; the daemon starts this program"))
    };
    Ok(Args {
        memory: needed(memory, "memory")?,
        control: needed(control, "control")?,
        agent: needed(agent, "agent")?,
        functions: functions.into_iter().flatten().collect(),
    })
}

/// Returns the descriptor N of `fd:N`.
fn inherited(value: &OsString) -> Result<OwnedFd, String> {
    let number = value.to_str().and_then(|text| text.strip_prefix("fd:"));
    let number = number.and_then(|number| number.parse::<RawFd>().ok()).filter(|one| *one >= 0);
    let number = number.ok_or_else(|| format!("{} is no descriptor, fd:N", value.display()))?;
    // SAFETY: borrowed for one call only, which fails if the descriptor is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)
        .map_err(|errno| format!("descriptor {number} was not inherited: {errno}"))?;
    // SAFETY: the descriptor is open, and the caller of this program gave it to this option alone:
    // nothing else in this process closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    fn parsed(words: &[String]) -> Result<Args, String> {
        parse(std::iter::once("slipway-hollow".into()).chain(words.iter().map(OsString::from)))
    }

    #[test]
    fn descriptors_are_taken_over_in_their_order() {
        let fd = || {
            let file = std::fs::File::open("/dev/null").unwrap();
            format!("fd:{}", OwnedFd::from(file).into_raw_fd())
        };
        let options = ["--memory", "--control", "--agent", "--function", "--function"];
        let words: Vec<String> =
            options.iter().flat_map(|option| [(*option).to_owned(), fd()]).collect();
        assert_eq!(parsed(&words).unwrap().functions.len(), 2);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let refused = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            parsed(&words).expect_err("refused")
        };
        assert!(refused(&[]).contains("--memory is missing"));
        assert!(refused(&["--kernel", "fd:0"]).contains("no option --kernel"));
        assert!(refused(&["--memory", "/dev/null"]).contains("is no descriptor"));
        assert!(refused(&["--memory", "fd:-1"]).contains("is no descriptor"));
        assert!(refused(&["--memory", "fd:999999"]).contains("was not inherited"));
        assert!(refused(&["--memory"]).contains("memory"));
    }
}
