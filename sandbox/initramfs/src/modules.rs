//! The kernel modules that a sandbox needs, and the order in which they must be loaded.
//!
//! A new driver is an entry of one of the lists below. `guest/kernel/sandbox.config` has it built
//! in, and `wanted` of `guest/kernel/build` names it. A new list is one of the groups of `build`
//! (`lib.rs` of this crate, whose tests have the folders); if only some sandboxes need it, it has a
//! field of `Extras` there, and one of `Needs` in `sandbox/runtime` (`record/needs.rs`), of which
//! `boot.rs` makes it. The agent loads a folder of `/modules` in `machine.rs` (`sandbox/agent`).
//! `docs/guest-kernel.md` says what sandboxes need of a kernel; any test of `tests/e2e` boots it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::elf::Elf;
use crate::unpack::Compression;
use crate::{Error, Result};

/// The largest module, packed or unpacked, in bytes.
const MAX_MODULE: usize = 64 << 20;

/// The deepest chain of dependencies. Real chains have about five links.
const MAX_DEPTH: usize = 32;

/// The deepest nesting of folders in a modules directory.
const MAX_FOLDERS: usize = 12;

/// The last bytes of a signed module (Linux, *admin-guide/module-signing.rst*).
const SIGNATURE_END: &[u8] = b"~Module signature appended~\n";

/// A driver that a sandbox uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxDriver {
    /// The module's name, with underscores.
    pub name: &'static str,
    /// Set if a kernel without the module cannot run sandboxes.
    pub required: bool,
}

/// The modules that every sandbox uses: the bus of the agent's port and the port itself, the disk,
/// the image and the layer above it, and optionally the file system of volumes and the random
/// number generator.
pub const WANTED: &[SandboxDriver] = &[
    SandboxDriver { name: "virtio_pci", required: true },
    SandboxDriver { name: "virtio_console", required: true },
    SandboxDriver { name: "nvme", required: true },
    SandboxDriver { name: "erofs", required: true },
    SandboxDriver { name: "overlay", required: true },
    SandboxDriver { name: "ext4", required: false },
    SandboxDriver { name: "virtio_rng", required: false },
];

/// Modules that few sandboxes use, loaded on request: the VMM's own disk, for comparisons.
pub const EXTRA: &[SandboxDriver] = &[SandboxDriver { name: "virtio_blk", required: false }];

/// Modules of [`EXTRA`], and those of network interfaces that are virtual functions of hardware, as
/// far as the kernel has them: of ConnectX, 82599 and newer, 82576 and I350, 700 and 800 series,
/// NetXtreme-E.
pub const HARDWARE: &[SandboxDriver] = &[
    SandboxDriver { name: "virtio_blk", required: false },
    SandboxDriver { name: "mlx5_core", required: false },
    SandboxDriver { name: "ixgbevf", required: false },
    SandboxDriver { name: "igbvf", required: false },
    SandboxDriver { name: "iavf", required: false },
    SandboxDriver { name: "bnxt_en", required: false },
];

/// Modules that a sandbox with a network needs in addition, whatever kind its interface is of.
/// Slipway's own driver for e1000 interfaces, where the kernel's directory has it, comes before the
/// kernel's: the first takes the interface.
pub const NETWORK: &[SandboxDriver] = &[
    SandboxDriver { name: "virtio_net", required: false },
    SandboxDriver { name: "e1000_slipway", required: false },
    SandboxDriver { name: "e1000", required: false },
];

/// Modules for VLAN interfaces, loaded when the guest's kernel requests them.
pub const VLAN: &[SandboxDriver] = &[SandboxDriver { name: "8021q", required: false }];

/// Modules for bridges, which containers in a pod or with all rights may make, loaded when the
/// guest's kernel requests them.
pub const BRIDGE: &[SandboxDriver] = &[SandboxDriver { name: "bridge", required: false }];

/// Modules for a root in shared pages: the device that tells where they are, and the disk that a
/// file system is mounted from.
pub const PMEM: &[SandboxDriver] = &[
    SandboxDriver { name: "virtio_pmem", required: true },
    SandboxDriver { name: "nd_pmem", required: true },
];

/// Modules for memory that comes and goes while the guest runs.
pub const MEMORY: &[SandboxDriver] = &[SandboxDriver { name: "virtio_mem", required: true }];

