//! The hardware of VFs, which VFIO keeps from its drivers.

use std::path::Path;
use std::sync::Arc;

use slipway_plane_api::vf_v1;
use slipway_vf_pool::Fault;
use slipway_vfio::{Device, Error, Host, PciAddress};

use super::binding::{NotedBinding, fault};
use super::limits::Limits;
use super::note::Note;
use super::{VfError, template};

/// The hardware of a VF. Dropping it closes the device and leaves it with vfio-pci.
pub(super) struct Hardware {
    host: Host,
    address: PciAddress,
    binding: NotedBinding,
    limits: Limits,
    /// The note of `limits`, while the physical function may hold the VF to them.
    pool_note: Note,
    /// The settings of its owner's client, to which the physical function may hold it.
    owned: Option<Limits>,
    /// The note of the settings that an owner's client has.
    note: Note,
    /// The open device. An endpoint has clones while it exists.
    device: Option<Arc<Device>>,
}

impl Hardware {
    /// Returns hardware that is closed. Files beside the sockets in `sockets` outlive the daemon.
    pub fn new(address: PciAddress, limits: Limits, sockets: &Path) -> Self {
        let note = |kind: &str| Note::new(sockets.join(format!("{address}.{kind}")));
        let binding = NotedBinding::new(address, note("driver"));
        let (pool_note, note) = (note("limits"), note("settings"));
        let (host, device, owned) = (Host::default(), None, None);
        Self { host, address, binding, limits, pool_note, owned, note, device }
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
        self.release()?;
        let device = self.device()?;
        device.unmap_all().and_then(|()| device.reset()).map_err(fault)
    }

    /// Has the physical function hold the VF to the settings of an owner's client, beside those of
    /// the pool, until the next reset. Does nothing for a client that has none.
    ///
    /// # Errors
    /// The physical function sets one of them not; the next reset ends the others.
    pub fn hold(&mut self, client: &vf_v1::Client) -> Result<(), Fault> {
        if !template::has_settings(client) {
            return Ok(());
        }
        let settings = self.limits.for_client(client);
        // First: a daemon that ends now leaves no setting without a note.
        self.keep(settings)?;
        let (set, outcome) = settings.set(self.address);
        match &outcome {
            Ok(()) => {}
            Err(_) if set.is_none() => self.forget(),
            // The reset does not try what was refused: a driver that refuses it again would take
            // the VF out of the pool, and one VF after the other. An error: the note names more.
            Err(_) => {
                drop(self.keep(set));
                self.owned = Some(set);
            }
        }
        outcome
    }

    /// Remembers the settings of an owner's client, also for the next daemon.
    ///
    /// # Errors
    /// The note cannot be written. What was remembered before stays.
    fn keep(&mut self, settings: Limits) -> Result<(), Fault> {
        self.note.keep(settings)?;
        self.owned = Some(settings);
        Ok(())
    }

    /// Takes over the settings that the note of the last daemon names, unless the VF has an owner
    /// of this one's.
    fn recall(&mut self) {
        self.owned = self.owned.or_else(|| self.note.recall());
    }

    /// Gives the settings of an owner's client the pool's values.
    fn release(&mut self) -> Result<(), Fault> {
        if let Some(settings) = self.owned {
            settings.replace(self.address, self.limits)?;
            self.forget();
        }
        Ok(())
    }

    /// Forgets the settings of an owner's client, which have ended.
    fn forget(&mut self) {
        self.owned = None;
        self.note.forget();
    }

    fn open(&mut self) -> Result<Device, Fault> {
        let sysfs = self.host.sysfs();
        sysfs.check(self.address).map_err(fault)?;
        self.binding.bind(sysfs)?;
        self.recall();
        self.release()?;
        self.limit()?;
        self.host.open(self.address).map_err(fault)
    }

