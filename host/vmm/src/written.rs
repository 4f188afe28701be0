//! The memory of a guest that runs, copied ahead of a save.
//!
//! While a guest is stopped to be saved, only those pages of its RAM are copied that were written
//! to since they were copied before. Three parties write to them, and each notes the pages:
//! - the guest, and KVM on its behalf: the dirty log of the memory slots;
//! - the functions of this process, by its mapping of the RAM: [`slipway_ram::Region::log_writes`];
//! - the functions behind sockets, each by a mapping of its server's: the server's log.
//!
//! A round takes the bits of all three, and then copies the pages: a page that is written to
//! meanwhile has its bit again. If a party has lost its log, as a server that took over has, every
//! page is copied while the guest is stopped. A function that comes ends this process's log
//! ([`crate::remote::Attached::plug`]), so that is done, too, if the function goes before the save.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use slipway_machine::pages::{END, ROUND, ROUNDS};

use crate::pages::Zeros;
use crate::remote::Attached;
use crate::{Chassis, Error, Result, pages};

/// The number of pages that are few enough to be copied while the guest is stopped: 1 MiB.
const FEW: usize = 256;

/// The pages of a guest's RAM that are written to. Dropping it ends the logs of all parties, which
/// waits for the functions' servers, so drop it on a thread of its own.
pub struct Written {
    chassis: Chassis,
    /// The functions behind sockets, with their numbers. One that the guest ejects goes.
    functions: Vec<(usize, Weak<Attached>)>,
    /// The rest was written to a reader, which may not have got all of it.
    rest_taken: AtomicBool,
}

impl Written {
    /// Has all parties note what they write from the return on. Waits for the functions' servers,
    /// so call it on a thread of its own. `functions` are all that there are, and no other may come
    /// until this has returned.
    ///
    /// # Errors
    /// [`Error::Kvm`]; [`Error::Function`] with a server that has no log; [`Error::Memory`] of a
    /// machine with hot-plug memory.
    pub fn begin(chassis: &Chassis, functions: Vec<(usize, Arc<Attached>)>) -> Result<Self> {
        if !chassis.ram.hot_memory().is_empty() {
            return Err(Error::Memory("hot-plug memory is not copied while its guest runs".into()));
        }
        let all = functions.iter().map(|(number, one)| (*number, Arc::downgrade(one))).collect();
        // After an error, dropping it ends what was begun.
        let (chassis, rest_taken) = (chassis.clone(), AtomicBool::new(false));
        let this = Self { chassis, functions: all, rest_taken };
        for (number, attached) in functions {
            attached.set_log(number, true)?;
        }
        this.chassis.ram.set_log(&this.chassis.vm, true)?;
        Ok(this)
    }

    /// Writes the RAM to `to` while the guest runs: all of it, and then in rounds what was written
    /// to meanwhile, until that is little or does not get less. Returns the number of pages of the
    /// last round.
    ///
    /// # Errors
    /// The error of writing, or the reason why a party has no log.
    pub fn copy(&self, to: &mut impl Write) -> io::Result<usize> {
        let ram = &self.chassis.ram;
        pages::write(ram, Zeros::Skip, to, &ROUND)?;
        let mut last = usize::MAX;
        for _ in 1..ROUNDS {
            let written = self.take().map_err(io::Error::other)?;
            let words = written.iter().flatten();
            let count = words.map(|word| word.count_ones() as usize).sum();
            pages::write_some(ram, &written, to, &ROUND)?;
            let goes_on = count > FEW && count < last - last / 4;
            last = count;
            if !goes_on {
                break;
            }
        }
        to.write_all(&END)?;
        Ok(last)
    }

    /// Writes the pages that were written to since they were last copied. The guest is stopped, and
    /// all of its functions are as well. If a party has lost its log, or at another call, writes
    /// all pages.
    ///
    /// # Errors
    /// The error of writing.
    pub fn copy_rest(&self, to: &mut impl Write) -> io::Result<()> {
        let ram = &self.chassis.ram;
        // An earlier reader may have given up, and its bits were taken.
        let taken = if self.rest_taken.swap(true, Ordering::Relaxed) {
            Err(Error::State("an earlier save has taken what was written to".into()))
        } else {
            self.take()
        };
        match taken {
            Ok(written) => pages::write_some(ram, &written, to, &END),
            Err(error) => {
                eprintln!("slipway-vmm: all memory is copied while the guest is stopped: {error}");
                pages::write(ram, Zeros::Write, to, &END)
            }
        }
    }

    /// Takes the bits of all parties, for each part of the RAM. After an error bits are lost.
    fn take(&self) -> Result<Vec<Vec<u64>>> {
        let ram = &self.chassis.ram;
        let mut written = ram.take_written(&self.chassis.vm)?;
        let gone = || Error::State("a function went meanwhile".into());
        for (part, words) in ram.parts().iter().zip(&mut written) {
            for (number, attached) in &self.functions {
                attached.upgrade().ok_or_else(gone)?.take_written(*number, part, words)?;
            }
        }
        Ok(written)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        // A function that is gone, or whose server is, notes nothing any more.
        for (number, attached) in &self.functions {
            let _ = attached.upgrade().map(|attached| attached.set_log(*number, false));
        }
        let _ = self.chassis.ram.set_log(&self.chassis.vm, false);
    }
}
