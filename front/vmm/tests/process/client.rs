//! A client of the control socket, and the program that serves it.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::pipe::PipeFlags;
use serde_json::{Value, json};

/// A program that runs, and is killed when the test ends.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A page of a guest's memory, with its offset.
pub(crate) type Page = (u64, Vec<u8>);

/// Returns the pages of a stream of one round.
fn pages_of(reading: JoinHandle<Vec<u8>>) -> Vec<Page> {
    let stream = reading.join().unwrap();
    let (records, end) = stream.split_at(stream.len() - 8);
    assert_eq!(end, u64::MAX.to_le_bytes());
    let page = |record: &[u8]| {
        let (offset, page) = record.split_first_chunk::<8>().unwrap();
        (u64::from_le_bytes(*offset), page.to_vec())
    };
    let pages: Vec<Page> = records.chunks(8 + 4096).map(page).collect();
    assert!(pages.is_sorted_by(|(one, _), (other, _)| one < other), "ascending");
    assert!(pages.iter().all(|(_, page)| page.len() == 4096));
    pages
}

/// A client of a control socket.
pub(crate) struct Client {
    pub(crate) lines: BufReader<UnixStream>,
    events: Vec<String>,
}

impl Client {
    /// Connects as soon as the socket is there.
    pub(crate) fn connect(path: &Path) -> Self {
        for _ in 0..6000 {
            if let Ok(stream) = UnixStream::connect(path) {
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let mut client = Self { lines: BufReader::new(stream), events: Vec::new() };
                assert!(client.read().get("QMP").is_some());
                assert_eq!(client.execute("qmp_capabilities"), json!({}));
                return client;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no control socket after a minute");
    }

    pub(crate) fn read(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.lines.read_line(&mut line).unwrap() > 0, "the connection ended");
        serde_json::from_str(&line).unwrap()
    }

    /// Runs a command and returns its result. Events that come before it are kept.
    pub(crate) fn ask(&mut self, line: &str) -> Value {
        self.lines.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> Value {
        loop {
            let answer = self.read();
            match answer.get("event") {
                Some(name) => self.events.push(name.as_str().unwrap().to_owned()),
                None => return answer,
            }
        }
    }

    /// Runs `device_add` with a connection to the server at `socket`.
    pub(crate) fn plug(&mut self, name: &str, socket: &Path) -> Value {
        self.begin_to_plug(name, socket);
        self.answer()
    }

    /// Sends `device_add` with a connection to the server at `socket`.
    pub(crate) fn begin_to_plug(&mut self, name: &str, socket: &Path) {
        let arguments = json!({ "driver": "vfio-user-pci", "id": name });
        let command = json!({ "execute": "device_add", "arguments": arguments });
        let connection = UnixStream::connect(socket).unwrap();
        self.send_with(&command, &[connection.as_fd()]);
    }

    /// Sends a command with at most three descriptors.
    pub(crate) fn send_with(&mut self, command: &Value, files: &[BorrowedFd<'_>]) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        assert!(attached.push(SendAncillaryMessage::ScmRights(files)));
        let line = format!("{command}\n");
        let (control, bytes) = (self.lines.get_ref(), [IoSlice::new(line.as_bytes())]);
        rustix::net::sendmsg(control, &bytes, &mut attached, SendFlags::empty()).unwrap();
    }

    /// Runs `slipway-save` with these descriptors.
    pub(crate) fn save(&mut self, files: &[BorrowedFd<'_>]) -> Value {
        self.send_with(&json!({ "execute": "slipway-save" }), files);
        self.answer()
    }

    /// Runs `slipway-save` with `state` and a pipe. Returns the answer, and the pages of memory
    /// that came through the pipe, by their offsets.
    pub(crate) fn save_with_memory(&mut self, state: BorrowedFd<'_>) -> (Value, Vec<Page>) {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let reading = std::thread::spawn(move || {
            let mut stream = Vec::new();
            File::from(reader).read_to_end(&mut stream).unwrap();
            stream
        });
        let answer = self.save(&[state, writer.as_fd()]);
        drop(writer);
        let pages = pages_of(reading);
        assert!(pages.iter().all(|(_, page)| *page != [0; 4096]));
        (answer, pages)
    }

    /// Runs `slipway-copy-ahead`, and applies the pages of all rounds to `copy`. Returns the number
    /// of rounds.
    pub(crate) fn copy_ahead(&mut self, copy: BorrowedFd<'_>) -> usize {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let reading = std::thread::spawn(move || {
            let mut stream = Vec::new();
            File::from(reader).read_to_end(&mut stream).unwrap();
            stream
        });
        self.send_with(&json!({ "execute": "slipway-copy-ahead" }), &[writer.as_fd()]);
        drop(writer);
        let answer = self.answer();
        assert!(answer["return"]["last"].is_u64(), "{answer}");
        let stream = reading.join().unwrap();
        let (mut rest, mut rounds) = (stream.as_slice(), 0);
        while let Some((head, behind)) = rest.split_first_chunk::<8>() {
            rest = match u64::from_le_bytes(*head) {
                u64::MAX => {
                    assert!(behind.is_empty(), "the end is the end");
                    return rounds;
                }
                offset if offset == u64::MAX - 1 => {
                    rounds += 1;
                    behind
                }
                offset => {
                    let (page, behind) = behind.split_at(4096);
                    assert_eq!(rustix::io::pwrite(copy, page, offset).unwrap(), page.len());
                    behind
                }
            };
        }
        panic!("a stream without an end");
    }

    /// Runs `slipway-save` for the rest of the memory, and applies it to `copy`. Returns the answer
    /// and the number of pages.
    pub(crate) fn save_rest(
        &mut self,
        state: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
    ) -> (Value, usize) {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let reading = std::thread::spawn(move || {
            let mut stream = Vec::new();
            File::from(reader).read_to_end(&mut stream).unwrap();
            stream
        });
        let command = json!({ "execute": "slipway-save", "arguments": { "rest": true } });
        self.send_with(&command, &[state, writer.as_fd()]);
        drop(writer);
        let answer = self.answer();
        let pages = pages_of(reading);
        for (offset, page) in &pages {
            assert_eq!(rustix::io::pwrite(copy, page, *offset).unwrap(), page.len());
        }
        (answer, pages.len())
    }

    pub(crate) fn unplug(&mut self, name: &str) -> Value {
        self.ask(&json!({ "execute": "device_del", "arguments": { "id": name } }).to_string())
    }

    pub(crate) fn execute(&mut self, command: &str) -> Value {
        let answer = self.ask(&json!({ "execute": command, "id": 1 }).to_string());
        assert_eq!(answer["id"], 1, "{answer}");
        answer["return"].clone()
    }

    pub(crate) fn exits(&mut self) -> u64 {
        self.execute("slipway-statistics")["exits"]["port_write"].as_u64().unwrap()
    }

    pub(crate) fn event(&mut self) -> Value {
        if self.events.is_empty() {
            return self.read()["event"].clone();
        }
        self.events.remove(0).into()
    }
}
