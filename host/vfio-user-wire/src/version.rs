//! Version data: the text after a version message's structure (section *VFIO_USER_VERSION*).

use serde::{Deserialize, Serialize};
use slipway_vfio_user_spec as spec;
use zerocopy::IntoBytes;

/// The capabilities that one side announces; a missing one has the specification's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// The largest number of descriptors per message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u64>,
    /// The largest number of data bytes per message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// The largest number of DMA maps at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// The page sizes of DMA maps, or'ed together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// `VFIO_USER_REGION_WRITE_MULTI` is understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
    /// An extension of Slipway. The client connects again when the server was replaced, gives RAM
    /// and interrupts again, and then sets the function running (`VFIO_USER_DEVICE_FEATURE`). The
    /// server leaves the function's state to its successor, which holds the function until then.
    #[serde(rename = "slipway_resume", skip_serializing_if = "Option::is_none")]
    pub resume: Option<bool>,
    /// An extension of Slipway. The function ends with this connection: no server will have it
    /// again, so a client has no reason to wait for one.
    #[serde(rename = "slipway_one_connection", skip_serializing_if = "Option::is_none")]
    pub one_connection: Option<bool>,
    /// An extension of Slipway. The client may write registers of BARs with `No_reply`, also where
    /// it raises eventfds: the function looks at all that eventfds announce after each such write,
    /// so that an eventfd may overtake a write. A server permits this to any client that asks, but
    /// to one that resumes the function ([`Capabilities::resume`]): writes that the server has not
    /// read would be lost for its successor.
    #[serde(rename = "slipway_posted_writes", skip_serializing_if = "Option::is_none")]
    pub posted_writes: Option<bool>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct VersionData {
    capabilities: Capabilities,
}

/// Encodes a version structure with data, for a proposal or a reply.
pub fn encode(minor: u16, capabilities: Capabilities) -> Vec<u8> {
    let version =
        spec::Version { major: spec::U16::new(spec::MAJOR), minor: spec::U16::new(minor) };
    let mut bytes = version.as_bytes().to_vec();
    // Numbers and booleans under fixed names: this cannot fail, and empty data would be valid, too.
    bytes.extend(serde_json::to_vec(&VersionData { capabilities }).unwrap_or_default());
    bytes.push(0);
    bytes
}

/// Parses version data, which are empty or one NUL-terminated JSON text. Returns `None` if they are
/// neither.
pub fn parse(data: &[u8]) -> Option<Capabilities> {
    if data.is_empty() {
        return Some(Capabilities::default());
    }
    let (last, text) = data.split_last()?;
    if *last != 0 || text.contains(&0) {
        return None;
    }
    Some(serde_json::from_slice::<VersionData>(text).ok()?.capabilities)
}
