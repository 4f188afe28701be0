//! `slipway-vmm` as a program that is launched, and its command line.
//!
//! All that the VMM uses arrives as an open descriptor, kernel and initramfs included, so that it
//! needs no right on any path. A vfio-user function arrives as a connection to its server.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use crate::cache::file_identity;
use crate::cage::Holes;
use crate::files::connect;
use crate::identity::SLIPWAY_VMM;
use crate::launch::{Common, Program};
use crate::process::Launch;
use crate::{Accel, CpuTemplate, Error, FreePages, HotRegion, Result, SharedPages, VmSpec};

/// A program `slipway-vmm`.
#[derive(Clone, Debug)]
pub(super) struct Binary(pub(super) PathBuf);

/// The descriptors with which the machine begins.
enum Begin {
    /// It boots a kernel with an initramfs.
    Boot { kernel: RawFd, initramfs: RawFd },
    /// It goes on from a state.
    Restore(RawFd),
}

/// The numbers of the child's descriptors.
struct Passed {
    common: Common,
    begin: Begin,
    /// The pages that guests share.
    shared: Option<RawFd>,
    /// Connections to the vfio-user servers.
    functions: Vec<RawFd>,
}

impl Program for Binary {
    const NAME: &'static str = SLIPWAY_VMM;
    const RECONNECTS: bool = true;
    const WITHOUT_KVM: Accel = Accel::Tcg;

    fn path(&self) -> &Path {
        &self.0
    }

    fn identity(&self) -> io::Result<String> {
        file_identity(&self.0)
    }

    fn check(&self, spec: &VmSpec, accel: Accel) -> Result<()> {
        let bad = |what: &str| Err(Error::BadSpec { what: what.to_owned() });
        if accel != Accel::Kvm {
            return bad(
                "slipway-vmm runs guests on KVM only; QEMU emulates a CPU (vmm = \"auto\")",
            );
        }
        if spec.emulates_devices() {
            return bad(
                "slipway-vmm emulates no disks or NICs and has no VFIO: QEMU does (vmm = \"auto\")",
            );
        }
        Ok(())
    }

    fn prepare(
        &self,
        spec: &VmSpec,
        _: Accel,
        common: Common,
        launch: &mut Launch,
    ) -> Result<Vec<OsString>> {
        launch.allow_holes(holes(spec));
        let functions = spec.vfio_user_sockets.iter().map(|path| connect(path));
        let functions = functions.collect::<Result<Vec<_>>>()?;
        let shared = spec.shared.as_ref().map(SharedPages::descriptor).transpose()?;
        let begin = match &spec.restore {
            Some(state) => {
                // The VMM reads by position, so that many may have the description.
                let state = state.try_clone();
                let failed = |source| Error::system("duplicating a descriptor", source);
                Begin::Restore(launch.pass(state.map_err(failed)?.into()))
            }
            None => Begin::Boot {
                kernel: launch.pass(open(&spec.kernel)?),
                initramfs: launch.pass(open(&spec.initramfs)?),
            },
        };
        let passed = Passed {
            common,
            begin,
            shared: shared.map(|fd| launch.pass(fd)),
            functions: functions.into_iter().map(|fd| launch.pass(fd)).collect(),
        };
        Ok(arguments(spec, &passed))
    }
}

/// Returns the holes that the VMM may make in its guest's memory.
fn holes(spec: &VmSpec) -> Holes {
    Holes::of(spec.makes_holes())
}

fn open(path: &Path) -> Result<OwnedFd> {
    let file = File::open(path).map_err(|source| Error::file("open", path, source))?;
    Ok(file.into())
}

