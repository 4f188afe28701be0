//! The kernel's tracepoints, enabled in a tracefs instance of our own, so that others can trace at
//! the same time.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};

use super::pairs::{Class, Pairs, What};
use super::ring::{self, u32_at, u64_at};

const INSTANCE: &str = "instances/slipway";
/// The size of each CPU's ring in KiB. A command makes four events of 60 to 100 bytes, and two for
/// a system call.
const RING_KIB: &str = "2048";
/// The size of the buffer for pages of a ring, as large as the largest page.
const PAGE: usize = 64 << 10;
/// The most pages of one CPU that are read in a round, since other work waits meanwhile.
const ROUND: usize = 64;

/// A tracepoint: its id, and the offsets of the fields in its records.
struct Event {
    id: u16,
    fields: Vec<(String, usize)>,
}

impl Event {
    fn open(instance: &Path, name: &str) -> Result<Self> {
        let path = instance.join("events").join(name).join("format");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("the kernel has no tracepoint {name}"))?;
        Self::parse(&text).with_context(|| format!("the format of tracepoint {name}"))
    }

    fn parse(text: &str) -> Option<Self> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID:"))?.trim().parse().ok()?;
        let fields = text.lines().filter_map(|line| {
            let (field, rest) = line.trim().strip_prefix("field:")?.split_once(';')?;
            let name = field.split_whitespace().last()?.split('[').next()?;
            let offset = rest.trim().strip_prefix("offset:")?.split(';').next()?;
            Some((name.to_owned(), offset.parse().ok()?))
        });
        Some(Self { id, fields: fields.collect() })
    }

    fn offset(&self, name: &str) -> Result<usize> {
        let field = self.fields.iter().find(|(field, _)| field == name);
        field.map(|(_, offset)| *offset).with_context(|| format!("no field {name}"))
    }

    fn offsets<const N: usize>(&self, names: [&str; N]) -> Result<[usize; N]> {
        let mut offsets = [0; N];
        for (offset, name) in offsets.iter_mut().zip(names) {
            *offset = self.offset(name)?;
        }
        Ok(offsets)
    }
}

/// The tracepoints that are used, each with its id and the offsets of its fields.
struct Layout {
    /// Offsets of ctrl_id, qid, cid, opcode.
    setup: (u16, [usize; 4]),
    /// Offsets of ctrl_id, qid, cid.
    completed: (u16, [usize; 3]),
    /// Offsets of dev, sector, nr_sector, rwbs.
    queued: (u16, [usize; 4]),
    ended: (u16, [usize; 4]),
    /// Ids of the system call events, or `None` if the kernel does not trace them.
    calls: Option<[u16; 2]>,
}

const TRACEPOINTS: [&str; 4] = [
    "nvme/nvme_setup_cmd",
    "nvme/nvme_complete_rq",
    "block/block_bio_queue",
    "block/block_rq_complete",
];

/// The tracepoints of entering a system call and of returning from it.
const CALLS: [&str; 2] = ["raw_syscalls/sys_enter", "raw_syscalls/sys_exit"];

/// The system calls in which programs submit I/O and wait for it.
const IO_CALLS: [libc::c_long; 15] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
];

/// The offset of the thread id in every record (`common_pid`).
const THREAD: usize = 4;

/// Returns the filter that passes [`IO_CALLS`] of other threads, since reading the rings must not
/// fill them.
fn calls_of_others() -> String {
    let ids = IO_CALLS.map(|call| format!("id == {call}")).join(" || ");
    format!("common_pid != {} && ({ids})", rustix::thread::gettid().as_raw_nonzero())
}

impl Layout {
    fn open(instance: &Path) -> Result<Self> {
        let [setup, completed, queued, ended] = TRACEPOINTS;
        let [setup, completed] = [Event::open(instance, setup)?, Event::open(instance, completed)?];
        let [queued, ended] = [Event::open(instance, queued)?, Event::open(instance, ended)?];
        let block = ["dev", "sector", "nr_sector", "rwbs"];
        Ok(Self {
            setup: (setup.id, setup.offsets(["ctrl_id", "qid", "cid", "opcode"])?),
            completed: (completed.id, completed.offsets(["ctrl_id", "qid", "cid"])?),
            queued: (queued.id, queued.offsets(block)?),
            ended: (ended.id, ended.offsets(block)?),
            calls: Self::calls(instance),
        })
    }

