//! The record of a container's process.

use serde::{Deserialize, Serialize};

use crate::security::Security;

/// The container's process, as requested and completed from the image's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The program and its arguments; never empty.
    pub args: Vec<String>,
    /// The environment, as `NAME=value`.
    pub env: Vec<String>,
    /// The working directory; empty: `/`.
    pub cwd: String,
    /// The user, in the form of `--user`; empty: root.
    pub user: String,
    /// Set if the process has a terminal.
    pub terminal: bool,
    /// The initial number of rows of the terminal.
    pub rows: u32,
    /// The initial number of columns of the terminal.
    pub columns: u32,
    /// Set if standard input stays open.
    pub stdin: bool,
    /// Resource limits, as (name, soft, hard).
    pub limits: Vec<(String, u64, u64)>,
    /// The adjustment of its score for the OOM killer of the guest's kernel, and through its VMM of
    /// the host's; `None`: as processes begin.
    #[serde(default)]
    pub oom_score_adj: Option<i32>,
    /// The rights of the process.
    #[serde(default)]
    pub security: Security,
}
