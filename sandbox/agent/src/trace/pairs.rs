//! Pairing of events to durations.

use std::collections::HashMap;

use slipway_telemetry::Histogram;

/// The most beginnings that wait for their ends. When there are more, all are dropped; those of
/// merged requests have no end.
const MOST_OPEN: usize = 1 << 16;

/// The class of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Read,
    Write,
    Flush,
    Other,
}

impl Class {
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    /// Returns the class of an opcode of the NVM command set.
    pub fn of_opcode(opcode: u8) -> Self {
        match opcode {
            0 => Self::Flush,
            1 => Self::Write,
            2 => Self::Read,
            _ => Self::Other,
        }
    }

    /// Returns the class of the block layer's letters for an operation (`blk_fill_rwbs`) and its
    /// number of sectors.
    pub fn of_letters(letters: &[u8], sectors: u32) -> Self {
        match letters {
            [b'R', ..] => Self::Read,
            [b'F', ..] if sectors == 0 => Self::Flush,
            [b'W', ..] | [b'F', b'W', ..] => Self::Write,
            _ => Self::Other,
        }
    }
}

/// An event in the guest's I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The driver began a command: controller, queue, identifier.
    Setup((u32, u32, u32), Class),
    /// The driver completed a command: controller, queue, identifier.
    Completed((u32, u32, u32)),
    /// A thread submitted a request to the block layer: device, sector.
    Queued((u32, u64), Class, Thread),
    /// The block layer completed a request: device, sector.
    Ended((u32, u64), Class),
    /// A thread entered a system call that may submit or wait.
    Entered(Thread),
    /// A thread returned from a system call to its program.
    Returned(Thread),
}

/// The kernel's id of a thread.
pub type Thread = u32;

/// Durations in ns, by [`Class`].
pub type Latencies = [Histogram; Class::ALL.len()];

/// The state for pairing beginnings with ends. Events must be added in the order of their times.
#[derive(Default)]
pub struct Pairs {
    commands: HashMap<(u32, u32, u32), (u64, Class)>,
    requests: HashMap<((u32, u64), Class), Request>,
    callers: HashMap<Thread, Caller>,
    /// Durations from the driver's beginning of a command to its completion.
    pub driver: Latencies,
    /// Durations from the submission to the block layer to the completion.
    pub block: Latencies,
    /// The time that a program waited: from the entry of the system call that submitted to the
    /// return of the one that brought the completion.
    pub application: Latencies,
    /// The time that a program spent between its calls, for each command: half of the time since
    /// the return before the call that submitted, and half of the time until the call after the one
    /// that brought the completion. So for a program with one command at a time, all of its time is
    /// counted once.
    pub between: Latencies,
}

/// A request in the block layer.
struct Request {
    from: u64,
    /// The thread and the system call that submitted the request, or `None` if the kernel submitted
    /// it for itself, as for writeback.
    caller: Option<(Thread, Call)>,
}

/// A system call that may submit or wait.
#[derive(Clone, Copy)]
struct Call {
    entered: u64,
    /// The time that the thread had been in its program before the call, or `None` if no return was
    /// seen before it.
    before: Option<u64>,
}

/// The state of a thread that submits or waits.
#[derive(Default)]
struct Caller {
    /// The current system call.
    call: Option<Call>,
    /// The time of the last return from a system call.
    returned: Option<u64>,
    /// Completed requests that the thread does not know of yet, with the calls that submitted them.
    unseen: Vec<(Call, Class)>,
    /// Requests whose completion the last call brought, with the time in the program before the
    /// call that submitted each.
    told: Vec<(u64, Class)>,
}

impl Pairs {
    /// Adds an event.
    pub fn add(&mut self, at_ns: u64, what: What) {
        match what {
            What::Setup(key, class) => {
                make_room(&mut self.commands);
                self.commands.insert(key, (at_ns, class));
            }
            What::Completed(key) => {
                if let Some((from, class)) = self.commands.remove(&key) {
                    self.driver[class as usize].record(at_ns.saturating_sub(from));
                }
            }
            What::Queued(key, class, thread) => {
                make_room(&mut self.requests);
                let call = self.callers.get(&thread).and_then(|caller| caller.call);
                let caller = call.map(|call| (thread, call));
                self.requests.insert((key, class), Request { from: at_ns, caller });
            }
            What::Ended(key, class) => {
                let Some(request) = self.requests.remove(&(key, class)) else { return };
                self.block[class as usize].record(at_ns.saturating_sub(request.from));
                if let Some((thread, call)) = request.caller {
                    let unseen = &mut self.caller(thread).unseen;
                    if unseen.len() < MOST_OPEN {
                        unseen.push((call, class));
                    }
                }
            }
            What::Entered(thread) => self.entered(at_ns, thread),
            What::Returned(thread) => self.returned(at_ns, thread),
        }
    }

    fn caller(&mut self, thread: Thread) -> &mut Caller {
        make_room(&mut self.callers);
        self.callers.entry(thread).or_default()
    }

