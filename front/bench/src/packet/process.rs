//! Peers' processes, and a network namespace for them.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The time between two reports of testpmd on received frames.
pub const PERIOD: Duration = Duration::from_secs(1);

/// A process that ends on drop, with this process, or with the thread that started it.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> Result<Self> {
        let dies_with_us = || {
            let signal = rustix::process::Signal::KILL;
            Ok(rustix::process::set_parent_process_death_signal(Some(signal))?)
        };
        #[allow(unsafe_code)] // a peer does not end by itself when this process is killed
        // SAFETY: one system call, which is allowed between fork and exec.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(command, dies_with_us);
        }
        let program = command.get_program().to_owned();
        let child = command.spawn();
        Ok(Self(child.with_context(|| format!("cannot start {}", program.display()))?))
    }

    /// Returns whether the process has ended by itself.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Returns the lines of the process's standard output as they come, which must be a pipe.
    pub fn lines(&mut self) -> Receiver<String> {
        let (send, lines) = channel();
        if let Some(output) = self.0.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                    if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                        break;
                    }
                }
            });
        }
        lines
    }

    /// Writes a line to the process's standard input, which must be a pipe.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.0.stdin.as_mut().context("a program that is told nothing")?;
        Ok(writeln!(input, "{line}")?)
    }

    /// Closes the process's standard input, if that is a pipe.
    pub fn end_input(&mut self) {
        self.0.stdin = None;
    }

    /// Waits until the process ends. An error status is an error.
    pub fn finish(&mut self, deadline: Instant) -> Result<()> {
        loop {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("a program of the measurement ended with {status}"),
                None if Instant::now() > deadline => {
                    bail!("a program of the measurement does not end")
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Returns the rates that a testpmd prints, in received frames per second, port after port.
    pub fn rates(&mut self) -> Receiver<u64> {
        let (send, rates) = channel();
        let lines = self.lines();
        std::thread::spawn(move || {
            for rate in lines.iter().filter_map(|line| rate(&line)) {
                if send.send(rate).is_err() {
                    break;
                }
            }
        });
        rates
    }
}

/// Parses the rate in a line such as `  Rx-pps:     19080727          Rx-bps:   9769332224`.
fn rate(line: &str) -> Option<u64> {
    line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok()
}

/// Returns the frames received on all of `ports` ports of a testpmd within `time`, and the number
/// of periods in that. The first frame may take until `deadline`.
pub fn listen(
    rates: &Receiver<u64>,
    ports: usize,
    deadline: Instant,
    time: Duration,
) -> Result<(u64, u64)> {
    let wanted = (time.as_secs_f64() / PERIOD.as_secs_f64()).ceil().max(1.0) as u64;
    let (mut sum, mut count, mut warm) = (0, 0, false);
    while count < wanted {
        let mut all = 0;
        for _ in 0..ports {
            let left = deadline.saturating_duration_since(Instant::now()) + time + PERIOD;
            match rates.recv_timeout(left) {
                Ok(rate) => all += rate,
                Err(RecvTimeoutError::Timeout) => bail!("testpmd tells nothing"),
                Err(RecvTimeoutError::Disconnected) => bail!("testpmd ended"),
            }
        }
        match all {
            0 if Instant::now() > deadline => bail!("testpmd received nothing"),
            0 => {}
            // The first period with frames is incomplete.
            _ if !warm => warm = true,
            _ => (sum, count) = (sum + all, count + 1),
        }
    }
    Ok((sum, count))
}

/// Returns the first of these programs in the path, or in the folders for administration.
pub fn find(names: &[&str]) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders: Vec<_> = std::env::split_paths(&paths).chain(system).collect();
    let programs = names.iter().flat_map(|name| folders.iter().map(move |path| path.join(name)));
    programs.into_iter().find(|program| program.is_file())
}

/// Waits until the file `path` exists.
pub fn wait_for(path: &Path, process: &mut Running, deadline: Instant) -> Result<()> {
    while !path.exists() {
        if Instant::now() > deadline || process.has_ended()? {
            bail!("{} did not appear", path.display());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Result<()> {
    let output = command.output();
    let program = command.get_program().to_owned();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let arguments: Vec<_> = command.get_args().map(|one| one.to_string_lossy()).collect();
        bail!("{} {}: {}", program.display(), arguments.join(" "), said.trim());
    }
    Ok(())
}

/// Runs `work` on a thread with a network namespace of its own. Interfaces made there disappear
/// with it, and the host's network is not changed.
pub fn in_namespace<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let thread = || {
        #[allow(unsafe_code)] // rustix has it as unsafe for the sake of another flag
        // SAFETY: only the network namespace is unshared, and no descriptors.
        let unshared =
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) };
        unshared.context("a network namespace takes root")?;
        work()
    };
    std::thread::scope(|scope| match scope.spawn(thread).join() {
        Ok(result) => result,
        Err(_) => bail!("the thread in the network namespace panicked"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        assert_eq!(rate("  Rx-pps:     19080727          Rx-bps:   9769332224"), Some(19_080_727));
        assert_eq!(rate("  Tx-pps:            0          Tx-bps:            0"), None);
        assert_eq!(rate("Rx-pps: many"), None);
    }

    #[test]
    fn ports_are_added_up_from_the_first_whole_period() {
        let (send, rates) = channel();
        for rate in [0, 0, 1, 2, 10, 20, 30, 40] {
            send.send(rate).unwrap();
        }
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(listen(&rates, 2, soon, 2 * PERIOD).unwrap(), (100, 2));
        drop(send);
        assert!(listen(&rates, 2, soon, PERIOD).is_err(), "it ended");
    }
}