    fn calls(instance: &Path) -> Option<[u16; 2]> {
        let [entered, returned] = CALLS.map(|name| Event::open(instance, name).ok());
        Some([entered?.id, returned?.id])
    }

    /// Parses a record. Returns `None` for other events and for admin commands.
    fn what(&self, record: &[u8]) -> Option<What> {
        let id = u32_at(record, 0)? as u16;
        let at = |offset: usize| u32_at(record, offset);
        if id == self.setup.0 {
            let [controller, queue, cid, opcode] = self.setup.1;
            // The command identifier is 16 bits wide in this event, and 32 bits in the completion.
            let key = (at(controller)?, at(queue)?, at(cid)? & 0xffff);
            let class = Class::of_opcode(*record.get(opcode)?);
            return (key.1 > 0).then_some(What::Setup(key, class));
        }
        if id == self.completed.0 {
            let [controller, queue, cid] = self.completed.1;
            return Some(What::Completed((at(controller)?, at(queue)?, at(cid)? & 0xffff)));
        }
        if let Some([entered, returned]) = self.calls {
            match id {
                id if id == entered => return Some(What::Entered(at(THREAD)?)),
                id if id == returned => return Some(What::Returned(at(THREAD)?)),
                _ => {}
            }
        }
        let queued = id == self.queued.0;
        if !queued && id != self.ended.0 {
            return None;
        }
        let [dev, sector, count, letters] = if queued { self.queued.1 } else { self.ended.1 };
        let key = (at(dev)?, u64_at(record, sector)?);
        let class = Class::of_letters(record.get(letters..)?, at(count)?);
        Some(match queued {
            true => What::Queued(key, class, at(THREAD)?),
            false => What::Ended(key, class),
        })
    }
}

/// A running trace, which stops when this is dropped.
pub struct Tracing {
    instance: PathBuf,
    layout: Layout,
    rings: Vec<File>,
    page: Vec<u8>,
    /// Events that were read, but are newer than the beginning of the last read. A ring that was
    /// read earlier may still have older ones.
    held: Vec<(u64, What)>,
    /// The number of times that the kernel dropped events that were not read in time.
    pub losses: u64,
}

impl Tracing {
    /// Starts a trace. Returns `None` if another one runs.
    ///
    /// # Errors
    /// The kernel has no tracefs, or lacks one of these tracepoints.
    pub fn start(sysfs: &Path) -> Result<Option<Self>> {
        let root = sysfs.join("kernel/tracing");
        if !root.join("events").is_dir() {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount("tracefs", &root, "tracefs", flags, c"").context("mounting tracefs")?;
        }
        let instance = root.join(INSTANCE);
        match std::fs::create_dir(&instance) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(None),
            made => made.context("an instance of tracefs")?,
        }
        match Self::set_up(&instance) {
            Ok((layout, rings)) => Ok(Some(Self {
                instance,
                layout,
                rings,
                page: vec![0; PAGE],
                held: Vec::new(),
                losses: 0,
            })),
            Err(error) => {
                let _ = std::fs::remove_dir(&instance);
                Err(error)
            }
        }
    }

    fn set_up(instance: &Path) -> Result<(Layout, Vec<File>)> {
        let layout = Layout::open(instance)?;
        put(instance, "trace_clock", "mono")?;
        put(instance, "buffer_size_kb", RING_KIB)?;
        for tracepoint in TRACEPOINTS {
            put(instance, &format!("events/{tracepoint}/enable"), "1")?;
        }
        if layout.calls.is_some() {
            let filter = calls_of_others();
            for tracepoint in CALLS {
                put(instance, &format!("events/{tracepoint}/filter"), &filter)?;
                put(instance, &format!("events/{tracepoint}/enable"), "1")?;
            }
        }
        let mut rings = Vec::new();
        for entry in std::fs::read_dir(instance.join("per_cpu"))? {
            let path = entry?.path().join("trace_pipe_raw");
            let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            rings.push(File::options().read(true).custom_flags(flags).open(path)?);
        }
        Ok((layout, rings))
    }

    /// Adds the events until now to `pairs`.
    pub fn read(&mut self, pairs: &mut Pairs) {
        let now = super::now();
        let mut lost = false;
        for ring in &mut self.rings {
            for _ in 0..ROUND {
                let length = match ring.read(&mut self.page) {
                    Ok(length) if length > 0 => length,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    _ => break,
                };
                let (layout, held) = (&self.layout, &mut self.held);
                lost |= ring::events(&self.page[..length], |event| {
                    held.extend(layout.what(event.record).map(|what| (event.at_ns, what)));
                });
            }
        }
        if lost {
            self.losses += 1;
            pairs.forget();
        }
        self.held.sort_by_key(|(at, _)| *at);
        let ready = self.held.partition_point(|(at, _)| *at <= now);
        for (at, what) in self.held.drain(..ready) {
            pairs.add(at, what);
        }
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        self.rings.clear();
        // Removing the instance disables its events; the tracepoints are no-ops again then.
        if let Err(error) = std::fs::remove_dir(&self.instance) {
            crate::log!("{}: {error}", self.instance.display());
        }
    }
}

