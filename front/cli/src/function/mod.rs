//! `slipway function`: a named image whose replicas come and go with its invocations.

mod queue;
mod scheduler;
