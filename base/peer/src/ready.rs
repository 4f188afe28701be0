//! poll(2) that only looks.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Returns which of `flags` hold of the file now, and beside them whether its peer has hung up or
/// it has failed. It never waits. The result is empty if the kernel cannot tell.
pub fn ready(file: impl AsFd, flags: PollFlags) -> PollFlags {
    let mut asked = [PollFd::new(&file, flags)];
    match poll(&mut asked, Some(&Timespec::default())) {
        Ok(_) => asked[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_pipe_is_ready_when_it_has_bytes_and_hung_up_when_its_writer_is_gone() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        assert!(ready(&reader, PollFlags::IN).is_empty());
        assert_eq!(ready(&writer, PollFlags::OUT), PollFlags::OUT);
        writer.write_all(b"x").unwrap();
        assert_eq!(ready(&reader, PollFlags::IN), PollFlags::IN);
        drop(writer);
        assert_eq!(ready(&reader, PollFlags::empty()), PollFlags::HUP);
    }
}
