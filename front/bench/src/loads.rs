//! Loads in saved reports: each is a string there, as it is typed.

use crate::attach::AttachLoad;
use crate::cgroups::CgroupLoad;
use crate::cgroups::idle::IdleLoad;
use crate::function::FunctionLoad;
use crate::memory::MemoryLoad;
use crate::packet::PacketLoad;
use crate::roots::RootLoad;
use crate::socket::SocketLoad;
use crate::vmm::VmmLoad;

slipway_load::saved_as_typed! {
    AttachLoad, CgroupLoad, FunctionLoad, IdleLoad, MemoryLoad, PacketLoad, RootLoad, SocketLoad,
    VmmLoad
}
