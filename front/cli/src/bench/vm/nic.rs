//! Guests with network interfaces, as subjects.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use slipway_bench::block::native::cpu_ns;
use slipway_bench::nic::{
    Counted, Ends, NicLoad, NicMeasured, NicWork, Times, Traffic, receive, send,
};
use slipway_bench::{Own, Subject};
use slipway_ethernet_spec::Mac;
use slipway_plane_api::{network_v1, v1 as plane_v1};
use slipway_runtime::v1;
use tokio::sync::oneshot;

use super::interfaces::{INTERFACES, Interface, Model};
use super::node::{Guest, Node};
use super::tap::Taps;
use crate::client::{answer, refused};

/// Where the frames of a memory port go to in a guest: the address to which `slipway pktgen` sends.
const FROM_PORT: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 1);
/// Frames in a row from a memory port (the paper's section 3.4).
const BURST: u32 = 100;
/// Headers of Ethernet, IPv4 and UDP, bytes.
const HEADERS: usize = 42;
/// The time for a receiver to be there before its sender begins.
const HEAD_START: Duration = Duration::from_secs(1);

/// A guest with what the traffic needs to know about its interface.
struct Member {
    guest: Guest,
    /// The guest's process on the host.
    vmm: u32,
    addresses: Addresses,
    /// Its interface's function, if that is Slipway's.
    function: Option<Function>,
}

/// Where frames between a guest and its peers go.
struct Addresses {
    /// The host's, for the guest.
    host: IpAddr,
    /// The guest's, for the host.
    guest: IpAddr,
    /// The guest's, for another guest.
    bridged: IpAddr,
}

/// A function of Slipway's that is a guest's interface.
struct Function {
    /// The plane's id, which the port of the switch is called by.
    id: String,
    network: String,
    mac: Mac,
}

/// Guests of one kind, up to two, which a load needs.
pub struct Interfaces {
    kind: Interface,
    node: Rc<Node>,
    times: Times,
    /// The processor of their VMMs.
    processor: Option<usize>,
    /// CPUs of the guests that run.
    cpus: u32,
    members: Vec<Member>,
    /// The name of the memory port that sends, while it exists.
    port: RefCell<Option<String>>,
    /// Their interfaces on the host, if QEMU emulates their devices. Dropped after the guests.
    taps: Option<Taps>,
}

impl Interfaces {
    /// Makes the subject; guests start when a load needs them.
    pub fn new(node: &Rc<Node>, kind: Interface, times: Times, processor: Option<usize>) -> Self {
        Self {
            kind,
            node: Rc::clone(node),
            times,
            processor,
            cpus: 0,
            members: Vec::new(),
            port: RefCell::default(),
            taps: None,
        }
    }

    /// Starts the guests that `load` needs and tells them how to drive their interfaces.
    fn prepare(&mut self, load: &NicLoad) -> Result<()> {
        if self.cpus != load.cpus {
            self.members.clear();
            (self.cpus, self.taps) = (load.cpus, None);
        }
        while self.members.len() < load.ends.guests() {
            let member = self.start(load.cpus, self.members.len() + 1)?;
            if let Some(processor) = self.processor {
                pin(member.vmm, processor)?;
            }
            self.members.push(member);
        }
        if let Some(taps) = &self.taps {
            taps.set_bridged(self.members.len() as u8, load.ends == Ends::GuestGuest)?;
        }
        let segmentation = if load.segmentation { "on" } else { "off" };
        let script = format!("{} && ethtool -K eth0 tso {segmentation}", self.kind.setup);
        for member in self.taking_part(load) {
            self.node.wait(member.guest.shell(&script, Duration::ZERO))?;
        }
        Ok(())
    }

    fn taking_part(&self, load: &NicLoad) -> &[Member] {
        &self.members[..load.ends.guests()]
    }

    fn start(&mut self, cpus: u32, number: usize) -> Result<Member> {
        let template = self.node.template();
        let kernel = match self.kind.driver.kernel(self.node.config()) {
            Some((kernel, _)) => kernel.to_string_lossy().into_owned(),
            None => template.kernel.clone(),
        };
        let spec = v1::RunSpec { kernel, cpus, queues: 1, ..template };
        match self.kind.model {
            Model::Slipway(nic) => self.start_with_function(nic, spec, number),
            Model::Qemu(model) => self.start_with_tap(model, spec, number),
        }
    }

