//! The process: from its command line to its end.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::Control;

use crate::args::Args;
use crate::device::{self, Client, PoolMemory};
use crate::filter;
use crate::jail;
use crate::pool::Pool;
use crate::session::Root;

/// Most descriptors of the process. A guest holds one for each inode that it knows.
const MOST_DESCRIPTORS: u64 = 262_144;
/// Descriptors that are not for the guest's files.
const OWN_DESCRIPTORS: u64 = 1024;

/// The time that the endpoint may take to notice the end of its client, after the function's reset.
const NOTICES: Duration = Duration::from_secs(1);
/// Looks at the endpoint after a reset. A guest resets its devices as well.
const LOOKS: usize = 5;

/// Serves until the VMM has disconnected.
///
/// # Errors
/// The failure, in one line.
pub fn run(args: Args) -> Result<(), String> {
    end_on_panic();
    // Before the root is replaced, since it takes /dev/null, and before system calls are refused.
    if !slipway_peer::eventfd::can_raise() {
        return Err("the kernel has no asynchronous I/O context left (fs.aio-max-nr)".to_owned());
    }
    // Before the root is replaced, too: kernels before 6.4 tell it by /proc/self/auxv alone.
    rustix::param::page_size();
    jail::end_first()?;
    // Makes a table in memory, which is refused later.
    let named = args.file.map(PoolMemory::new).transpose()?;
    let most = jail::limit_descriptors(MOST_DESCRIPTORS)?;
    let descriptors = jail::enter()?;
    jail::give_up_rights()?;
    filter::apply()?;
    let resets = Arc::new(Resets::default());
    let settings = Settings { name: "shares".into(), ..Settings::default() };
    let reactor = Reactor::spawn(settings).map_err(|error| format!("no thread: {error}"))?;
    let client = Client {
        user: args.user,
        memory_bytes: args.memory_bytes,
        memory: args.memory,
        named,
        pages: args.pages,
    };
    let most_files = most.saturating_sub(OWN_DESCRIPTORS);
    let root = Root { path: jail::SHARES, descriptors, most_files };
    let told = Arc::clone(&resets);
    let pool = Pool::new(root, Box::new(move || told.note()))?;
    let control = device::serve(&client, args.tag, args.socket, pool, &reactor.handle())?;
    let mut ready = File::from(args.ready);
    ready.write_all(b"ready\n").map_err(|error| format!("nobody waits: {error}"))?;
    drop(ready);
    wait(&control, &resets);
    Ok(())
}

/// Ends the process after a panic of any thread: with a thread less it would fail later.
fn end_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        std::process::abort();
    }));
}

/// Resets of the function that nobody has looked at.
#[derive(Default)]
struct Resets {
    news: Mutex<bool>,
    told: Condvar,
}

impl Resets {
    fn note(&self) {
        *self.news.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.told.notify_all();
    }

    fn wait(&self) {
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        while !std::mem::take(&mut *news) {
            news = self.told.wait(news).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Waits until the endpoint's client has gone. A function is reset when its client goes.
fn wait(control: &Control, resets: &Resets) {
    loop {
        resets.wait();
        for _ in 0..LOOKS {
            if device::is_over(control) {
                return;
            }
            std::thread::sleep(NOTICES / LOOKS as u32);
        }
    }
}
