//! A profile's JSON: `linux.seccomp` of the OCI runtime specification (*config-linux*, Seccomp),
//! and docker's form of it, which has conditions on rules.

use serde::Deserialize;

use crate::Error;

/// The oldest kernel that a guest may have. Debian 12 has 6.1.
const OLDEST_KERNEL: (u32, u32) = (5, 10);

/// A profile.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Profile {
    /// The action for calls without a rule, as "SCMP_ACT_ERRNO".
    pub default_action: String,
    /// The error of the default action.
    pub default_errno_ret: Option<u32>,
    /// The rules.
    #[serde(deserialize_with = "or_default")]
    pub syscalls: Vec<Rule>,
}

/// A rule for system calls.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Rule {
    /// Names of system calls.
    #[serde(deserialize_with = "or_default")]
    pub names: Vec<String>,
    /// One more name, as in old profiles of docker's.
    pub name: String,
    /// The action.
    pub action: String,
    /// The error of the action.
    pub errno_ret: Option<u32>,
    /// Comparisons of arguments.
    #[serde(deserialize_with = "or_default")]
    pub args: Vec<Arg>,
    /// Conditions that must all be met for the rule to count.
    #[serde(deserialize_with = "or_default")]
    pub includes: Filter,
    /// Conditions of which none may be met for the rule to count.
    #[serde(deserialize_with = "or_default")]
    pub excludes: Filter,
}

/// A comparison of an argument.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Arg {
    /// Index of the argument, 0 to 5.
    pub index: u32,
    /// The value, or the mask of [`Operator::MaskedEqual`].
    pub value: u64,
    /// The value under the mask.
    #[serde(default)]
    pub value_two: u64,
    /// The operator, with the argument to its left.
    pub op: Operator,
}

/// How an argument is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Operator {
    /// With the value.
    Compare(slipway_syscall_filter::Operator),
    /// Under the mask [`Arg::value`], with [`Arg::value_two`].
    MaskedEqual,
}

impl TryFrom<String> for Operator {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        use slipway_syscall_filter::Operator as Op;
        Ok(match name.as_str() {
            "SCMP_CMP_NE" => Self::Compare(Op::NotEqual),
            "SCMP_CMP_LT" => Self::Compare(Op::Less),
            "SCMP_CMP_LE" => Self::Compare(Op::LessOrEqual),
            "SCMP_CMP_EQ" => Self::Compare(Op::Equal),
            "SCMP_CMP_GE" => Self::Compare(Op::GreaterOrEqual),
            "SCMP_CMP_GT" => Self::Compare(Op::Greater),
            "SCMP_CMP_MASKED_EQ" => Self::MaskedEqual,
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(format!("unknown comparison {other:?}"));
            }
        })
    }
}

/// Conditions of a rule in docker's profiles.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Filter {
    /// Capabilities, as "CAP_SYS_ADMIN".
    #[serde(deserialize_with = "or_default")]
    pub caps: Vec<String>,
    /// Architectures by docker's or the kernel's name.
    #[serde(deserialize_with = "or_default")]
    pub arches: Vec<String>,
    /// The oldest kernel.
    pub min_kernel: MinKernel,
}

/// The oldest kernel of a rule, as "4.8"; empty: any.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub struct MinKernel(pub String);

impl Rule {
    /// Returns whether the rule counts for a process with these capabilities in a guest.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub(crate) fn counts(&self, capabilities: &[String]) -> Result<bool, Error> {
        let (includes, excludes) = (&self.includes, &self.excludes);
        let has = |name: &String| capabilities.contains(name);
        let is_ours = |name: &String| ["amd64", "x86_64"].contains(&name.as_str());
        let included = includes.caps.iter().all(has)
            && (includes.arches.is_empty() || includes.arches.iter().any(is_ours));
        let excluded = excludes.caps.iter().any(has) || excludes.arches.iter().any(is_ours);
        let recent = includes.min_kernel.is_met()?;
        let too_recent = !excludes.min_kernel.0.is_empty() && excludes.min_kernel.is_met()?;
        Ok(included && !excluded && recent && !too_recent)
    }

    /// Returns all names.
    pub(crate) fn all_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str).chain(Some(self.name.as_str()))
    }
}

impl MinKernel {
    fn is_met(&self) -> Result<bool, Error> {
        if self.0.is_empty() {
            return Ok(true);
        }
        let number = |text: &str| text.parse::<u32>().ok();
        let version = self
            .0
            .split_once('.')
            .and_then(|(major, minor)| Some((number(major)?, number(minor.split('.').next()?)?)));
        match version.is_some_and(|version| version <= OLDEST_KERNEL) {
            true => Ok(true),
            false => Err(Error::Kernel(self.0.chars().take(16).collect())),
        }
    }
}

/// Reads a value that may be null.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
