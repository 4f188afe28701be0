//! A priority queue of tenants.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::TenantId;

/// Tenants by key, the least key first; equal keys in the order of the tenants' slots. Allocates
/// only when it grows beyond its largest size so far.
#[derive(Debug)]
pub(super) struct Heap<K>(BinaryHeap<Reverse<(K, TenantId)>>);

impl<K: Ord + Copy> Heap<K> {
    pub(super) fn new() -> Self {
        Self(BinaryHeap::new())
    }

    pub(super) fn push(&mut self, key: K, tenant: TenantId) {
        self.0.push(Reverse((key, tenant)));
    }

    pub(super) fn pop(&mut self) -> Option<(K, TenantId)> {
        self.0.pop().map(|Reverse(least)| least)
    }

    pub(super) fn least(&self) -> Option<K> {
        self.0.peek().map(|Reverse((key, _))| *key)
    }
}
