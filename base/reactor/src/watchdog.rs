//! The thread that finds reactors that sleep inside a call.
//!
//! No task sleeps in a call on purpose, but a peer can make one sleep: a page fault on memory that
//! the peer takes away at that moment waits in the kernel. The watchdog looks at the threads of all
//! reactors of several tasks at regular times. A reactor of one task
//! ([`exit_when_empty`](crate::Settings::exit_when_empty)) has no other task that could go on, and
//! is not looked at. A thread that is inside the same call at two looks, and asleep at the second
//! one, loses its reactor: a new thread goes on with all other tasks. A thread that is merely not
//! scheduled, on a busy machine, is not asleep and keeps its reactor. A task whose calls each sleep
//! for less than the time between two looks is found asleep at many looks; its thread loses the
//! reactor for that.
//!
//! The thread that goes on is made before it is needed ([`Standby`]): the page fault that a thread
//! sleeps in may hold the lock of the process's mappings for reading, and making a thread takes
//! that lock for writing.
//!
//! The watchdog sleeps while all these reactors do; the first reactor that wakes up wakes it. The
//! flag that it sleeps is set and read in the order of `slipway_ring::sleep`. It is not the word
//! from there, since it is also the condition of the condition variable that the watchdog sleeps
//! on.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::TaskId;
use crate::mailbox::Mailbox;
use crate::run::Run;
use crate::seat::Seat;

/// Time between two looks. A sleeping call is found within twice this time.
const PERIOD: Duration = Duration::from_millis(15);
/// Number of consecutive looks without activity of any reactor after which the watchdog sleeps.
const PATIENCE: u32 = 20;
/// Number of looks in a window, over which sleeps are counted: about a second.
const WINDOW: u32 = 64;
/// Maximum number of looks in a window that may find a task asleep in different calls.
const MOST_ASLEEP: u32 = 8;

/// Bytes of stack that are enough for most steps of a reactor.
const STACK: usize = 64 << 10;

struct Watched {
    seat: Weak<Seat>,
    /// The seat's count of calls at the last look.
    calls: u64,
    /// Number of looks in this window.
    looks: u32,
    /// Tasks that were found asleep in this window, with the number of such looks.
    asleep: Vec<(TaskId, u32)>,
}

/// The channel to a thread that waits for a reactor to go on with.
type Standby = Sender<Box<Run>>;

static STANDBY: Mutex<Option<Standby>> = Mutex::new(None);
static SEATS: Mutex<Vec<Watched>> = Mutex::new(Vec::new());
static WOKEN: Condvar = Condvar::new();
static ASLEEP: AtomicBool = AtomicBool::new(false);

/// Starts the watchdog's thread, once per process.
///
/// # Errors
/// If no thread is left, or the kernel has no membarrier(2).
pub(crate) fn start() -> std::io::Result<()> {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let mut started = STARTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if !*started {
        crate::seat::register()?;
        prepare();
        std::thread::Builder::new().name("watchdog".into()).spawn(run)?;
        *started = true;
    }
    Ok(())
}

/// Watches a seat until the seat is dropped.
pub(crate) fn watch(seat: &Arc<Seat>) {
    let (seat, asleep) = (Arc::downgrade(seat), Vec::new());
    seats().push(Watched { seat, calls: 0, looks: 0, asleep });
    notify();
}

/// Wakes the watchdog if it sleeps. Called by the thread of `seat` after it has slept itself.
pub(crate) fn wake(seat: &Seat) {
    // `notify`'s fence pairs with the one in `sleep_until_woken`: either the watchdog sees the new
    // count, or this thread sees that the watchdog sleeps.
    seat.count();
    notify();
}

fn notify() {
    fence(Ordering::SeqCst);
    if ASLEEP.load(Ordering::Relaxed) {
        ASLEEP.store(false, Ordering::Relaxed);
        drop(seats());
        WOKEN.notify_one();
    }
}

fn run() {
    let mut quiet = 0;
    loop {
        std::thread::sleep(PERIOD);
        quiet = if look() { 0 } else { quiet + 1 };
        if quiet >= PATIENCE {
            sleep_until_woken();
            quiet = 0;
        }
    }
}

/// Sleeps until a reactor's thread wakes up.
fn sleep_until_woken() {
    ASLEEP.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let seats = seats();
    // A reactor that has just woken up may not have seen that the watchdog sleeps.
    if seats.iter().any(Watched::has_moved) {
        ASLEEP.store(false, Ordering::Relaxed);
        return;
    }
    let asleep = WOKEN.wait_while(seats, |_| ASLEEP.load(Ordering::Relaxed));
    drop(asleep.unwrap_or_else(|poisoned| poisoned.into_inner()));
}

