//! The figures of *Speeding Up Packet I/O in Virtual Machines* for Linux guests (2013, an Intel
//! i7-3930K with KVM): its tables 4 and 11, of which figures 6 to 9 are drawn.

use super::{Ends, NicLoad, Traffic};

/// A row of a table: thousands of datagrams per second with 8 and with 1460 bytes, Mbit/s of TCP
/// written in pieces of 1460 bytes and of netperf's default, thousands of exchanges per second. 0
/// where the paper has nothing.
type Row = [f64; 5];

/// Subjects, ends and CPUs whose receiver could not keep up: the paper's datagrams are those that
/// were sent.
const SENT: [(&str, Ends, u32); 4] = [
    ("base", Ends::GuestGuest, 1),
    ("csb", Ends::GuestGuest, 1),
    ("virtio", Ends::GuestGuest, 1),
    ("virtio", Ends::GuestGuest, 2),
];

/// Rows by subject, ends and CPUs: guest to host by TAP; the same with the host sending, where `sc`
/// and `csb` moderate with itr=100; between two guests, by VALE for Slipway's subjects and by TAP
/// for QEMU's virtio-net. There is none for QEMU's e1000, which moderated nothing then.
const ROWS: [(&str, Ends, u32, Row); 30] = [
    ("base", Ends::GuestHost, 1, [30.0, 28.0, 103.0, 182.0, 11.8]),
    ("itr", Ends::GuestHost, 1, [83.0, 71.0, 135.0, 249.0, 14.2]),
    ("sc", Ends::GuestHost, 1, [216.0, 138.0, 1309.0, 1521.0, 4.6]),
    ("csb", Ends::GuestHost, 1, [353.0, 242.0, 2620.0, 2594.0, 21.2]),
    ("virtio", Ends::GuestHost, 1, [342.0, 320.0, 3490.0, 3485.0, 24.3]),
    ("qemu-virtio", Ends::GuestHost, 1, [342.0, 320.0, 3490.0, 3485.0, 24.3]),
    ("base", Ends::GuestHost, 2, [45.0, 38.0, 239.0, 349.0, 13.5]),
    ("itr", Ends::GuestHost, 2, [84.0, 54.0, 329.0, 396.0, 13.5]),
    ("sc", Ends::GuestHost, 2, [291.0, 136.0, 1723.0, 1761.0, 11.3]),
    ("csb", Ends::GuestHost, 2, [369.0, 190.0, 1993.0, 1959.0, 20.7]),
    ("virtio", Ends::GuestHost, 2, [334.0, 312.0, 3346.0, 3335.0, 26.7]),
    ("qemu-virtio", Ends::GuestHost, 2, [334.0, 312.0, 3346.0, 3335.0, 26.7]),
    ("base", Ends::HostGuest, 1, [0.0, 0.0, 3370.0, 3327.0, 12.3]),
    ("sc", Ends::HostGuest, 1, [0.0, 0.0, 3912.0, 3890.0, 13.4]),
    ("csb", Ends::HostGuest, 1, [0.0, 0.0, 7179.0, 7493.0, 0.0]),
    ("base", Ends::HostGuest, 2, [0.0, 0.0, 3938.0, 4118.0, 0.0]),
    ("sc", Ends::HostGuest, 2, [0.0, 0.0, 2300.0, 5128.0, 0.0]),
    ("csb", Ends::HostGuest, 2, [0.0, 0.0, 4400.0, 7566.0, 0.0]),
    ("base", Ends::GuestGuest, 1, [32.0, 31.0, 559.0, 805.0, 7.4]),
    ("itr", Ends::GuestGuest, 1, [125.0, 98.0, 792.0, 859.0, 7.1]),
    ("sc", Ends::GuestGuest, 1, [455.0, 186.0, 1856.0, 2450.0, 6.7]),
    ("csb", Ends::GuestGuest, 1, [1526.0, 480.0, 4190.0, 4206.0, 12.3]),
    ("virtio", Ends::GuestGuest, 1, [981.0, 768.0, 4526.0, 4532.0, 15.3]),
    ("qemu-virtio", Ends::GuestGuest, 1, [424.0, 394.0, 3475.0, 3480.0, 14.5]),
    ("base", Ends::GuestGuest, 2, [77.0, 66.0, 456.0, 548.0, 7.3]),
    ("itr", Ends::GuestGuest, 2, [118.0, 90.0, 813.0, 900.0, 7.0]),
    ("sc", Ends::GuestGuest, 2, [468.0, 286.0, 2144.0, 3130.0, 6.6]),
    ("csb", Ends::GuestGuest, 2, [1221.0, 447.0, 4380.0, 4849.0, 11.2]),
    ("virtio", Ends::GuestGuest, 2, [875.0, 774.0, 4346.0, 3682.0, 14.6]),
    ("qemu-virtio", Ends::GuestGuest, 2, [417.0, 367.0, 3359.0, 3416.0, 13.8]),
];

