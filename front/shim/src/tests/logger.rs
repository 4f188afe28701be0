//! Tests of the paths of loggers and of their pipes. Loggers themselves are processes of the shim's
//! program: `tests/e2e/74-containerd.sh` runs some.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};

use slipway_sandbox_api::v1::run_in;

use super::*;
use crate::cursor::{Cursor, Stream};
use crate::foreign::has_ended;
use crate::io::{HeldFifos, Output, Paths, open_piped};
use crate::store::{RestartStore, Store};

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn a_path_names_a_program_with_its_words_and_variables() {
    let nerdctl = "/usr/local/bin/nerdctl?_NERDCTL_INTERNAL_LOGGING=%2Fvar%2Flib%2Fnerdctl%2F19";
    let logger = Logger::parse(nerdctl).unwrap();
    assert_eq!(logger.program, "/usr/local/bin/nerdctl");
    assert_eq!(logger.words, ["_NERDCTL_INTERNAL_LOGGING", "/var/lib/nerdctl/19"]);
    assert!(logger.environment.is_empty());
    let path = "/a%20b?one=1+%2B&env.A=x%3Dy&two&one=2&env.CONTAINER_ID=other&&env.A=z&%C3%BC=%25";
    let logger = Logger::parse(path).unwrap();
    assert_eq!(logger.program, "/a b");
    assert_eq!(logger.words, ["one", "1 +", "two", "", "ü", "%"]);
    assert_eq!(logger.environment, pairs(&[("A", "x=y")]));
    assert!(Logger::parse("/bin/x").unwrap().words.is_empty());
}

#[test]
fn what_names_no_program_is_refused_in_one_line() {
    let long = format!("/{}", "x".repeat(LONGEST));
    for wrong in ["", "logger", "?a=b", "/a%2", "/a%zz", "/a?b=%+1", "/a%ff", long.as_str()] {
        let refused = Logger::parse(wrong).unwrap_err();
        assert!(refused.contains("logger") && !refused.contains('\n'), "{refused}");
    }
}

#[test]
fn the_path_of_standard_output_counts() {
    let of = |stdout: &str, stderr: &str| {
        Paths { stdout: stdout.into(), stderr: stderr.into(), ..Paths::default() }
            .logger()
            .is_some()
    };
    assert!(of("binary:///bin/x", "binary:///bin/x") && of("binary:///bin/x", ""));
    assert!(!of("", "binary:///bin/x") && !of("/run/fifo", "") && !of("file:///log", ""));
}

#[tokio::test]
async fn output_goes_nowhere_once_its_logger_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::make(&dir.path().join("state")).unwrap();
    let process = Process::new(String::new(), Paths::default(), run_in::Kind::StdinClosed(true));
    process.keep_in(&RestartStore { store: store.clone(), holder: None }, "one").unwrap();
    let ((reader, stdout), (other, stderr)) =
        (fifo(&process, "stdout").unwrap(), fifo(&process, "stderr").unwrap());
    assert!(store.names("stdout").is_empty() && store.names("stderr").is_empty());
    let (held, cursor) = (HeldFifos::default(), Cursor::default());
    let mut streams = open_piped(&Paths::default(), &held, [stdout, stderr]).unwrap();
    streams.stdout.write(b"kept", Stream::Out, &cursor).await;
    assert_eq!(held.unread(), 4);
    let (mut reader, mut four) = (File::from(reader), [0; 4]);
    reader.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"kept");
    drop((reader, other));
    streams.stdout.write(&vec![0; 1 << 20], Stream::Out, &cursor).await;
    assert!(matches!(streams.stdout, Output::Nothing));
    assert_eq!(cursor.carried(), 4 + (1 << 20));
}

#[tokio::test]
async fn a_logger_that_is_not_ready_says_so_and_another_one_is() {
    let logger = Logger { program: "/bin/logger".into(), ..Logger::default() };
    for (told, expected) in [
        ("", Ok(())),
        ("1", Ok(())),
        (
            "containerd-shim-slipway-v2: No such file\n",
            Err("the logger /bin/logger cannot be run: No such file".to_owned()),
        ),
    ] {
        let (ready, to_ready) = std::io::pipe().unwrap();
        rustix::io::write(&to_ready, told.as_bytes()).unwrap();
        drop(to_ready);
        assert_eq!(logger.ready(ready.into()).await, expected);
    }
}

#[tokio::test]
async fn a_logger_that_does_not_end_is_ended() {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = Pid::from_child(&child);
    let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
    assert!(!has_ended(&descriptor));
    let process = Process::new(String::new(), Paths::default(), run_in::Kind::StdinClosed(true));
    // Without a logger there is nothing to wait for.
    end(&process).await;
    process.held.keep_logger(descriptor.try_clone().unwrap());
    end(&process).await;
    assert!(has_ended(&descriptor));
    child.wait().unwrap();
}

#[test]
fn a_descriptor_takes_a_number_that_was_in_use() {
    let (mut reader, writer) = io::pipe().unwrap();
    let number = reader.try_clone().unwrap().into_raw_fd();
    let placed = place(&writer.into(), number).unwrap();
    assert_eq!(placed.as_raw_fd(), number);
    assert!(rustix::io::fcntl_getfd(&placed).unwrap().is_empty());
    File::from(placed).write_all(b"placed").unwrap();
    let mut six = [0; 6];
    reader.read_exact(&mut six).unwrap();
    assert_eq!(&six, b"placed");
}
