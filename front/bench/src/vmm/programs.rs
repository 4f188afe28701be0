//! VMMs as programs: their arguments, and the cage.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use slipway_hypervisor::Cage;
use tempfile::TempDir;

use super::process::{Started, private_bytes};
use super::{VmmLoad, VmmMeasured, stub};
use crate::cpu_time::process_cpu_ns;
use crate::measurement::Subject;

/// A VMM that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Slipway's own VMM, `slipway-vmm`.
    Native,
    /// Firecracker.
    Firecracker,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// QEMU's machine for microVMs.
    QemuMicrovm,
    /// QEMU's PC, which runs firmware first.
    QemuQ35,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Firecracker => "firecracker",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::QemuMicrovm => "qemu-microvm",
            Self::QemuQ35 => "qemu-q35",
        }
    }

    /// Returns the arguments of a VMM that boots `kernel`, its serial port on standard output.
    /// `folder` is for its other files.
    fn arguments(self, load: &VmmLoad, kernel: &Path, folder: &Path) -> Result<Vec<OsString>> {
        let mib = load.mib();
        let mut words: Vec<OsString> = match self {
            Self::Native => text(&["--cpus", "1", "--memory", &mib.to_string()]),
            Self::CloudHypervisor => {
                let memory = format!("size={mib}M");
                text(&["--cpus", "boot=1", "--memory", &memory, "--console", "off"])
                    .into_iter()
                    .chain(text(&["--serial", "tty"]))
                    .collect()
            }
            // Without ACPI tables its firmware has least to do; on a KVM that emulates what runs in
            // ring 0, that is most of the time.
            Self::QemuMicrovm => qemu("microvm,acpi=off,pit=off,pic=off,rtc=off", mib),
            Self::QemuQ35 => qemu("q35", mib),
            Self::Firecracker => {
                let config = folder.join("firecracker.json");
                std::fs::write(&config, firecracker(mib, kernel).to_string())?;
                return Ok(vec!["--no-api".into(), "--config-file".into(), config.into()]);
            }
        };
        let option =
            if matches!(self, Self::QemuMicrovm | Self::QemuQ35) { "-kernel" } else { "--kernel" };
        words.extend([option.into(), kernel.into()]);
        Ok(words)
    }
}

