//! Existing programs as loads, over the same ways.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::peer::{Memcached, Role};
use super::{Cost, Way};
use crate::packet::process::{Running, find};

/// The longest time that a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);
/// The name that stands for this program in place of an installed one.
const OWN: &str = "slipway";
/// The number of connections of loads with many.
const CONNECTIONS: u32 = 50;

/// The load of an existing program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum App {
    /// iperf3 with messages of 128 KiB.
    Iperf3,
    /// wrk, and nginx with an answer of 1 KiB.
    Nginx,
    /// wrk, nginx as a proxy, and nginx behind it.
    NginxProxy,
    /// redis-benchmark's GET and a redis-server.
    Redis,
    /// memcached with values of 64 bytes, requested by this program.
    Memcached,
}

/// A program's measured rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppRun {
    /// The subject's name.
    pub subject: String,
    /// The program.
    pub app: App,
    /// The number of the round, from 0.
    pub round: u32,
    /// Requests per second; gigabits per second for iperf3.
    pub rate: f64,
    /// The servers' cost while the client ran.
    pub server: Cost,
    /// The time that the client ran, ns.
    pub elapsed_ns: u64,
}

impl std::fmt::Display for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.names().0)
    }
}

impl App {
    /// All programs.
    pub const ALL: [Self; 5] =
        [Self::Iperf3, Self::Nginx, Self::NginxProxy, Self::Redis, Self::Memcached];

