//! Boot files of sandboxes: the guest kernel, and an initramfs made for it.
//!
//! [`Kernel::locate`] finds a kernel and its modules: the one that set-up unpacked, or a file of
//! the user's. [`Kernel::bootable`] returns the form that boots fastest, an uncompressed ELF file
//! if the kernel has a PVH entry. [`build`] makes the initramfs:
//! - the agent as `/init`;
//! - the modules that a sandbox needs and that are not built into this kernel, in the order in
//!   which they must be loaded (`/modules/NN-NAME.ko`); `/modules/network` has those of the network
//!   interface, `/modules/extra` those that few sandboxes need, `/modules/vlan` those that the
//!   kernel itself requests, and `/modules/connections` those that end connections of a saved
//!   machine;
//! - the empty directories that the agent mounts on;
//! - for a sandbox with a socket function ([`Sockets`]): the socket engine's program, the libraries
//!   that its containers' programs load, and the driver in `/modules/sockets`;
//! - for a sandbox with a root in shared pages: their drivers in `/modules/pmem`;
//! - for a sandbox with directories of the host: their drivers in `/modules/shares`;
//! - for a sandbox with room for more memory: the driver that adds it, in `/modules/memory`, and
//!   that by which a guest reports free pages, for a sandbox whose guest does;
//! - for a pod, and a container with all rights: bridges, in `/modules/bridge`.
//!
//! The unpacked kernel and the initramfs are kept in a cache directory. They are written under
//! temporary names and renamed into place, so that an interrupted build leaves nothing that looks
//! complete.
//!
//! The initramfs is not compressed: QEMU passes it to the guest as it is, and unpacking it would
//! cost the guest time at every boot (under emulation far more than the host saves in memory).
//!
//! Signatures of modules are hidden from the guest's kernel, unless it insists on them: the host
//! gives the guest its kernel, initramfs and modules alike.
//!
//! Not implemented: fetching kernels (set-up does), checking signatures of modules, reading
//! `modules.dep` (packages come without it; dependencies are read from the modules).
//!
//! Dependencies: `flate2`, `zstd`, `lz4_flex` and `lzma-rust2`, since kernels and modules are
//! compressed with any of them; `sha2` and `hex` name cache files by content; `thiserror` for
//! errors at the crate's edge.

use std::fs;
use std::path::{Path, PathBuf};

mod cache;
mod cpio;
mod elf;
mod error;
mod kernel;
mod modules;
mod unpack;

pub use error::{Error, Result};
pub use kernel::{Kernel, is_same_content};
pub use modules::{
    BRIDGE, CONNECTIONS, EXTRA, HARDWARE, MEMORY, NETWORK, PMEM, REPORTING, SHARES, SOCKETS,
    SandboxDriver, VLAN, WANTED,
};

use cpio::Archive;
use elf::Elf;
use modules::Module;

/// The largest file that is put into an initramfs, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// The path of the socket engine's program in an initramfs.
const ENGINE: &str = "sockets/slipway-guest-sockets";
/// The path of the library for programs that use glibc.
const LIBRARY: &str = "sockets/libslipway.so";
/// The path of the library for programs that use musl, if there is one.
const MUSL_LIBRARY: &str = "sockets/libslipway-musl.so";

/// The empty directories of the initramfs, on which the agent mounts.
const DIRECTORIES: &[&str] = &[
    "dev",
    "proc",
    "sys",
    "run",
    "containers",
    "modules",
    "modules/bridge",
    "modules/connections",
    "modules/extra",
    "modules/memory",
    "modules/network",
    "modules/pmem",
    "modules/shares",
    "modules/sockets",
    "modules/vlan",
];
/// The directory of each group of modules.
const GROUPS: [&str; 10] = [
    "modules",
    "modules/network",
    "modules/extra",
    "modules/vlan",
    "modules/sockets",
    "modules/pmem",
    "modules/shares",
    "modules/bridge",
    "modules/memory",
    "modules/connections",
];

/// The host's files that a sandbox with a socket function needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The socket engine, a static x86-64 program: `/sockets/slipway-guest-sockets`.
    pub engine: PathBuf,
    /// The library for programs that use glibc: `/sockets/libslipway.so`.
    pub library: PathBuf,
    /// The library for programs that use musl: `/sockets/libslipway-musl.so`.
    pub musl_library: Option<PathBuf>,
}

