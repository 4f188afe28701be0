//! The devices of a set and their locks (FastIOV, section 4.2.1).
//!
//! The set is the parent and each VF a child. An operation on a VF holds the set's lock for reading
//! and the VF's mutex; an operation on the set holds the set's lock for writing. So operations on
//! different VFs run in parallel, operations on one VF follow each other, and an operation on the
//! set is alone.
//!
//! The paper's kernel waits for the lock for writing. Here an operation on the set is refused while
//! an operation on a VF runs: a waiting writer would hold up the readers behind it, so that one
//! reset that hangs would hold up every VF of the set.

use super::outside::{Mutex, MutexGuard, PoisonError, RwLock};

/// Devices that are reset together where one alone cannot be.
pub struct Devset<D> {
    /// Guards what concerns the set: whether a VF is attached to an owner, over all of them.
    set: RwLock<()>,
    children: Vec<Mutex<Child<D>>>,
}

struct Child<D> {
    device: D,
    /// An owner has the VF: the set must not be reset.
    is_attached: bool,
}

/// Error: an operation on the set has to be alone, and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    /// This VF of the set is attached.
    Attached(usize),
    /// An operation on a VF of the set runs, or one on the set.
    Operation,
}

/// Error: the VF is attached to an owner already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached;

impl<D> Devset<D> {
    /// Makes a set of `devices`, of which none is attached. They are numbered from 0.
    pub fn new(devices: impl IntoIterator<Item = D>) -> Self {
        let child = |device| Mutex::new(Child { device, is_attached: false });
        Self { set: RwLock::new(()), children: devices.into_iter().map(child).collect() }
    }

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.children.len()
    }

    /// Returns whether the set has no device.
    pub fn is_empty(&self) -> bool {
        self.children.is_empty()
    }

    /// Runs an operation on one VF. Waits for another operation on the same VF and for one on the
    /// set, and for nothing else.
    ///
    /// # Panics
    /// If the set has no such VF, which is the caller's mistake.
    pub fn with<R>(&self, vf: usize, operation: impl FnOnce(&mut D) -> R) -> R {
        self.child(vf, |child| operation(&mut child.device))
    }

    /// Runs an operation on one VF and attaches the VF if the operation succeeds. Waits as
    /// [`with`](Self::with) does.
    ///
    /// # Errors
    /// `Ok(Err(_))`: the operation's own; [`Attached`], and then it was not run.
    ///
    /// # Panics
    /// If the set has no such VF.
    pub fn attach<R, E>(
        &self,
        vf: usize,
        operation: impl FnOnce(&mut D) -> Result<R, E>,
    ) -> Result<Result<R, E>, Attached> {
        self.child(vf, |child| {
            if child.is_attached {
                return Err(Attached);
            }
            let result = operation(&mut child.device);
            child.is_attached = result.is_ok();
            Ok(result)
        })
    }

    /// Detaches a VF. Returns `false` if it was not attached. Waits as [`with`](Self::with) does.
    ///
    /// # Panics
    /// If the set has no such VF.
    pub fn detach(&self, vf: usize) -> bool {
        self.child(vf, |child| std::mem::replace(&mut child.is_attached, false))
    }

    /// Runs an operation on all VFs of the set, with no other operation on any of them. Never
    /// waits.
    ///
    /// # Errors
    /// [`Busy`], and then the operation was not run.
    pub fn try_all<R>(&self, operation: impl FnOnce(&mut [&mut D]) -> R) -> Result<R, Busy> {
        // A poisoned lock: an operation panicked. The pool takes that device out of service.
        let _alone = match self.set.try_write() {
            Ok(guard) => guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return Err(Busy::Operation),
        };
        // The lock for writing keeps everybody else from these mutexes: none of them waits.
        let mut children: Vec<_> = self.children.iter().map(lock).collect();
        if let Some(vf) = children.iter().position(|child| child.is_attached) {
            return Err(Busy::Attached(vf));
        }
        let mut devices: Vec<&mut D> = children.iter_mut().map(|child| &mut child.device).collect();
        Ok(operation(&mut devices))
    }

    fn child<R>(&self, vf: usize, operation: impl FnOnce(&mut Child<D>) -> R) -> R {
        let _shared = self.set.read().unwrap_or_else(PoisonError::into_inner);
        operation(&mut lock(&self.children[vf]))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
