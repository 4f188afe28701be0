//! Pools of virtual functions (VFs) of the plane.
//!
//! A VF is an endpoint, called POOL.NUMBER, that exists before anybody asks for it: its controller
//! is reset, its disk is empty. Its socket refuses clients until an owner has taken the VF.
//! `function` is such an endpoint as a device of `slipway-vf-pool`, which has the states, the locks
//! and the ledger. `hardware` is a real VF behind one, `binding` its binding to vfio-pci, and
//! `limits` its MAC address, VLAN and rate. `service` answers the calls of `vf.proto`.
//!
//! The ledger has the pools' templates too, so the next daemon makes the pools again. Endpoints
//! that outlived the last daemon by the keeper go on where they were; their owners are in the
//! ledger.
//!
//! A new kind of VF is one of `Template.kind` in `vf.proto`. `template` checks it and makes the
//! request of its endpoint, `function` empties it for the next owner. `slipway vf` (`front/cli`,
//! `vf` and `args/vf.rs`) makes and shows it. Pods are given it by `pod_functions` of
//! `sandbox/runtime`, and kubelet counts it by `front/device-plugin` (`pools`), which passes over
//! kinds that it does not know. `docs/virtual-functions.md`; `tests/e2e/66-vf.sh`,
//! `41-start-kills.sh`.

mod binding;
mod function;
mod hardware;
mod limits;
mod note;
mod service;
mod template;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message;
use slipway_plane_api::vf_v1::template::Kind;
use slipway_plane_api::{v1, vf_v1};
use slipway_vf_pool::{Ledger, LedgerError, Owner, Pool, Retries, Settings};

use crate::Plane;
use function::Function;
use hardware::Hardware;
use limits::Limits;

/// The number of VFs of a pool that are made and reset at once.
const WORKERS: u32 = 4;
/// The time that making or resetting a VF may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// The tries of a VF that failed: after 1, 2, 4 s and so on, ten in about five minutes.
const RETRIES: Retries =
    Retries { first: Duration::from_secs(1), longest: Duration::from_secs(60), most: 10 };
/// The time that closing all VFs of a pool may take.
const CLOSE: Duration = Duration::from_secs(120);

/// The reason why a request about VFs failed.
#[derive(Debug, thiserror::Error)]
pub enum VfError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A pool of this name exists.
    #[error("a pool called \"{0}\" is there already")]
    Exists(String),
    /// No pool has this name.
    #[error("there is no pool \"{0}\"; `slipway vf ls` lists pools")]
    Unknown(String),
    /// The pool cannot be removed now.
    #[error("pool {0} cannot be removed: {1}")]
    InUse(String, String),
    /// The ledger is damaged or belongs to another version.
    #[error("{0}")]
    NoLedger(String),
    /// The ledger is whole, so there is nothing to rebuild.
    #[error("the ledger {} is whole; nothing was done", .0.display())]
    Whole(PathBuf),
    /// Hardware cannot be had.
    #[error("{0}")]
    Hardware(String),
    /// A VF has a client while its owner is unknown.
    #[error("endpoint {0} has a client (process {1}); end it first")]
    Client(String, u32),
    /// The pool refused.
    #[error(transparent)]
    Pool(#[from] slipway_vf_pool::Error),
}

impl From<LedgerError> for VfError {
    fn from(error: LedgerError) -> Self {
        Self::NoLedger(error.to_string())
    }
}

/// The pools of a plane. Clones share them.
#[derive(Clone)]
pub struct VirtualFunctions {
    shared: Arc<Shared>,
}

struct Shared {
    plane: Plane,
    /// The directory of the VFs' sockets.
    sockets: PathBuf,
    ledger_path: PathBuf,
    state: Mutex<Ledgered>,
}

/// The ledger, or the reason why it cannot be used, and the pools that it has.
struct Ledgered {
    ledger: Result<Ledger, String>,
    pools: BTreeMap<String, TemplatePool>,
}

#[derive(Clone)]
struct TemplatePool {
    template: vf_v1::Template,
    pool: Pool<Function>,
}

