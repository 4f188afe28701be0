//! The binding of a hardware VF to vfio-pci, which outlives the daemon, and a note of the driver
//! that the VF goes back to.
//!
//! The note has the VF's driver and override from before, and the boot: a binding ends with its
//! boot. It is written before anything is changed, and removed when the VF has its driver again. So
//! it is there after a crash at any step. It counts if the VF is in a state that follows from it
//! ([`DriverState::leads_to`]). Without such a note the VF's present state is the one from before:
//! a VF that an administrator bound to vfio-pci stays there.
//!
//! A note is for a pool that is in the ledger, or is made again of the same VFs. The VFs of a
//! ledger that was lost stay with vfio-pci until then: another program may use them by now, and to
//! take them from it would wait for its end.

use serde::{Deserialize, Serialize};
use slipway_vf_pool::Fault;
use slipway_vfio::{Binding, DriverState, Error, PciAddress, Sysfs};

use super::note::Note;

/// The binding of a VF to vfio-pci. Dropping it leaves the VF bound, and the note.
pub(super) struct NotedBinding {
    address: PciAddress,
    /// The binding that this daemon made or took over.
    binding: Option<Binding>,
    /// The note of the state from before the binding.
    note: Note,
}

/// The text of a note, as JSON.
#[derive(Serialize, Deserialize)]
struct Noted {
    /// The id of the boot.
    boot: String,
    /// The driver; empty if the VF had none.
    driver: String,
    /// The override; empty if the VF had none.
    #[serde(rename = "override")]
    only: String,
}

impl NotedBinding {
    /// Returns the binding of the VF at `address`, which the last daemon may have made and noted in
    /// `note`. Nothing is read before the first call.
    pub fn new(address: PciAddress, note: Note) -> Self {
        Self { address, binding: None, note }
    }

    /// Binds the VF, which was checked, unless this daemon has. May wait for the VF's driver.
    ///
    /// # Errors
    /// The note cannot be written, and nothing was changed: a binding without a note would be for
    /// good if the daemon were killed. Those of [`Sysfs::bind`].
    pub fn bind(&mut self, sysfs: &Sysfs) -> Result<(), Fault> {
        if self.binding.is_some() {
            return Ok(());
        }
        let now = sysfs.driver_state(self.address).map_err(fault)?;
        let prior = match self.recall(&now) {
            Some(prior) => prior,
            None => {
                self.keep(&now)?;
                now
            }
        };
        self.binding = Some(sysfs.bind(self.address, prior).map_err(fault)?);
        Ok(())
    }

    /// Gives the VF back to the driver that it had, also if the last daemon bound it and this one
    /// could not. May wait for a program that has it open.
    ///
    /// # Errors
    /// The errors of [`Sysfs::give_back`]. The next call tries again.
    pub fn give_back(&mut self, sysfs: &Sysfs) -> Result<(), Fault> {
        let binding = self.binding.take().or_else(|| {
            // An error: the VF is gone, and its binding with it.
            let now = sysfs.driver_state(self.address).ok()?;
            let prior = self.recall(&now)?;
            Some(Binding::of_earlier(self.address, prior))
        });
        if let Some(binding) = binding {
            sysfs.give_back(binding).map_err(fault)?;
        }
        self.note.forget();
        Ok(())
    }

    /// Notes the state of the VF.
    fn keep(&self, state: &DriverState) -> Result<(), Fault> {
        let (driver, only) = (state.driver().to_owned(), state.only().to_owned());
        let noted = boot().and_then(|boot| {
            let noted = Noted { boot, driver, only };
            serde_json::to_string(&noted).map_err(|error| error.to_string())
        });
        self.note.write(&noted.map_err(Fault)?)
    }

    /// Returns the state from before the binding that the last daemon made, by its note. Returns
    /// `None` without a note of this boot, and if `now`, the VF's present state, does not follow
    /// from the note's.
    fn recall(&self, now: &DriverState) -> Option<DriverState> {
        let noted = self.noted().unwrap_or_else(|why| {
            let (address, note) = (self.address, self.note.path().display());
            tracing::warn!(
                %address, %note, why,
                "a note of a virtual function's driver is of no use: bound to vfio-pci, it stays so"
            );
            None
        });
        noted.filter(|prior| prior.leads_to(now))
    }