    fn launch(&self, spec: v1::RunSpec, number: usize) -> Result<Guest> {
        let guest = Guest::start_as(&self.node, &format!("{}-{number}", self.kind.name), spec)?;
        guest.install_load()?;
        Ok(guest)
    }

    fn start_with_function(&self, nic: &str, spec: v1::RunSpec, number: usize) -> Result<Member> {
        let (nic, network) = (nic.to_owned(), String::new());
        let guest =
            self.launch(v1::RunSpec { nic, network, wait_network: true, ..spec }, number)?;
        let listed = self.listed(&guest)?;
        let address = listed.addresses.first().context("the guest has no address")?.parse()?;
        let routes = self.node.wait(guest.shell("ip -4 route show default", Duration::ZERO))?;
        let gateway = routes.split_whitespace().skip_while(|word| *word != "via").nth(1);
        let gateway = gateway.context("the guest has no default route")?.parse()?;
        let mac = listed.mac.parse().map_err(|error| anyhow!("{}: {error}", listed.mac))?;
        let function = Function { id: listed.network_function, network: listed.network, mac };
        let addresses = Addresses { host: gateway, guest: address, bridged: address };
        Ok(Member { guest, vmm: listed.vmm_pid, addresses, function: Some(function) })
    }

    fn start_with_tap(&mut self, model: &str, spec: v1::RunSpec, number: usize) -> Result<Member> {
        if self.taps.is_none() {
            let kind = INTERFACES.iter().position(|one| one.name == self.kind.name);
            self.taps = Some(Taps::make(kind.unwrap_or_default() as u8)?);
        }
        let taps = self.taps.as_ref().context("no TAP interfaces")?;
        let at = number as u8;
        let (tap, mac, model) = (taps.name(at), taps.mac(at), model.to_owned());
        let (host, guest, bridged) = (taps.host(at), taps.guest(at), taps.bridged(at));
        let addresses = Addresses { host, guest, bridged };
        let emulated_nic = Some(v1::EmulatedNic { model, tap, mac });
        let guest = self.launch(v1::RunSpec { emulated_nic, queues: 0, ..spec }, number)?;
        let script = taps.take(at)?;
        self.node.wait(guest.shell(&script, Duration::ZERO)).context("the guest's interface")?;
        let vmm = self.listed(&guest)?.vmm_pid;
        Ok(Member { guest, vmm, addresses, function: None })
    }

    fn listed(&self, guest: &Guest) -> Result<v1::Sandbox> {
        let listed = self.node.wait(self.node.sandboxes().list(v1::Empty {}));
        let listed = answer(listed)?.sandboxes;
        listed.into_iter().find(|one| one.id == guest.id).context("the daemon has lost the guest")
    }

    /// Carries the traffic. Returns what the sender and the receiver have counted, and the CPU time
    /// of the guests' VMMs from the sender's start to the receiver's end, ns.
    async fn carry(&self, load: &NicLoad) -> Result<(Counted, Counted, u64)> {
        let members = self.taking_part(load);
        let (Some(one), Some(two)) = (members.first(), members.last()) else {
            bail!("there is no guest");
        };
        let (stop, stopped) = oneshot::channel();
        let flag = Arc::new(AtomicBool::new(false));
        let receiver = async {
            let received = match load.ends {
                Ends::GuestHost => self.receive_here(load, one.addresses.host).await,
                Ends::HostGuest | Ends::SwitchGuest => self.receive_in(one, load).await,
                Ends::GuestGuest => self.receive_in(two, load).await,
            };
            // The sender goes on until its receiver has measured.
            flag.store(true, Ordering::Relaxed);
            drop(stop);
            anyhow::Ok((received?, self.cpu_ns(load)?))
        };
        let sender = async {
            tokio::time::sleep(HEAD_START).await;
            let before = self.cpu_ns(load)?;
            let sent = match load.ends {
                Ends::GuestHost => self.send_in(one, load, one.addresses.host, stopped).await,
                Ends::GuestGuest => self.send_in(one, load, two.addresses.bridged, stopped).await,
                Ends::HostGuest => self.send_here(load, one.addresses.guest, &flag).await,
                Ends::SwitchGuest => self.send_from_port(one, load, &flag).await,
            };
            anyhow::Ok((sent?, before))
        };
        match tokio::join!(receiver, sender) {
            (Ok((received, after)), Ok((sent, before))) => {
                Ok((sent, received, after.saturating_sub(before)))
            }
            // The end that failed first knows why; the other one only misses it.
            (Err(receiver), Err(sender)) => {
                Err(anyhow!("the receiver: {receiver:#}; the sender: {sender:#}"))
            }
            (received, sent) => {
                sent.context("the sender")?;
                Err(received.err().unwrap_or_else(|| anyhow!("no end failed")))
                    .context("the receiver")
            }
        }
    }

