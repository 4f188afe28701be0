//! The status of a process that may have stopped itself (proc_pid_status(5)).

/// The part of a process's status that decides whether it can be forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The letter of its state: "T" once it is stopped by a signal.
    state: char,
    /// The process whose child it is.
    pub parent: i32,
    /// The number of its threads.
    pub threads: u32,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

impl Status {
    /// Reads the status of a process. Returns `None` if there is no such process.
    pub fn read(pid: i32) -> Option<Status> {
        parse(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    /// Returns whether a signal has stopped the process, and no tracer has it.
    pub fn is_stopped(self) -> bool {
        self.state == 'T'
    }
}

fn parse(text: &str) -> Option<Status> {
    let number = |name: &str, at: usize| -> Option<u32> { word(text, name, at)?.parse().ok() };
    Some(Status {
        state: word(text, "State", 0)?.chars().next()?,
        parent: word(text, "PPid", 0)?.parse().ok()?,
        threads: number("Threads", 0)?,
        // The real one comes first.
        uid: number("Uid", 1)?,
        gid: number("Gid", 1)?,
    })
}

/// Returns a word of the field `name`.
fn word<'a>(text: &'a str, name: &str, at: usize) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(field, _)| *field == name)?;
    value.split_whitespace().nth(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_by_its_names() {
        let text = "Name:\tState: T\\n\nState:\tT (stopped)\nPPid:\t3\nUid:\t1\t2\t3\t4\n\
            Gid:\t5\t6\t7\t8\nThreads:\t9\n";
        let status = parse(text).unwrap();
        assert_eq!(status, Status { state: 'T', parent: 3, threads: 9, uid: 2, gid: 6 });
        assert!(status.is_stopped());
        let traced = text.replace("T (stopped)", "t (tracing stop)");
        assert!(!parse(&traced).unwrap().is_stopped());
        assert_eq!(parse("State:\tT (stopped)\n"), None);
        let own = Status::read(std::process::id() as i32).unwrap();
        assert!(own.threads >= 1 && !own.is_stopped());
        assert_eq!(Status::read(i32::MAX), None);
    }
}