    /// Has the physical function hold the VF to the pool's limits, in place of those of a pool
    /// whose ledger was lost.
    fn limit(&self) -> Result<(), Fault> {
        if let Some(had) = self.pool_note.recall() {
            had.replace(self.address, self.limits)?;
        }
        if self.limits.is_none() {
            self.pool_note.forget();
            return Ok(());
        }
        self.pool_note.keep(self.limits)?;
        self.limits.set(self.address).1
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

    /// Closes the device, which stays with vfio-pci and keeps its settings until it is opened once
    /// more or closed for good. A device that an endpoint still has stays open: the next reset and
    /// the next close have to find that its client is not cut off.
    pub fn shut(&mut self) {
        if self.check_alone().is_ok() {
            self.device = None;
        }
    }

    /// Closes the device, takes its limits from it and gives it back to the driver that it had.
    pub fn close(&mut self) -> Result<(), Fault> {
        // The kernel would wait for the endpoint that has it open.
        self.check_alone()?;
        self.device = None;
        // Of a VF that this daemon could not open, too.
        self.recall();
        if let Some(settings) = self.owned {
            settings.clear(self.address);
            self.forget();
        }
        if let Some(limits) = self.pool_note.recall() {
            limits.clear(self.address);
            self.pool_note.forget();
        }
        self.binding.give_back(self.host.sysfs())
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

/// Checks that the hardware of a template, if it has some, could be held to the settings of a
/// client that was checked.
///
/// # Errors
/// [`VfError::Invalid`].
pub(super) fn check_client(
    template: &vf_v1::Template,
    client: &vf_v1::Client,
) -> Result<(), VfError> {
    let addresses = template::addresses(template).map_err(VfError::Invalid)?;
    let limits = Limits::of(template);
    match addresses.first() {
        // The others are the same device's as a rule, and else fail when they are taken.
        Some(address) if template::has_settings(client) => {
            let checked = limits.allow(client);
            let checked = checked.and_then(|()| limits.for_client(client).check(*address));
            checked.map_err(VfError::Invalid)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(text: &str) -> vf_v1::Template {
        let addresses = vec![text.to_owned()];
        let hardware = vf_v1::template::Hardware { addresses, ..Default::default() };
        let kind = Some(vf_v1::template::Kind::Hardware(hardware));
        vf_v1::Template { kind, count: 1, ..Default::default() }
    }

    #[test]
    fn settings_of_a_client_are_noted_until_they_end() {
        let folder = tempfile::tempdir().unwrap();
        let address: PciAddress = "0000:fe:1f.7".parse().unwrap();
        let mut hardware = Hardware::new(address, Limits::default(), folder.path());
        hardware.hold(&vf_v1::Client::default()).unwrap();
        let note = folder.path().join("0000:fe:1f.7.settings");
        assert!(!note.exists() && hardware.owned.is_none());
        let client = vf_v1::Client { vlan: 5, ..Default::default() };
        let Fault(why) = hardware.hold(&client).unwrap_err();
        assert!(why.contains("no physical function"), "{why}");
        // Nothing was set, so nothing is left that the next reset could fail to end.
        assert!(!note.exists() && hardware.owned.is_none());
        hardware.release().unwrap();
        hardware.keep(Limits::default().for_client(&client)).unwrap();
        assert_eq!(std::fs::read_to_string(&note).unwrap(), "vlan");
        hardware.close().unwrap();
        assert!(!note.exists() && hardware.owned.is_none());
        // The settings of the last daemon end with the pool, although the VF was never opened.
        std::fs::write(&note, "vlan").unwrap();
        let mut next = Hardware::new(address, Limits::default(), folder.path());
        let limits = folder.path().join("0000:fe:1f.7.limits");
        std::fs::write(&limits, "vlan rate").unwrap();
        next.close().unwrap();
        assert!(!note.exists() && !limits.exists());
        // Without a note nothing is set, and nothing is left to end.
        let gone = folder.path().join("gone");
        let mut unnoted = Hardware::new(address, Limits::default(), &gone);
        let Fault(why) = unnoted.hold(&client).unwrap_err();
        assert!(why.contains("cannot write") && unnoted.owned.is_none(), "{why}");
        let refused = check_client(&pool("0000:fe:1f.7"), &client).unwrap_err();
        assert!(matches!(refused, VfError::Invalid(_)), "{refused}");
        check_client(&pool("0000:fe:1f.7"), &vf_v1::Client::default()).unwrap();
        let mut tagged = pool("0000:fe:1f.7");
        if let Some(vf_v1::template::Kind::Hardware(hardware)) = &mut tagged.kind {
            hardware.vlan = 6;
        }
        let refused = check_client(&tagged, &client).unwrap_err().to_string();
        assert!(refused.contains("in VLAN 6, not in VLAN 5"), "{refused}");
    }

    #[test]
    fn a_function_is_in_one_pool() {
        let others = [pool("0000:01:10.0"), vf_v1::Template::default()];
        check_others(&pool("0000:01:10.2"), others.iter()).unwrap();
        let refused = check_others(&pool("0000:01:10.0"), others.iter()).unwrap_err();
        assert!(refused.to_string().contains("0000:01:10.0 is in another pool"), "{refused}");
    }
}