fn text(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn qemu(machine: &str, mib: u64) -> Vec<OsString> {
    let (machine, memory) = (format!("{machine},accel=kvm"), format!("{mib}M"));
    let mut words = text(&["-machine", &machine, "-cpu", "host", "-smp", "1", "-m", &memory]);
    words.extend(text(&["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]));
    words
}

/// Returns Firecracker's configuration. Its serial port exists if the kernel's console is on it.
fn firecracker(mib: u64, kernel: &Path) -> serde_json::Value {
    serde_json::json!({
        "boot-source": { "kernel_image_path": kernel, "boot_args": "console=ttyS0" },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": mib },
    })
}

/// A VMM's program as a subject.
pub struct Vmm {
    program: Program,
    path: PathBuf,
    /// Has the kernel and the VMM's configuration.
    folder: TempDir,
    /// The commands of the loads met so far, without scripts before the program.
    commands: HashMap<VmmLoad, (PathBuf, Vec<OsString>)>,
}

impl Vmm {
    /// Makes a subject of the program at `path`.
    ///
    /// # Errors
    /// If there is no place for the kernel's file.
    pub fn new(program: Program, path: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        std::fs::write(folder.path().join("kernel"), stub::elf())?;
        let path = std::path::absolute(path)?;
        Ok(Self { program, path, folder, commands: HashMap::new() })
    }

    /// Returns the command for a load. The first time, the VMM is started once for it without being
    /// measured: its files are then in the page cache, and the command leaves out whatever only
    /// starts the program, such as a script that sets the path of its libraries.
    fn command(&mut self, load: &VmmLoad) -> Result<Command> {
        if !self.commands.contains_key(load) {
            let kernel = self.folder.path().join("kernel");
            let arguments = self.program.arguments(load, &kernel, self.folder.path())?;
            let started = Started::start(Command::new(&self.path).args(arguments), || Ok(()))?;
            self.commands.insert(*load, started.command()?);
        }
        let (program, arguments) = self.commands.get(load).context("a command")?;
        let mut command = Command::new(program);
        command.args(arguments);
        Ok(command)
    }
}

impl Subject for Vmm {
    type Load = VmmLoad;
    type Measured = VmmMeasured;

    fn name(&self) -> &str {
        self.program.name()
    }

    fn about(&self) -> String {
        self.path.display().to_string()
    }

    fn run(&mut self, load: &VmmLoad) -> Result<VmmMeasured> {
        measured(Started::start(&mut self.command(load)?, || Ok(()))?, load)
    }
}

/// A VMM that starts in the namespaces of the cage that Slipway's daemon puts VMMs into, as root.
pub struct Caged {
    inner: Vmm,
    name: String,
    cage: Cage,
}

impl Caged {
    /// Makes a subject of the program at `path`, or returns `None` if this process may not make
    /// namespaces.
    ///
    /// # Errors
    /// If there is no place for the kernel's file.
    pub fn new(program: Program, path: &Path) -> Result<Option<Self>> {
        let Some(cage) = Cage::of_launcher() else { return Ok(None) };
        let name = format!("{}-caged", program.name());
        Ok(Some(Self { inner: Vmm::new(program, path)?, name, cage }))
    }
}

impl Subject for Caged {
    type Load = VmmLoad;
    type Measured = VmmMeasured;

    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        format!("{}, with namespaces of its own, as sandboxes have them", self.inner.about())
    }

    fn run(&mut self, load: &VmmLoad) -> Result<VmmMeasured> {
        let mut command = self.inner.command(load)?;
        let cage = self.cage;
        // A thread's children can be moved to a new process namespace once, and die with it.
        let turn = move || {
            cage.divert_children()?;
            measured(Started::start(&mut command, move || cage.enter())?, load)
        };
        std::thread::scope(|scope| match scope.spawn(turn).join() {
            Ok(result) => result,
            Err(_) => bail!("the thread of the cage panicked"),
        })
    }
}

fn measured(started: Started, load: &VmmLoad) -> Result<VmmMeasured> {
    let cpu_ns = Some(process_cpu_ns(started.id())?);
    let private_bytes = Some(private_bytes(started.id(), load.memory)?);
    let byte_ns = started.byte_ns;
    let end_ns = started.end()?;
    Ok(VmmMeasured { byte_ns, end_ns, private_bytes, cpu_ns, slot_ns: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vmm_gets_kernel_and_memory() {
        let folder = tempfile::tempdir().unwrap();
        let load: VmmLoad = "2G".parse().unwrap();
        let all = [
            Program::Native,
            Program::Firecracker,
            Program::CloudHypervisor,
            Program::QemuMicrovm,
            Program::QemuQ35,
        ];
        for program in all {
            let words = program.arguments(&load, Path::new("/k"), folder.path()).unwrap();
            let line = words.join(std::ffi::OsStr::new(" ")).into_string().unwrap();
            let line = match program {
                Program::Firecracker => {
                    std::fs::read_to_string(folder.path().join("firecracker.json")).unwrap()
                }
                _ => line,
            };
            assert!(line.contains("/k") && line.contains("2048"), "{program:?}: {line}");
        }
    }

    /// A script that starts the program is left out of measured starts.
    #[test]
    fn a_script_before_the_program_is_not_measured() {
        let folder = tempfile::tempdir().unwrap();
        let (script, count) = (folder.path().join("vmm"), folder.path().join("count"));
        let body = format!(
            "#!/bin/sh\necho x >>{}\nexec /bin/sh -c 'printf \"\\001\"; sleep 100; :' \"$@\"\n",
            count.display()
        );
        let text = folder.path().join("text");
        std::fs::write(&text, body).unwrap();
        // Another process writes the program, so that no descriptor of this one keeps it busy.
        let copied = Command::new("install").arg(&text).arg(&script).status();
        assert!(copied.unwrap().success());
        let mut vmm = Vmm::new(Program::Native, &script).unwrap();
        let load = "16M".parse().unwrap();
        for _ in 0..3 {
            let measured = vmm.run(&load).unwrap();
            assert!(measured.byte_ns > 0 && measured.private_bytes.unwrap() > 0);
        }
        assert_eq!(std::fs::read_to_string(&count).unwrap(), "x\n");
    }
}
