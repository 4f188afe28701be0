//! Tests of reactors with real threads, pipes and eventfds.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipway_reactor::{Context, Interest, Reactor, Settings, Step, Task};

/// A task made of a closure and an optional descriptor to watch.
struct Closure<F>(Option<OwnedFd>, F);

impl<F: FnMut(&mut Context<'_>) -> Step + Send> Task for Closure<F> {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        match &self.0 {
            Some(file) => context.watch(file.as_fd(), Interest::Read, 7),
            None => Ok(()),
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        (self.1)(context)
    }
}

fn task(f: impl FnMut(&mut Context<'_>) -> Step + Send + 'static) -> Box<dyn Task> {
    Box::new(Closure(None, f))
}

fn next<T>(receiver: &Receiver<T>) -> T {
    receiver.recv_timeout(Duration::from_secs(60)).expect("the reactor does nothing")
}

fn reactor(poll_budget: Duration) -> Reactor {
    Reactor::spawn(Settings { poll_budget, ..Settings::default() }).unwrap()
}

#[test]
fn a_descriptor_wakes_its_task_and_only_that() {
    let reactor = reactor(Duration::ZERO);
    let (sender, receiver) = channel();
    let others = Arc::new(AtomicUsize::new(0));
    for _ in 0..1000 {
        let others = Arc::clone(&others);
        reactor
            .handle()
            .add(task(move |_| {
                others.fetch_add(1, Ordering::Relaxed);
                Step::Idle(None)
            }))
            .unwrap();
    }
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = reader.try_clone().unwrap();
    let step = move |context: &mut Context<'_>| {
        for event in context.events() {
            assert!(event.readable && event.token == 7);
            rustix::io::read(&file, &mut [0u8; 1]).unwrap();
            sender.send(()).unwrap();
        }
        Step::Idle(None)
    };
    reactor.handle().add(Box::new(Closure(Some(reader), step))).unwrap();
    for _ in 0..100 {
        rustix::io::write(&writer, b"x").unwrap();
        next(&receiver);
    }
    assert_eq!(others.load(Ordering::Relaxed), 1000, "each polled once, after its start");
}

#[test]
fn deadlines_come_in_order_and_not_early() {
    let reactor = reactor(Duration::from_micros(20));
    let (sender, receiver) = channel();
    let start = Instant::now();
    for millis in [30u64, 10, 20] {
        let sender = sender.clone();
        let at = start + Duration::from_millis(millis);
        reactor
            .handle()
            .add(task(move |context| {
                if context.now() < at {
                    return Step::Idle(Some(at));
                }
                sender.send(millis).unwrap();
                Step::Done
            }))
            .unwrap();
    }
    assert_eq!([next(&receiver), next(&receiver), next(&receiver)], [10, 20, 30]);
}

#[test]
fn a_busy_task_does_not_starve_messages_or_others() {
    let reactor = reactor(Duration::ZERO);
    let (sender, receiver) = channel();
    reactor.handle().add(task(|_| Step::Busy)).unwrap();
    reactor
        .handle()
        .add(task(move |_| {
            sender.send(()).unwrap();
            Step::Done
        }))
        .unwrap();
    next(&receiver);
}

#[test]
fn others_are_quick_for_who_does_little_and_not_for_who_is_behind() {
    for (step, quick) in [(Step::Busy, true), (Step::Behind, false), (Step::Looking, false)] {
        let reactor = reactor(Duration::ZERO);
        let (sender, receiver) = channel();
        reactor.handle().add(task(move |_| step)).unwrap();
        let mut steps = 0;
        let other = move |context: &mut Context<'_>| {
            steps += 1;
            // The first steps may come before the other task's first one.
            if steps < 10 {
                return Step::Behind;
            }
            sender.send(context.is_shared()).unwrap();
            Step::Done
        };
        reactor.handle().add(task(other)).unwrap();
        assert_eq!(next(&receiver), quick, "{step:?}");
    }
}

