//! `slipway doctor`: reports what this host can do, what is missing, and the command that mends it.
//!
//! A new check is a function that returns a `Finding`, in the list of `doctor`. The check changes
//! nothing on the host. If something is missing, the finding has a command that adds it. The
//! decision is a function of values that were read from the host, with a test below, and
//! `tests/e2e/50-bad-input.sh` runs `slipway doctor`. If a feature needs the part of the host that
//! is checked, the section of `docs/operation.md` about that feature names the check;
//! `deploy/kubernetes/node/services.sh` reports lines with the word `MISSING`.

use std::borrow::Cow;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Result;
use slipway_cgroup::{FAVORDYNMODS, Moves};
use slipway_hypervisor::{CpuTemplate, Hypervisor, OfferedTemplate, Page, accel};
use slipway_runtime::Config;
use slipway_space::Space;

use crate::args::DoctorArgs;
use crate::vmm::vmms;
use crate::{pci, table};

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Fine,
    /// The host works, but worse than it could.
    Lesser,
    /// A necessity is missing: sandboxes cannot run.
    Missing,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Fine => "ok",
            Self::Lesser => "note",
            Self::Missing => "MISSING",
        }
    }
}

struct Finding {
    what: &'static str,
    verdict: Verdict,
    detail: String,
    /// The command that mends it.
    mend: Cow<'static, str>,
}

/// The command that sets a host up; an installed copy names it, too.
const SET_UP: &str = "make setup (in Slipway's source tree)";

/// The check of moves of processes by others.
const MOVES: &str = "moves into groups";

/// Runs all checks. The exit status is 1 if sandboxes cannot run.
pub async fn doctor(config: &Config, args: &DoctorArgs) -> Result<i32> {
    let [vmm, qemu] = vmm(config).await;
    let findings = [
        root(),
        vmm,
        qemu,
        accelerator(),
        cpu_templates(config),
        memory(config),
        huge_pages(config),
        kernel(config),
        agent(config),
        mkfs_ext4(),
        cgroups(),
        moves(),
        networks(),
        hardware_functions(),
        data_dir(config),
        space(config),
        daemon(config),
    ];
    let header = ["CHECK", "", "FOUND", "MEND IT WITH"];
    table::list(&findings, args.json, json, header, row)?;
    Ok(i32::from(findings.iter().any(|finding| finding.verdict == Verdict::Missing)))
}

fn json(finding: &Finding) -> serde_json::Value {
    serde_json::json!({
        "check": finding.what,
        "verdict": finding.verdict.word().to_lowercase(),
        "found": finding.detail,
        "mend": (finding.verdict != Verdict::Fine).then_some(&finding.mend),
    })
}

fn row(finding: &Finding) -> [String; 4] {
    let fine = finding.verdict == Verdict::Fine;
    let mend = if fine { String::new() } else { finding.mend.to_string() };
    let word = finding.verdict.word();
    [finding.what.to_owned(), word.to_owned(), finding.detail.clone(), mend]
}

/// Makes a finding: fine with the detail in `Ok`, or missing with the detail in `Err`.
fn needed(what: &'static str, outcome: Result<String, String>, mend: &'static str) -> Finding {
    let (verdict, detail) = match outcome {
        Ok(detail) => (Verdict::Fine, detail),
        Err(detail) => (Verdict::Missing, detail),
    };
    Finding { what, verdict, detail, mend: mend.into() }
}

fn root() -> Finding {
    let uid = rustix::process::geteuid();
    let outcome = if uid.is_root() { Ok("root".to_owned()) } else { Err(format!("{uid:?}")) };
    needed("user", outcome, "sudo slipway …")
}

/// Returns the findings about the VMM that sandboxes get, and about QEMU, which is a necessity only
/// if it is that VMM.
async fn vmm(config: &Config) -> [Finding; 2] {
    let vmms = match vmms(config) {
        Ok(vmms) => vmms,
        Err(error) => {
            let mend = "vmm = \"auto\" in the settings, or SLIPWAY_VMM=auto";
            return [
                needed("VMM", Err(error.to_string()), mend),
                qemu(Err("not looked for".into())),
            ];
        }
    };
    let chosen = vmms.preview();
    let used = match vmms.check().await {
        Ok(()) if chosen.vmm != "qemu" => accel::probe_without_boot()
            .map_err(|reason| format!("slipway-vmm, which was asked for, needs KVM: {reason}")),
        checked => checked.map_err(|error| error.to_string()),
    };
    let used = used.map(|()| match vmms.native() {
        Ok(native) if chosen.vmm == native.name() => {
            format!("{} at {}: {}", chosen.vmm, native.path().display(), chosen.reason)
        }
        _ => format!("{}: {}", chosen.vmm, chosen.reason),
    });
    let found = vmms.qemu().await.map_err(|error| error.to_string()).map(|qemu| {
        let binary = qemu.binary();
        format!("{} at {}", binary.version(), binary.path().display())
    });
    let mut qemu = qemu(found);
    if qemu.verdict == Verdict::Missing && chosen.vmm != "qemu" {
        qemu.verdict = Verdict::Lesser;
    }
    [needed("VMM", used, SET_UP), qemu]
}