    /// Returns the state that the note has, or `None` if there is no note of this boot.
    ///
    /// # Errors
    /// A sentence about a note that cannot be used.
    fn noted(&self) -> Result<Option<DriverState>, String> {
        let text = self.note.read().map_err(|error| error.to_string())?;
        let Some(text) = text else { return Ok(None) };
        let noted: Noted = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        if noted.boot != boot()? {
            return Ok(None);
        }
        let state = DriverState::new(&noted.driver, &noted.only);
        state.map(Some).map_err(|error| error.to_string())
    }
}

/// Returns the id of the host's boot.
///
/// # Errors
/// A sentence about the file that cannot be read.
fn boot() -> Result<String, String> {
    slipway_peer::boot_id().map_err(|error| error.to_string())
}

pub(super) fn fault(error: Error) -> Fault {
    Fault(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, create_dir_all, read_to_string, remove_file, write};
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    const ADDRESS: &str = "0000:01:10.0";

    /// A sysfs with a VF, whose files no kernel answers, and a folder for notes.
    struct Tree(tempfile::TempDir);

    impl Tree {
        /// Returns a tree whose VF has a driver, none if that is empty, and an override.
        fn new(driver: &str, only: &str) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for driver in ["vfio-pci", "igbvf"] {
                create_dir_all(tree.driver(driver)).unwrap();
                write(tree.driver(driver).join("unbind"), "").unwrap();
            }
            write(tree.0.path().join("bus/pci/drivers_probe"), "").unwrap();
            create_dir_all(tree.device()).unwrap();
            create_dir(tree.0.path().join("vf")).unwrap();
            tree.set(driver, only);
            tree
        }

        fn driver(&self, name: &str) -> PathBuf {
            self.0.path().join("bus/pci/drivers").join(name)
        }

        fn device(&self) -> PathBuf {
            self.0.path().join("bus/pci/devices").join(ADDRESS)
        }

        fn set(&self, driver: &str, only: &str) {
            let link = self.device().join("driver");
            let _ = remove_file(&link);
            if !driver.is_empty() {
                symlink(self.driver(driver), link).unwrap();
            }
            write(self.device().join("driver_override"), only).unwrap();
        }

        fn sysfs(&self) -> Sysfs {
            Sysfs::at(self.0.path())
        }

        fn note(&self) -> PathBuf {
            self.0.path().join("vf").join(format!("{ADDRESS}.driver"))
        }

        /// Returns the binding as a daemon has it that has just started.
        fn daemon(&self) -> NotedBinding {
            NotedBinding::new(ADDRESS.parse().unwrap(), Note::new(self.note()))
        }

        fn notes(&self, boot: &str, driver: &str) {
            let noted = Noted { boot: boot.into(), driver: driver.into(), only: String::new() };
            write(self.note(), serde_json::to_string(&noted).unwrap()).unwrap();
        }

        /// Binds the VF and gives it back. Returns what was written to its override, empty if
        /// nothing was.
        fn bind_and_give_back(&self) -> String {
            let mut binding = self.daemon();
            binding.bind(&self.sysfs()).unwrap();
            assert!(self.note().exists());
            self.gives_back(binding)
        }

        fn gives_back(&self, mut binding: NotedBinding) -> String {
            let file = self.device().join("driver_override");
            write(&file, "").unwrap();
            binding.give_back(&self.sysfs()).unwrap();
            assert!(!self.note().exists(), "a note of a VF that went back is left");
            read_to_string(file).unwrap()
        }

        /// Returns whether the VF was taken from vfio-pci.
        fn was_parted(&self) -> bool {
            read_to_string(self.driver("vfio-pci").join("unbind")).unwrap() == ADDRESS
        }
    }

    #[test]
    fn the_note_is_there_before_anything_is_changed() {
        let tree = Tree::new("igbvf", "");
        let only = tree.device().join("driver_override");
        remove_file(&only).unwrap();
        // The first step of the binding fails.
        create_dir(&only).unwrap();
        tree.daemon().bind(&tree.sysfs()).unwrap_err();
        let noted = tree.daemon().noted().unwrap().unwrap();
        assert_eq!((noted.driver(), noted.only()), ("igbvf", ""));
        // Nothing has changed, so nothing is given back.
        tree.daemon().give_back(&tree.sysfs()).unwrap();
        assert!(!tree.note().exists());
    }

    #[test]
    fn without_a_note_nothing_is_changed() {
        let tree = Tree::new("igbvf", "");
        create_dir(tree.note().with_extension("driver.new")).unwrap();
        let Fault(why) = tree.daemon().bind(&tree.sysfs()).unwrap_err();
        assert!(why.contains("cannot write") && why.contains(".driver"), "{why}");
        assert_eq!(read_to_string(tree.device().join("driver_override")).unwrap(), "");
    }

    #[test]
    fn the_next_daemon_gives_a_function_back_to_its_first_driver() {
        let tree = Tree::new("igbvf", "");
        let state = tree.sysfs().driver_state(ADDRESS.parse().unwrap()).unwrap();
        tree.daemon().keep(&state).unwrap();
        // The state in which the kernel leaves it.
        tree.set("vfio-pci", "vfio-pci");
        let written = tree.bind_and_give_back();
        // First "igbvf\n", which binds it to its driver; then "\n": it had no override.
        assert_eq!((written.as_str(), tree.was_parted()), ("\ngbvf\n", true));
    }

    #[test]
    fn a_function_that_this_daemon_did_not_bind_goes_back_too() {
        let tree = Tree::new("vfio-pci", "igbvf");
        // The last daemon was killed while it gave the VF back.
        tree.notes(&boot().unwrap(), "igbvf");
        let mut binding = tree.daemon();
        binding.give_back(&tree.sysfs()).unwrap();
        assert!(tree.was_parted() && !tree.note().exists());
    }

    #[test]
    fn a_function_that_was_bound_before_stays_so() {
        let tree = Tree::new("vfio-pci", "vfio-pci");
        assert_eq!((tree.bind_and_give_back().as_str(), tree.was_parted()), ("", false));
        // The same after a crash.
        tree.set("vfio-pci", "vfio-pci");
        tree.daemon().bind(&tree.sysfs()).unwrap();
        assert_eq!((tree.bind_and_give_back().as_str(), tree.was_parted()), ("", false));
    }

    #[test]
    fn a_note_of_another_boot_is_void() {
        let tree = Tree::new("vfio-pci", "vfio-pci");
        tree.notes("00000000-0000-4000-8000-000000000000", "igbvf");
        assert_eq!((tree.bind_and_give_back().as_str(), tree.was_parted()), ("", false));
    }

    #[test]
    fn a_note_of_a_function_that_has_another_driver_since_is_void() {
        let tree = Tree::new("igbvf", "igbvf");
        tree.notes(&boot().unwrap(), "");
        let mut binding = tree.daemon();
        binding.give_back(&tree.sysfs()).unwrap();
        assert!(!tree.note().exists());
        assert_eq!(read_to_string(tree.driver("igbvf").join("unbind")).unwrap(), "");
    }

    #[test]
    fn a_note_of_a_function_that_is_gone_is_void() {
        let tree = Tree::new("vfio-pci", "vfio-pci");
        tree.notes(&boot().unwrap(), "igbvf");
        std::fs::remove_dir_all(tree.device()).unwrap();
        tree.daemon().give_back(&tree.sysfs()).unwrap();
        assert!(!tree.note().exists());
    }

    #[test]
    fn a_note_that_cannot_be_used_is_passed_over() {
        let tree = Tree::new("vfio-pci", "vfio-pci");
        let boot = boot().unwrap();
        let whole = format!(r#"{{"boot":"{boot}","driver":"igbvf","override":""}}"#);
        let bad = [
            String::new(),
            "\0".repeat(8192),
            whole[..whole.len() - 1].to_owned(),
            whole.replace("igbvf", "../../igbvf"),
            whole.replace("igbvf", "igbvf\\n"),
            whole.replace(r#""driver":"igbvf","#, ""),
            whole.replace("igbvf", &"x".repeat(5000)),
        ];
        for text in bad {
            write(tree.note(), &text).unwrap();
            tree.daemon().noted().unwrap_err();
            tree.set("vfio-pci", "vfio-pci");
            assert_eq!((tree.bind_and_give_back().as_str(), tree.was_parted()), ("", false));
        }
        write(tree.note(), b"\xff\xfe").unwrap();
        tree.daemon().noted().unwrap_err();
        write(tree.note(), whole).unwrap();
        assert_eq!(tree.daemon().noted().unwrap().unwrap().driver(), "igbvf");
    }
}
