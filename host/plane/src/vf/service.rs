//! The gRPC service of VFs.

use std::time::Instant;

use slipway_plane_api::vf_v1::{self, virtual_functions_server::VirtualFunctionsServer};
use slipway_vf_pool::{Error as PoolError, Owner, VfState};
use tonic::{Request, Status};

use super::{TemplatePool, VfError, VirtualFunctions, template};
use crate::service::{Reply, blocking};

impl From<VfError> for Status {
    fn from(error: VfError) -> Self {
        let message = error.to_string();
        match error {
            VfError::Invalid(_) => Self::invalid_argument(message),
            VfError::Exists(_) | VfError::Pool(PoolError::Held { .. }) => {
                Self::already_exists(message)
            }
            VfError::Unknown(_)
            | VfError::Pool(
                PoolError::NoVf { .. } | PoolError::NoSet { .. } | PoolError::NoLease { .. },
            ) => Self::not_found(message),
            VfError::Pool(PoolError::Empty { .. } | PoolError::Threads { .. }) => {
                Self::resource_exhausted(message)
            }
            // It is ready soon, by all that is known.
            VfError::Pool(PoolError::Unready { state, .. })
                if state == VfState::Returning.word() =>
            {
                Self::resource_exhausted(message)
            }
            VfError::InUse(..)
            | VfError::NoLedger(_)
            | VfError::Whole(_)
            | VfError::Hardware(_)
            | VfError::Client(..)
            | VfError::Pool(_) => Self::failed_precondition(message),
        }
    }
}

