//! The list of descriptors that the kernel polls on behalf of a poll(2) set.
//!
//! Another thread may close or open any number while a set is polled. So each number is looked up
//! once. The result of that lookup decides the length of the list, the position of each descriptor
//! in it, and how the answers are read.

use libc::{c_int, pollfd};

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
                    let events = polled.events & (libc::POLLIN | libc::POLLRDNORM);
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
                    polled.revents = list[at].revents | list[second].revents;
                }
                Role::Kernels => polled.revents = list[at].revents,
            }
            ready += usize::from(polled.revents != 0);
        }
        ready
    }
}