/// Modules for a guest that reports pages that it does not use.
pub const REPORTING: &[SandboxDriver] = &[SandboxDriver { name: "virtio_balloon", required: true }];

/// The modules of [`MEMORY`] and those of [`REPORTING`].
const MEMORY_AND_REPORTING: &[SandboxDriver] = &[
    SandboxDriver { name: "virtio_mem", required: true },
    SandboxDriver { name: "virtio_balloon", required: true },
];

/// Returns the modules for memory that comes and goes, for reports of free pages, or for both.
pub(crate) fn of_memory(memory: bool, reporting: bool) -> &'static [SandboxDriver] {
    match (memory, reporting) {
        (true, true) => MEMORY_AND_REPORTING,
        (true, false) => MEMORY,
        (false, true) => REPORTING,
        (false, false) => &[],
    }
}

/// Modules that list and end connections, for a machine that was saved while it ran.
pub const CONNECTIONS: &[SandboxDriver] = &[
    SandboxDriver { name: "inet_diag", required: false },
    SandboxDriver { name: "tcp_diag", required: false },
    SandboxDriver { name: "udp_diag", required: false },
];

/// Modules for directories of the host: FUSE and its virtio transport.
pub const SHARES: &[SandboxDriver] = &[SandboxDriver { name: "virtiofs", required: true }];

/// Modules for a socket function: a driver that leaves the function to a program.
pub const SOCKETS: &[SandboxDriver] = &[SandboxDriver { name: "uio_pci_generic", required: true }];

/// A module, ready to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// The module's name, with underscores.
    pub(crate) name: String,
    /// The unpacked object file. A signature is hidden by a zero byte behind it, see
    /// [`hide_signature`].
    pub(crate) object: Vec<u8>,
}

/// Returns the modules under `directory` that each of `groups` needs and that are not built in,
/// each after its dependencies. A module of the first group is not repeated in the others: every
/// group may rely on the first, and on no other group.
pub(crate) fn resolve<const N: usize>(
    directory: &Path,
    groups: [&[SandboxDriver]; N],
) -> Result<[Vec<Module>; N]> {
    let mut resolver = Resolver::new(directory)?;
    let mut first = None;
    let mut resolved = [const { Vec::new() }; N];
    for (modules, wanted) in resolved.iter_mut().zip(groups) {
        *modules = resolver.all(wanted)?;
        // A later group has all its dependencies, even if another later group has them too, since
        // it may be loaded alone.
        resolver.visited.clone_from(first.get_or_insert_with(|| resolver.visited.clone()));
    }
    Ok(resolved)
}

struct Resolver {
    directory: PathBuf,
    builtin: HashSet<String>,
    files: HashMap<String, PathBuf>,
    /// The names of modules that are loaded or are being loaded.
    visited: HashSet<String>,
    order: Vec<Module>,
}

impl Resolver {
    fn new(directory: &Path) -> Result<Self> {
        let mut files = HashMap::new();
        collect(directory, 0, &mut files)?;
        let list = directory.join("modules.builtin");
        let builtin =
            fs::read_to_string(&list).map_err(|source| Error::file("read", list, source))?;
        let builtin = builtin.lines().filter_map(|line| module_name(Path::new(line))).collect();
        let directory = directory.to_owned();
        Ok(Self { directory, builtin, files, visited: HashSet::new(), order: Vec::new() })
    }

    /// Returns the modules that `wanted` needs in addition to those that were visited before.
    fn all(&mut self, wanted: &[SandboxDriver]) -> Result<Vec<Module>> {
        let mut missing = Vec::new();
        for SandboxDriver { name, required } in wanted {
            if self.has(name) {
                self.load(name, 0)?;
            } else if *required {
                missing.push((*name).to_owned());
            }
        }
        if missing.is_empty() {
            Ok(std::mem::take(&mut self.order))
        } else {
            Err(Error::MissingModules { missing, directory: self.directory.clone() })
        }
    }

    fn has(&self, name: &str) -> bool {
        self.builtin.contains(name) || self.files.contains_key(name)
    }