fn qemu(found: Result<String, String>) -> Finding {
    needed("QEMU 10.1 or newer", found, SET_UP)
}

fn accelerator() -> Finding {
    let (verdict, detail) = match accel::probe_without_boot() {
        Ok(()) => (Verdict::Fine, "KVM (the first run proves it with a boot)".to_owned()),
        Err(reason) => (Verdict::Lesser, format!("software emulation: {reason}")),
    };
    let mend = "a machine, or a VM with nested virtualisation, that has VT-x or AMD-V";
    Finding { what: "accelerator", verdict, detail, mend: mend.into() }
}

/// Returns the finding about the CPU templates that this host can give.
fn cpu_templates(config: &Config) -> Finding {
    let mend = "cpu_template = \"host\" in the settings";
    let outcome = config
        .cpu_template()
        .map_err(|error| error.to_string())
        .and_then(|wanted| given_templates(wanted, slipway_hypervisor::cpu_templates()));
    needed("CPU templates", outcome, mend)
}

/// Returns the names of the templates that can be had, if the wanted one is among them.
fn given_templates(
    wanted: CpuTemplate,
    all: Result<Vec<OfferedTemplate>, String>,
) -> Result<String, String> {
    let all = match all {
        Ok(all) => all,
        // Software emulation has none, and needs none.
        Err(reason) if wanted == CpuTemplate::Host => return Ok(format!("host; no KVM: {reason}")),
        Err(reason) => return Err(format!("{wanted} needs KVM: {reason}")),
    };
    if let Some((_, Err(reason))) = all.iter().find(|(template, _)| *template == wanted) {
        return Err(reason.clone());
    }
    let given = all.iter().filter(|(_, outcome)| outcome.is_ok());
    let given: Vec<_> = given.map(|(template, _)| template.as_str()).collect();
    Ok(format!("{} (in use: {wanted})", given.join(", ")))
}

fn kernel(config: &Config) -> Finding {
    let found = slipway_initramfs::Kernel::locate(None, &config.kernel_dir);
    let outcome = found.map(|kernel| kernel.image.display().to_string()).map_err(|e| e.to_string());
    needed("guest kernel", outcome, SET_UP)
}

fn agent(config: &Config) -> Finding {
    let found = config.find_agent();
    let outcome = found.map(|path| path.display().to_string()).map_err(|error| error.to_string());
    needed("agent", outcome, "make build")
}

fn mkfs_ext4() -> Finding {
    let places = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4"];
    let found = places.iter().find(|place| Path::new(place).exists());
    let outcome = found.map(|place| (*place).to_owned()).ok_or("not found".to_owned());
    needed("mkfs.ext4", outcome, "apt-get install e2fsprogs")
}

fn cgroups() -> Finding {
    let root = Path::new("/sys/fs/cgroup");
    let kind = if root.join("cgroup.controllers").exists() {
        Ok("v2")
    } else if root.join("memory").is_dir() {
        Ok("v1")
    } else {
        Err("not mounted: VMMs run without limits")
    };
    let writable = rustix::fs::access(root, rustix::fs::Access::WRITE_OK).is_ok();
    let (verdict, detail) = match kind {
        Ok(kind) if writable => (Verdict::Fine, kind.to_owned()),
        Ok(kind) => (Verdict::Lesser, format!("{kind}, read-only: VMMs run without limits")),
        Err(words) => (Verdict::Lesser, words.to_owned()),
    };
    let mend = "mount -t cgroup2 none /sys/fs/cgroup";
    Finding { what: "control groups", verdict, detail, mend: mend.into() }
}

/// Returns the finding about the wait of processes that others move into groups.
fn moves() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match Moves::of_host() {
        Ok(moves) => found_moves(&moves, &release),
        Err(error) => fine_moves(format!("not known: {error}")),
    }
}

