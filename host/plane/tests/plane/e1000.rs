//! E1000 functions of a plane: drivers on sockets that reach each other through a switch, with
//! interrupts of the pin.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slipway_e1000::driver::{Driver, Options, memory_len};
use slipway_plane::{Error, Plane, Settings};
use slipway_plane_api::v1;
use slipway_vfio_user_client::{Registers, TestGuest};
use slipway_vfio_user_spec::{IrqSetFlags, irq, region};

const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 4 << 20;

fn request(directory: &Path, number: u8, model: v1::NetworkModel) -> v1::CreateEndpointRequest {
    v1::CreateEndpointRequest {
        id: format!("net-{number}"),
        socket_path: directory.join(format!("{number}")).to_string_lossy().into_owned(),
        virtio_net: Some(v1::VirtioNet {
            switch: "blue".to_owned(),
            mac: format!("02:00:00:00:00:{number:02x}"),
            spoof_check: true,
            model: model.into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A guest and its driver.
struct Guest {
    driver: Driver<Registers>,
    guest: TestGuest,
}

impl Guest {
    fn new(path: &Path, csb: bool, io_fds: bool) -> Self {
        let guest = TestGuest::new(0, MEMORY).unwrap().with_interrupts(1).unwrap();
        let mut registers = guest.connect(path, PATIENCE).unwrap();
        assert_eq!(registers.client.irq(irq::MSIX).unwrap().count, 0);
        // Ports, memory and bus mastering.
        registers.client.write(region::CONFIG, 4, &[7, 0]).unwrap();
        let options = Options { descriptors: 128, csb, ..Options::default() };
        assert!(memory_len(options.descriptors) as u64 <= MEMORY);
        let registers = if io_fds { registers.with_io_fds().unwrap() } else { registers };
        let driver = Driver::new(registers, &guest.memory, (0, MEMORY), options).unwrap();
        Self { driver, guest }
    }

    /// Waits for an interrupt and serves it, and returns the frames that came with it.
    fn serve(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut fds = [PollFd::new(&self.guest.interrupts[0], PollFlags::IN)];
        let soon = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        if poll(&mut fds, Some(&soon)).unwrap() == 0 {
            return None;
        }
        assert!(self.guest.count(0) > 0);
        let mut frames = Vec::new();
        self.driver.interrupt(|one| frames.push(one.bytes.to_vec())).unwrap();
        let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::UNMASK;
        self.driver.registers.client.set_irqs(flags, irq::INTX, 0, 1, &[], &[]).unwrap();
        Some(frames)
    }
}

fn frame(from: u8, to: u8, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, to]);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, from]);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}

/// Sends a frame until it arrives: the links may not be negotiated yet.
fn cross(from: &mut Guest, to: &mut Guest, sent: &[u8]) -> bool {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        from.driver.sending.clean().unwrap();
        to.driver.want(false, true).unwrap();
        assert!(from.driver.sending.queue(sent, 0).unwrap());
        from.driver.flush().unwrap();
        while let Some(frames) = to.serve() {
            if frames.iter().any(|frame| frame == sent) {
                return true;
            }
        }
    }
    false
}

fn plane() -> (Plane, tempfile::TempDir) {
    let plane = Plane::new(Settings { reactors: 2, ..Default::default() }).unwrap();
    let switch = v1::CreateSwitchRequest { name: "blue".into(), ..Default::default() };
    plane.fabric().create_switch(&switch).unwrap();
    (plane, tempfile::tempdir().unwrap())
}