#[test]
fn a_panic_ends_the_task_and_is_told() {
    let (told, panics) = channel();
    let told = Mutex::new(told);
    let on_panic = Arc::new(move |text: &str| told.lock().unwrap().send(text.to_owned()).unwrap());
    let reactor = Reactor::spawn(Settings { on_panic, ..Settings::default() }).unwrap();
    let (alive, dropped) = channel::<()>();
    reactor
        .handle()
        .add(task(move |_| {
            let _keep = &alive;
            panic!("as the test wants it")
        }))
        .unwrap();
    assert_eq!(next(&panics), "it panicked: as the test wants it");
    assert!(dropped.recv_timeout(Duration::from_secs(60)).is_err());
    let (sender, receiver) = channel();
    reactor
        .handle()
        .add(task(move |_| {
            sender.send(()).unwrap();
            Step::Done
        }))
        .unwrap();
    next(&receiver);
}

#[test]
fn wakes_from_many_threads_are_not_lost() {
    let reactor = reactor(Duration::ZERO);
    let steps = Arc::new(AtomicUsize::new(0));
    let id = {
        let steps = Arc::clone(&steps);
        reactor.handle().add(task(move |_| {
            steps.fetch_add(1, Ordering::SeqCst);
            Step::Idle(None)
        }))
    }
    .unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let before = steps.load(Ordering::SeqCst);
                    reactor.handle().wake(id).unwrap();
                    let limit = Instant::now() + Duration::from_secs(60);
                    while steps.load(Ordering::SeqCst) == before {
                        assert!(Instant::now() < limit, "a wake-up was lost");
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
}

#[test]
fn dropping_the_reactor_drops_its_tasks() {
    struct Tells(Sender<&'static str>);
    impl Drop for Tells {
        fn drop(&mut self) {
            let _ = self.0.send("dropped");
        }
    }
    let (sender, receiver) = channel();
    let tells = Tells(sender);
    let reactor = reactor(Duration::ZERO);
    let handle = reactor.handle();
    handle
        .add(task(move |_| {
            let _keep = &tells;
            Step::Idle(None)
        }))
        .unwrap();
    drop(reactor);
    assert_eq!(receiver.try_recv(), Ok("dropped"));
    assert!(handle.add(task(|_| Step::Done)).is_err());
}

struct Mover {
    to: Option<slipway_reactor::Handle>,
    threads: Sender<std::thread::ThreadId>,
}

impl Task for Mover {
    fn poll(&mut self, _: &mut Context<'_>) -> Step {
        self.threads.send(std::thread::current().id()).unwrap();
        if self.to.is_some() { Step::Leave } else { Step::Done }
    }

    fn leave(mut self: Box<Self>) {
        let to = self.to.take().unwrap();
        to.add(self).unwrap();
    }
}

#[test]
fn a_task_moves_to_another_reactor() {
    let (first, second) = (reactor(Duration::ZERO), reactor(Duration::ZERO));
    let (threads, receiver) = channel();
    first.handle().add(Box::new(Mover { to: Some(second.handle()), threads })).unwrap();
    assert_ne!(next(&receiver), next(&receiver));
}

#[test]
fn a_detached_reactor_ends_with_its_task() {
    let (sender, receiver) = channel();
    let step = move |_: &mut Context<'_>| {
        sender.send(()).unwrap();
        Step::Done
    };
    let handle = Reactor::detached(Settings::default(), task(step)).ok().unwrap();
    next(&receiver);
    let limit = Instant::now() + Duration::from_secs(60);
    while handle.add(task(|_| Step::Done)).is_ok() {
        assert!(Instant::now() < limit, "the thread goes on");
        std::thread::yield_now();
    }
}

#[test]
fn a_reactor_of_one_task_has_its_waker_and_ends_it() {
    let (sender, receiver) = channel();
    let step = move |_: &mut Context<'_>| {
        sender.send(()).unwrap();
        Step::Idle(None)
    };
    let settings = Settings { self_polling: true, ..Settings::default() };
    let (reactor, waker) = Reactor::of_one(settings, task(step)).unwrap();
    next(&receiver);
    waker.wake_by_ref();
    next(&receiver);
    drop(reactor);
    assert_eq!(receiver.recv(), Err(RecvError), "the task is dropped");
    waker.wake();
}