/// Looks at all reactors' threads and rescues reactors from sleeping ones. Returns whether any
/// thread has done something since the last look, or is inside a call.
fn look() -> bool {
    let mut asleep = Vec::new();
    let mut moved = false;
    seats().retain_mut(|watched| {
        let Some(seat) = watched.seat.upgrade() else { return false };
        let (calls, task) = seat.look();
        moved |= task.is_some() || calls != watched.calls;
        if let Some(task) = task.filter(|_| is_asleep(seat.thread()))
            && (calls == watched.calls || watched.sleeps_often(task))
        {
            asleep.push((seat, calls));
        }
        watched.calls = calls;
        watched.looks += 1;
        if watched.looks == WINDOW {
            watched.looks = 0;
            watched.asleep.clear();
        }
        true
    });
    for (seat, calls) in asleep {
        if rescue(&seat, calls) {
            let seat = Arc::downgrade(&seat);
            seats().retain(|watched| !watched.seat.ptr_eq(&seat));
        }
    }
    moved
}

impl Watched {
    fn has_moved(&self) -> bool {
        self.seat.upgrade().is_some_and(|seat| {
            let (calls, task) = seat.look();
            task.is_some() || calls != self.calls
        })
    }

    /// Counts that `task` was found asleep. Returns whether it was at too many looks of this
    /// window.
    fn sleeps_often(&mut self, task: TaskId) -> bool {
        let known = self.asleep.iter().position(|(one, _)| *one == task);
        let at = known.unwrap_or_else(|| {
            self.asleep.push((task, 0));
            self.asleep.len() - 1
        });
        self.asleep[at].1 += 1;
        self.asleep[at].1 > MOST_ASLEEP
    }
}

/// Returns whether a thread of this process waits for something in the kernel.
fn is_asleep(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    // The state follows the name, which stands in parentheses and may contain anything.
    stat.is_ok_and(|stat| {
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        matches!(state, Some('S' | 'D'))
    })
}

/// Makes the standby thread for the next stall, if there is none. May wait for another thread's
/// page fault. Without a standby thread the next rescue has to make it.
pub(crate) fn prepare() {
    if standby().is_none()
        && let Some(made) = make_standby()
    {
        *standby() = Some(made);
    }
}

fn make_standby() -> Option<Standby> {
    let (give, given) = channel::<Box<Run>>();
    let builder = std::thread::Builder::new().name("standby".into());
    let made = builder.spawn(move || {
        // Touches the pages of the stack, so that they are present later.
        std::hint::black_box(&mut [0_u8; STACK]);
        if let Ok(run) = given.recv() {
            take_place(run);
        }
    });
    made.is_ok().then_some(give)
}

fn standby() -> MutexGuard<'static, Option<Standby>> {
    STANDBY.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Takes the reactor from a thread that sleeps in the call counted as `calls`, and goes on with it
/// on a new thread. Returns `false` and does nothing if the call has ended, or if no thread or
/// descriptor is left: then the next look tries again.
fn rescue(seat: &Seat, calls: u64) -> bool {
    let Ok(mailbox) = Mailbox::new() else { return false };
    let mailbox = Arc::new(mailbox);
    // The new thread must exist before the reactor is taken, since the reactor cannot be given
    // back.
    let waiting = standby().take();
    let Some(give) = waiting.or_else(make_standby) else { return false };
    let Some(mut run) = seat.take_over(mailbox.clone(), calls) else {
        *standby() = Some(give);
        return false;
    };
    let on_stall = run.settings.on_stall.clone();
    if run.abandon_called(mailbox).is_some() {
        on_stall("a task slept in a step; it has a thread of its own now");
    }
    // Cannot fail: the thread waits for the reactor.
    let _ = give.send(run);
    true
}

/// Runs a reactor that was taken from its thread, under that thread's name and on its CPU.
fn take_place(run: Box<Run>) {
    let settings = run.settings.clone();
    if let Ok(name) = std::ffi::CString::new(settings.name.as_bytes()) {
        let _ = rustix::thread::set_name(&name);
    }
    let _ = crate::run::pin(settings.cpu);
    crate::run::drive(run);
}

fn seats() -> MutexGuard<'static, Vec<Watched>> {
    SEATS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