/// The parts of an initramfs that few sandboxes need.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras<'a> {
    /// The files for a socket function.
    pub sockets: Option<&'a Sockets>,
    /// Set for the drivers of shared pages (persistent memory), in `/modules/pmem`.
    pub pmem: bool,
    /// Set for the drivers of directories of the host, in `/modules/shares`.
    pub shares: bool,
    /// Set for bridges, in `/modules/bridge`.
    pub bridge: bool,
    /// Set for the driver of memory that comes and goes, in `/modules/memory`.
    pub memory: bool,
    /// Set for the driver by which the guest reports free pages, in `/modules/memory`.
    pub reporting: bool,
    /// Set for drivers of virtual functions of hardware, in `/modules/extra`.
    pub hardware: bool,
}

/// Returns the path of the initramfs for `kernel` with `agent` (a static x86-64 program) as its
/// init. Makes the initramfs if it is not in the directory `cache`, which is created if it is
/// missing. With `extras` the guest can have what they are for.
///
/// The file's name contains a digest of its content. So a new agent or kernel makes a new file, and
/// a running start never sees its initramfs change. Takes some ten milliseconds.
///
/// # Errors
/// [`Error`] if the kernel lacks a wanted module, a module or the agent is invalid, or a file
/// cannot be read or written.
pub fn build(kernel: &Kernel, agent: &Path, extras: Extras<'_>, cache: &Path) -> Result<PathBuf> {
    let agent = read_program(agent)?;
    let sockets = if extras.sockets.is_some() { SOCKETS } else { &[] };
    let pmem = if extras.pmem { PMEM } else { &[] };
    let shares = if extras.shares { SHARES } else { &[] };
    let bridge = if extras.bridge { BRIDGE } else { &[] };
    let memory = modules::of_memory(extras.memory, extras.reporting);
    let extra = if extras.hardware { HARDWARE } else { EXTRA };
    let modules = match &kernel.modules {
        Some(directory) => {
            let groups =
                [WANTED, NETWORK, extra, VLAN, sockets, pmem, shares, bridge, memory, CONNECTIONS];
            modules::resolve(directory, groups)?
        }
        None => Default::default(),
    };
    let mut archive = assemble(&agent, &modules);
    if let Some(sockets) = extras.sockets {
        archive.directory("sockets");
        archive.file(ENGINE, 0o755, &read_program(&sockets.engine)?);
        archive.file(LIBRARY, 0o644, &read_file(&sockets.library)?);
        if let Some(library) = &sockets.musl_library {
            archive.file(MUSL_LIBRARY, 0o644, &read_file(library)?);
        }
    }
    let archive = archive.finish();
    let release = kernel.release.as_deref().unwrap_or("unknown");
    cache::by_content(cache, &format!("initramfs-{release}"), "cpio", &archive)
}

/// Assembles the archive. The same input makes the same bytes, since every time stamp is zero.
fn assemble(agent: &[u8], modules: &[Vec<Module>; GROUPS.len()]) -> Archive {
    let mut archive = Archive::new();
    for directory in DIRECTORIES {
        archive.directory(directory);
    }
    // The kernel opens /dev/console as the standard streams of init, before init can mount
    // anything.
    archive.character_device("dev/console", 0o600, 5, 1);
    // When the kernel requests a module, it starts the agent without standard streams.
    archive.character_device("dev/null", 0o666, 1, 3);
    archive.file("init", 0o755, agent);
    for (directory, modules) in GROUPS.iter().zip(modules) {
        for (number, module) in modules.iter().enumerate() {
            let path = format!("{directory}/{number:02}-{}.ko", module.name);
            archive.file(&path, 0o644, &module.object);
        }
    }
    archive
}

/// Checks that `path` is a program that can run in an initramfs.
///
/// # Errors
/// [`Error`] if the file cannot be read, is not an x86-64 program, or is linked dynamically.
pub fn check_program(path: &Path) -> Result<()> {
    read_program(path).map(drop)
}