#[test]
fn a_shared_descriptor_is_held_until_it_is_unwatched() {
    let reactor = reactor(Duration::ZERO);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let reader = Arc::new(reader);
    let (sender, receiver) = channel();
    let mut file = Some(reader.clone());
    let step = move |context: &mut Context<'_>| {
        if let Some(file) = file.take() {
            context.watch_shared(file, Interest::Read, 3).unwrap();
        } else if context.events().iter().any(|event| event.token == 3 && event.readable) {
            context.unwatch(3);
            sender.send(()).unwrap();
        }
        Step::Idle(None)
    };
    reactor.handle().add(task(step)).unwrap();
    rustix::io::write(&writer, &[1]).unwrap();
    next(&receiver);
    assert_eq!(Arc::strong_count(&reader), 1);
}

#[test]
fn a_cpu_that_is_not_there_is_an_error() {
    let settings = Settings { cpu: Some(1023), ..Settings::default() };
    assert!(Reactor::spawn(settings).is_err());
}

/// Returns a task that blocks in its first step until `told` receives, and then steps with `after`.
fn sleeper(
    told: Receiver<()>,
    mut after: impl FnMut(&mut Context<'_>) -> Step + Send + 'static,
) -> Box<dyn Task> {
    let mut slept = false;
    task(move |context| {
        if !std::mem::replace(&mut slept, true) {
            let _ = told.recv();
        }
        after(context)
    })
}

#[test]
fn a_step_that_sleeps_holds_up_no_other_task() {
    let (stalled, is_stalled) = channel();
    let stalled = Mutex::new(stalled);
    let on_stall = Arc::new(move |_: &str| stalled.lock().unwrap().send(()).unwrap_or(()));
    let settings = Settings { name: "stalls".into(), on_stall, ..Settings::default() };
    let reactor = Reactor::spawn(settings).unwrap();
    let handle = reactor.handle();
    let (steps, stepped) = channel();
    // Tasks that wait for a descriptor, a deadline and a sweep.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = reader.try_clone().unwrap();
    let watching = steps.clone();
    let watcher = move |context: &mut Context<'_>| {
        for _ in context.events() {
            rustix::io::read(&file, &mut [0u8; 1]).unwrap();
            watching.send("watched").unwrap();
        }
        Step::Idle(None)
    };
    handle.add(Box::new(Closure(Some(reader), watcher))).unwrap();
    let due = steps.clone();
    handle
        .add(task(move |context| {
            let _ = due.send("due");
            Step::Idle(Some(context.now() + Duration::from_millis(1)))
        }))
        .unwrap();
    let swept = steps.clone();
    handle
        .add(task(move |_| {
            let _ = swept.send("swept");
            Step::Sweep(Duration::from_millis(1), None)
        }))
        .unwrap();
    let (wake, told) = channel();
    let (after, is_after) = channel();
    let id = handle
        .add(sleeper(told, move |context| {
            let _ = after.send((context.is_alone(), std::thread::current().id()));
            Step::Idle(None)
        }))
        .unwrap();
    next(&is_stalled);
    stepped.try_iter().for_each(drop);
    // All of them have steps after the stall, and new tasks are taken, while the one task sleeps.
    rustix::io::write(&writer, b"x").unwrap();
    for wanted in ["watched", "due", "swept"] {
        while next(&stepped) != wanted {}
    }
    let added = steps.clone();
    handle
        .add(task(move |_| {
            let _ = added.send("added");
            Step::Done
        }))
        .unwrap();
    while next(&stepped) != "added" {}
    assert!(is_after.try_recv().is_err(), "it sleeps still");
    // The sleeper goes on on a thread of its own, and wakes reach it there.
    wake.send(()).unwrap();
    let (_, own) = next(&is_after);
    assert_eq!(next(&is_after), (true, own));
    handle.wake(id).unwrap();
    assert_eq!(next(&is_after), (true, own));
    drop(reactor);
}