impl VirtualFunctions {
    /// Opens the ledger at `ledger` and makes its pools on `plane`, with sockets in `sockets`,
    /// which must exist. VFs whose owners are processes that have ended are taken back. A ledger
    /// that cannot be used is logged, and every request says so until it is rebuilt: a daemon that
    /// would not start for it could not run sandboxes either.
    pub fn open(plane: Plane, sockets: &Path, ledger: &Path) -> Self {
        let (opened, pools) = match Ledger::open(ledger) {
            Ok(opened) => (Ok(opened), BTreeMap::new()),
            Err(error) => {
                tracing::error!(%error, "no virtual functions");
                (Err(error.to_string()), BTreeMap::new())
            }
        };
        let shared = Shared {
            plane,
            sockets: sockets.to_owned(),
            ledger_path: ledger.to_owned(),
            state: Mutex::new(Ledgered { ledger: opened, pools }),
        };
        let functions = Self { shared: Arc::new(shared) };
        functions.recover();
        functions
    }

    /// Returns whether there is a pool.
    pub fn is_in_use(&self) -> bool {
        !self.lock().pools.is_empty()
    }

    fn recover(&self) {
        let mut state = self.lock();
        let Ok(ledger) = state.ledger.clone() else { return };
        let templates = match ledger.templates() {
            Ok(templates) => templates,
            Err(error) => return state.ledger = Err(error.to_string()),
        };
        for (name, bytes) in templates {
            let made = vf_v1::Template::decode(&*bytes)
                .map_err(|error| VfError::NoLedger(format!("template of pool {name}: {error}")))
                .and_then(|template| self.make(&name, template, ledger.clone()));
            match made {
                Ok(entry) => {
                    let found = entry.pool.reconcile(lives);
                    let (kept, returned) = (found.kept.len(), found.returned.len());
                    tracing::info!(pool = name, kept, returned, "virtual functions go on");
                    state.pools.insert(name, entry);
                }
                Err(error) => tracing::error!(%error, pool = name, "a pool is lost"),
            }
        }
    }

    fn make(
        &self,
        name: &str,
        template: vf_v1::Template,
        ledger: Ledger,
    ) -> Result<TemplatePool, VfError> {
        template::check(name, &template).map_err(VfError::Invalid)?;
        let addresses = template::addresses(&template).map_err(VfError::Invalid)?;
        let limits = Limits::of(&template);
        let device = |number| {
            let request = template::request(name, number, &template, &self.shared.sockets);
            let hardware = addresses.get(number as usize).copied();
            let sockets = &self.shared.sockets;
            let hardware = hardware.map(|address| Hardware::new(address, limits, sockets));
            Function::new(self.shared.plane.clone(), request, hardware)
        };
        let set_size = if template.set_size == 0 { template.count } else { template.set_size };
        let settings = Settings {
            name: name.to_owned(),
            set_size,
            workers: WORKERS,
            deadline: DEADLINE,
            retries: RETRIES,
        };
        let pool = Pool::new(settings, (0..template.count).map(device), ledger)?;
        Ok(TemplatePool { template, pool })
    }

    /// Makes a pool.
    ///
    /// # Errors
    /// [`VfError`]; nothing is left then.
    pub fn create(&self, name: &str, template: vf_v1::Template) -> Result<vf_v1::Pool, VfError> {
        let template = template::counted(template);
        template::check(name, &template).map_err(VfError::Invalid)?;
        // Without the lock, which those need who close what the check may wait for.
        hardware::check(&template)?;
        let mut state = self.lock();
        let ledger = state.ledger.clone().map_err(VfError::NoLedger)?;
        if state.pools.contains_key(name) {
            return Err(VfError::Exists(name.to_owned()));
        }
        hardware::check_others(&template, state.pools.values().map(|entry| &entry.template))?;
        // Written first: a daemon that dies now leaves no endpoint that nobody knows.
        ledger.set_template(name, Some(&template.encode_to_vec()))?;
        let made = self.make(name, template, ledger.clone());
        let entry = made.inspect_err(|_| {
            let _ = ledger.set_template(name, None);
        })?;
        state.pools.insert(name.to_owned(), entry.clone());
        drop(state);
        Ok(self.describe(name, &entry))
    }