    fn entered(&mut self, at_ns: u64, thread: Thread) {
        let caller = self.caller(thread);
        let between = caller.returned.map(|returned| at_ns.saturating_sub(returned));
        caller.call = Some(Call { entered: at_ns, before: between });
        let told = std::mem::take(&mut caller.told);
        for (before, class) in told {
            self.between[class as usize].record(before.midpoint(between.unwrap_or(before)));
        }
    }

    fn returned(&mut self, at_ns: u64, thread: Thread) {
        let caller = self.caller(thread);
        caller.call = None;
        caller.returned = Some(at_ns);
        let unseen = std::mem::take(&mut caller.unseen);
        let told = unseen.iter().filter_map(|(call, class)| Some((call.before?, *class)));
        caller.told = told.collect();
        for (call, class) in unseen {
            self.application[class as usize].record(at_ns.saturating_sub(call.entered));
        }
    }

    /// Drops all open beginnings. Call this after events were lost, since a beginning without its
    /// end would pair with a later end.
    pub fn forget(&mut self) {
        self.commands.clear();
        self.requests.clear();
        self.callers.clear();
    }

    /// Returns the durations of driver, block layer, application and between, and resets them. Open
    /// beginnings stay.
    pub fn take(&mut self) -> [Latencies; 4] {
        let all = [&mut self.driver, &mut self.block, &mut self.application, &mut self.between];
        all.map(std::mem::take)
    }
}

fn make_room<K, V>(open: &mut HashMap<K, V>) {
    if open.len() >= MOST_OPEN {
        open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_and_ends_pair_by_their_keys() {
        let mut pairs = Pairs::default();
        pairs.add(85, What::Entered(70));
        pairs.add(90, What::Queued((1, 8), Class::Read, 70));
        pairs.add(100, What::Setup((0, 1, 7), Class::Read));
        pairs.add(110, What::Setup((0, 2, 7), Class::Write));
        pairs.add(150, What::Completed((0, 1, 7)));
        pairs.add(155, What::Ended((1, 8), Class::Read));
        pairs.add(160, What::Returned(70));
        pairs.add(180, What::Completed((0, 2, 7)));
        pairs.add(190, What::Completed((0, 2, 7)));
        pairs.add(191, What::Ended((1, 8), Class::Write));
        let sums = pairs.take().map(|kind| kind.map(|one| one.sum() as u64));
        assert_eq!(sums, [[50, 70, 0, 0], [65, 0, 0, 0], [75, 0, 0, 0], [0; 4]]);
        pairs.add(200, What::Setup((0, 1, 1), Class::Read));
        pairs.forget();
        pairs.add(300, What::Completed((0, 1, 1)));
        assert_eq!(pairs.driver[0].count(), 0);
    }

    #[test]
    fn a_program_may_submit_and_wait_in_two_calls_and_the_kernel_in_none() {
        let mut pairs = Pairs::default();
        pairs.add(10, What::Entered(7));
        pairs.add(11, What::Queued((1, 8), Class::Write, 7));
        pairs.add(12, What::Queued((1, 16), Class::Write, 7));
        pairs.add(15, What::Returned(7));
        pairs.add(20, What::Queued((1, 24), Class::Write, 9));
        for (at, sector) in [(30, 8), (31, 24)] {
            pairs.add(at, What::Ended((1, sector), Class::Write));
        }
        pairs.add(40, What::Entered(7));
        pairs.add(45, What::Ended((1, 16), Class::Write));
        pairs.add(50, What::Returned(7));
        let [_, block, application, _] = pairs.take();
        let write = Class::Write as usize;
        assert_eq!((block[write].count(), application[write].count()), (3, 2));
        assert_eq!(application[write].sum() as u64, 40 + 40);
    }

    #[test]
    fn what_a_program_does_between_its_calls_is_halved_between_its_commands() {
        let mut pairs = Pairs::default();
        // A call that moves no data comes first, then reads of 100 ns, with 10, 20 and 40 ns in the
        // program around them.
        pairs.add(0, What::Entered(7));
        pairs.add(90, What::Returned(7));
        for (from, sector) in [(100, 1), (220, 2)] {
            pairs.add(from, What::Entered(7));
            pairs.add(from + 1, What::Queued((1, sector), Class::Read, 7));
            pairs.add(from + 90, What::Ended((1, sector), Class::Read));
            pairs.add(from + 100, What::Returned(7));
        }
        let read = Class::Read as usize;
        let [_, _, application, between] = pairs.take();
        assert_eq!((application[read].count(), between[read].count()), (2, 1));
        assert_eq!(between[read].sum() as u64, (10 + 20) / 2);
        pairs.add(360, What::Entered(7));
        assert_eq!(pairs.take()[3][read].sum() as u64, (20 + 40) / 2);
    }

    #[test]
    fn the_block_layers_letters() {
        let of = |letters: &str, sectors| Class::of_letters(letters.as_bytes(), sectors);
        assert_eq!(
            (of("R", 8), of("RA", 8), of("WS", 8)),
            (Class::Read, Class::Read, Class::Write)
        );
        assert_eq!((of("FWS", 0), of("FWFS", 8)), (Class::Flush, Class::Write));
        assert_eq!(
            (of("D", 8), of("", 0), of("FF", 0)),
            (Class::Other, Class::Other, Class::Flush)
        );
    }
}
