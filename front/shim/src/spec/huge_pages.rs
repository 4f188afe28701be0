//! Limits of huge pages: a guest's kernel makes pages of 2 MiB for a container, as its limit says.

use slipway_sandbox_api::v1;

use super::oci::Resources;

/// The size of the pages, bytes.
const PAGE: u64 = 2 << 20;
/// Their size as configurations have it.
const SIZE: &str = "2MB";
/// A limit of less than one page: 0 stands for no limit in a request to the daemon.
const NONE: u64 = 1;

/// Refuses limits of huge pages of other sizes. kubelet names a limit of 0 for each size of pages
/// that its node has.
///
/// # Errors
/// One line that names the limit.
pub fn check(resources: &Resources) -> Result<(), String> {
    let is_other = |size: &str, limit: u64| size != SIZE && limit > 0;
    let other = resources.huge_pages.iter().find(|one| is_other(&one.page_size, one.limit));
    let Some(other) = other else { return Ok(()) };
    Err(format!(
        "the limit of {} bytes of huge pages of {:?} cannot be given: a guest's kernel makes pages \
         of \"{SIZE}\" only while it runs; have a limit of these (hugepages-2Mi), or of memory",
        other.limit, other.page_size
    ))
}

/// Returns the limit of a container as a request to the daemon has it, bytes. 0: it has none.
pub fn limit(resources: &Resources) -> u64 {
    let named = resources.huge_pages.iter().rfind(|one| one.page_size == SIZE);
    named.map_or(0, |one| one.limit.clamp(NONE, u64::MAX - 1))
}

/// Returns the bytes of the pages that a guest makes for a container.
pub fn bytes(resources: &Resources) -> u64 {
    let limit = limit(resources);
    limit - limit % PAGE
}

/// Returns whether a container cannot run without huge pages of its guest.
pub fn needs_huge_pages(run: &v1::RunSpec) -> bool {
    let limit = run.resources.map_or(0, |limits| limits.huge_page_bytes);
    limit >= PAGE || run.empty_dirs.iter().any(|dir| dir.huge_pages)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn with(limits: Value) -> Resources {
        serde_json::from_value(json!({ "hugepageLimits": limits })).unwrap()
    }

    fn none(size: &str) -> Value {
        json!({"pageSize": size, "limit": 0})
    }

    #[test]
    fn pages_of_2_mib_are_given_and_others_are_refused() {
        let taken = [
            json!([]),
            json!([none("2MB"), none("1GB"), {"pageSize": "64KB"}]),
            json!([{"pageSize": "2MB", "limit": u64::MAX}]),
        ];
        for limits in taken {
            assert_eq!(check(&with(limits)), Ok(()));
        }
        assert_eq!(check(&Resources::default()), Ok(()));
        for (size, limit) in [("1GB", 1 << 30), ("2MB\n", u64::MAX)] {
            let error = check(&with(json!([none("2MB"), {"pageSize": size, "limit": limit}])));
            let error = error.unwrap_err();
            let named = format!("the limit of {limit} bytes of huge pages of {size:?} cannot");
            assert!(error.starts_with(&named) && !error.contains('\n'), "{error}");
            assert!(error.contains("hugepages-2Mi"), "{error}");
        }
    }

    #[test]
    fn a_limit_stands_for_whole_pages() {
        let of = |limit: u64| {
            let resources = with(json!([none("1GB"), {"pageSize": "2MB", "limit": limit}]));
            (super::limit(&resources), bytes(&resources) >> 20)
        };
        assert_eq!(of(0), (1, 0), "none of them is a limit");
        assert_eq!(of(4 << 20), (4 << 20, 4));
        assert_eq!(of((4 << 20) - 1), ((4 << 20) - 1, 2));
        assert_eq!(of(u64::MAX).0, u64::MAX - 1, "the greatest number takes a limit away");
        assert_eq!((limit(&with(json!([]))), limit(&with(json!([none("1GB")])))), (0, 0));
    }

    #[test]
    fn a_limit_of_less_than_a_page_needs_none() {
        let needs = |huge_page_bytes| {
            let resources = Some(v1::Resources { huge_page_bytes, ..v1::Resources::default() });
            needs_huge_pages(&v1::RunSpec { resources, ..v1::RunSpec::default() })
        };
        assert_eq!([0, 1, 2 << 20].map(needs), [false, false, true]);
        let dir = v1::EmptyDir { huge_pages: true, ..v1::EmptyDir::default() };
        let run = v1::RunSpec { empty_dirs: vec![dir], ..v1::RunSpec::default() };
        assert!(needs_huge_pages(&run) && !needs_huge_pages(&v1::RunSpec::default()));
    }
}