/// Returns the time until `at` in whole milliseconds, rounded up; 0 if it has passed.
fn milliseconds_until(at: Instant) -> u64 {
    let left = at.saturating_duration_since(Instant::now());
    u64::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

fn owner(text: &str) -> Result<Owner, VfError> {
    text.parse().map_err(|error| VfError::Invalid(format!("\"{text}\" is no owner: {error}")))
}

impl VirtualFunctions {
    /// Connects a channel to the service within this process.
    ///
    /// # Errors
    /// The connection within this process fails.
    pub async fn connect(&self) -> Result<tonic::transport::Channel, tonic::transport::Error> {
        let service = VirtualFunctionsServer::new(self.clone());
        let router = tonic::transport::Server::builder().add_service(service);
        slipway_plane_api::within(router).await
    }

    pub(super) fn describe(&self, name: &str, entry: &TemplatePool) -> vf_v1::Pool {
        let health = entry.pool.health();
        let addresses = template::addresses(&entry.template).unwrap_or_default();
        let vf = |status: slipway_vf_pool::VfStatus| {
            let address = addresses.get(status.vf as usize);
            let mut vf = vf_v1::Vf {
                number: status.vf,
                set: status.set,
                state: status.state.word().to_owned(),
                draining: status.is_draining,
                takes: status.takes,
                tries: status.tries,
                next_try_ms: status.next_try.map(milliseconds_until),
                socket_path: self.socket_of(name, status.vf),
                address: address.map_or_else(String::new, ToString::to_string),
                ..Default::default()
            };
            match status.state {
                VfState::Taken { owner, since_ns } => {
                    (vf.owner, vf.since_ns) = (owner.to_string(), since_ns);
                }
                VfState::Failed(why) | VfState::Stuck(why) => vf.reason = why,
                VfState::Ready | VfState::Returning | VfState::Drained => {}
            }
            vf
        };
        vf_v1::Pool {
            name: name.to_owned(),
            template: Some(entry.template.clone()),
            vfs: entry.pool.status().into_iter().map(vf).collect(),
            resets: health.resets,
            failures: health.failures,
            unwritten: health.unwritten,
            refusals: health.refusals,
            retries: health.retries,
        }
    }

    fn socket_of(&self, pool: &str, vf: u32) -> String {
        self.shared.sockets.join(template::id(pool, vf)).to_string_lossy().into_owned()
    }

    /// Runs a change on one VF of a pool, or on all of them. The pool is not removed meanwhile. The
    /// change must not wait.
    fn each(
        &self,
        pool: &str,
        number: Option<u32>,
        change: impl Fn(&TemplatePool, u32) -> Result<(), PoolError>,
    ) -> Result<vf_v1::Pool, VfError> {
        let state = self.lock();
        let entry = state.entry(pool)?;
        match number {
            Some(number) => change(entry, number)?,
            None => (0..entry.template.count).try_for_each(|vf| change(entry, vf))?,
        }
        Ok(self.describe(pool, entry))
    }
}

#[tonic::async_trait]
impl vf_v1::virtual_functions_server::VirtualFunctions for VirtualFunctions {
    async fn create_pool(&self, request: Request<vf_v1::CreatePoolRequest>) -> Reply<vf_v1::Pool> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || functions.create(&request.name, request.template.unwrap_or_default()))
            .await
    }

    async fn list_pools(
        &self,
        _: Request<vf_v1::ListPoolsRequest>,
    ) -> Reply<vf_v1::ListPoolsReply> {
        let functions = self.clone();
        blocking(move || {
            let state = functions.lock();
            state.ledger.as_ref().map_err(|why| VfError::NoLedger(why.clone()))?;
            let pools = state.pools.iter().map(|(name, entry)| functions.describe(name, entry));
            Ok::<_, VfError>(vf_v1::ListPoolsReply { pools: pools.collect() })
        })
        .await
    }

    async fn get_pool(&self, request: Request<vf_v1::GetPoolRequest>) -> Reply<vf_v1::Pool> {
        let (functions, name) = (self.clone(), request.into_inner().name);
        blocking(move || {
            let entry = functions.entry(&name)?;
            Ok::<_, VfError>(functions.describe(&name, &entry))
        })
        .await
    }

    async fn remove_pool(
        &self,
        request: Request<vf_v1::RemovePoolRequest>,
    ) -> Reply<vf_v1::RemovePoolReply> {
        let (functions, name) = (self.clone(), request.into_inner().name);
        blocking(move || functions.remove(&name).map(|()| vf_v1::RemovePoolReply {})).await
    }

    async fn take(&self, request: Request<vf_v1::TakeRequest>) -> Reply<vf_v1::Lease> {
        let (functions, request) = (self.clone(), request.into_inner());
        let vf_v1::TakeRequest { pool, owner: taker, client, number } = request;
        blocking(move || functions.take(&pool, &owner(&taker)?, number, client)).await
    }

    async fn admit(&self, request: Request<vf_v1::AdmitRequest>) -> Reply<vf_v1::Lease> {
        let (functions, request) = (self.clone(), request.into_inner());
        let client = request.client.unwrap_or_default();
        blocking(move || functions.admit(&request.pool, &owner(&request.owner)?, client)).await
    }

    async fn r#return(&self, request: Request<vf_v1::ReturnRequest>) -> Reply<vf_v1::ReturnReply> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || {
            let number = functions.give_back(&request.pool, &owner(&request.owner)?)?;
            Ok::<_, VfError>(vf_v1::ReturnReply { number })
        })
        .await
    }

    async fn reconcile(
        &self,
        request: Request<vf_v1::ReconcileRequest>,
    ) -> Reply<vf_v1::ReconcileReply> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || {
            let returned = functions.reconcile(&request.kind, &request.ids);
            Ok::<_, VfError>(vf_v1::ReconcileReply { returned })
        })
        .await
    }

    async fn drain(&self, request: Request<vf_v1::DrainRequest>) -> Reply<vf_v1::Pool> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || {
            functions.each(&request.pool, request.number, |entry, vf| entry.pool.drain(vf))
        })
        .await
    }

    async fn resume(&self, request: Request<vf_v1::ResumeRequest>) -> Reply<vf_v1::Pool> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || {
            functions.each(&request.pool, request.number, |entry, vf| entry.pool.resume(vf))
        })
        .await
    }

    async fn reset_set(&self, request: Request<vf_v1::ResetSetRequest>) -> Reply<vf_v1::Pool> {
        let (functions, request) = (self.clone(), request.into_inner());
        blocking(move || {
            let entry = functions.entry(&request.pool)?;
            entry.pool.reset_set(request.set)?;
            Ok::<_, VfError>(functions.describe(&request.pool, &entry))
        })
        .await
    }

    async fn rebuild(&self, _: Request<vf_v1::RebuildRequest>) -> Reply<vf_v1::RebuildReply> {
        let functions = self.clone();
        blocking(move || functions.rebuild().map(|moved_to| vf_v1::RebuildReply { moved_to })).await
    }
}
