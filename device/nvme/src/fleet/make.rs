//! Makes a controller's lanes.

use std::task::Waker;

use slipway_pci::Lane;

use super::lane::QueueLane;
use super::{Fleet, choose};
use crate::engine::{IoEngine, IoEngineParts, Role};
use crate::journal::{Journal, SlotNumber, UsedSlot};

/// Makes lanes, at most as many as there are `wakers` and parts of the journal, with the disks that
/// namespaces have for them. Splits the commands in `found`, which are to be carried out again, by
/// the thread that is to serve their queues: those of the home stay in `found`, those of each lane
/// are returned.
pub(crate) fn make(
    fleet: &mut Fleet,
    home: &mut IoEngine,
    found: &mut Vec<UsedSlot>,
    wakers: Vec<Waker>,
) -> (Vec<Box<dyn Lane>>, Vec<Vec<UsedSlot>>) {
    let most = usize::from(home.limits.lanes) - 1;
    let most = home.journal.as_ref().map_or(most, |journal| most.min(journal.parts() - 1));
    let wakers: Vec<Waker> = wakers.into_iter().take(most).collect();
    let mut engines: Vec<IoEngine> = (1..=wakers.len()).map(|lane| of_lane(home, lane)).collect();
    let far = share_out(home, &mut engines, found);
    let mut lanes: Vec<Box<dyn Lane>> = Vec::new();
    for (engine, waker) in engines.into_iter().zip(wakers) {
        let lane = QueueLane::new(engine, fleet.mailbox(), waker);
        fleet.links.push(lane.link());
        lanes.push(Box::new(lane));
    }
    home.namespaces.iter_mut().for_each(|one| one.lanes.clear());
    if !lanes.is_empty() {
        home.role = Role::Home;
    }
    (lanes, far)
}

/// Makes the engine of lane `lane`, counted from 1.
fn of_lane(home: &mut IoEngine, lane: usize) -> IoEngine {
    let namespaces = home.namespaces.iter_mut().filter_map(|one| one.of_lane()).collect();
    let mut engine = IoEngine::new(IoEngineParts {
        memory: home.memory.clone(),
        interrupts: home.interrupts.clone(),
        doorbells: home.doorbells.clone(),
        clock: home.clock.clone(),
        limits: home.limits,
        namespaces,
        journal: home.journal.as_ref().and_then(|journal| journal.part(lane)),
    });
    engine.limiter = home.limiter.clone();
    engine.role = Role::Lane;
    engine
}

/// Splits recovered commands by lane, with journal slots of that lane, and returns them. Commands
/// of the home's queues stay in `found`.
fn share_out(
    home: &mut IoEngine,
    lanes: &mut [IoEngine],
    found: &mut Vec<UsedSlot>,
) -> Vec<Vec<UsedSlot>> {
    let mut far: Vec<Vec<UsedSlot>> = lanes.iter().map(|_| Vec::new()).collect();
    let mut own = Vec::new();
    for mut one in found.drain(..) {
        let queue = home.queues.pair(one.queue);
        let lane = queue.and_then(|(_, queue)| choose(far.len(), queue.id, queue.vector));
        move_slot(home, lanes, lane, &mut one);
        lane.map_or(&mut own, |at| &mut far[at]).push(one);
    }
    *found = own;
    far
}

/// Moves a recovered command's journal slot to the part of the lane, or of the home, that is to
/// carry the command out, if the slot lies in another thread's part.
fn move_slot(home: &mut IoEngine, lanes: &mut [IoEngine], to: Option<usize>, one: &mut UsedSlot) {
    let taker: &mut Option<Journal> = match to {
        Some(at) => &mut lanes[at].journal,
        None => &mut home.journal,
    };
    let Some(journal) = taker else { return };
    if journal.owns(one.slot_number) {
        return;
    }
    let moved = journal.adopt(one);
    if moved == SlotNumber::NONE {
        // More slots than a thread can have: this slot stays in its part.
        return;
    }
    let old = std::mem::replace(&mut one.slot_number, moved);
    let mut journals = lanes.iter_mut().filter_map(|lane| lane.journal.as_mut());
    let owner = journals.find(|journal| journal.owns(old)).or(home.journal.as_mut());
    if let Some(owner) = owner {
        owner.end(old);
    }
}