    /// Appends a module after its dependencies, unless it was visited already. A module in a circle
    /// of dependencies is appended once.
    fn load(&mut self, name: &str, depth: usize) -> Result<()> {
        if self.builtin.contains(name) || self.visited.contains(name) {
            return Ok(());
        }
        if depth > MAX_DEPTH {
            return Err(Error::NoOrder(name.to_owned()));
        }
        let Some(path) = self.files.get(name).cloned() else {
            let missing = vec![name.to_owned()];
            return Err(Error::MissingModules { missing, directory: self.directory.clone() });
        };
        self.visited.insert(name.to_owned());
        let object = read_object(&path)?;
        let needs = Needs::of(&object).ok_or_else(|| Error::BadModule {
            path,
            what: "it has no module information".into(),
        })?;
        for dependency in needs.hard {
            self.load(&dependency, depth + 1)?;
        }
        for dependency in needs.soft {
            self.load_soft(&dependency, depth + 1)?;
        }
        self.order.push(Module { name: name.to_owned(), object });
        Ok(())
    }

    /// Appends a soft dependency, if it exists. It may name an alias (`crc32c`) of a module with
    /// nearly that name (`crc32c_generic`).
    fn load_soft(&mut self, name: &str, depth: usize) -> Result<()> {
        let generic = format!("{name}_generic");
        match [name, &generic].into_iter().find(|candidate| self.has(candidate)) {
            Some(found) => self.load(found, depth),
            None => Ok(()),
        }
    }
}

/// The dependencies that a module declares.
struct Needs {
    hard: Vec<String>,
    soft: Vec<String>,
}

impl Needs {
    /// Reads `.modinfo`: `key=value` strings, each terminated by a zero byte (Linux,
    /// *MODULE_INFO*).
    fn of(object: &[u8]) -> Option<Self> {
        let info = Elf::parse(object)?.section(b".modinfo")?;
        let mut needs = Self { hard: Vec::new(), soft: Vec::new() };
        for entry in info.split(|&byte| byte == 0) {
            let entry = String::from_utf8_lossy(entry);
            match entry.split_once('=') {
                Some(("depends", names)) => {
                    needs.hard.extend(names.split(',').filter(|n| !n.is_empty()).map(normal));
                }
                Some(("softdep", rule)) => needs.soft.extend(soft_before(rule).map(normal)),
                _ => {}
            }
        }
        Some(needs)
    }
}

/// Returns the names after `pre:` in `pre: a b post: c`.
fn soft_before(rule: &str) -> impl Iterator<Item = &str> {
    let after = rule.split_once("pre:").map_or("", |(_, after)| after);
    after.split_whitespace().take_while(|word| !word.ends_with(':'))
}

/// Replaces `-` by `_`, since both mean the same in a module's name.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the module's name of a path: `erofs` for `kernel/fs/erofs/erofs.ko.xz`. Returns `None`
/// if the file is not a module.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, suffix) = file.split_once(".ko")?;
    matches!(suffix, "" | ".xz" | ".zst" | ".gz").then(|| normal(name))
}

/// Finds every module file under a directory. Links are not followed: `build` and `source` of an
/// installed kernel lead out of the directory.
fn collect(directory: &Path, depth: usize, files: &mut HashMap<String, PathBuf>) -> Result<()> {
    let failed = |source| Error::file("read", directory, source);
    if depth > MAX_FOLDERS {
        return Ok(());
    }
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        let path = entry.path();
        if kind.is_dir() {
            collect(&path, depth + 1, files)?;
        } else if kind.is_file()
            && let Some(name) = module_name(&path)
        {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn read_object(path: &Path) -> Result<Vec<u8>> {
    let bad = |what: String| Error::BadModule { path: path.to_owned(), what };
    let mut packed = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_MODULE as u64 + 1).read_to_end(&mut packed))
        .map_err(|source| Error::file("read", path, source))?;
    if packed.len() > MAX_MODULE {
        return Err(bad("it is larger than 64 MiB".into()));
    }
    let mut object = match Compression::of(&packed) {
        Some(compression) => {
            compression.unpack(&packed, MAX_MODULE).map_err(|error| bad(error.to_string()))?
        }
        None => packed,
    };
    hide_signature(&mut object);
    Ok(object)
}

