//! The driver of a function and its override: the state to which a function returns after vfio-pci.

/// The driver that keeps functions for this process.
pub(crate) const VFIO_PCI: &str = "vfio-pci";
/// The most bytes of a driver's name.
const LONGEST_NAME: usize = 255;

/// The driver of a function, and its override: the name of the only driver that may have it
/// (`driver_override` of sysfs).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverState {
    /// Its driver; empty if it has none.
    pub(crate) driver: String,
    /// Its override; empty if any driver may have it.
    pub(crate) only: String,
}

/// Error: a text is no name of a driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name of a driver")]
pub struct BadDriver(pub String);

impl DriverState {
    /// Returns the state of a function with the driver `driver` and the override `only`, either of
    /// which is empty for none.
    ///
    /// # Errors
    /// One of them has more than 255 bytes, a slash or a control character.
    pub fn new(driver: &str, only: &str) -> Result<Self, BadDriver> {
        Ok(Self { driver: checked(driver)?, only: checked(only)? })
    }

    /// Returns the name of the driver, empty if there is none.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Returns the override, empty if there is none.
    pub fn only(&self) -> &str {
        &self.only
    }

    /// Returns whether `now` is a state of a function that was in this one and is bound to
    /// vfio-pci, or of which [`Sysfs::bind`](crate::Sysfs::bind) or
    /// [`Sysfs::give_back`](crate::Sysfs::give_back) was cut off. If not, the function is back in
    /// this state, or somebody else has changed its driver or its override since.
    pub fn leads_to(&self, now: &Self) -> bool {
        let drivers = [VFIO_PCI, "", self.driver.as_str()];
        let overrides = [VFIO_PCI, self.driver.as_str()];
        self != now
            && drivers.contains(&now.driver.as_str())
            && overrides.contains(&now.only.as_str())
    }
}

fn checked(name: &str) -> Result<String, BadDriver> {
    let is_bad = name.len() > LONGEST_NAME || name.contains(|c: char| c == '/' || c.is_control());
    if is_bad { Err(BadDriver(name.to_owned())) } else { Ok(name.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(driver: &str, only: &str) -> DriverState {
        DriverState::new(driver, only).unwrap()
    }

    #[test]
    fn names_that_no_driver_has_are_refused() {
        let long = "x".repeat(256);
        for bad in ["../igbvf", "a/b", "igbvf\nvfio-pci", "a\0", &long] {
            assert_eq!(DriverState::new(bad, ""), Err(BadDriver(bad.into())));
            assert_eq!(DriverState::new("", bad), Err(BadDriver(bad.into())));
        }
        assert_eq!(BadDriver("a\n".into()).to_string(), r#""a\n" is no name of a driver"#);
        let good = state("HD-Audio Generic", "");
        assert_eq!((good.driver(), good.only()), ("HD-Audio Generic", ""));
    }

    #[test]
    fn each_step_to_vfio_and_back_follows_from_the_state_before() {
        let prior = state("igbvf", "");
        let steps = [
            ("igbvf", "vfio-pci"),
            ("", "vfio-pci"),
            ("vfio-pci", "vfio-pci"),
            ("vfio-pci", "igbvf"),
            ("", "igbvf"),
            ("igbvf", "igbvf"),
        ];
        for (driver, only) in steps {
            assert!(prior.leads_to(&state(driver, only)), "{driver} {only}");
        }
        let none = state("", "");
        assert!(none.leads_to(&state("vfio-pci", "vfio-pci")));
        assert!(none.leads_to(&state("vfio-pci", "")));
    }

    #[test]
    fn what_somebody_else_has_set_does_not_follow() {
        let prior = state("igbvf", "");
        let others = [("igbvf", ""), ("", ""), ("vfio-pci", ""), ("igb", "igb"), ("igb", "")];
        for (driver, only) in others {
            assert!(!prior.leads_to(&state(driver, only)), "{driver} {only}");
        }
        assert!(!state("", "").leads_to(&state("igbvf", "")));
    }
}
