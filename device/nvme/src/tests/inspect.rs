//! Views of a controller's threads.

use std::sync::mpsc;

use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::Function;

use super::rig::{HeldDisk, Rig, Setup, ram};
use crate::driver::io;
use crate::{Rate, Rates, Request, ThreadView};

/// Returns the views of all threads, the controller's own first.
fn views(rig: &mut Rig) -> Vec<ThreadView> {
    let threads = rig.controller().home.fleet.len() + 1;
    let mailbox = rig.controller().mailbox();
    let (sender, answers) = mpsc::channel();
    for thread in 0..threads {
        let sender = sender.clone();
        let answer = move |view: ThreadView| sender.send((thread, view)).unwrap();
        mailbox.post(Request::Inspect(thread, Box::new(answer)));
    }
    rig.poll(2);
    let mut views: Vec<_> = answers.try_iter().collect();
    views.sort_by_key(|(thread, _)| *thread);
    assert_eq!(views.len(), threads);
    views.into_iter().map(|(_, view)| view).collect()
}

#[test]
fn an_idle_controller_names_its_queues() {
    let mut rig = Setup::new().rig();
    let views = views(&mut rig);
    let own = views[0].controller.as_ref().unwrap();
    assert_eq!((own.phase.as_str(), own.shutdown.as_str()), ("enabled", "none"));
    assert_eq!((own.cc & 1, own.csts & 1, own.waiting_admin), (1, 1, 0));
    assert!(views[1..].iter().all(|view| view.controller.is_none()));
    assert!(views.iter().all(|view| view.mode == "running" && view.requests == 0));
    let mut queues: Vec<_> = views.iter().flat_map(|view| &view.submission).collect();
    queues.sort_by_key(|queue| queue.id);
    assert_eq!(
        queues.iter().map(|queue| (queue.id, queue.size)).collect::<Vec<_>>(),
        [(0, 32), (1, 64)]
    );
    assert_eq!((queues[1].fetched, queues[1].in_flight, queues[1].completion), (0, 0, 1));
    let pair = views.iter().flat_map(|view| &view.completion).find(|queue| queue.id == 1);
    let pair = pair.unwrap();
    assert_eq!((pair.size, pair.phase, pair.vector, pair.posted), (64, true, Some(1), 0));
}

#[test]
fn what_a_disk_works_on_is_in_flight_and_then_completed() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).alone().rig();
    let address = rig.buffer(512);
    let read = rig.with_data(io(NvmOpcode::Read, 1, 0, 1), address, 512);
    rig.driver.submit(1, read).unwrap();
    rig.poll(1);
    let view = views(&mut rig).remove(0);
    let queue = view.submission.iter().find(|queue| queue.id == 1).unwrap();
    assert_eq!((view.requests, queue.in_flight, queue.fetched), (1, 1, 1));
    assert_eq!((queue.head, queue.tail, queue.doorbell), (1, 1, 1));
    let completion = view.completion.iter().find(|queue| queue.id == 1).unwrap();
    assert_eq!((completion.reserved, completion.posted), (1, 0));
    gate.open();
    rig.settle();
    let view = views(&mut rig).remove(0);
    let queue = view.submission.iter().find(|queue| queue.id == 1).unwrap();
    assert_eq!((view.requests, queue.in_flight), (0, 0));
    let completion = view.completion.iter().find(|queue| queue.id == 1).unwrap();
    assert_eq!((completion.reserved, completion.posted, completion.tail), (0, 1, 1));
}

#[test]
fn limits_and_a_reset_are_seen() {
    let mut rig = Setup::new().rig();
    assert!(views(&mut rig).iter().all(|view| view.held_ns.is_none()));
    let rates = Rates { commands: Some(Rate { per_second: 10, burst: 1 }), bytes: None };
    rig.controller().limit(rates);
    assert!(views(&mut rig).iter().all(|view| view.held_ns == Some(0)));
    rig.controller().reset();
    rig.settle();
    let views = views(&mut rig);
    assert_eq!(views[0].controller.as_ref().unwrap().phase, "disabled");
    assert!(views.iter().all(|view| view.submission.is_empty() && view.mode == "off"));
}

#[test]
fn a_view_goes_through_json_and_back() {
    let mut rig = Setup::new().rig();
    for view in views(&mut rig) {
        let json = serde_json::to_string(&view).unwrap();
        assert_eq!(serde_json::from_str::<ThreadView>(&json).unwrap(), view);
    }
}

#[test]
fn a_thread_that_is_not_there_gives_no_view() {
    let mut rig = Setup::new().rig();
    let (sender, answer) = mpsc::channel();
    let send = move |view: ThreadView| sender.send(view).unwrap();
    rig.controller().mailbox().post(Request::Inspect(99, Box::new(send)));
    rig.poll(1);
    assert!(answer.recv().is_err());
}
