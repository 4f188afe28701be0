//! The parents of a pool's groups, which are made once.
//!
//! A group of version 2 has the controllers that its parent gives it. Each write to the file
//! `cgroup.subtree_control` takes the kernel's lock under which groups are made and processes are
//! moved, also if it changes nothing.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Group, Hierarchies, Result};

/// The parents of a pool's groups. Its flag is set once they were made.
#[derive(Debug, Default)]
pub(crate) struct Parents(AtomicBool);

impl Parents {
    /// Makes a group. Returns `false` if the first of its directories exists. Makes the groups'
    /// parents, and gives them the controllers, before the first group, and again if a parent is
    /// gone or a controller was taken away from it.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub fn make(&self, all: &Hierarchies, group: &Group) -> Result<bool> {
        if !self.0.load(Ordering::Relaxed) {
            all.make_parents()?;
            self.0.store(true, Ordering::Relaxed);
        }
        let made = match group.make() {
            Err(error) if error.source.kind() == ErrorKind::NotFound => {
                all.make_parents()?;
                group.make()?
            }
            made => made?,
        };
        if all.lacks_controllers(group) {
            // Groups that are there already get the controllers, too.
            all.make_parents()?;
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Directories and files of a file system stand for version 2.
    #[test]
    fn parents_are_made_and_get_controllers_once() {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str| root.path().join(name);
        let host_has = |list: &str| fs::write(file("cgroup.controllers"), list).unwrap();
        let all = Hierarchies::at(vec![root.path().into()], "p");
        let parents = Parents::default();
        // Returns whether the directories were given controllers since the last call.
        let given = || {
            let files = ["cgroup.subtree_control", "p/cgroup.subtree_control"].map(file);
            let new = files.each_ref().map(|file| fs::read_to_string(file).unwrap() != "old");
            files.iter().for_each(|file: &PathBuf| fs::write(file, "old").unwrap());
            new
        };
        host_has("io");
        assert!(parents.make(&all, &all.group("one")).unwrap());
        assert_eq!(given(), [true; 2]);
        assert!(parents.make(&all, &all.group("two")).unwrap());
        assert!(!parents.make(&all, &all.group("two")).unwrap(), "it is there");
        assert_eq!(given(), [false; 2], "nothing is missing");
        // The group has none that the host has.
        host_has("io memory");
        assert!(parents.make(&all, &all.group("three")).unwrap());
        assert_eq!(given(), [true; 2]);
        host_has("io");
        fs::remove_dir_all(file("p")).unwrap();
        assert!(parents.make(&all, &all.group("four")).unwrap());
        assert!(file("p/four").is_dir());
        assert_eq!(given(), [true; 2]);
    }
}