/// Rows with TCP segmentation offload, by TAP: table 11.
const SEGMENTED: [(&str, Ends, u32, [f64; 2]); 4] = [
    ("qemu-virtio", Ends::GuestHost, 1, [11_329.0, 21_478.0]),
    ("qemu-virtio", Ends::GuestHost, 2, [10_809.0, 21_293.0]),
    ("qemu-virtio", Ends::GuestGuest, 1, [19_510.0, 19_435.0]),
    ("qemu-virtio", Ends::GuestGuest, 2, [16_558.0, 18_930.0]),
];

/// A figure of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperFigure {
    /// Datagrams, bytes of a stream or exchanges per second.
    pub rate: f64,
    /// Set if these were sent and not all received.
    pub only_sent: bool,
}

/// Returns the paper's figure of a subject with a load, or `None` if the paper has none.
pub fn paper(subject: &str, load: &NicLoad) -> Option<PaperFigure> {
    let is =
        |name: &str, ends: Ends, cpus: u32| (name, ends, cpus) == (subject, load.ends, load.cpus);
    let mbit = 1e6 / 8.0;
    let (column, unit) = match load.traffic {
        _ if load.offered > 0 => return None,
        Traffic::Udp(8) => (0, 1e3),
        Traffic::Udp(1460) => (1, 1e3),
        Traffic::Tcp(1460) => (2, mbit),
        Traffic::Tcp(16_384) => (3, mbit),
        Traffic::RequestResponse => (4, 1e3),
        _ => return None,
    };
    let value: f64 = if load.segmentation {
        let row = SEGMENTED.iter().find(|row| is(row.0, row.1, row.2))?.3;
        *row.get(usize::checked_sub(column, 2)?)?
    } else {
        ROWS.iter().find(|row| is(row.0, row.1, row.2))?.3[column]
    };
    let udp = matches!(load.traffic, Traffic::Udp(_));
    let only_sent = udp && SENT.iter().any(|row| is(row.0, row.1, row.2));
    (value > 0.0).then_some(PaperFigure { rate: value * unit, only_sent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_load() {
        let starred = paper("csb", &"udp8-gg".parse().unwrap()).unwrap();
        assert_eq!(starred, PaperFigure { rate: 1_526_000.0, only_sent: true });
        assert!(!paper("csb", &"rr-gg".parse().unwrap()).unwrap().only_sent);
        let paper = |subject, load: &str| Some(paper(subject, &load.parse().unwrap())?.rate);
        assert_eq!(paper("base", "rr-hg"), Some(12_300.0));
        assert_eq!(paper("base", "tcp1460-hg-c2"), Some(3938e6 / 8.0));
        assert_eq!(paper("qemu-virtio", "tcp16384-gh-tso"), Some(21_478e6 / 8.0));
        assert_eq!(paper("virtio", "rr-gg-c2"), Some(14_600.0));
        for (subject, load) in [
            ("csb", "udp8-gg-o5k"),
            ("csb", "udp9-gg"),
            ("csb", "udp8-hg"),
            ("csb", "tcp1460-gh-tso"),
            ("polling", "udp8-gg"),
            ("qemu-e1000", "udp8-gh"),
            ("csb", "udp8-gh-c4"),
        ] {
            assert_eq!(paper(subject, load), None, "{subject} {load}");
        }
    }
}