/// Hides the signature of a module, so that the guest does not check what its host gives it
/// anyway. SHA-256 and RSA for each module are a sixth of a guest's start. A kernel that takes
/// signed modules only refuses the file; the agent then loads it without the byte behind the
/// signature.
fn hide_signature(object: &mut Vec<u8>) {
    if object.ends_with(SIGNATURE_END) {
        object.push(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::tests::ElfFile;

    /// Makes a modules directory with these modules, each with its `.modinfo`.
    fn directory(modules: &[(&str, &str)], builtin: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("kernel")).unwrap();
        for (name, info) in modules {
            let path = directory.path().join("kernel").join(format!("{name}.ko"));
            fs::write(path, ElfFile::module(info).bytes()).unwrap();
        }
        fs::write(directory.path().join("modules.builtin"), builtin).unwrap();
        directory
    }

    fn resolved(directory: &tempfile::TempDir, name: &'static str) -> Result<Vec<String>> {
        let [modules] = resolve(directory.path(), [&[SandboxDriver { name, required: true }]])?;
        Ok(modules.into_iter().map(|module| module.name).collect())
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let modules = [
            ("virtio", "depends=\0"),
            ("virtio_ring", "depends=virtio\0"),
            ("virtio-pci", "license=GPL\0depends=virtio-ring,virtio,legacy\0"),
            ("legacy", ""),
        ];
        let directory = directory(&modules, "");
        let order = resolved(&directory, "virtio_pci").unwrap();
        assert_eq!(order, ["virtio", "virtio_ring", "legacy", "virtio_pci"]);
    }

    #[test]
    fn soft_dependencies_are_taken_where_they_exist() {
        let modules = [
            ("libcrc32c", "softdep=pre: crc32c nothing post: after\0"),
            ("crc32c_generic", ""),
            ("after", ""),
        ];
        let order = resolved(&directory(&modules, ""), "libcrc32c").unwrap();
        assert_eq!(order, ["crc32c_generic", "libcrc32c"]);
    }

    #[test]
    fn built_in_is_not_loaded() {
        let directory = directory(&[("a", "depends=b-c\0")], "kernel/lib/b_c.ko\nkernel/x/d.ko\n");
        assert_eq!(resolved(&directory, "a").unwrap(), ["a"]);
        assert_eq!(resolved(&directory, "d").unwrap(), [""; 0]);
    }

    #[test]
    fn slipways_driver_comes_before_the_kernels() {
        let modules = [("e1000", ""), ("e1000-slipway", ""), ("virtio_net", "")];
        let [modules] = resolve(directory(&modules, "").path(), [NETWORK]).unwrap();
        let names: Vec<_> = modules.into_iter().map(|module| module.name).collect();
        assert_eq!(names, ["virtio_net", "e1000_slipway", "e1000"]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let directory = directory(&[("a", "depends=b\0")], "");
        for (wanted, missing) in [("a", "b"), ("z", "z")] {
            match resolved(&directory, wanted) {
                Err(Error::MissingModules { missing: named, .. }) => assert_eq!(named, [missing]),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_signature_is_hidden_and_kept() {
        let directory = directory(&[("a", ""), ("b", "")], "");
        let path = directory.path().join("kernel/a.ko");
        let signed = [fs::read(&path).unwrap().as_slice(), b"PKCS#7", SIGNATURE_END].concat();
        fs::write(&path, &signed).unwrap();
        let object = |name| {
            let wanted = [SandboxDriver { name, required: true }];
            let [mut modules] = resolve(directory.path(), [&wanted]).unwrap();
            modules.remove(0).object
        };
        assert_eq!(object("a").strip_suffix(&[0]), Some(&signed[..]));
        assert_eq!(object("b"), ElfFile::module("").bytes());
    }

    #[test]
    fn circles_end() {
        let directory = directory(&[("a", "depends=b\0"), ("b", "depends=a\0")], "");
        assert_eq!(resolved(&directory, "a").unwrap(), ["b", "a"]);
    }

    #[test]
    fn damaged_modules_are_refused() {
        let directory = directory(&[("a", "")], "");
        let path = directory.path().join("kernel/a.ko");
        for content in [&b""[..], b"\x7fELF", b"\x1f\x8bxx", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"] {
            fs::write(&path, content).unwrap();
            let error = resolved(&directory, "a").unwrap_err();
            assert!(matches!(error, Error::BadModule { .. }), "{error}");
        }
    }
}
