//! Functions of pools in place of the ports of containers' attachments. Those of hardware have the
//! addresses of the network, and their physical function holds them to their settings.
//!
//! An attachment has its function from when it is made until it is removed. The pools' ledger names
//! it as the owner, so that no crash loses the function. A sandbox in the namespace is let in at
//! the function in the attachment's name.

use slipway_plane_api::functions::ATTACHMENT;
use slipway_plane_api::vf_v1::template::Kind;
use slipway_plane_api::{VfClient, vf_v1};
use tonic::{Code, Response, Status};

use super::Networks;
use super::attachment_request::Request;
use crate::attachment::Attachment;
use crate::{Error, Result};

/// The largest packet of a function whose template names none, in bytes.
const MTU: u32 = 1500;

/// Returns the owner that the attachment of this id is for a pool.
fn owner(id: &str) -> String {
    format!("{ATTACHMENT}:{id}")
}

/// A function of a pool that an attachment has. Both fields are empty if it has none, as in
/// `Interface` of `network.proto`.
#[derive(Default)]
pub(super) struct PoolFunction {
    /// The pool's name.
    pub(super) pool: String,
    /// The owner of the function in the pools' ledger.
    pub(super) owner: String,
}

impl PoolFunction {
    /// Returns the function of an attachment.
    pub(super) fn of(attachment: &Attachment) -> Self {
        if attachment.pool.is_empty() {
            return Self::default();
        }
        Self { pool: attachment.pool.clone(), owner: owner(&attachment.key.id()) }
    }
}

fn refused(status: Status) -> Error {
    Error::Functions(Box::new(status))
}

impl Networks {
    /// Lets attachments have functions of these pools.
    #[must_use]
    pub fn with_functions(mut self, functions: VfClient) -> Self {
        self.functions = Some(functions);
        self
    }

    fn pools(&self) -> Result<VfClient> {
        let none = || Error::Host("this daemon has no pools of functions".to_owned());
        self.functions.clone().ok_or_else(none)
    }

    async fn pool(&self, name: &str) -> Result<vf_v1::Pool> {
        let request = vf_v1::GetPoolRequest { name: name.to_owned() };
        let found = self.pools()?.get_pool(request).await;
        found.map(Response::into_inner).map_err(refused)
    }

    /// Checks that the functions of the pool that a request names, if it names one, can be
    /// interfaces of its network. Returns whether they are hardware, which has addresses of the
    /// network and no port of its switch.
    ///
    /// # Errors
    /// [`Error::Functions`]: there is no such pool; [`Error::Invalid`].
    pub(super) async fn check_pool(&self, request: &Request<'_>) -> Result<bool> {
        let &Request { pool, network, .. } = request;
        if pool.is_empty() {
            return Ok(false);
        }
        let template = self.pool(pool).await?.template.unwrap_or_default();
        if let Some(Kind::Hardware(_)) = template.kind {
            return Ok(true);
        }
        // A network that is not there is refused later.
        let needed = self.state.lock().await.networks.get(network).map(|network| network.mtu);
        let fits = fits(&template, (network, needed.unwrap_or_default()));
        fits.map(|()| false).map_err(|what| {
            Error::Invalid(format!(
                "the functions of pool {pool} {what}; `slipway vf create --switch {network}` makes \
                 a pool for the network"
            ))
        })
    }

    /// Takes a function of an attachment's pool, if it has one, for clients of the pool's user.
    ///
    /// # Errors
    /// [`Error::Functions`].
    pub(super) async fn take_function(&self, id: &str, attachment: &Attachment) -> Result<()> {
        let Attachment { pool, hardware, lease, rates, .. } = attachment;
        if pool.is_empty() {
            return Ok(());
        }
        let settings = hardware.unwrap_or_default();
        let client = vf_v1::Client {
            mac: lease.mac.to_string(),
            // The plane has no port of hardware that could check them.
            addresses: match hardware {
                Some(_) => Vec::new(),
                None => vec![lease.ipv4.to_string(), lease.ipv6.to_string()],
            },
            vlan: settings.vlan,
            no_spoof_check: settings.no_spoof_check,
            max_rate: rates.max_rate,
            max_burst: rates.max_burst,
            receive_rate: rates.receive_rate,
            receive_burst: rates.receive_burst,
            ..Default::default()
        };
        let (pool, owner, client) = (pool.clone(), owner(id), Some(client));
        let request = vf_v1::TakeRequest { pool, owner, client, number: None };
        self.pools()?.take(request).await.map(drop).map_err(refused)
    }

