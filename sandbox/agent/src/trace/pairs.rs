//! From events to durations.

use std::collections::HashMap;

use slipway_telemetry::Histogram;

/// Beginnings that wait for their ends; more are forgotten, as those of merged requests must be.
const MOST_OPEN: usize = 1 << 16;

/// A command's class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Read,
    Write,
    Flush,
    Other,
}

impl Class {
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    /// Of an opcode of the NVM command set.
    pub fn of_opcode(opcode: u8) -> Self {
        match opcode {
            0 => Self::Flush,
            1 => Self::Write,
            2 => Self::Read,
            _ => Self::Other,
        }
    }

    /// Of the block layer's letters for an operation (`blk_fill_rwbs`) and its sectors.
    pub fn of_letters(letters: &[u8], sectors: u32) -> Self {
        match letters {
            [b'R', ..] => Self::Read,
            [b'F', ..] if sectors == 0 => Self::Flush,
            [b'W', ..] | [b'F', b'W', ..] => Self::Write,
            _ => Self::Other,
        }
    }
}

/// What was seen at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The driver began a command: controller, queue, identifier.
    Setup((u32, u32, u32), Class),
    /// It has its end.
    Completed((u32, u32, u32)),
    /// A thread submitted to the block layer: device, sector.
    Queued((u32, u64), Class, Thread),
    /// The block layer has its end.
    Ended((u32, u64), Class),
    /// A thread entered a system call that may submit or wait.
    Entered(Thread),
    /// It is back in its program.
    Returned(Thread),
}

/// The kernel's number of a thread.
pub type Thread = u32;

/// Durations in ns, by [`Class`].
pub type Latencies = [Histogram; Class::ALL.len()];

/// Pairs beginnings and ends, given in the order of their times.
#[derive(Default)]
pub struct Pairs {
    commands: HashMap<(u32, u32, u32), (u64, Class)>,
    requests: HashMap<((u32, u64), Class), Request>,
    callers: HashMap<Thread, Caller>,
    /// From the driver's beginning to its end.
    pub driver: Latencies,
    /// From the submission to the block layer to its end.
    pub block: Latencies,
    /// From the system call that submitted to the return of the one that brought the end: what a
    /// program waited.
    pub application: Latencies,
    /// What the program spent between its calls, for each of those: half of the time since the
    /// return before the call that submitted, and half of that until the call after the one that
    /// brought the end. A program with one command at a time thus has all of its time counted once.
    pub between: Latencies,
}

/// A request that the block layer has.
struct Request {
    from: u64,
    /// Who submitted it in which system call. None: the kernel for itself, as when it writes back.
    caller: Option<(Thread, Call)>,
}

/// A system call that may submit or wait.
#[derive(Clone, Copy)]
struct Call {
    entered: u64,
    /// How long its thread had been in its program. None: nobody saw it return there.
    before: Option<u64>,
}

/// A thread that makes such calls.
#[derive(Default)]
struct Caller {
    /// The one that it is in.
    call: Option<Call>,
    /// When it was back from the last one.
    returned: Option<u64>,
    /// Requests that ended and of which it does not know yet, by the calls that submitted them.
    unseen: Vec<(Call, Class)>,
    /// Those of which its last call told: how long it had been in its program before.
    told: Vec<(u64, Class)>,
}

impl Pairs {
    /// Takes an event in.
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

    /// Events were lost: a beginning without its end would pair with a later one.
    pub fn forget(&mut self) {
        self.commands.clear();
        self.requests.clear();
        self.callers.clear();
    }

    /// Gives what was counted, of driver, block layer, application and between, and begins anew;
    /// what is under way stays.
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
        // A call that moves nothing, then reads of 100 ns that follow after 10, 20 and 40 ns.
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