/// Builds the command line for a checked spec.
fn arguments(spec: &VmSpec, passed: &Passed) -> Vec<OsString> {
    let Common { memory, lease, control, agent, kvm } = passed.common;
    let some = [("--kvm", kvm), ("--lease", lease), ("--pmem", passed.shared)];
    let some = some.into_iter().filter_map(|(option, fd)| Some((option, fd?)));
    let begin = match passed.begin {
        Begin::Boot { kernel, initramfs } => {
            vec![("--kernel", kernel), ("--initramfs", initramfs)]
        }
        Begin::Restore(state) => vec![("--restore", state)],
    };
    let own = [("--memory", memory), ("--control", control), ("--agent", agent)];
    let descriptors = some.chain(own).chain(begin);
    let functions = passed.functions.iter().map(|function| ("--function", *function));
    let mut arguments: Vec<OsString> = Vec::new();
    for (option, descriptor) in descriptors.chain(functions) {
        arguments.extend([option.into(), format!("fd:{descriptor}").into()]);
    }
    arguments.extend(["--name".into(), format!("slipway-{}", spec.name).into()]);
    if spec.plug_slots > 0 {
        let slots = spec.vfio_user_sockets.len() + spec.plug_slots;
        arguments.extend(["--slots".into(), slots.to_string().into()]);
    }
    for HotRegion { bytes, node } in &spec.hot_memory {
        let region = format!("{},{node}", bytes >> 20);
        arguments.extend(["--hotplug-memory".into(), region.into()]);
    }
    if spec.free_pages != FreePages::Unreported {
        arguments.push("--free-page-reporting".into());
    }
    arguments.extend(["--cpus".into(), spec.cpus.to_string().into()]);
    if spec.plug_cpus > 0 {
        let most = spec.cpus + spec.plug_cpus;
        arguments.extend(["--max-cpus".into(), most.to_string().into()]);
    }
    if spec.cpu_template != CpuTemplate::Host {
        arguments.extend(["--cpu-template".into(), spec.cpu_template.as_str().into()]);
    }
    if matches!(passed.begin, Begin::Boot { .. }) {
        arguments.extend(["--cmdline".into(), spec.kernel_words(&[]).into()]);
    }
    arguments.push("--paused".into());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;
    use crate::{DiskModel, EmulatedDisk};

    #[test]
    fn all_that_it_uses_is_a_descriptor() {
        let common = Common { memory: 3, lease: Some(4), control: 5, agent: 6, kvm: Some(9) };
        let (kernel, initramfs, functions) = (10, 11, vec![7, 8]);
        let (begin, shared) = (Begin::Boot { kernel, initramfs }, Some(12));
        let mut passed = Passed { common, begin, shared, functions };
        let arguments = arguments(&spec(), &passed);
        let words: Vec<_> = arguments.iter().map(|word| word.to_str().unwrap()).collect();
        let value = |option| {
            let at = words.iter().position(|word| *word == option)?;
            words.get(at + 1).copied()
        };
        for (option, descriptor) in [
            ("--kvm", "fd:9"),
            ("--memory", "fd:3"),
            ("--lease", "fd:4"),
            ("--kernel", "fd:10"),
            ("--initramfs", "fd:11"),
            ("--pmem", "fd:12"),
            ("--control", "fd:5"),
            ("--agent", "fd:6"),
            ("--name", "slipway-web-1"),
            ("--cpus", "2"),
        ] {
            assert_eq!(value(option), Some(descriptor), "{option}");
        }
        let functions = words.windows(2).filter(|pair| pair[0] == "--function");
        assert_eq!(functions.map(|pair| pair[1]).collect::<Vec<_>>(), ["fd:7", "fd:8"]);
        let cmdline = value("--cmdline").unwrap();
        assert!(cmdline.ends_with("jent_mod_init slipway.debug=1"), "{cmdline}");
        assert_eq!(words.last(), Some(&"--paused"));
        assert!(!words.iter().any(|word| word.contains('/')), "{words:?}");
        assert_eq!(value("--slots"), None);
        let hot_memory = vec![HotRegion { bytes: 128 << 20, node: 2 }];
        let free_pages = FreePages::Kept;
        let plugs = VmSpec { plug_slots: 3, plug_cpus: 1, hot_memory, free_pages, ..spec() };
        let plugs = super::arguments(&plugs, &passed);
        assert!(plugs.iter().any(|word| word == "--free-page-reporting"), "{plugs:?}");
        assert!(!words.contains(&"--free-page-reporting"), "{words:?}");
        for option in [["--slots", "5"], ["--max-cpus", "3"], ["--hotplug-memory", "128,2"]] {
            assert!(plugs.windows(2).any(|pair| pair == option), "{plugs:?}");
        }
        assert_eq!(value("--cpu-template"), None);
        let level = "x86-64-v3".parse().unwrap();
        let level = super::arguments(&VmSpec { cpu_template: level, ..spec() }, &passed);
        assert!(level.windows(2).any(|pair| pair == ["--cpu-template", "x86-64-v3"]), "{level:?}");
        passed.begin = Begin::Restore(13);
        let fork = super::arguments(&spec(), &passed);
        assert!(fork.windows(2).any(|pair| pair == ["--restore", "fd:13"]), "{fork:?}");
        for option in ["--kernel", "--initramfs", "--cmdline"] {
            assert!(!fork.iter().any(|word| word == option), "{fork:?}");
        }
    }

    #[test]
    fn only_a_vmm_that_gives_memory_back_makes_holes() {
        let of = |free_pages| holes(&VmSpec { free_pages, ..spec() });
        assert_eq!([of(FreePages::Unreported), of(FreePages::Kept)], [Holes::None; 2]);
        assert_eq!(of(FreePages::GivenBack), Holes::Small);
        let hot_memory = vec![HotRegion { bytes: 128 << 20, node: 2 }];
        assert_eq!(holes(&VmSpec { hot_memory, ..spec() }), Holes::Small);
    }

    #[test]
    fn what_only_qemu_can_do_is_refused() {
        let program = Binary("/nowhere".into());
        program.check(&spec(), Accel::Kvm).unwrap();
        let refusal = |spec: &VmSpec, accel| match program.check(spec, accel) {
            Err(Error::BadSpec { what }) => what,
            other => panic!("{other:?}"),
        };
        assert!(refusal(&spec(), Accel::Tcg).contains("KVM only"));
        let disk = EmulatedDisk { model: DiskModel::Nvme, path: "/d".into(), read_only: false };
        let with_disk = VmSpec { disks: vec![disk], ..spec() };
        assert!(refusal(&with_disk, Accel::Kvm).contains("no disks or NICs"));
    }
}
