//! The list of descriptors that the kernel polls on behalf of a poll(2) set.
//!
//! Another thread may close or open any number while a set is polled. So each number is looked up
//! once. The result of that lookup decides the length of the list, the position of each descriptor
//! in it, and how the answers are read.

use libc::{c_int, pollfd};

/// Events for bytes that have arrived, or an end.
pub const READ: i16 = libc::POLLIN | libc::POLLRDNORM;
/// Events for room to send.
pub const WRITE: i16 = libc::POLLOUT | libc::POLLWRNORM;
/// The number of descriptors that are polled without allocating.
const FEW: usize = 32;
const NOTHING: pollfd = pollfd { fd: -1, events: 0, revents: 0 };

/// The owner of a set's number when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetOwner {
    /// No connection and no listener of ours: the kernel answers for it.
    Kernels,
    /// A connection of ours.
    Stream {
        /// The connection's identity, which tells it from a later owner of the number.
        object: usize,
        /// The kernel polls the connection's eventfd.
        sleeps: bool,
    },
    /// A listener with a second queue, and the eventfd that reports connections in that queue.
    Listener(c_int),
}

/// How the answer for a number of the set is read.
#[derive(Clone, Copy)]
enum Role {
    Kernels,
    Stream(usize),
    /// The position in the list of the second queue's eventfd.
    Listener(usize),
}

/// A vector that stores its first few elements without allocating.
struct Short<T> {
    few: [T; FEW],
    many: Vec<T>,
    len: usize,
}

impl<T: Copy> Short<T> {
    fn new(nothing: T) -> Self {
        Self { few: [nothing; FEW], many: Vec::new(), len: 0 }
    }

    fn push(&mut self, value: T) -> usize {
        if let Some(place) = self.few.get_mut(self.len).filter(|_| self.many.is_empty()) {
            *place = value;
        } else {
            if self.many.is_empty() {
                self.many.extend_from_slice(&self.few);
            }
            self.many.push(value);
        }
        self.len += 1;
        self.len - 1
    }

    fn all(&mut self) -> &mut [T] {
        if self.many.is_empty() { &mut self.few[..self.len] } else { &mut self.many }
    }
}

/// The list for one set.
pub struct Polled {
    list: Short<pollfd>,
    roles: Short<Role>,
}

impl Polled {
    /// Builds the list for `set`. Calls `look` once for each number.
    pub fn new(set: &[pollfd], mut look: impl FnMut(c_int) -> SetOwner) -> Self {
        let (mut list, mut roles) = (Short::new(NOTHING), Short::new(Role::Kernels));
        set.iter().for_each(|polled| _ = list.push(*polled));
        for (at, polled) in set.iter().enumerate() {
            let role = match look(polled.fd) {
                SetOwner::Kernels => Role::Kernels,
                SetOwner::Stream { object, sleeps } => {
                    let fd = if sleeps { polled.fd } else { -1 };
                    list.all()[at] = pollfd { fd, events: libc::POLLIN, revents: 0 };
                    Role::Stream(object)
                }
                SetOwner::Listener(fd) => {
                    // An eventfd has no other event for this.
                    let events = if polled.events & READ != 0 { libc::POLLIN } else { 0 };
                    Role::Listener(list.push(pollfd { fd, events, revents: 0 }))
                }
            };
            roles.push(role);
        }
        Self { list, roles }
    }

    /// Adds one descriptor. Returns its position, for [`Polled::said`].
    pub fn add(&mut self, fd: c_int, events: i16) -> usize {
        self.list.push(pollfd { fd, events, revents: 0 })
    }

    /// Returns the list to pass to the kernel.
    pub fn list(&mut self) -> &mut [pollfd] {
        self.list.all()
    }

    /// Returns the kernel's answer for the descriptor that [`Polled::add`] put at `place`.
    pub fn said(&mut self, place: usize) -> i16 {
        self.list.all()[place].revents
    }

    /// Stores the kernel's answers for kernel descriptors and listeners in `set`, which the list
    /// was built for. Returns how many are ready. Calls `raised` with number and identity of each
    /// connection of ours whose eventfd was raised.
    pub fn tell(mut self, set: &mut [pollfd], mut raised: impl FnMut(c_int, usize)) -> usize {
        let (list, mut ready) = (self.list.all(), 0);
        for (at, (polled, role)) in set.iter_mut().zip(self.roles.all()).enumerate() {
            match *role {
                Role::Stream(object) => {
                    if list[at].revents != 0 {
                        raised(polled.fd, object);
                    }
                    continue;
                }
                Role::Listener(second) => {
                    let queue = list[second].revents;
                    let waits = if queue & libc::POLLIN != 0 { polled.events & READ } else { 0 };
                    polled.revents = list[at].revents | queue & !libc::POLLIN | waits;
                }
                Role::Kernels => polled.revents = list[at].revents,
            }
            ready += usize::from(polled.revents != 0);
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use libc::POLLIN;

    use super::*;

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
        list.iter_mut()
            .for_each(|one| one.revents = if ready.contains(&one.fd) { POLLIN } else { 0 });
    }

    #[test]
    fn each_number_is_looked_at_once_and_keeps_its_place() {
        let stream = SetOwner::Stream { object: 7, sleeps: true };
        // The owner of each number at first, and after another thread has changed it.
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

    #[test]
    fn a_set_keeps_its_order_however_long_it_is() {
        for count in [0, 1, FEW - 1, FEW, FEW + 1, 3 * FEW] {
            let mut short = Short::new(0);
            for value in 0..count {
                assert_eq!(short.push(value), value);
            }
            assert!(short.all().iter().copied().eq(0..count), "{count}");
        }
    }

    #[test]
    fn both_queues_of_a_listener_are_one_answer() {
        let mut polled = set(2);
        let mut list = Polled::new(&polled, |fd| match fd {
            100 => SetOwner::Listener(7),
            _ => SetOwner::Kernels,
        });
        let engine = list.add(9, 0);
        assert_eq!(list.list().iter().map(|one| one.fd).collect::<Vec<_>>(), [100, 101, 7, 9]);
        kernel(list.list(), &[7]);
        assert_eq!(list.said(engine), 0);
        assert_eq!(list.tell(&mut polled, |_, _| panic!("no connection is in the set")), 1);
        assert_eq!((polled[0].revents, polled[1].revents), (POLLIN, 0));
        polled[0].events = libc::POLLRDNORM;
        let mut list = Polled::new(&polled[..1], |_| SetOwner::Listener(7));
        assert_eq!(list.list()[1].events, POLLIN, "an eventfd has no POLLRDNORM");
        kernel(list.list(), &[7]);
        assert_eq!(list.tell(&mut polled[..1], |_, _| panic!("no connection is in the set")), 1);
        assert_eq!(polled[0].revents, libc::POLLRDNORM);
    }
}
