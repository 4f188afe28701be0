//! Requests from other threads.

use std::sync::mpsc;

use slipway_pci::Function;

use super::rig::Setup;
use crate::{Rates, Request};

#[test]
fn requests_are_carried_out_in_order_at_the_next_poll() {
    let mut controller = Setup::new().controller();
    let mailbox = controller.mailbox();
    let (sender, answers) = mpsc::channel();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for number in 0..3 {
                let sender = sender.clone();
                mailbox.post(Request::Threads(Box::new(move |threads| {
                    sender.send((number, threads.queues)).unwrap();
                })));
            }
        });
    });
    assert!(answers.try_recv().is_err(), "nothing runs on the poster's thread");
    controller.poll();
    assert_eq!(answers.try_iter().collect::<Vec<_>>(), [(0, 0), (1, 0), (2, 0)]);
    controller.poll();
    assert!(answers.try_recv().is_err(), "once each");
}

#[test]
fn requests_to_a_controller_that_is_gone_are_dropped() {
    let controller = Setup::new().controller();
    let mailbox = controller.mailbox();
    let (sender, answers) = mpsc::channel();
    let limit = |sender: &mpsc::Sender<_>| {
        let sender = sender.clone();
        Request::Limit(Rates::default(), Box::new(move |done| sender.send(done).unwrap()))
    };
    mailbox.post(limit(&sender));
    drop(controller);
    let late = mailbox.post(limit(&sender));
    drop(sender);
    assert_eq!(answers.recv(), Err(mpsc::RecvError));
    assert!(late.take_back().is_none());
}

#[test]
fn a_request_is_taken_back_until_it_is_begun() {
    let mut controller = Setup::new().controller();
    let mailbox = controller.mailbox();
    let (sender, answers) = mpsc::channel();
    let post = |number: u32| {
        let sender = sender.clone();
        mailbox.post(Request::Threads(Box::new(move |_| sender.send(number).unwrap())))
    };
    let [first, second] = [post(1), post(2)];
    assert!(first.take_back().is_some());
    assert!(first.take_back().is_none(), "once");
    controller.poll();
    assert!(second.take_back().is_none());
    assert_eq!(answers.try_iter().collect::<Vec<_>>(), [2]);
}