    /// Closes a pool's VFs and removes the pool; blocks.
    ///
    /// # Errors
    /// [`VfError::Unknown`]; [`VfError::InUse`], and then the VFs that nobody has are drained.
    pub fn remove(&self, name: &str) -> Result<(), VfError> {
        self.remove_entry(name, &self.entry(name)?)
    }

    fn remove_entry(&self, name: &str, entry: &TemplatePool) -> Result<(), VfError> {
        let in_use = |why: String| VfError::InUse(name.to_owned(), why);
        let counts = entry.pool.counts();
        if counts.taken > 0 {
            return Err(in_use(format!("owners have {} of its VFs", counts.taken)));
        }
        (0..entry.template.count).try_for_each(|vf| entry.pool.drain(vf))?;
        let is_settled = entry.pool.settle(CLOSE);
        // With the lock held, which `resume` needs: no VF is opened again after this look.
        let mut state = self.lock();
        // Another caller may have removed the pool meanwhile, and made one of the same name.
        if !state.entry(name)?.pool.is_same(&entry.pool) {
            return Err(VfError::Unknown(name.to_owned()));
        }
        let counts = entry.pool.counts();
        if !is_settled || counts.drained < counts.all() {
            return Err(in_use(format!("of its VFs {}", counts.unready())));
        }
        state.ledger.clone().map_err(VfError::NoLedger)?.set_template(name, None)?;
        state.pools.remove(name);
        Ok(())
    }

    /// Gives `owner` a VF, the one that `number` names if it does, for `client` if that is said.
    ///
    /// # Errors
    /// [`VfError`].
    pub fn take(
        &self,
        pool: &str,
        owner: &Owner,
        number: Option<u32>,
        client: Option<vf_v1::Client>,
    ) -> Result<vf_v1::Lease, VfError> {
        let entry = self.entry(pool)?;
        if let Some(client) = &client {
            template::check_client(&entry.template, client).map_err(VfError::Invalid)?;
            hardware::check_client(&entry.template, client)?;
        }
        let prepare = |function: &mut Function| function.prepare(client);
        let lease = entry.pool.take_prepared(owner, number, prepare)?;
        Ok(vf_v1::Lease { number: lease.vf, ..lease.access })
    }

    /// Has the VF of `owner` admit another client: of the template's user if the client has none.
    ///
    /// # Errors
    /// [`VfError`]; the VF is the owner's still.
    pub fn admit(
        &self,
        pool: &str,
        owner: &Owner,
        client: vf_v1::Client,
    ) -> Result<vf_v1::Lease, VfError> {
        let entry = self.entry(pool)?;
        template::check_client(&entry.template, &client).map_err(VfError::Invalid)?;
        let is_hardware = matches!(entry.template.kind, Some(Kind::Hardware(_)));
        if is_hardware && template::has_settings(&client) {
            let why = "a VF of hardware has its settings from when it is taken until it returns";
            return Err(VfError::Invalid(why.to_owned()));
        }
        let user = client.user.or(entry.template.user).unwrap_or_else(|| v1::Owner {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        });
        let client = vf_v1::Client { user: Some(user), ..client };
        let lease = entry.pool.admit(owner, |function| function.prepare(Some(client)))?;
        Ok(vf_v1::Lease { number: lease.vf, ..lease.access })
    }

    /// Takes the VF of `owner` back. Returns its number.
    ///
    /// # Errors
    /// [`VfError`].
    pub fn give_back(&self, pool: &str, owner: &Owner) -> Result<u32, VfError> {
        let pool = self.entry(pool)?.pool;
        let vf = pool.vf_of(owner)?;
        pool.give_back(vf, owner)?;
        Ok(vf)
    }

