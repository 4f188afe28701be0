//! Settings that are words or have bounds: each is parsed or checked here, by the daemon when it
//! starts and by its users.

use std::path::{Component, Path};

use slipway_hypervisor::{AccelChoice, CpuTemplate, Page, VmmChoice};

use super::{Config, MOST_CPUS, MOST_FUNCTIONS};
use crate::{Error, Result};

/// The most containers of pods that can have socket functions by `slipway device-plugin`.
const MOST_SOCKETS: u32 = 1024;
/// The most VMMs that are started ahead, which take memory while they wait.
const MOST_SPARES: u32 = 64;
/// The most CPUs of a machine of `slipway-vmm`, and so of the room for CPUs that every pod has.
pub(super) const MOST_POD_CPUS: u32 = 32;
/// The most starts of an image that can be asked for before its sandboxes begin with a template.
const MOST_STARTS: u32 = 1000;
/// The most memories that the pool has ready for forks of one template.
const MOST_SPARE_FORKS: u32 = 64;

/// The smallest disk of a pod's `emptyDir` volumes in bytes.
const LEAST_EMPTY_DIRS: u64 = 16 << 20;
/// The smallest bound of the kept output of a pod's containers in bytes. Each of the most that it
/// can have has room for two of the agent's pieces of output then.
pub(super) const LEAST_POD_LOGS: u64 = 128 << 20;

impl Config {
    /// Returns whether sandboxes have memory of the pool.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting is neither "kernel" nor "pool".
    pub fn uses_pool(&self) -> Result<bool> {
        match self.memory.as_str() {
            "kernel" => Ok(false),
            "pool" => Ok(true),
            other => Err(Error::Invalid(format!("memory = \"{other}\": kernel or pool"))),
        }
    }

    /// Returns the size of the pages of the pool's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting is neither "base" nor "huge".
    pub fn pool_page(&self) -> Result<Page> {
        match self.pool_pages.as_str() {
            "base" => Ok(Page::Base),
            "huge" => Ok(Page::Huge),
            other => Err(Error::Invalid(format!("pool_pages = \"{other}\": base or huge"))),
        }
    }

    /// Returns whether sandboxes of one image share their root.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting is neither "off" nor "on".
    pub fn shares_roots(&self) -> Result<bool> {
        match self.shared_root.as_str() {
            "off" => Ok(false),
            "on" => Ok(true),
            other => Err(Error::Invalid(format!("shared_root = \"{other}\": off or on"))),
        }
    }

    /// Returns whether sandboxes that start together begin with templates of the node's own without
    /// being told to.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting is neither "auto" nor "off".
    pub fn forks_many(&self) -> Result<bool> {
        match self.templates.as_str() {
            "auto" => Ok(true),
            "off" => Ok(false),
            other => Err(Error::Invalid(format!("templates = \"{other}\": auto or off"))),
        }
    }

    /// Returns the processor that guests see.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting names no CPU template.
    pub fn cpu_template(&self) -> Result<CpuTemplate> {
        let parsed = self.cpu_template.parse();
        parsed.map_err(|why: String| Error::Invalid(format!("cpu_template: {why}")))
    }

    /// Returns the accelerator of sandboxes that name none.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting names no accelerator.
    pub fn accelerator(&self) -> Result<AccelChoice> {
        let parsed = self.accelerator.parse();
        parsed.map_err(|why: String| Error::Invalid(format!("accelerator: {why}")))
    }

    /// Returns the choice of the VMM.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the setting names no VMM.
    pub fn vmm(&self) -> Result<VmmChoice> {
        let parsed = self.vmm.parse();
        parsed.map_err(|why: String| Error::Invalid(format!("vmm: {why}")))
    }