fn put(instance: &Path, file: &str, value: &str) -> Result<()> {
    let open = File::options().write(true).open(instance.join(file));
    open.and_then(|mut file| file.write_all(value.as_bytes())).with_context(|| file.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: &str = "name: nvme_complete_rq\nID: 1259\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
        \tfield:char disk[32];\toffset:8;\tsize:32;\tsigned:1;\n\
        \tfield:int ctrl_id;\toffset:40;\tsize:4;\tsigned:1;\n\
        \tfield:int qid;\toffset:44;\tsize:4;\tsigned:1;\n\
        \tfield:int cid;\toffset:48;\tsize:4;\tsigned:1;\n\n\
        print fmt: \"nvme%d\", REC->ctrl_id\n";

    #[test]
    fn a_format_names_the_fields_places() {
        let event = Event::parse(FORMAT).unwrap();
        assert_eq!(event.id, 1259);
        assert_eq!(event.offsets(["ctrl_id", "qid", "cid", "disk"]).unwrap(), [40, 44, 48, 8]);
        assert!(event.offset("dev").is_err() && Event::parse("name: x\n").is_none());
    }

    #[test]
    fn records_tell_what_happened() {
        let layout = Layout {
            setup: (1, [4, 8, 12, 16]),
            completed: (2, [4, 8, 12]),
            queued: (3, [4, 8, 16, 20]),
            ended: (4, [4, 8, 16, 20]),
            calls: Some([5, 6]),
        };
        let record = |id: u16, words: [u32; 5]| {
            let words = [id.into()].into_iter().chain(words);
            words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        let what = |id, words| layout.what(&record(id, words));
        assert_eq!(what(1, [0, 3, 9, 1, 0]), Some(What::Setup((0, 3, 9), Class::Write)));
        assert_eq!(what(1, [0, 0, 9, 1, 0]), None, "an admin command");
        assert_eq!(what(2, [0, 3, 9, 0, 0]), Some(What::Completed((0, 3, 9))));
        let letters = u32::from_le_bytes(*b"RA\0\0");
        assert_eq!(what(3, [5, 64, 0, 8, letters]), Some(What::Queued((5, 64), Class::Read, 5)));
        assert_eq!(what(4, [5, 64, 0, 8, letters]), Some(What::Ended((5, 64), Class::Read)));
        assert_eq!(what(5, [77, 0, 0, 0, 0]), Some(What::Entered(77)));
        assert_eq!(what(6, [77, 0, 0, 0, 0]), Some(What::Returned(77)));
        assert_eq!(what(9, [0; 5]), None);
        assert_eq!(layout.what(&[1, 0]), None);
        assert_eq!(layout.what(&record(4, [5, 64, 0, 8, letters])[..18]), None);
    }
}