    fn limit(&self) -> Duration {
        self.times.warm_up + self.times.time
    }

    async fn receive_in(&self, member: &Member, load: &NicLoad) -> Result<Counted> {
        let script = Guest::load_script(&format!("receive {load}"), self.times);
        counted(&member.guest.shell(&script, self.limit()).await?)
    }

    async fn send_in(
        &self,
        member: &Member,
        load: &NicLoad,
        to: IpAddr,
        stopped: oneshot::Receiver<()>,
    ) -> Result<Counted> {
        let script = Guest::load_script(&format!("send {load} {to}"), self.times);
        counted(&member.guest.until(&script, self.limit(), stopped).await?)
    }

    async fn receive_here(&self, load: &NicLoad, at: IpAddr) -> Result<Counted> {
        let (load, times) = (*load, self.times);
        self.on_host(move || receive(&load, at, times, &AtomicBool::new(false))).await
    }

    async fn send_here(
        &self,
        load: &NicLoad,
        to: IpAddr,
        flag: &Arc<AtomicBool>,
    ) -> Result<Counted> {
        let (load, times, flag) = (*load, self.times, Arc::clone(flag));
        self.on_host(move || send(&load, to, times, &flag)).await
    }

    /// Runs the host's end on a thread of its own, where the guests' interfaces are.
    async fn on_host(
        &self,
        end: impl FnOnce() -> Result<Counted> + Send + 'static,
    ) -> Result<Counted> {
        let namespace = self.taps.as_ref().map(|taps| taps.namespace.clone());
        let (done, counted) = oneshot::channel();
        std::thread::spawn(move || {
            let entered = namespace.map_or(Ok(()), |namespace| namespace.enter());
            // A measurement that was given up waits for nothing.
            let _ = done.send(entered.and_then(|()| end()));
        });
        counted.await.context("the host's end panicked")?
    }

    /// Sends from a memory port of the member's network, which exists meanwhile.
    async fn send_from_port(
        &self,
        member: &Member,
        load: &NicLoad,
        flag: &Arc<AtomicBool>,
    ) -> Result<Counted> {
        let function = member.function.as_ref().context("the interface is at no switch")?;
        let add = format!("ip addr replace {FROM_PORT}/32 dev eth0");
        member.guest.shell(&add, Duration::ZERO).await?;
        let name = format!("bench-{}", std::process::id());
        let request = network_v1::CreatePortRequest {
            network: function.network.clone(),
            name: name.clone(),
            slots: 4096,
            ..network_v1::CreatePortRequest::default()
        };
        self.port.replace(Some(name.clone()));
        let socket = answer(self.node.networks().create_port(request).await)?.socket_path;
        let (to, load, times, flag) = (function.mac, *load, self.times, Arc::clone(flag));
        let sent = tokio::task::spawn_blocking(move || {
            from_port(Path::new(&socket), to, &load, times, &flag)
        });
        let sent = sent.await;
        let mut networks = self.node.networks();
        let removed = networks.remove_port(network_v1::RemovePortRequest { name }).await;
        let sent = sent??;
        removed.map_err(refused)?;
        self.port.replace(None);
        Ok(sent)
    }

    /// Returns what the functions of the guests that take part have done until now, if all of them
    /// count it.
    async fn work(&self, load: &NicLoad) -> Result<Option<NicWork>> {
        let reply = self.node.plane().list_switches(plane_v1::ListSwitchesRequest {}).await;
        let switches = answer(reply)?.switches;
        let ports: Vec<_> = switches.into_iter().flat_map(|switch| switch.ports).collect();
        let mut all = NicWork::default();
        for member in self.taking_part(load) {
            let Some(function) = &member.function else { return Ok(None) };
            let port = ports.iter().find(|port| port.name == function.id);
            let port = port.context("the switch has lost the guest's port")?;
            let Some(counters) = &port.e1000 else { return Ok(None) };
            let accesses = |one: &plane_v1::RegisterAccesses| one.reads + one.writes;
            all.exits += counters.registers.iter().map(accesses).sum::<u64>() + counters.announced;
            all.kicks += counters.kicks;
            all.interrupts += counters.interrupts;
            all.sent += counters.frames_sent;
            all.received += counters.frames_received;
        }
        Ok(Some(all))
    }

