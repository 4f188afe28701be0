//! RunD-V's figures of the creation of groups, of another machine.

use super::CgroupLoad;

/// The groups of the paper's load (section IV.A2, figure 5).
const GROUPS: u32 = 2000;
/// The time for the creation of all groups with RunD-V's pool by so many threads, ns (section
/// VI.B).
static POOL_NS: [(u32, f64); 3] = [(1, 90e6), (50, 100e6), (200, 140e6)];
/// The part of the time without the pool that creation takes with it: 94 % less (section VI.B).
const LEFT: f64 = 0.06;

/// Returns the paper's time for all groups of `load` with its pool, ns. Returns `None` if the paper
/// has no such load.
pub(super) fn pool_ns(load: &CgroupLoad) -> Option<f64> {
    let of = POOL_NS.iter().find(|(threads, _)| *threads == load.threads);
    of.filter(|_| load.groups == GROUPS).map(|(_, ns)| *ns)
}

/// Returns the paper's time for the way of `subject`, which is the creation of groups without
/// limits, ns. That without a pool is computed from the one with it.
pub(super) fn creation_ns(subject: &str, load: &CgroupLoad) -> Option<f64> {
    let pool = pool_ns(load)?;
    match subject {
        "mkdir" | "joint-mkdir" => Some(pool / LEFT),
        "take" | "joint-take" => Some(pool),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_loads_have_its_times() {
        let load: CgroupLoad = "2000-t50".parse().unwrap();
        assert_eq!(creation_ns("take", &load), Some(100e6));
        assert!((creation_ns("mkdir", &load).unwrap() - 1.667e9).abs() < 1e6);
        assert_eq!(creation_ns("create", &load), None);
        for other in ["2000-t51", "1000-t50"] {
            assert_eq!(pool_ns(&other.parse().unwrap()), None, "{other}");
        }
    }
}
