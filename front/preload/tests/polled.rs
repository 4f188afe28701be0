//! A poll(2) set whose numbers other threads close and open meanwhile.
#![allow(clippy::unwrap_used)]

#[path = "../src/polled.rs"]
mod polled;

use libc::{POLLIN, pollfd};
use polled::{Polled, SetOwner};

/// A table in which each number stands for something else at its second lookup. Counts lookups.
struct Changing(Vec<[SetOwner; 2]>, Vec<usize>);

impl Changing {
    fn look(&mut self, fd: i32) -> SetOwner {
        let (at, looks) = (fd as usize - 100, &mut self.1[fd as usize - 100]);
        *looks += 1;
        self.0[at][(*looks - 1).min(1)]
    }
}

fn set(count: usize) -> Vec<pollfd> {
    (0..count).map(|at| pollfd { fd: 100 + at as i32, events: POLLIN, revents: 0 }).collect()
}

/// Answers as the kernel would if `ready` were readable.
fn kernel(list: &mut [pollfd], ready: &[i32]) {
    list.iter_mut().for_each(|one| one.revents = if ready.contains(&one.fd) { POLLIN } else { 0 });
}

#[test]
fn each_number_is_looked_at_once_and_keeps_its_place() {
    let stream = SetOwner::Stream { object: 7, sleeps: true };
    // What each number stands for at first, and after another thread changed it during the poll.
    let all = [
        [SetOwner::Listener(900), SetOwner::Kernels],
        [SetOwner::Kernels, SetOwner::Listener(901)],
        [stream, SetOwner::Listener(902)],
        [SetOwner::Listener(903), stream],
        [SetOwner::Kernels, stream],
    ];
    for count in [all.len(), 40, 400] {
        let mut looked =
            Changing(all.iter().cycle().take(count).copied().collect(), vec![0; count]);
        let mut set = set(count);
        let mut polled = Polled::new(&set, |fd| looked.look(fd));
        assert!(looked.1.iter().all(|looks| *looks == 1));
        let place = polled.add(999, POLLIN);
        kernel(polled.list(), &[903, 102, 999]);
        assert_eq!(polled.said(place), POLLIN);
        let mut raised = Vec::new();
        let ready = polled.tell(&mut set, |fd, object| raised.push((fd, object)));
        assert!(looked.1.iter().all(|looks| *looks == 1));
        // Every fourth listener's second queue has a connection; nothing else is ready.
        let told: Vec<_> = (0..count).filter(|at| set[*at].revents != 0).collect();
        let wanted: Vec<_> = (0..count).filter(|at| at % all.len() == 3).collect();
        assert_eq!((ready, told), (wanted.len(), wanted));
        assert_eq!(raised, [(102, 7)]);
    }
}

#[test]
fn a_connection_that_is_awake_is_not_polled() {
    let mut set = set(1);
    let mut polled = Polled::new(&set, |_| SetOwner::Stream { object: 1, sleeps: false });
    assert_eq!(polled.list()[0].fd, -1);
    kernel(polled.list(), &[100]);
    assert_eq!(polled.tell(&mut set, |_, _| panic!("it was not polled")), 0);
}
