//! Jobs from other threads.

use std::sync::mpsc;

use slipway_pci::Function;

use super::rig::Setup;

#[test]
fn jobs_run_in_order_at_the_next_poll() {
    let mut controller = Setup::new().controller();
    let mailbox = controller.mailbox();
    let (sender, answers) = mpsc::channel();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for number in 0..3 {
                let sender = sender.clone();
                mailbox.post(move |controller| {
                    sender.send((number, controller.requests_in_flight())).unwrap();
                });
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
fn jobs_for_a_controller_that_is_gone_are_dropped() {
    let controller = Setup::new().controller();
    let mailbox = controller.mailbox();
    let (sender, answers) = mpsc::channel::<()>();
    let waits = sender.clone();
    mailbox.post(move |_| waits.send(()).unwrap());
    drop(controller);
    mailbox.post(move |_| sender.send(()).unwrap());
    assert_eq!(answers.recv(), Err(mpsc::RecvError));
}
