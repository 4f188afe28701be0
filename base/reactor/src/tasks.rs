//! The tasks of a reactor.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::{Event, Task, TaskId};

/// The part of a task that a step needs: the task itself, and state that only its steps use.
pub(crate) struct Body {
    pub(crate) id: TaskId,
    pub(crate) task: Box<dyn Task>,
    /// Watched descriptors: the task's tokens with the keys of their epoll events.
    pub(crate) watched: Vec<(u32, u64)>,
    /// Descriptors found ready since the last step.
    pub(crate) events: Vec<Event>,
}

/// The reactor's state of a task.
pub(crate) struct Slot {
    pub(crate) id: TaskId,
    /// `None` during a call into the task.
    pub(crate) body: Option<Box<Body>>,
    pub(crate) deadline: Option<Instant>,
    /// Period of [`Task::stirs`], if the task is swept.
    pub(crate) sweep: Option<Duration>,
    /// Set while the task is in the queue of ready tasks.
    pub(crate) queued: bool,
}

impl Slot {
    pub(crate) fn new(id: TaskId, task: Box<dyn Task>) -> Self {
        let body = Body { id, task, watched: Vec::new(), events: Vec::new() };
        Self { id, body: Some(Box::new(body)), deadline: None, sweep: None, queued: false }
    }
}

/// Tasks, each at a fixed place, so that a step needs no search and moves nothing.
#[derive(Default)]
pub(crate) struct Tasks {
    places: Vec<Option<Slot>>,
    free: Vec<usize>,
    by_id: HashMap<TaskId, usize>,
}

impl Tasks {
    pub(crate) fn insert(&mut self, slot: Slot) -> usize {
        let id = slot.id;
        let place = self.free.pop().unwrap_or(self.places.len());
        if place == self.places.len() {
            self.places.push(None);
        }
        self.places[place] = Some(slot);
        self.by_id.insert(id, place);
        place
    }

    pub(crate) fn remove(&mut self, place: usize) -> Option<Slot> {
        let slot = self.places.get_mut(place)?.take()?;
        self.by_id.remove(&slot.id);
        self.free.push(place);
        Some(slot)
    }

    pub(crate) fn at(&mut self, place: usize) -> Option<&mut Slot> {
        self.places.get_mut(place)?.as_mut()
    }

    pub(crate) fn find(&mut self, id: TaskId) -> Option<(usize, &mut Slot)> {
        let place = *self.by_id.get(&id)?;
        Some((place, self.at(place)?))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}
