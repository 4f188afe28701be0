//! CPUs that are added and removed while the sandbox runs (Linux, *core-api/cpu_hotplug.rst*).

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::uevent::wait_for;

/// The folder of CPUs in sysfs.
const CPUS: &str = "devices/system/cpu";
/// The time in which the kernel finds a CPU that the VMM has added.
const PATIENCE: Duration = Duration::from_secs(20);

/// Brings CPUs 0 to `count` - 1 online, each as soon as the kernel has found it, and takes all
/// others offline. The first CPU cannot be taken offline.
///
/// # Errors
/// The first CPU that the kernel does not find in time, or does not bring online or offline. The
/// CPUs before it stay changed.
pub async fn set(sysfs: &Path, count: u32) -> Result<()> {
    set_within(PATIENCE, &sysfs.join(CPUS), count).await
}

/// Brings all CPUs online that the kernel has found. It starts with one (`maxcpus=1` on its command
/// line). To be called before drivers are loaded, some of which make a queue for each CPU.
///
/// # Errors
/// The first CPU that the kernel does not bring online. The others are tried all the same.
pub fn start_all(sysfs: &Path) -> Result<()> {
    let cpus = sysfs.join(CPUS);
    let start = |cpu: &u32| {
        let started = std::fs::write(switch(&cpus, *cpu), "1");
        started.with_context(|| format!("bringing CPU {cpu} online"))
    };
    let outcomes: Vec<_> = numbers(&cpus)?.iter().map(start).collect();
    outcomes.into_iter().collect()
}

async fn set_within(patience: Duration, cpus: &Path, count: u32) -> Result<()> {
    ensure!(count > 0, "the first CPU stays");
    for cpu in 1..count {
        let switch = switch(cpus, cpu);
        if wait_for(patience, || there(&switch)).await?.is_none() {
            bail!("the guest's kernel has not found CPU {cpu} in {} s", patience.as_secs());
        }
        turn(switch, "1").await.with_context(|| format!("bringing CPU {cpu} online"))?;
    }
    for cpu in numbers(cpus)?.into_iter().rev().filter(|cpu| *cpu >= count) {
        let turned = turn(switch(cpus, cpu), "0").await;
        turned.with_context(|| format!("taking CPU {cpu} offline"))?;
    }
    Ok(())
}

/// Returns the file that says whether a CPU is online. A CPU that cannot be taken offline has none.
fn switch(cpus: &Path, cpu: u32) -> PathBuf {
    cpus.join(format!("cpu{cpu}/online"))
}

fn there(path: &Path) -> io::Result<Option<()>> {
    Ok(path.try_exists()?.then_some(()))
}

/// Writes to a CPU's switch, on another thread: the kernel answers when the CPU has changed.
async fn turn(switch: PathBuf, to: &'static str) -> Result<()> {
    Ok(tokio::task::spawn_blocking(move || std::fs::write(switch, to)).await??)
}

/// Returns the numbers of the CPUs that have a switch, in ascending order.
fn numbers(cpus: &Path) -> Result<Vec<u32>> {
    let entries = std::fs::read_dir(cpus).with_context(|| cpus.display().to_string())?;
    let number = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok()?;
        entry.path().join("online").exists().then_some(number)
    };
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.ok()?)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(cpus: &Path, cpu: u32) {
        std::fs::create_dir(cpus.join(format!("cpu{cpu}"))).unwrap();
        std::fs::write(switch(cpus, cpu), "0").unwrap();
    }

    fn online(cpus: &Path) -> Vec<String> {
        let numbers = numbers(cpus).unwrap();
        numbers.iter().map(|cpu| std::fs::read_to_string(switch(cpus, *cpu)).unwrap()).collect()
    }

    /// Makes a folder as Linux has it: CPU 0 without a switch, and three that are offline.
    fn four() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for other in ["cpu0", "cpufreq", "cpuidle"] {
            std::fs::create_dir(dir.path().join(other)).unwrap();
        }
        (1..4).for_each(|cpu| add(dir.path(), cpu));
        dir
    }

    #[tokio::test]
    async fn the_first_cpus_are_online() {
        let dir = four();
        for (count, expected) in [(3, "110"), (4, "111"), (1, "000"), (2, "100")] {
            set_within(Duration::ZERO, dir.path(), count).await.unwrap();
            assert_eq!(online(dir.path()).concat(), expected, "{count}");
        }
    }

    #[test]
    fn all_cpus_are_started_even_if_one_fails() {
        let dir = tempfile::tempdir().unwrap();
        let cpus = dir.path().join(CPUS);
        std::fs::create_dir_all(&cpus).unwrap();
        (1..4).for_each(|cpu| add(&cpus, cpu));
        start_all(dir.path()).unwrap();
        assert_eq!(online(&cpus).concat(), "111");
        std::fs::remove_file(switch(&cpus, 1)).unwrap();
        std::fs::create_dir(switch(&cpus, 1)).unwrap();
        std::fs::write(switch(&cpus, 3), "0").unwrap();
        let error = start_all(dir.path()).unwrap_err();
        assert!(format!("{error:#}").starts_with("bringing CPU 1 online: "), "{error:#}");
        assert_eq!(std::fs::read_to_string(switch(&cpus, 3)).unwrap(), "1");
    }

    #[tokio::test]
    async fn a_cpu_may_come_late_or_not_at_all() {
        let dir = four();
        let error = set_within(Duration::ZERO, dir.path(), 6).await.unwrap_err().to_string();
        assert!(error.contains("not found CPU 4"), "{error}");
        assert_eq!(online(dir.path()).concat(), "111");
        let late = dir.path().to_owned();
        let added = tokio::spawn(async move { add(&late, 4) });
        set_within(PATIENCE, dir.path(), 5).await.unwrap();
        added.await.unwrap();
        assert_eq!(online(dir.path()).concat(), "1111");
    }

    #[tokio::test]
    async fn a_switch_that_fails_is_named() {
        let dir = four();
        std::fs::remove_file(switch(dir.path(), 2)).unwrap();
        std::fs::create_dir(switch(dir.path(), 2)).unwrap();
        let error = set_within(Duration::ZERO, dir.path(), 4).await.unwrap_err();
        assert!(format!("{error:#}").starts_with("bringing CPU 2 online: "), "{error:#}");
        let none = set_within(Duration::ZERO, dir.path(), 0).await.unwrap_err().to_string();
        assert!(none.contains("first CPU stays"), "{none}");
        assert!(set_within(Duration::ZERO, &dir.path().join("absent"), 1).await.is_err());
    }
}
