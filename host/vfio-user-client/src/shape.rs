//! The shape of a function: what must not change when a VMM connects to it again.

use slipway_vfio_user_spec as spec;
use spec::{Command, DeviceFlags, RegionFlags, irq, region};

use crate::{Client, ClientError, IrqDescription, RegionDescription};

/// A region of a function. It is the same for as long as the function lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionShape {
    /// The size in bytes; zero if the region does not exist.
    pub size: u64,
    /// The operations that are allowed.
    pub flags: RegionFlags,
    /// Parts that may be mapped, each as its offset in the region and its length in bytes. Empty if
    /// nothing may be mapped.
    pub areas: Vec<(u64, u64)>,
}

/// The parts of configuration space that identify a function (PCI Express Base Specification,
/// section *Type 0/1 Common Configuration Space*): vendor and device, revision and class, and the
/// subsystem of a type 0 header. Each is the offset of 32 bits.
const IDENTITY: [usize; 3] = [0x00, 0x08, 0x2c];
/// The bytes of configuration space up to the end of [`IDENTITY`].
pub(crate) const IDENTIFIERS: usize = 0x30;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub regions: Vec<RegionShape>,
    pub irqs: Vec<IrqDescription>,
    /// The contents of [`IDENTITY`].
    identity: [[u8; 4]; 3],
}

impl Shape {
    /// Asks for the shape of the function behind `client`.
    pub fn learn(client: &mut Client) -> Result<Self, ClientError> {
        let info = client.ask(Command::DeviceGetInfo, &spec::DeviceInfo::request())?;
        let flags = DeviceFlags::from_bits_retain(info.flags.get());
        if !flags.contains(DeviceFlags::PCI)
            || info.num_regions.get() < region::COUNT
            || info.num_irqs.get() < irq::COUNT
        {
            return Err(ClientError::Malformed("this is no PCI function"));
        }
        let regions = client.regions(region::COUNT, region_shape)?;
        let irqs = client.irqs(irq::COUNT)?;
        let mut head = [0; IDENTIFIERS];
        client.read(region::CONFIG, 0, &mut head)?;
        let identity = IDENTITY.map(|at| [head[at], head[at + 1], head[at + 2], head[at + 3]]);
        Ok(Self { regions, irqs, identity })
    }

    /// Returns in which way `other` is another function. Returns `None` if it is the same.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        [
            (self.regions != other.regions, "it has other regions"),
            (self.irqs != other.irqs, "it has other interrupts"),
            (self.identity != other.identity, "its configuration space has other identifiers"),
        ]
        .into_iter()
        .find_map(|(differs, how)| differs.then_some(how))
    }
}

fn region_shape(described: RegionDescription) -> Result<RegionShape, ClientError> {
    let (size, flags) = (described.size, described.flags);
    let mappable = described.file.is_some() && flags.contains(RegionFlags::MMAP);
    let areas = match (mappable, described.areas.is_empty()) {
        (false, _) => Vec::new(),
        (true, true) => vec![(0, size)],
        (true, false) => described.areas,
    };
    let inside = |&(start, len): &(u64, u64)| start.checked_add(len).is_some_and(|e| e <= size);
    if !areas.iter().all(inside) {
        return Err(ClientError::Malformed("a mappable area outside of its region"));
    }
    Ok(RegionShape { size, flags, areas })
}