fn read_program(path: &Path) -> Result<Vec<u8>> {
    let bad = |what| Error::BadProgram { path: path.to_owned(), what };
    let program = read_file(path)?;
    let elf = Elf::parse(&program).ok_or_else(|| bad("it is no x86-64 ELF program"))?;
    if elf.has_interpreter() {
        return Err(bad("it is not static: an initramfs has no dynamic loader"));
    }
    Ok(program)
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let size = fs::metadata(path).map_err(|source| Error::file("read", path, source))?.len();
    if size > MAX_FILE {
        return Err(Error::BadProgram { path: path.to_owned(), what: "it is larger than 64 MiB" });
    }
    fs::read(path).map_err(|source| Error::file("read", path, source))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::elf::tests::ElfFile;

    /// Makes a kernel directory with compressed modules that depend on each other.
    fn kernel_in(directory: &Path) -> Kernel {
        let modules = directory.join("modules/kernel/fs");
        fs::create_dir_all(&modules).unwrap();
        fs::write(directory.join("release"), "6.1.0-test\n").unwrap();
        fs::write(directory.join("vmlinuz"), ElfFile::kernel().bytes()).unwrap();
        let erofs = ElfFile::module("depends=libcrc32c,lz4-decompress\0").bytes();
        fs::write(modules.join("erofs.ko"), erofs).unwrap();
        let net = ElfFile::module("depends=failover,libcrc32c\0").bytes();
        fs::write(modules.join("virtio_net.ko"), net).unwrap();
        fs::write(modules.join("failover.ko"), ElfFile::module("depends=\0").bytes()).unwrap();
        fs::write(modules.join("virtio_blk.ko"), ElfFile::module("depends=\0").bytes()).unwrap();
        fs::write(modules.join("8021q.ko"), ElfFile::module("depends=garp\0").bytes()).unwrap();
        fs::write(modules.join("garp.ko"), ElfFile::module("depends=\0").bytes()).unwrap();
        fs::write(modules.join("libcrc32c.ko"), ElfFile::module("depends=\0").bytes()).unwrap();
        let zstd = zstd::encode_all(&ElfFile::module("").bytes()[..], 3).unwrap();
        fs::write(modules.join("lz4_decompress.ko.zst"), zstd).unwrap();
        let builtin: String = ["virtio_pci", "virtio_console", "nvme", "overlay"]
            .map(|name| format!("kernel/drivers/{name}.ko\n"))
            .concat();
        fs::write(directory.join("modules/modules.builtin"), builtin).unwrap();
        Kernel::locate(None, directory).unwrap()
    }

    fn agent_in(directory: &Path) -> PathBuf {
        let path = directory.join("agent");
        fs::write(&path, ElfFile::program().bytes()).unwrap();
        path
    }

    /// Returns the output of `cpio -tv` for an archive. Returns `None` if cpio is not installed.
    fn listed_by_cpio(archive: &[u8]) -> Option<String> {
        let mut child = Command::new("cpio")
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        child.stdin.take().unwrap().write_all(archive).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        Some(String::from_utf8(output.stdout).unwrap())
    }

    #[test]
    fn an_initramfs_holds_init_devices_and_modules_in_load_order() {
        let directory = tempfile::tempdir().unwrap();
        let kernel = kernel_in(directory.path());
        let cache = directory.path().join("cache");
        let built = build(&kernel, &agent_in(directory.path()), Extras::default(), &cache).unwrap();
        let Some(listing) = listed_by_cpio(&fs::read(&built).unwrap()) else {
            println!(
                "SKIPPED: an_initramfs_holds_init_devices_and_modules_in_load_order: needs cpio"
            );
            return;
        };
        let lines: Vec<_> = listing.lines().map(|line| line.trim_end().to_owned()).collect();
        for (line, name) in lines.iter().zip(DIRECTORIES) {
            assert!(line.starts_with("drwxr-xr-x") && line.ends_with(name), "{line}");
        }
        let rest = &lines[DIRECTORIES.len()..];
        assert!(rest[0].starts_with("crw-------") && rest[0].contains("5,   1"), "{}", rest[0]);
        assert!(rest[1].starts_with("crw-rw-rw-") && rest[1].contains("1,   3"), "{}", rest[1]);
        assert!(rest[2].starts_with("-rwxr-xr-x") && rest[2].ends_with("init"), "{}", rest[2]);
        let names: Vec<_> = rest[3..].iter().map(|line| line.rsplit(' ').next().unwrap()).collect();
        let expected = [
            "modules/00-libcrc32c.ko",
            "modules/01-lz4_decompress.ko",
            "modules/02-erofs.ko",
            "modules/network/00-failover.ko",
            "modules/network/01-virtio_net.ko",
            "modules/extra/00-virtio_blk.ko",
            "modules/vlan/00-garp.ko",
            "modules/vlan/01-8021q.ko",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn the_same_input_is_built_once_and_another_agent_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let kernel = kernel_in(directory.path());
        let (agent, cache) = (agent_in(directory.path()), directory.path().join("cache"));
        let first = build(&kernel, &agent, Extras::default(), &cache).unwrap();
        let written = fs::metadata(&first).unwrap().modified().unwrap();
        assert_eq!(build(&kernel, &agent, Extras::default(), &cache).unwrap(), first);
        assert_eq!(fs::metadata(&first).unwrap().modified().unwrap(), written);
        let mut changed = fs::read(&agent).unwrap();
        changed.push(0);
        fs::write(&agent, changed).unwrap();
        assert_ne!(build(&kernel, &agent, Extras::default(), &cache).unwrap(), first);
        // Only complete files are in the cache.
        let names: Vec<_> = fs::read_dir(&cache).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }

    #[test]
    fn a_sandbox_with_sockets_has_their_driver_engine_and_libraries() {
        let directory = tempfile::tempdir().unwrap();
        let (agent, at) = (agent_in(directory.path()), |name: &str| directory.path().join(name));
        fs::write(at("library"), "library").unwrap();
        let sockets = Sockets { engine: agent.clone(), library: at("library"), musl_library: None };
        let built = |sockets: &Sockets| {
            let extras = Extras { sockets: Some(sockets), ..Extras::default() };
            build(&kernel_in(directory.path()), &agent, extras, directory.path())
        };
        let lacks = built(&sockets).unwrap_err().to_string();
        assert!(lacks.contains("lacks uio_pci_generic"), "{lacks}");
        let modules = directory.path().join("modules/kernel/fs");
        let driver = ElfFile::module("depends=uio\0").bytes();
        fs::write(modules.join("uio_pci_generic.ko"), driver).unwrap();
        fs::write(modules.join("uio.ko"), ElfFile::module("depends=\0").bytes()).unwrap();
        let both = Sockets { musl_library: Some(at("library")), ..sockets.clone() };
        for (sockets, libraries) in [(&sockets, 1), (&both, 2)] {
            let archive = fs::read(built(sockets).unwrap()).unwrap();
            let text = String::from_utf8_lossy(&archive);
            for name in ["modules/sockets/00-uio.ko", "modules/sockets/01-uio_pci", ENGINE] {
                assert_eq!(text.matches(name).count(), 1, "{name}");
            }
            assert_eq!(text.matches("sockets/libslipway").count(), libraries);
        }
        let absent = Sockets { engine: at("absent"), ..sockets };
        assert!(built(&absent).unwrap_err().to_string().contains("absent"));
    }

    #[test]
    fn a_root_in_shared_pages_has_drivers_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let agent = agent_in(directory.path());
        let extras = Extras { pmem: true, ..Extras::default() };
        let built = |extras| build(&kernel_in(directory.path()), &agent, extras, directory.path());
        let lacks = built(extras).unwrap_err().to_string();
        assert!(lacks.contains("lacks virtio_pmem, nd_pmem"), "{lacks}");
        let modules = directory.path().join("modules/kernel/fs");
        for (name, info) in [
            ("virtio_pmem", "depends=libnvdimm\0"),
            ("nd_pmem", "depends=libnvdimm\0"),
            ("libnvdimm", "depends=\0"),
        ] {
            fs::write(modules.join(format!("{name}.ko")), ElfFile::module(info).bytes()).unwrap();
        }
        let [with, without] = [extras, Extras::default()].map(|extras| {
            String::from_utf8_lossy(&fs::read(built(extras).unwrap()).unwrap()).into_owned()
        });
        for name in ["00-libnvdimm.ko", "01-virtio_pmem.ko", "02-nd_pmem.ko"] {
            let path = format!("modules/pmem/{name}");
            assert!(with.contains(&path) && !without.contains(&path), "{path}");
        }
    }

    #[test]
    fn directories_of_the_host_have_drivers_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let agent = agent_in(directory.path());
        let extras = Extras { shares: true, ..Extras::default() };
        let built = |extras| build(&kernel_in(directory.path()), &agent, extras, directory.path());
        let lacks = built(extras).unwrap_err().to_string();
        assert!(lacks.contains("lacks virtiofs"), "{lacks}");
        let modules = directory.path().join("modules/kernel/fs");
        for (name, info) in [("virtiofs", "depends=fuse\0"), ("fuse", "depends=\0")] {
            fs::write(modules.join(format!("{name}.ko")), ElfFile::module(info).bytes()).unwrap();
        }
        let [with, without] = [extras, Extras::default()].map(|extras| {
            String::from_utf8_lossy(&fs::read(built(extras).unwrap()).unwrap()).into_owned()
        });
        for name in ["00-fuse.ko", "01-virtiofs.ko"] {
            let path = format!("modules/shares/{name}");
            assert!(with.contains(&path) && !without.contains(&path), "{path}");
        }
    }

    #[test]
    fn drivers_of_memory_are_in_a_folder_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let agent = agent_in(directory.path());
        let built = |extras| build(&kernel_in(directory.path()), &agent, extras, directory.path());
        let memory = Extras { memory: true, ..Extras::default() };
        let reporting = Extras { reporting: true, ..Extras::default() };
        for (extras, name) in [(memory, "virtio_mem"), (reporting, "virtio_balloon")] {
            let lacks = built(extras).unwrap_err().to_string();
            assert!(lacks.contains(&format!("lacks {name}")), "{lacks}");
            let path = directory.path().join(format!("modules/kernel/fs/{name}.ko"));
            fs::write(path, ElfFile::module("depends=\0").bytes()).unwrap();
            let [with, without] = [extras, Extras::default()].map(|extras| {
                let built = fs::read(built(extras).unwrap()).unwrap();
                String::from_utf8_lossy(&built).contains(&format!("modules/memory/00-{name}.ko"))
            });
            assert!(with && !without);
        }
    }

    #[test]
    fn bridges_are_there_for_those_that_may_make_them() {
        let directory = tempfile::tempdir().unwrap();
        let agent = agent_in(directory.path());
        let build = |bridge| {
            let extras = Extras { bridge, ..Extras::default() };
            build(&kernel_in(directory.path()), &agent, extras, directory.path()).unwrap()
        };
        // Kernels without the module are no error.
        build(true);
        let path = directory.path().join("modules/kernel/fs/bridge.ko");
        fs::write(path, ElfFile::module("depends=\0").bytes()).unwrap();
        let has = |bridge| {
            let built = fs::read(build(bridge)).unwrap();
            String::from_utf8_lossy(&built).contains("modules/bridge/00-bridge.ko")
        };
        assert_eq!((has(true), has(false)), (true, false));
    }

    #[test]
    fn connections_can_be_ended_where_the_kernel_has_modules_for_that() {
        let directory = tempfile::tempdir().unwrap();
        let agent = agent_in(directory.path());
        let built = || {
            let kernel = kernel_in(directory.path());
            let built = build(&kernel, &agent, Extras::default(), directory.path()).unwrap();
            String::from_utf8_lossy(&fs::read(built).unwrap()).into_owned()
        };
        // Kernels without the modules are no error.
        assert!(!built().contains("_diag.ko"));
        let modules = directory.path().join("modules/kernel/fs");
        for (name, info) in [
            ("inet_diag", "depends=\0"),
            ("tcp_diag", "depends=inet_diag\0"),
            ("udp_diag", "depends=inet_diag\0"),
        ] {
            fs::write(modules.join(format!("{name}.ko")), ElfFile::module(info).bytes()).unwrap();
        }
        let built = built();
        for name in ["00-inet_diag.ko", "01-tcp_diag.ko", "02-udp_diag.ko"] {
            assert!(built.contains(&format!("modules/connections/{name}")), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_an_agent_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let kernel = kernel_in(directory.path());
        let agent = directory.path().join("agent");
        let refused = |content: &[u8]| {
            fs::write(&agent, content).unwrap();
            build(&kernel, &agent, Extras::default(), directory.path()).unwrap_err().to_string()
        };
        assert!(refused(b"#!/bin/sh\n").contains("no x86-64 ELF"));
        assert!(refused(b"").contains("no x86-64 ELF"));
        assert!(refused(&ElfFile::dynamic().bytes()).contains("not static"));
        assert!(
            build(&kernel, &directory.path().join("absent"), Extras::default(), directory.path())
                .is_err()
        );
    }

    /// Uses the kernel that set-up unpacked. A small ELF program stands in for the agent.
    #[test]
    fn installed_kernel_has_what_a_sandbox_needs() {
        let installed = Path::new("/var/lib/slipway/kernel");
        let Ok(kernel) = Kernel::locate(None, installed) else {
            println!("SKIPPED: installed_kernel_has_what_a_sandbox_needs: needs 'make setup'");
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let built =
            build(&kernel, &agent_in(directory.path()), Extras::default(), directory.path())
                .unwrap();
        if let Some(listing) = listed_by_cpio(&fs::read(built).unwrap()) {
            print!("{listing}");
            assert!(listing.contains("-overlay.ko"), "{listing}");
        }
        let bootable = kernel.bootable(directory.path()).unwrap();
        let bytes = fs::read(bootable).unwrap();
        assert!(Elf::parse(&bytes).is_some_and(|elf| elf.has_pvh_entry()));
    }
}