    /// Gives an attachment's function back, if it has one. Its client is cut off.
    pub(super) async fn return_function(&self, id: &str, attachment: &Attachment) {
        let (Ok(mut pools), false) = (self.pools(), attachment.pool.is_empty()) else { return };
        let request = vf_v1::ReturnRequest { pool: attachment.pool.clone(), owner: owner(id) };
        match pools.r#return(request).await {
            // The addresses are freed all the same, and the next daemon takes the function back.
            Err(status) if status.code() != Code::NotFound => {
                let (pool, error) = (&attachment.pool, status.message());
                tracing::warn!(id, pool, error, "a function is not given back");
            }
            _ => {}
        }
    }

    /// Returns an attachment's function, or `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Host`]: the attachment has lost it.
    pub(super) async fn function_of(
        &self,
        id: &str,
        attachment: &Attachment,
    ) -> Result<Option<vf_v1::Vf>> {
        let name = &attachment.pool;
        if name.is_empty() {
            return Ok(None);
        }
        let vfs = match self.pool(name).await {
            Err(Error::Functions(status)) if status.code() == Code::NotFound => Vec::new(),
            found => found?.vfs,
        };
        let owner = owner(id);
        let own = vfs.into_iter().find(|vf| vf.owner == owner);
        own.map(Some).ok_or_else(|| {
            Error::Host(format!(
                "the attachment has lost its function of pool {name}; DEL and ADD give it another"
            ))
        })
    }

    /// Takes back the functions of attachments that are gone. For a daemon that has just started.
    pub(super) async fn drop_lost_functions(&self) {
        let Ok(mut pools) = self.pools() else { return };
        let ids = self.state.lock().await.attachments.keys().cloned().collect();
        let request = vf_v1::ReconcileRequest { kind: ATTACHMENT.to_owned(), ids };
        match pools.reconcile(request).await {
            Ok(reply) if reply.get_ref().returned.is_empty() => {}
            Ok(reply) => {
                let functions = reply.into_inner().returned.join(", ");
                tracing::info!(functions, "their attachments are gone");
            }
            Err(status) => tracing::warn!(error = status.message(), "functions are not returned"),
        }
    }
}

/// Checks that the functions of a template can be interfaces of a network with packets of `mtu`
/// bytes.
///
/// # Errors
/// The reason as a predicate of the pool's functions, such as "are no interfaces on a switch".
fn fits(template: &vf_v1::Template, (network, mtu): (&str, u32)) -> Result<(), String> {
    let Some(Kind::Nic(nic)) = &template.kind else {
        return Err("are no interfaces on a switch".to_owned());
    };
    let most = if nic.mtu == 0 { MTU } else { nic.mtu };
    if nic.switch != network {
        return Err(format!("are on the switch {}, not on that of {network}", nic.switch));
    }
    if most < mtu {
        return Err(format!("take packets of {most} bytes, the network {network} has {mtu}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::vf_v1::template::{Nic, Nvme};

    use super::*;

    #[test]
    fn functions_are_on_the_networks_switch_or_refused() {
        let why = |kind| {
            let template = vf_v1::Template { kind: Some(kind), ..Default::default() };
            fits(&template, ("blue", 1400))
        };
        let nic = |switch: &str, mtu| Kind::Nic(Nic { switch: switch.to_owned(), mtu });
        assert_eq!(why(nic("blue", 0)), Ok(()));
        assert_eq!(why(nic("blue", 1400)), Ok(()));
        assert!(why(nic("red", 0)).unwrap_err().contains("on the switch red"));
        assert!(why(nic("blue", 1399)).unwrap_err().contains("1399 bytes"));
        assert!(why(Kind::Nvme(Nvme::default())).unwrap_err().contains("no interfaces"));
    }
}
