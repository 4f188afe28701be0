//! `slipway bench vmm`: measures how soon VMMs run their guests.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use slipway_bench::Subject;
use slipway_bench::vmm::{
    Bare, Caged, Fork, ForkPlane, Program, Vmm, VmmLoad, VmmMeasured, VmmPlan, VmmReport,
    VmmSubject, keeper_in, vmm_table,
};
use slipway_plane::{Plane, Settings};
use slipway_plane_api::PlaneClient;

use super::reports::{self, View};
use super::subjects;
use crate::args::VmmArgs;

/// The subjects to measure, with descriptions. Those from the second line on need a program.
const SUBJECTS: [(&str, &str); 9] = [
    ("native", "Slipway's own VMM"),
    ("native-caged", "the same, in the namespaces that sandboxes' VMMs have, as root"),
    ("fork", "the same, with a saved machine in place of a boot, by the driver of sandboxes"),
    ("fork-functions", "the same, with an NVMe controller and an interface of a plane"),
    ("firecracker", "Firecracker, where it is in PATH"),
    ("cloud-hypervisor", "Cloud Hypervisor, where it is in PATH"),
    ("qemu-microvm", "QEMU's machine for microVMs"),
    ("qemu-q35", "QEMU's PC, which runs firmware first"),
    ("bare", "KVM alone, without a VMM: the floor"),
];
/// The size of memory of a quick run.
const QUICK: &str = "128M";
const KVM: &str = slipway_hypervisor::accel::KVM_DEVICE;

/// Measures, or shows an earlier report.
pub fn vmm(args: &VmmArgs) -> Result<i32> {
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<VmmReport> = View::of(VmmReport::picture, vmm_table);

fn loads(args: &VmmArgs) -> Result<Vec<VmmLoad>> {
    if args.quick { subjects::loads(&[], &[QUICK]) } else { Ok(args.memory.clone()) }
}

fn subjects(args: &VmmArgs) -> Result<Vec<Box<VmmSubject>>> {
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let programs = args.program.iter().map(|named| &*named.name);
    for name in programs {
        ensure!(
            name != "bare" && SUBJECTS.iter().any(|(one, _)| *one == name),
            "there is no subject \"{name}\" with a program; --list shows them"
        );
    }
    let mut subjects: Vec<Box<VmmSubject>> = Vec::new();
    for (name, _) in chosen {
        subjects.extend(subjects::able(name, &args.only, subject(name, args)?)?);
    }
    Ok(subjects)
}

/// Returns a subject if it can run here, else what it needs.
fn subject(name: &str, args: &VmmArgs) -> Result<Result<Box<VmmSubject>, &'static str>> {
    fn boxed(
        subject: impl Subject<Load = VmmLoad, Measured = VmmMeasured> + 'static,
    ) -> Box<VmmSubject> {
        Box::new(subject)
    }
    let (program, found, needs) = match name {
        "native" | "native-caged" | "fork" | "fork-functions" => {
            (Program::Native, own_vmm(), "slipway-vmm: `make build`")
        }
        "firecracker" => (Program::Firecracker, in_path("firecracker"), "--program or PATH"),
        "cloud-hypervisor" => {
            (Program::CloudHypervisor, in_path("cloud-hypervisor"), "--program or PATH")
        }
        "qemu-microvm" => (Program::QemuMicrovm, qemu(), "QEMU: `make setup`"),
        "qemu-q35" => (Program::QemuQ35, qemu(), "QEMU: `make setup`"),
        _ => return Ok(Ok(boxed(Bare))),
    };
    let named = |name: &str| args.program.iter().find(|one| one.name == name);
    // All ways to start it have the same program, unless the user says otherwise.
    let same = match name {
        "fork" | "fork-functions" => Some("native"),
        _ => name.strip_suffix("-caged"),
    };
    let said = named(name).or_else(|| named(same?));
    let Some(path) = said.map(|one| one.path.clone()).or(found) else {
        return Ok(Err(needs));
    };
    Ok(match name {
        "native-caged" => Caged::new(program, &path)?.map(boxed).ok_or("root"),
        "fork" => Ok(boxed(Fork::new(&path)?)),
        "fork-functions" => Ok(boxed(Fork::with_functions(&path, plane)?)),
        _ => Ok(boxed(Vmm::new(program, &path)?)),
    })
}

/// Starts a plane as that of a node, with a keeper, and serves its pool. Its files are in `folder`.
async fn plane(folder: PathBuf) -> Result<ForkPlane> {
    let settings = Settings { templates: true, ..Settings::default() };
    let plane = Plane::with_keeper(settings, keeper_in(&folder)?, &folder.join("io.lock"))?;
    let socket = folder.join("pool");
    let server = plane.pool().map(|pool| pool.listen(&socket)).transpose()?;
    let client = PlaneClient::new(plane.connect().await?);
    Ok(ForkPlane { client, pool: server.map(|server| (socket, server)) })
}

/// Returns the program of Slipway's own VMM: beside this program, or where cargo puts one that is
/// linked statically.
fn own_vmm() -> Option<PathBuf> {
    const NAME: &str = "slipway-vmm";
    let own = slipway_bench::slipway().ok()?;
    let folder = own.parent()?;
    let statically = folder.parent()?.join("x86_64-unknown-linux-gnu/agent");
    let installed = Path::new("/usr/libexec/slipway");
    [folder, &statically, installed].into_iter().map(|one| one.join(NAME)).find(|one| one.is_file())
}

/// Returns set-up's QEMU, or that in the path.
fn qemu() -> Option<PathBuf> {
    let tools = std::env::var_os("SLIPWAY_TOOLS").map(PathBuf::from);
    let tools = tools.unwrap_or_else(|| slipway_hypervisor::qemu::TOOL_ROOT.into());
    let name = "qemu-system-x86_64";
    Some(tools.join("bin").join(name)).filter(|path| path.is_file()).or_else(|| in_path(name))
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn run(args: &VmmArgs) -> Result<VmmReport> {
    let kvm = std::fs::File::options().read(true).write(true).open(KVM);
    kvm.map_err(|error| anyhow::anyhow!("{KVM}: {error}; all subjects need KVM"))?;
    let rounds = if args.quick { args.rounds.min(3) } else { args.rounds };
    let plan = VmmPlan::new(loads(args)?, rounds);
    subjects::report(subjects(args)?, plan, "kvm".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs no KVM: without it the VMM is not started either.
    #[test]
    fn a_fork_whose_vmm_does_not_start_leaves_no_functions_to_the_next_one() {
        let mut fork = Fork::with_functions(Path::new("/nowhere/slipway-vmm"), plane).unwrap();
        assert!(fork.about().contains("NVMe controller"), "{}", fork.about());
        let load = QUICK.parse().unwrap();
        let [first, second] = [(); 2].map(|()| format!("{:#}", fork.run(&load).unwrap_err()));
        assert_eq!(first, second);
        assert!(!first.contains("a function of a fork"), "{first}");
    }
}
