//! The policy as a formula: progressive filling.
//!
//! Where each executor is a resource of its own, with C bytes per second, and tenant *t* uses a set
//! S of them:
//!
//! > Z(t) = min over j in S(t) of C(j), a(t) = s* · w(t) · Z(t),
//! > s* = min over j of C(j) / Σ w(t) · Z(t), the sum over the tenants on j.
//!
//! Tenants on the executor that gives s* have their final rate. For the other tenants s grows on,
//! with the capacity that is left on the other executors, until all have a rate. In general a
//! resource has one second each second, and *t* takes d(t, r) of it for a byte; then Z(t) = 1 / max
//! over r of d(t, r), and the rest holds unchanged.

/// The demand of a tenant.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Seconds of each resource that one byte takes; 0 if the tenant does not use the resource.
    pub seconds: Vec<f64>,
    /// The tenant's weight, above 0.
    pub weight: f64,
    /// The largest rate that the tenant may have or wants, in bytes per second.
    pub most: Option<f64>,
}

impl Demand {
    /// Returns the bytes per second that the tenant would have alone, by the slowest resource that
    /// it uses, or 0 if it uses none.
    pub fn alone(&self) -> f64 {
        let slowest = self.seconds.iter().copied().fold(0.0, f64::max);
        if slowest > 0.0 { slowest.recip() } else { 0.0 }
    }
}

/// The limit that keeps a tenant from a higher rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The resource of this index is used up.
    Resource(usize),
    /// The tenant's own [`Demand::most`].
    Most,
}

/// The rate of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grant {
    /// Bytes per second.
    pub rate: f64,
    /// The limit that keeps the rate from being higher.
    pub bound: Bound,
}

/// The relative difference between two levels that counts as rounding.
const ROUNDING: f64 = 1e-9;

/// Returns the shares of all tenants, of `resources` resources. Deterministic. O(tenants *
/// resources) for each level, of which there are at most as many as resources and limits together.
pub fn fill(resources: usize, demands: &[Demand]) -> Vec<Grant> {
    let mut grants: Vec<Option<Grant>> = demands
        .iter()
        .map(|demand| (demand.alone() <= 0.0).then_some(Grant { rate: 0.0, bound: Bound::Most }))
        .collect();
    while grants.iter().any(Option::is_none) {
        let bounds = (0..resources).map(Bound::Resource).chain([Bound::Most]);
        let levels: Vec<(f64, Bound)> =
            bounds.filter_map(|bound| Some((level(bound, demands, &grants)?, bound))).collect();
        let Some(least) = levels.iter().map(|(at, _)| *at).min_by(f64::total_cmp) else { break };
        for (at, bound) in levels {
            if at <= least * (1.0 + ROUNDING) {
                freeze(bound, least, demands, &mut grants);
            }
        }
    }
    let nothing = Grant { rate: 0.0, bound: Bound::Most };
    grants.into_iter().map(|grant| grant.unwrap_or(nothing)).collect()
}

/// Returns the level at which `bound` stops a tenant without a grant, or `None` if it stops none.
fn level(bound: Bound, demands: &[Demand], grants: &[Option<Grant>]) -> Option<f64> {
    let open = || demands.iter().zip(grants).filter(|(_, grant)| grant.is_none());
    let Bound::Resource(resource) = bound else {
        return open()
            .filter_map(|(demand, _)| Some(demand.most? / step(demand)))
            .min_by(f64::total_cmp);
    };
    let slope: f64 = open().map(|(demand, _)| step(demand) * demand.seconds[resource]).sum();
    let taken = demands.iter().zip(grants);
    let taken: f64 = taken
        .filter_map(|(demand, grant)| Some(grant.as_ref()?.rate * demand.seconds[resource]))
        .sum();
    (slope > 0.0).then(|| (1.0 - taken).max(0.0) / slope)
}

/// Grants the tenants that `bound` stops at `level` their rate there.
fn freeze(bound: Bound, level: f64, demands: &[Demand], grants: &mut [Option<Grant>]) {
    for (demand, grant) in demands.iter().zip(grants) {
        let stopped = match bound {
            Bound::Resource(resource) => demand.seconds[resource] > 0.0,
            Bound::Most => {
                demand.most.is_some_and(|most| most <= level * step(demand) * (1.0 + ROUNDING))
            }
        };
        if grant.is_none() && stopped {
            *grant = Some(Grant { rate: level * step(demand), bound });
        }
    }
}

/// Returns the bytes per second that a tenant has for each unit of the level.
fn step(demand: &Demand) -> f64 {
    demand.weight * demand.alone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(capacities: &[f64], uses: &[usize]) -> Demand {
        let seconds = capacities
            .iter()
            .enumerate()
            .map(|(index, capacity)| if uses.contains(&index) { capacity.recip() } else { 0.0 });
        Demand { seconds: seconds.collect(), weight: 1.0, most: None }
    }

    fn rates(resources: usize, demands: &[Demand]) -> Vec<f64> {
        fill(resources, demands)
            .iter()
            .map(|grant| (grant.rate * 1000.0).round() / 1000.0)
            .collect()
    }

    #[test]
    fn the_example_of_the_slides() {
        let capacities = [100.0, 60.0];
        let demands = [demand(&capacities, &[0, 1]), demand(&capacities, &[0])];
        assert_eq!(rates(2, &demands), [37.5, 62.5]);
        assert_eq!(fill(2, &demands)[0].bound, Bound::Resource(0));
    }

    #[test]
    fn the_others_go_on_with_what_is_left() {
        let capacities = [100.0, 60.0];
        let demands = [&[0, 1][..], &[0], &[1]].map(|uses| demand(&capacities, uses));
        assert_eq!(rates(2, &demands), [30.0, 70.0, 30.0]);
        assert_eq!(fill(2, &demands)[1].bound, Bound::Resource(0));
    }

    #[test]
    fn weights_limits_and_nothing_at_all() {
        let capacities = [90.0];
        let mut demands = vec![demand(&capacities, &[0]); 3];
        demands[0].weight = 2.0;
        assert_eq!(rates(1, &demands), [45.0, 22.5, 22.5]);
        demands[0].most = Some(10.0);
        assert_eq!(rates(1, &demands), [10.0, 40.0, 40.0]);
        demands[1].most = Some(0.0);
        demands.push(demand(&capacities, &[]));
        assert_eq!(rates(1, &demands), [10.0, 0.0, 80.0, 0.0]);
        assert!(fill(1, &[]).is_empty());
    }

    #[test]
    fn executors_of_one_core_share_its_time() {
        // Copying at 10 and sealing at 10 on one core: a tenant that does both gets half the bytes,
        // and the same time.
        let both = Demand { seconds: vec![0.2], weight: 1.0, most: None };
        let copy = Demand { seconds: vec![0.1], weight: 1.0, most: None };
        assert_eq!(rates(1, &[both, copy]), [2.5, 5.0]);
    }
}