    /// Returns the CPU time that the VMMs of the guests that take part have used until now, ns.
    fn cpu_ns(&self, load: &NicLoad) -> Result<u64> {
        let of_vmm = |member: &Member| {
            cpu_ns(member.vmm).context("the VMM has ended, or its CPU time is not counted")
        };
        self.taking_part(load).iter().map(of_vmm).sum()
    }
}

impl Drop for Interfaces {
    /// Removes the port of a turn that was interrupted.
    fn drop(&mut self) {
        let Some(name) = self.port.take() else { return };
        // The turn may have ended before the port was made: an error is not told.
        let request = network_v1::RemovePortRequest { name };
        let _ = self.node.wait(self.node.networks().remove_port(request));
    }
}

impl Subject for Interfaces {
    type Load = NicLoad;
    type Measured = NicMeasured;

    fn name(&self) -> &str {
        self.kind.name
    }

    fn about(&self) -> String {
        self.kind.about.to_owned()
    }

    fn takes(&self, load: &NicLoad) -> bool {
        load.ends != Ends::SwitchGuest || matches!(self.kind.model, Model::Slipway(_))
    }

    fn own(&self) -> Own {
        Own::Node
    }

    fn run(&mut self, load: &NicLoad) -> Result<NicMeasured> {
        self.prepare(load)?;
        let before = self.node.wait(self.work(load))?;
        let (sent, received, cpu_ns) = self.node.wait(self.carry(load))?;
        let after = self.node.wait(self.work(load))?;
        let work = after.zip(before).map(|(after, before)| after.since(&before));
        if !self.kind.rest.is_empty() {
            for member in self.taking_part(load) {
                self.node.wait(member.guest.shell(self.kind.rest, Duration::ZERO))?;
            }
        }
        Ok(NicMeasured { sent, received, cpu_ns, work })
    }
}

/// Sends datagrams from a memory port until `flag` is set.
fn from_port(
    socket: &Path,
    to: Mac,
    load: &NicLoad,
    times: Times,
    flag: &AtomicBool,
) -> Result<Counted> {
    use slipway_pktgen::{Limits, MemoryWire, Plan, Vary, source};
    let Traffic::Udp(bytes) = load.traffic else { bail!("a memory port sends datagrams only") };
    let size = (usize::from(bytes) + HEADERS).to_string();
    let plan = Plan {
        to,
        from: None,
        sizes: size.parse().map_err(|error| anyhow!("{size}: {error}"))?,
        rate: (load.offered > 0).then_some(load.offered as f64),
        burst: BURST,
        flows: 1,
        vary: Vary { mac: false, ip: false, port: false },
        id: std::process::id() as u16,
    };
    // A receiver that never measures gives up by itself.
    let time = times.warm_up + times.time + Duration::from_secs(300);
    let limits = Limits { count: None, time: Some(time), stop: flag };
    let mut wire = MemoryWire::connect(socket)?;
    let figures = source(&mut wire, &plan, limits, &mut |_| {})?;
    let elapsed_ns = (figures.seconds * 1e9) as u64;
    Ok(Counted { count: figures.frames, all: figures.frames, elapsed_ns })
}

/// Lets all threads of a process run on one processor only.
fn pin(process: u32, processor: usize) -> Result<()> {
    ensure!(processor < rustix::thread::CpuSet::MAX_CPU, "there is no processor {processor}");
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let name = thread?.file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok());
        let thread = thread.and_then(rustix::process::Pid::from_raw);
        rustix::thread::sched_setaffinity(thread, &set)
            .with_context(|| format!("running a guest on processor {processor}"))?;
    }
    Ok(())
}

/// Parses the counts that a guest's end has printed.
fn counted(text: &str) -> Result<Counted> {
    serde_json::from_str(text).context("the load printed no counts")
}
