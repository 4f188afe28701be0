//! The thread that makes memory ready for forks (`spares`).
//!
//! It waits for an idle CPU before each part, and works at the default priority, as the thread that
//! zeroes ahead does (`background`): a page fault of its own may hold a lock of the process.

use std::sync::{Arc, Weak};

use slipway_pool_spec::{Page, Request};
use slipway_ram::LateMemory;

use crate::background::wait_for_idle_cpu;
use crate::fork::{Fork, copy_spare};
use crate::make;
use crate::shared::Shared;
use crate::templates::SpareWork;

/// Starts the thread. It ends with the pool.
pub(crate) fn start(shared: &Arc<Shared>) -> std::io::Result<()> {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new().name("pool-spares".into()).spawn(move || run(&weak))?;
    Ok(())
}

fn run(shared: &Weak<Shared>) {
    while let Some(pool) = shared.upgrade() {
        let Some(work) = pool.templates.next_spare(pool.settings.spare_bytes) else { return };
        match make_ready(&pool, &work) {
            Ok(Some(memory)) => pool.templates.put_spare(&work, memory),
            // The template is gone, or its forks need no memory any more.
            Ok(None) => {}
            Err(reason) => {
                tracing::warn!(reason, "no memory is made ready for forks of a template");
                pool.templates.give_up_spares(&work);
            }
        }
    }
}

/// Makes memory for a fork. Returns `None` if it is not wanted any more.
///
/// # Errors
/// The host has too little memory.
fn make_ready(shared: &Shared, work: &SpareWork) -> Result<Option<Arc<LateMemory>>, String> {
    let SpareWork { name, named, near } = work;
    let (bytes, template) = (named.template.len() as u64, Some(*name));
    let request = Request { bytes, page: Page::Base, near: *near, template };
    wait_for_idle_cpu();
    let memory = make::fork(request, &named.template, shared.home_of_fork(*near))?;
    let mut fork = Fork::new(&named.ahead);
    while fork.has_more() {
        wait_for_idle_cpu();
        if !shared.templates.wants_spare(work) {
            return Ok(None);
        }
        let copied = copy_spare(&memory, &mut fork);
        shared.count_copied(copied.map_err(|_| "the host has no memory left")?);
    }
    Ok(Some(memory))
}
