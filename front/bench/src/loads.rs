//! Loads in saved reports: each is a string there, as it is typed.

use crate::attach::AttachLoad;
use crate::block::Workload;
use crate::cgroups::CgroupLoad;
use crate::cgroups::idle::IdleLoad;
use crate::function::FunctionLoad;
use crate::memory::MemoryLoad;
use crate::nic::NicLoad;
use crate::packet::PacketLoad;
use crate::roots::RootLoad;
use crate::socket::SocketLoad;
use crate::vmm::VmmLoad;

/// Converts loads from strings and to them by their `FromStr` and `Display`. Serde reads and writes
/// a load by these conversions.
macro_rules! saved_as_typed {
    ($($load:ident),+) => {$(
        impl TryFrom<String> for $load {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$load> for String {
            fn from(load: $load) -> Self {
                load.to_string()
            }
        }
    )+};
}

saved_as_typed! {
    AttachLoad, CgroupLoad, FunctionLoad, IdleLoad, MemoryLoad, NicLoad, PacketLoad, RootLoad,
    SocketLoad, VmmLoad, Workload
}