    /// Returns the name of the load, and the unit of its rate.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Iperf3 => ("iperf3", "Gbit/s"),
            Self::Nginx => ("wrk-nginx", "requests/s"),
            Self::NginxProxy => ("wrk-proxy-nginx", "requests/s"),
            Self::Redis => ("redis-get", "requests/s"),
            Self::Memcached => ("memcached-get", "requests/s"),
        }
    }

    /// Returns the programs that must be installed: the client and the server.
    fn programs(self) -> [&'static str; 2] {
        match self {
            Self::Iperf3 => ["iperf3", "iperf3"],
            Self::Nginx | Self::NginxProxy => ["wrk", "nginx"],
            Self::Redis => ["redis-benchmark", "redis-server"],
            Self::Memcached => [OWN, "memcached"],
        }
    }

    /// Returns the first of the programs that is not installed, or `None` if all are.
    pub fn lacks(self) -> Option<&'static str> {
        let lacks = |program: &&str| *program != OWN && find(&[program]).is_none();
        self.programs().into_iter().find(lacks)
    }

    /// Runs the load over `way`, for about as long as its turns are.
    ///
    /// # Errors
    /// If one of the programs fails.
    pub fn run(self, way: &Way, round: u32) -> Result<AppRun> {
        // The folder for configuration files and for the servers' standard and temporary files.
        let directory = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        let servers = self.servers(way, &directory)?;
        let pids: Vec<u32> = servers.iter().flat_map(|server| family(server.id())).collect();
        let (began, before) = (Instant::now(), Cost::of_all(&pids));
        let text = self.client(way)?;
        let (elapsed, server) = (began.elapsed(), Cost::of_all(&pids).since(before));
        let rate = self.rate(&text);
        let rate = rate.with_context(|| format!("{} says: {text}", self.programs()[0]))?;
        ensure!(rate > 0.0, "{} did nothing: {text}", self.programs()[0]);
        let elapsed_ns = elapsed.as_nanos() as u64;
        Ok(AppRun { subject: way.name.to_owned(), app: self, round, rate, server, elapsed_ns })
    }

    fn servers(self, way: &Way, directory: &TempDir) -> Result<Vec<Running>> {
        let address = way.net.address();
        let server = |port: u16, arguments: String| -> Result<Running> {
            let mut command = program(way, Role::Server, self.programs()[1])?;
            command.args(arguments.split_whitespace()).current_dir(directory.path());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut running = Running::start(&mut command)?;
            wait_for_listener(&mut running, port)?;
            Ok(running)
        };
        match self {
            Self::Iperf3 => Ok(vec![server(5201, format!("-s -1 -B {address}"))?]),
            Self::Redis => {
                let options = "--port 6379 --appendonly no --protected-mode no";
                Ok(vec![server(6379, format!("--bind {address} {options} --save ''"))?])
            }
            Self::Memcached => {
                let options = "-u root -U 0 -t 1 -c 1024";
                Ok(vec![server(11_211, format!("{options} -l {address} -p 11211"))?])
            }
            Self::Nginx => Ok(vec![server(8080, nginx(directory.path(), address, 8080)?)?]),
            Self::NginxProxy => Ok(vec![
                server(8080, nginx(directory.path(), address, 8080)?)?,
                server(8081, nginx(directory.path(), address, 8081)?)?,
            ]),
        }
    }

    /// Runs the client. Returns its output.
    fn client(self, way: &Way) -> Result<String> {
        let (address, seconds) = (way.net.address(), way.times.time.as_secs().max(1));
        let mut command = program(way, Role::Client, self.programs()[0])?;
        let port = if self == Self::NginxProxy { 8081 } else { 8080 };
        let arguments = match self {
            Self::Iperf3 => format!("-c {address} -t {seconds} -l 128K -J"),
            Self::Nginx | Self::NginxProxy => {
                format!("-t1 -c{CONNECTIONS} -d{seconds}s http://{address}:{port}/")
            }
            // So many requests take about a second at the rate over the loopback interface.
            Self::Redis => format!(
                "-h {address} -p 6379 -t get --csv -d 64 -c {CONNECTIONS} -n {}",
                seconds * 50_000
            ),
            Self::Memcached => {
                let told = Memcached {
                    memcached: (address, 11_211).into(),
                    connections: CONNECTIONS as usize,
                    seconds,
                };
                format!("bench socket-load {}", serde_json::to_string(&told)?)
            }
        };
        let output = command.args(arguments.split_whitespace()).stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "{} ended with {}: {text}{}",
            self.programs()[0],
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(text)
    }

    /// Parses the rate in the client's output. Returns `None` if there is none, or if requests
    /// failed.
    fn rate(self, text: &str) -> Option<f64> {
        match self {
            Self::Iperf3 => {
                let value: serde_json::Value = serde_json::from_str(text).ok()?;
                Some(value["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9)
            }
            Self::Nginx | Self::NginxProxy => {
                // Errors must not count as fast answers.
                let failed = ["Socket errors", "Non-2xx"].iter().any(|line| text.contains(line));
                let line = text.lines().find_map(|line| line.strip_prefix("Requests/sec:"))?;
                line.trim().parse().ok().filter(|_| !failed)
            }
            Self::Redis => {
                let line = text.lines().find_map(|line| line.strip_prefix("\"GET\",\""))?;
                line.split('"').next()?.parse().ok()
            }
            Self::Memcached => text.trim().strip_prefix("answers a second: ")?.parse().ok(),
        }
    }
}

/// Returns the command that runs a program on a side of `way`.
fn program(way: &Way, role: Role, name: &str) -> Result<Command> {
    let path = match name {
        OWN => crate::slipway()?,
        name => find(&[name]).with_context(|| format!("{name} is not installed"))?,
    };
    let mut command = Command::new("taskset");
    let cpus = if role == Role::Server { &way.cpus.target } else { &way.cpus.client };
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    command.arg("-c").arg(cpus.join(",")).arg(path);
    way.put(role, &mut command)?;
    Ok(command)
}

/// Writes a configuration for nginx at `port`: port 8080 answers itself, any other is a proxy of
/// 8080. Returns nginx's arguments.
fn nginx(directory: &Path, address: IpAddr, port: u16) -> Result<String> {
    let place = directory.join(port.to_string());
    std::fs::create_dir(&place)?;
    let answer = match port {
        8080 => format!("return 200 \"{}\";", "x".repeat(1024)),
        _ => "proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection \"\";"
            .into(),
    };
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {};", place.join(name).display()));
    let text = format!(
        "daemon off; master_process off; pid {place}/pid; error_log {place}/log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 100000000; {paths}\n\
         upstream behind {{ server {address}:8080; keepalive 64; }}\n\
         server {{ listen {address}:{port}; location / {{ {answer} }} }} }}\n",
        place = place.display(),
        paths = paths.join(" "),
    );
    let file = place.join("conf");
    std::fs::write(&file, text)?;
    Ok(format!(
        "-p {place} -e {place}/log -c {file}",
        place = place.display(),
        file = file.display()
    ))
}

/// Waits until `port` has a listener in the network namespace of `server`.
fn wait_for_listener(server: &mut Running, port: u16) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let path = format!("/proc/{}/net/tcp", server.id());
    let end = format!(":{port:04X}");
    loop {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let listens = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&end)) && words.nth(1) == Some("0A")
        };
        if text.lines().any(listens) {
            return Ok(());
        }
        if Instant::now() > deadline || server.has_ended()? {
            bail!("nobody listens at port {port}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a process and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    std::iter::once(pid).chain(children.flat_map(family)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        let text = r#"{"end":{"sum_received":{"bits_per_second":16400000000.0}}}"#;
        assert_eq!(App::Iperf3.rate(text), Some(16.4));
        assert_eq!(App::Iperf3.rate("iperf3: error"), None);
        let text = "Running 1s test\nRequests/sec:  12345.67\nTransfer/sec:  1.00MB\n";
        assert_eq!(App::Nginx.rate(text), Some(12_345.67));
        let failed = format!("  Socket errors: connect 0, read 1, write 0, timeout 0\n{text}");
        assert_eq!(App::NginxProxy.rate(&failed), None);
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"110864.74\",\"0.243\"\n";
        assert_eq!(App::Redis.rate(text), Some(110_864.74));
        assert_eq!(App::Redis.rate("Could not connect"), None);
        assert_eq!(App::Memcached.rate("answers a second: 98765.4\n"), Some(98_765.4));
        assert_eq!(App::Memcached.rate(""), None);
    }
}