/// No step lasts from one look of the watchdog to the next but one; together the steps take most of
/// the time.
#[test]
fn a_task_that_sleeps_often_and_shortly_is_left_behind_too() {
    let reactor = reactor(Duration::ZERO);
    let (left, is_left) = channel();
    let short = task(move |context| {
        if context.is_alone() {
            return left.send(()).map_or(Step::Done, |()| Step::Done);
        }
        std::thread::sleep(Duration::from_millis(5));
        Step::Busy
    });
    reactor.handle().add(short).unwrap();
    next(&is_left);
}

#[test]
fn a_task_that_was_left_behind_may_leave() {
    let first = reactor(Duration::ZERO);
    let second = reactor(Duration::ZERO);
    let (wake, told) = channel();
    let (arrived, is_there) = channel();
    struct Mover(Option<Receiver<()>>, slipway_reactor::Handle, Sender<bool>);
    impl Task for Mover {
        fn poll(&mut self, context: &mut Context<'_>) -> Step {
            match self.0.take() {
                Some(told) => {
                    let _ = told.recv();
                    Step::Leave
                }
                None => {
                    self.2.send(context.is_alone()).unwrap();
                    Step::Done
                }
            }
        }

        fn leave(self: Box<Self>) {
            let home = self.1.clone();
            home.add(self).unwrap();
        }
    }
    first.handle().add(Box::new(Mover(Some(told), second.handle(), arrived))).unwrap();
    // The first reactor serves other tasks, which shows that it has left the sleeping one behind.
    let (sender, receiver) = channel();
    first.handle().add(task(move |_| sender.send(()).map_or(Step::Done, |()| Step::Done))).unwrap();
    next(&receiver);
    wake.send(()).unwrap();
    assert!(!next(&is_there), "at home it is one of many again");
}

#[test]
fn a_task_that_panics_after_it_slept_is_dropped_and_told_of() {
    let (told_of, panics) = channel();
    let told_of = Mutex::new(told_of);
    let on_panic = Arc::new(move |text: &str| told_of.lock().unwrap().send(text.into()).unwrap());
    let reactor = Reactor::spawn(Settings { on_panic, ..Settings::default() }).unwrap();
    let (wake, told) = channel();
    let (alive, dropped) = channel::<()>();
    reactor
        .handle()
        .add(sleeper(told, move |_| {
            let _keep = &alive;
            panic!("after a sleep")
        }))
        .unwrap();
    let (sender, receiver) = channel();
    reactor
        .handle()
        .add(task(move |_| sender.send(()).map_or(Step::Done, |()| Step::Done)))
        .unwrap();
    next(&receiver);
    wake.send(()).unwrap();
    let text: String = next(&panics);
    assert_eq!(text, "it panicked: after a sleep");
    assert!(dropped.recv_timeout(Duration::from_secs(60)).is_err());
}

#[test]
fn a_reactor_with_a_sleeping_task_can_be_stopped() {
    let reactor = reactor(Duration::ZERO);
    let (_wake, told) = channel();
    let (alive, dropped) = channel::<()>();
    reactor.handle().add(sleeper(told, |_| Step::Done)).unwrap();
    let other = task(move |_| {
        let _keep = &alive;
        Step::Idle(None)
    });
    reactor.handle().add(other).unwrap();
    drop(reactor);
    assert!(dropped.recv_timeout(Duration::ZERO).is_err(), "its other task is gone");
}

#[test]
fn many_tasks_that_sleep_one_after_the_other_are_each_left_behind() {
    let reactor = reactor(Duration::ZERO);
    let mut wakes = Vec::new();
    let (after, is_after) = channel();
    for number in 0..5 {
        let (wake, told) = channel();
        wakes.push(wake);
        let after = after.clone();
        let goes_on = move |context: &mut Context<'_>| {
            if context.is_alone() {
                after.send(number).map_or(Step::Done, |()| Step::Done)
            } else {
                Step::Busy
            }
        };
        reactor.handle().add(sleeper(told, goes_on)).unwrap();
    }
    let (sender, receiver) = channel();
    reactor
        .handle()
        .add(task(move |_| sender.send(()).map_or(Step::Done, |()| Step::Done)))
        .unwrap();
    next(&receiver);
    drop(wakes);
    let mut found: Vec<i32> = (0..5).map(|_| next(&is_after)).collect();
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2, 3, 4]);
}