/// Returns the finding about moves on a host whose kernel has this release.
fn found_moves(moves: &Moves, release: &str) -> Finding {
    match &moves.v2 {
        _ if moves.favoured => fine_moves(format!("the host favours them ({FAVORDYNMODS})")),
        Some(point) if knows_favordynmods(release) => Finding {
            what: MOVES,
            verdict: Verdict::Lesser,
            detail: "some wait 8 to 20 ms; a host that favours them starts and ends all of its \
                     processes a little slower"
                .to_owned(),
            mend: format!("mount -o remount,{FAVORDYNMODS} {}", point.display()).into(),
        },
        Some(_) => fine_moves("some wait 8 to 20 ms; Linux 6.0 can favour them".to_owned()),
        None => fine_moves("no cgroup2 is mounted, whose option favours them".to_owned()),
    }
}

fn fine_moves(detail: String) -> Finding {
    Finding { what: MOVES, verdict: Verdict::Fine, detail, mend: "".into() }
}

/// Returns whether a kernel of this release, as `uname -r` prints it, has the option: Linux 6.0 was
/// the first.
fn knows_favordynmods(release: &str) -> bool {
    let major = release.split('.').next().and_then(|major| major.parse::<u32>().ok());
    major.is_some_and(|major| major >= 6)
}

fn networks() -> Finding {
    let (verdict, detail) = match slipway_runtime::missing_for_networks() {
        None => (Verdict::Fine, "nft and /dev/net/tun".to_owned()),
        Some(what) => (Verdict::Lesser, format!("{what} is missing: sandboxes have none")),
    };
    let mend = "apt-get install nftables; modprobe tun";
    Finding { what: "networks", verdict, detail, mend: mend.into() }
}

/// Returns the finding about virtual functions of hardware, which few hosts give to guests.
fn hardware_functions() -> Finding {
    let detail = match pci::lacks(Path::new("/")) {
        None => "guests can be given some".to_owned(),
        Some(what) => format!("none can be given to guests: {what}"),
    };
    Finding { what: "hardware functions", verdict: Verdict::Fine, detail, mend: "".into() }
}

/// Checks that the users of VMMs can pass to the kernel and the initramfs in the data directory.
/// The directory itself gets its permissions from the daemon.
fn data_dir(config: &Config) -> Finding {
    let parents = config.data_dir.ancestors().skip(1).filter(|dir| dir.exists());
    let outcome = match closed(parents) {
        None => Ok(format!("{} can be reached by VMMs", config.data_dir.display())),
        Some(dir) => Err(format!(
            "{} is closed to the users that VMMs run as, who pass through it to {}",
            dir.display(),
            config.data_dir.display()
        )),
    };
    needed("data directory", outcome, "chmod o+x on it, or another --data-dir")
}

/// Returns the first directory that other users cannot pass through.
fn closed<'a>(mut dirs: impl Iterator<Item = &'a Path>) -> Option<&'a Path> {
    dirs.find(|dir| dir.metadata().is_ok_and(|found| found.permissions().mode() & 0o001 == 0))
}

fn space(config: &Config) -> Finding {
    let dir = config.data_dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let free = Space::at(dir).map_or(0, |space| space.free);
    let verdict = if free < 2 << 30 { Verdict::Lesser } else { Verdict::Fine };
    let detail = format!("{} free at {}", crate::size::show(free), dir.display());
    Finding { what: "disk space", verdict, detail, mend: "slipway image prune --all".into() }
}

/// Returns the finding about the source of sandboxes' memory.
fn memory(config: &Config) -> Finding {
    let device = "/dev/userfaultfd";
    let outcome = match config.uses_pool() {
        Err(error) => Err(error.to_string()),
        Ok(false) => Ok("new pages of the kernel".to_owned()),
        Ok(true) => match std::fs::File::options().read(true).write(true).open(device) {
            Ok(_) => Ok("recycled pages of the pool".to_owned()),
            Err(error) => Err(format!("the pool needs {device} (Linux 6.1): {error}")),
        },
    };
    needed("memory", outcome, "memory = \"kernel\" in the settings")
}

/// Returns the finding about the pages of the pool.
fn huge_pages(config: &Config) -> Finding {
    let what = "huge pages";
    let (verdict, detail) = match (config.uses_pool(), config.pool_page()) {
        (_, Err(error)) => (Verdict::Missing, error.to_string()),
        (Ok(true), Ok(Page::Huge)) => match huge_pages_to_be_had() {
            0 => (Verdict::Lesser, "none: sandboxes get pages of 4 KiB".to_owned()),
            pages => (Verdict::Fine, format!("{} to be had", crate::size::show(pages << 21))),
        },
        _ => (Verdict::Fine, "not used".to_owned()),
    };
    Finding { what, verdict, detail, mend: "sysctl vm.nr_hugepages=PAGES (of 2 MiB)".into() }
}