    /// Takes back the VFs of owners of `kind` that are not among `ids`.
    pub fn reconcile(&self, kind: &str, ids: &[String]) -> Vec<String> {
        let pools = self.lock().pools.clone();
        let lives = |owner: &Owner| owner.kind() != kind || ids.iter().any(|id| id == owner.id());
        let mut returned = Vec::new();
        for (name, entry) in pools {
            let found = entry.pool.reconcile(lives);
            returned.extend(found.returned.iter().map(|(vf, _)| template::id(&name, *vf)));
        }
        returned
    }

    /// Moves a damaged ledger away and begins an empty one; removes the VFs that are left.
    ///
    /// # Errors
    /// [`VfError::Whole`]; [`VfError::Client`].
    pub fn rebuild(&self) -> Result<String, VfError> {
        let mut state = self.lock();
        if state.ledger.is_ok() {
            return Err(VfError::Whole(self.shared.ledger_path.clone()));
        }
        let is_ours = |path: &str| Path::new(path).parent() == Some(&self.shared.sockets);
        let left = self.shared.plane.list();
        let left: Vec<_> = left.into_iter().filter(|one| is_ours(&one.socket_path)).collect();
        if let Some(used) = left.iter().find(|endpoint| endpoint.client_pid != 0) {
            return Err(VfError::Client(used.id.clone(), used.client_pid));
        }
        for endpoint in left {
            // An error: it is gone.
            let _ = self.shared.plane.remove(&endpoint.id);
        }
        let (ledger, aside) = Ledger::rebuild(&self.shared.ledger_path)?;
        (state.ledger, state.pools) = (Ok(ledger), BTreeMap::new());
        Ok(aside.map(|path| path.display().to_string()).unwrap_or_default())
    }

    fn entry(&self, name: &str) -> Result<TemplatePool, VfError> {
        self.lock().entry(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Ledgered> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledgered {
    fn entry(&self, name: &str) -> Result<&TemplatePool, VfError> {
        self.ledger.as_ref().map_err(|why| VfError::NoLedger(why.clone()))?;
        self.pools.get(name).ok_or_else(|| VfError::Unknown(name.to_owned()))
    }
}

/// Returns whether an owner still lives, as far as the daemon can know by itself: a process, with
/// the kind "process" and the id PID-STARTTIME, by /proc; all other owners return their VFs.
fn lives(owner: &Owner) -> bool {
    if owner.kind() != "process" {
        return true;
    }
    let Some((pid, started)) = owner.id().split_once('-') else { return true };
    let Ok(pid) = pid.parse::<u32>() else { return true };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The command's name may have spaces and parentheses; the fields after it have none (proc(5)).
    let fields = stat.rsplit_once(") ").map(|(_, fields)| fields).unwrap_or_default();
    let is_zombie = fields.starts_with(['Z', 'X']);
    !is_zombie && fields.split_ascii_whitespace().nth(19) == Some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_was_made_again_is_not_removed_by_the_caller_that_meant_the_former() {
        let folder = tempfile::tempdir().unwrap();
        let plane = Plane::new(crate::Settings::default()).unwrap();
        let ledger = folder.path().join("ledger");
        let functions = VirtualFunctions::open(plane, folder.path(), &ledger);
        let ram = v1::disk::Kind::Ram(v1::RamDisk { size_bytes: 1 << 20 });
        let disk = Some(v1::Disk { block_size: 0, kind: Some(ram) });
        let kind = Some(Kind::Nvme(vf_v1::template::Nvme { disk, layers_bytes: 0 }));
        let template = vf_v1::Template { kind, count: 1, ..Default::default() };
        functions.create("disks", template.clone()).unwrap();
        let former = functions.entry("disks").unwrap();
        functions.remove("disks").unwrap();
        functions.create("disks", template).unwrap();
        let late = functions.remove_entry("disks", &former);
        assert!(matches!(late, Err(VfError::Unknown(_))), "{late:?}");
        functions.remove("disks").unwrap();
        let gone = functions.remove("disks");
        assert!(matches!(gone, Err(VfError::Unknown(_))), "{gone:?}");
    }
}
