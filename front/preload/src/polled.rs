//! The list that the kernel polls for a set of poll(2).
//!
//! Another thread may close or open any number while a set is polled. So each number is looked at once: what was
//! found then decides how long the list is, what lies where in it, and how the answers are read.

use libc::{c_int, pollfd};

/// Descriptors that are polled without taking memory.
const FEW: usize = 32;
const NOTHING: pollfd = pollfd { fd: -1, events: 0, revents: 0 };

/// What a number of a set was when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// No connection and no listener of ours: the kernel answers for it.
    Kernels,
    /// A connection of ours.
    Stream {
        /// Tells it from what may have the number later.
        object: usize,
        /// The kernel polls its eventfd.
        sleeps: bool,
    },
    /// A listener with a second queue, which this eventfd tells of.
    Listener(c_int),
}

/// How the answers for a number of the set are read.
#[derive(Clone, Copy)]
enum Role {
    Kernels,
    Stream(usize),
    /// The place of the second queue's eventfd in the list.
    Listener(usize),
}

/// A vector whose first few elements take no memory.
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
    /// The list for `set`, each of whose numbers is looked at by one call of `look`.
    pub fn new(set: &[pollfd], mut look: impl FnMut(c_int) -> Found) -> Self {
        let (mut list, mut roles) = (Short::new(NOTHING), Short::new(Role::Kernels));
        set.iter().for_each(|polled| _ = list.push(*polled));
        for (at, polled) in set.iter().enumerate() {
            let role = match look(polled.fd) {
                Found::Kernels => Role::Kernels,
                Found::Stream { object, sleeps } => {
                    let fd = if sleeps { polled.fd } else { -1 };
                    list.all()[at] = pollfd { fd, events: libc::POLLIN, revents: 0 };
                    Role::Stream(object)
                }
                Found::Listener(fd) => {
                    let events = polled.events & (libc::POLLIN | libc::POLLRDNORM);
                    Role::Listener(list.push(pollfd { fd, events, revents: 0 }))
                }
            };
            roles.push(role);
        }
        Self { list, roles }
    }

    /// Has one descriptor more polled. The result is its place, for [`Polled::said`].
    pub fn add(&mut self, fd: c_int, events: i16) -> usize {
        self.list.push(pollfd { fd, events, revents: 0 })
    }

    /// What the kernel is given.
    pub fn list(&mut self) -> &mut [pollfd] {
        self.list.all()
    }

    /// What the kernel said of what [`Polled::add`] put at `place`.
    pub fn said(&mut self, place: usize) -> i16 {
        self.list.all()[place].revents
    }

    /// Tells the set, which it was made for, what the kernel said of its own descriptors and of listeners. Returns how
    /// many are ready. Connections of ours whose eventfd was raised are named to `raised`, by number and object.
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
                    polled.revents = list[at].revents | list[second].revents;
                }
                Role::Kernels => polled.revents = list[at].revents,
            }
            ready += usize::from(polled.revents != 0);
        }
        ready
    }
}
