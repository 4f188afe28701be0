//! The hardware of VFs, which VFIO keeps from its drivers.

use std::sync::Arc;

use slipway_plane_api::vf_v1;
use slipway_vf_pool::Fault;
use slipway_vfio::{Binding, Device, Error, Host, PciAddress};

use super::limits::Limits;
use super::{VfError, template};

/// The hardware of a VF. Dropping it closes the device and leaves it with vfio-pci.
pub(super) struct Hardware {
    host: Host,
    address: PciAddress,
    binding: Option<Binding>,
    limits: Limits,
    /// The physical function may hold it to `limits`.
    is_limited: bool,
    /// The open device. An endpoint has clones while it exists.
    device: Option<Arc<Device>>,
}

impl Hardware {
    pub fn new(address: PciAddress, limits: Limits) -> Self {
        let (host, binding, device) = (Host::default(), None, None);
        Self { host, address, binding, limits, is_limited: false, device }
    }

    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Returns the open device.
    pub fn device(&self) -> Result<&Arc<Device>, Fault> {
        let closed = || Fault(format!("PCI function {} is closed", self.address));
        self.device.as_ref().ok_or_else(closed)
    }

    /// Resets the device, which has no endpoint. Opens it first if it is closed.
    pub fn reset(&mut self) -> Result<(), Fault> {
        if self.device.is_none() {
            self.device = Some(Arc::new(self.open()?));
        }
        self.check_alone()?;
        let device = self.device()?;
        device.unmap_all().and_then(|()| device.reset()).map_err(fault)
    }

    fn open(&mut self) -> Result<Device, Fault> {
        let sysfs = self.host.sysfs();
        sysfs.check(self.address).map_err(fault)?;
        if self.binding.is_none() {
            self.binding = Some(sysfs.bind(self.address).map_err(fault)?);
        }
        if !self.limits.is_none() {
            self.is_limited = true;
            self.limits.set(self.address)?;
        }
        self.host.open(self.address).map_err(fault)
    }

    /// Checks that no endpoint has the device.
    fn check_alone(&self) -> Result<(), Fault> {
        match &self.device {
            Some(device) if Arc::strong_count(device) > 1 => {
                Err(Fault("its last client is not cut off yet".into()))
            }
            _ => Ok(()),
        }
    }

    /// Closes the device, takes its limits from it and gives it back to the driver that it had.
    pub fn close(&mut self) -> Result<(), Fault> {
        // The kernel would wait for the endpoint that has it open.
        self.check_alone()?;
        self.device = None;
        if std::mem::take(&mut self.is_limited) {
            self.limits.clear(self.address);
        }
        match self.binding.take() {
            Some(binding) => self.host.sysfs().give_back(binding).map_err(fault),
            None => Ok(()),
        }
    }
}

/// Checks that the hardware of a template, if it has some, can be had. May wait: the kernel answers
/// for a physical function whose virtual ones it is removing when they are closed.
///
/// # Errors
/// [`VfError::Invalid`], [`VfError::Hardware`].
pub(super) fn check(template: &vf_v1::Template) -> Result<(), VfError> {
    let addresses = template::addresses(template).map_err(VfError::Invalid)?;
    let (sysfs, limits) = (slipway_vfio::Sysfs::default(), Limits::of(template));
    let refused = |error: Error| VfError::Hardware(error.to_string());
    addresses.into_iter().try_for_each(|address| {
        sysfs.check(address).map_err(refused)?;
        limits.check(address).map_err(VfError::Hardware)
    })
}

/// Checks that no other pool has the hardware of a template.
///
/// # Errors
/// [`VfError::Invalid`], [`VfError::Hardware`].
pub(super) fn check_others<'a>(
    template: &vf_v1::Template,
    others: impl Iterator<Item = &'a vf_v1::Template>,
) -> Result<(), VfError> {
    let addresses = template::addresses(template).map_err(VfError::Invalid)?;
    let other: Vec<PciAddress> =
        others.flat_map(|other| template::addresses(other).unwrap_or_default()).collect();
    match addresses.iter().find(|address| other.contains(address)) {
        Some(address) => {
            Err(VfError::Hardware(format!("PCI function {address} is in another pool")))
        }
        None => Ok(()),
    }
}

fn fault(error: Error) -> Fault {
    Fault(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_in_one_pool() {
        let pool = |text: &str| {
            let addresses = vec![text.to_owned()];
            let hardware = vf_v1::template::Hardware { addresses, ..Default::default() };
            let kind = Some(vf_v1::template::Kind::Hardware(hardware));
            vf_v1::Template { kind, count: 1, ..Default::default() }
        };
        let others = [pool("0000:01:10.0"), vf_v1::Template::default()];
        check_others(&pool("0000:01:10.2"), others.iter()).unwrap();
        let refused = check_others(&pool("0000:01:10.0"), others.iter()).unwrap_err();
        assert!(refused.to_string().contains("0000:01:10.0 is in another pool"), "{refused}");
    }
}