/// Checks the counters of both ports after frames both ways.
fn look_at_counters(plane: &Plane, csb: bool, io_fds: bool) {
    for port in plane.list_switches().remove(0).ports {
        let counters = port.e1000.unwrap();
        let of = |name: &str| {
            let found = counters.registers.iter().find(|one| one.register == name);
            found.map(|one| (one.reads, one.writes)).unwrap_or_default()
        };
        let interrupts = counters.interrupts;
        assert!(counters.frames_sent >= 20 && counters.frames_received >= 20, "{counters:?}");
        assert_eq!(of("TDT").0, 0, "{counters:?}");
        // A cause between the read of ICR and the write of IMC raises the pin once more. The last
        // interrupt may not be served yet.
        assert!((1..=2 * (of("ICR").0 + 1)).contains(&interrupts), "{counters:?}");
        // One write of TDT is from the driver's start.
        let [tdt, csbk, sent] = [of("TDT").1 - 1, of("CSBK").1, counters.frames_sent];
        let announced = counters.announced;
        match (csb, io_fds) {
            (false, false) => assert_eq!((tdt, csbk, announced), (sent, 0, 0), "{counters:?}"),
            // RDT is written as well.
            (false, true) => assert!(tdt == 0 && announced > sent, "{counters:?}"),
            (true, false) => assert!(tdt == 0 && announced == 0 && csbk <= sent, "{counters:?}"),
            (true, true) => assert!(tdt == 0 && csbk == 0 && announced <= sent, "{counters:?}"),
        }
        assert!((1..=tdt + csbk + announced).contains(&counters.kicks), "{counters:?}");
    }
}

#[test]
fn drivers_reach_each_other_with_interrupts_of_the_pin() {
    let kinds = [(v1::NetworkModel::E1000, false), (v1::NetworkModel::E1000Csb, true)];
    let kinds =
        kinds.into_iter().flat_map(|(model, csb)| [(model, csb, false), (model, csb, true)]);
    for (model, csb, io_fds) in kinds {
        let (plane, directory) = plane();
        for number in 1..=2 {
            plane.create(&request(directory.path(), number, model)).unwrap();
        }
        let mut one = Guest::new(&directory.path().join("1"), csb, io_fds);
        let mut two = Guest::new(&directory.path().join("2"), csb, io_fds);
        for round in 0..20 {
            assert!(cross(&mut one, &mut two, &frame(1, 2, 60 + round)), "{model:?} {round}");
            assert!(cross(&mut two, &mut one, &frame(2, 1, 1000 + round)), "{model:?} {round}");
        }
        let ports = &plane.fabric().list_switches()[0].ports;
        assert!(ports.iter().all(|port| port.up && port.frames_in >= 20 && port.frames_out >= 20));
        look_at_counters(&plane, csb, io_fds);
        // Memory is unmapped under a running device.
        let file = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        for round in 0..5 {
            two.driver.registers.client.map(1 << 40, 8192, file.as_fd(), 0, true).unwrap();
            two.driver.registers.client.unmap(1 << 40, 8192).unwrap();
            assert!(cross(&mut one, &mut two, &frame(1, 2, 200 + round)), "{model:?}");
        }
        drop(two);
        plane.remove("net-2").unwrap();
        assert_eq!(plane.fabric().list_switches()[0].ports.len(), 1);
    }
}

#[test]
fn settings_that_no_e1000_can_have_are_refused() {
    let (plane, directory) = plane();
    let with = |change: fn(&mut v1::VirtioNet)| {
        let mut request = request(directory.path(), 1, v1::NetworkModel::E1000);
        change(request.virtio_net.as_mut().unwrap());
        plane.create(&request).unwrap_err()
    };
    for (change, part) in [
        ((|net| net.interrupt_interval_ns = 17_000_000) as fn(&mut v1::VirtioNet), "16.7 ms"),
        (|net| net.mac = "01:00:00:00:00:01".into(), "address"),
        (
            |net| {
                net.interrupt_interval_ns = 1;
                net.set_model(v1::NetworkModel::Virtio);
            },
            "e1000",
        ),
    ] {
        let error = with(change);
        assert!(matches!(&error, Error::Invalid(text) if text.contains(part)), "{error}");
    }
    assert!(plane.fabric().list_switches()[0].ports.is_empty());
}