    /// Checks the settings of control groups.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the parent is no path below a hierarchy's root, or the pool is larger
    /// than the number of user ids for VMMs; if there are too many spare VMMs, or no pool for them.
    pub fn check_cgroups(&self) -> Result<()> {
        let parent = Path::new(&self.cgroup_parent);
        let mut names = parent.components().filter(|part| *part != Component::RootDir);
        if parent.file_name().is_none() || !names.all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::Invalid(format!(
                "cgroup_parent = \"{}\": a path below the root of a hierarchy, as in \"/slipway\"",
                self.cgroup_parent
            )));
        }
        if self.cgroup_pool > self.vmm_uid_count {
            let (pool, most) = (self.cgroup_pool, self.vmm_uid_count);
            return Err(Error::Invalid(format!(
                "cgroup_pool = {pool}: at most {most}, as many as there can be sandboxes"
            )));
        }
        let (asked, most) = (self.spare_vmms, MOST_SPARES);
        if asked > most {
            return Err(Error::Invalid(format!("spare_vmms = {asked}: at most {most}")));
        }
        if asked > 0 && self.cgroup_pool == 0 {
            return Err(Error::Invalid(format!(
                "spare_vmms = {asked}: needs cgroup_pool, since each is started in a control group \
                 that was made ahead"
            )));
        }
        Ok(())
    }

    /// Checks the numbers of functions of pods.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one is more than a machine has room for, or than kubelet is told of.
    pub fn check_functions(&self) -> Result<()> {
        let (asked, most) = (self.pod_functions, MOST_FUNCTIONS);
        if asked > most {
            return Err(Error::Invalid(format!("pod_functions = {asked}: at most {most}")));
        }
        let (asked, most) = (self.pod_sockets, MOST_SOCKETS);
        if asked > most {
            return Err(Error::Invalid(format!("pod_sockets = {asked}: at most {most}")));
        }
        Ok(())
    }

    /// Checks the CPUs of sandboxes, and the most CPUs of pods.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are none, or more than a machine can have.
    pub fn check_cpus(&self) -> Result<()> {
        let asked = self.cpus;
        if !(1..=MOST_CPUS).contains(&asked) {
            return Err(Error::Invalid(format!("cpus = {asked}: 1 to {MOST_CPUS}")));
        }
        let (asked, most) = (self.pod_max_cpus, MOST_POD_CPUS);
        match asked > most {
            true => Err(Error::Invalid(format!("pod_max_cpus = {asked}: at most {most}"))),
            false => Ok(()),
        }
    }

    /// Checks from how many starts on an image's sandboxes begin with a template, and how many
    /// memories are ready for forks.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a number is more than the node remembers, or the pool has ready, or
    /// the time is 0.
    pub fn check_templates(&self) -> Result<()> {
        let (asked, most) = (self.templates_after, MOST_STARTS);
        if asked > most {
            return Err(Error::Invalid(format!("templates_after = {asked}: at most {most}")));
        }
        let (asked, most) = (self.spare_forks, MOST_SPARE_FORKS);
        if asked > most {
            return Err(Error::Invalid(format!("spare_forks = {asked}: at most {most}")));
        }
        match self.templates_within_s {
            0 => Err(Error::Invalid("templates_within_s = 0: at least 1".to_owned())),
            _ => Ok(()),
        }
    }

    /// Checks the bound of `emptyDir` volumes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is too little for a file system.
    pub fn check_empty_dirs(&self) -> Result<()> {
        match self.empty_dirs_bytes {
            bytes @ 1..LEAST_EMPTY_DIRS => Err(Error::Invalid(format!(
                "empty_dirs_bytes = {bytes}: at least {LEAST_EMPTY_DIRS}, or 0"
            ))),
            _ => Ok(()),
        }
    }

    /// Checks the bound of the kept output of a pod's containers.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is too little for as many containers as a pod can have.
    pub fn check_logs(&self) -> Result<()> {
        let (asked, least) = (self.pod_log_bytes, LEAST_POD_LOGS);
        match asked < least {
            true => Err(Error::Invalid(format!("pod_log_bytes = {asked}: at least {least}"))),
            false => Ok(()),
        }
    }
}
