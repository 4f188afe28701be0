//! The kept output of a pod's containers, which has a bound for all of them together.
//!
//! A container has its part from its creation until it is removed. Half of the bound is divided
//! among the most containers that a pod can have, so that each has some. Of the other half, a
//! container has at most half of what is left.

use crate::record::{Added, MOST_ADDED};

/// Returns the most bytes of kept output of one more container of a pod, beside its containers
/// `others`. A container has at most `most` bytes, and all of a pod's have `of_pod` together.
pub(super) fn part(others: &[Added], most: u64, of_pod: u64) -> u64 {
    let least = of_pod / 2 / MOST_ADDED as u64;
    let beyond = others.iter().map(|one| bytes(one, most).saturating_sub(least));
    let left = (of_pod / 2).saturating_sub(beyond.fold(0, u64::saturating_add));
    least.saturating_add(left / 2).min(most)
}

/// Returns the most bytes of kept output of a container. One that an earlier version of Slipway
/// made has `most`.
pub(super) fn bytes(added: &Added, most: u64) -> u64 {
    if added.log_bytes == 0 { most } else { added.log_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::added_of;
    use crate::record::SandboxState;

    const MIB: u64 = 1 << 20;

    fn with(log_bytes: u64) -> Added {
        Added { log_bytes, ..added_of("a", SandboxState::Running) }
    }

    #[test]
    fn the_containers_of_a_pod_keep_no_more_than_its_bound() {
        for (most, of_pod) in [(256 * MIB, 2048 * MIB), (256 * MIB, 128 * MIB), (MIB, 2048 * MIB)] {
            let mut all = Vec::new();
            for _ in 0..MOST_ADDED {
                all.push(with(part(&all, most, of_pod)));
            }
            assert!(all.iter().map(|one| one.log_bytes).sum::<u64>() <= of_pod);
            let least = most.min(of_pod / 2 / MOST_ADDED as u64);
            assert!(all.iter().all(|one| (least..=most).contains(&one.log_bytes)));
            // One that is removed leaves its part to the next.
            let first = all.remove(0).log_bytes;
            assert!(part(&all, most, of_pod) >= least + (first - least) / 2);
        }
    }

    #[test]
    fn a_few_containers_keep_as_much_as_a_sandbox() {
        let (most, of_pod) = (256 * MIB, 2048 * MIB);
        for count in 0..3 {
            assert_eq!(part(&vec![with(most); count], most, of_pod), most, "{count}");
        }
        // Containers of an earlier version may have more than all may have now.
        assert_eq!(part(&vec![with(0); 9], most, of_pod), 4 * MIB);
        assert_eq!((bytes(&with(0), most), bytes(&with(5), most)), (most, 5));
    }
}