/// Returns the number of huge pages that are free, or that the kernel may make when they are asked
/// for.
fn huge_pages_to_be_had() -> u64 {
    let directory = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
    let count = |name| {
        let text = std::fs::read_to_string(directory.join(name)).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    free + count("nr_overcommit_hugepages").saturating_sub(count("surplus_hugepages"))
}

fn daemon(config: &Config) -> Finding {
    let running = config.socket().exists();
    let detail = if running { "runs" } else { "does not run; the next run starts one" };
    Finding { what: "daemon", verdict: Verdict::Fine, detail: detail.to_owned(), mend: "".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_that_cannot_be_had_is_missing() {
        let level = |name: &str| name.parse::<CpuTemplate>().unwrap();
        let (v2, v3) = (level("x86-64-v2"), level("x86-64-v3"));
        let all = || {
            Ok(vec![(CpuTemplate::Host, Ok(())), (v2, Ok(())), (v3, Err("it lacks avx2".into()))])
        };
        let given = Ok("host, x86-64-v2 (in use: x86-64-v2)".to_owned());
        assert_eq!(given_templates(v2, all()), given);
        assert_eq!(given_templates(v3, all()), Err("it lacks avx2".to_owned()));
        let none = || Err("/dev/kvm: it is not there".to_owned());
        assert!(given_templates(CpuTemplate::Host, none()).is_ok());
        assert!(given_templates(v2, none()).unwrap_err().starts_with("x86-64-v2 needs KVM: "));
    }

    /// The mounts of a host with version 2 alone, and of one with both versions.
    const MOUNTS: [(&str, &str); 2] = [
        (
            "/sys/fs/cgroup",
            "28 24 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        ),
        (
            "/sys/fs/cgroup/unified",
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
        ),
    ];

    #[test]
    fn a_host_that_can_favour_moves_gets_the_command_for_its_mount_point() {
        for (point, lines) in MOUNTS {
            let finding = found_moves(&Moves::parse(lines), "6.18.44-cloud");
            let [what, word, detail, mend] = row(&finding);
            assert_eq!((&*what, &*word), ("moves into groups", "note"));
            assert!(detail.contains("a little slower"), "{detail}");
            assert_eq!(mend, format!("mount -o remount,favordynmods {point}"));
            assert_eq!(json(&finding)["mend"], mend);
        }
    }

    #[test]
    fn a_host_that_favours_moves_or_cannot_is_fine() {
        let fine = |lines: &str, release: &str| {
            let finding = found_moves(&Moves::parse(lines), release);
            let [_, word, detail, mend] = row(&finding);
            assert_eq!((&*word, &*mend), ("ok", ""), "{detail}");
            detail
        };
        for (_, lines) in MOUNTS {
            let favoured = lines.replace("cgroup2 rw", "cgroup2 rw,favordynmods");
            assert!(fine(&favoured, "6.1.0-1").contains("favours"));
            assert!(fine(lines, "5.15.0-91-generic").contains("Linux 6.0"));
        }
        assert!(fine("", "6.18.44").contains("no cgroup2"));
    }

    #[test]
    fn the_option_is_known_since_linux_6() {
        for (release, known) in [("6.0.0", true), ("10.2", true), ("5.19.17", false), ("x", false)]
        {
            assert_eq!(knows_favordynmods(release), known, "{release}");
        }
    }

    #[test]
    fn a_directory_that_is_closed_to_others_is_found() {
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(top.path(), 0o711);
        mode(&top.path().join("a"), 0o750);
        let below = || inner.ancestors().take(3);
        assert_eq!(closed(below()), Some(&*top.path().join("a")));
        mode(&top.path().join("a"), 0o751);
        assert_eq!(closed(below()), None);
    }

    #[test]
    fn a_data_directory_that_vmms_cannot_enter_is_missing() {
        let top = tempfile::tempdir().unwrap();
        let shut = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(top.path(), shut).unwrap();
        let config = Config { data_dir: top.path().join("data"), ..Config::default() };
        let finding = data_dir(&config);
        assert!(finding.verdict == Verdict::Missing, "{}", finding.detail);
        let [what, word, detail, mend] = row(&finding);
        assert_eq!((&*what, &*word), ("data directory", "MISSING"));
        assert!(detail.contains("closed to the users that VMMs run as"), "{detail}");
        assert!(mend.contains("chmod o+x"), "{mend}");
    }
}
