//! The file system device (section 5.11): FUSE requests of the guest in virtqueues.
//!
//! The requests themselves are those of `linux/fuse.h`, which section 5.11.6 refers to. Here are
//! only the headers that each request and each reply begins with.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U32, U64};

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 26;
/// The number of the queue for requests that must not wait behind others (section 5.11.2).
pub const HIGH_PRIORITY_QUEUE: u16 = 0;
/// The number of the first request queue, of a device without VIRTIO_FS_F_NOTIFICATION.
pub const FIRST_REQUEST_QUEUE: u16 = 1;
/// Most bytes of a tag.
pub const TAG: usize = 36;

/// `struct virtio_fs_config` (section 5.11.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The name by which the guest mounts the file system: UTF-8, padded with zeros.
    pub tag: [u8; TAG],
    /// The number of request queues.
    pub num_request_queues: U32,
    /// The least bytes of a notification buffer; only with VIRTIO_FS_F_NOTIFICATION.
    pub notify_buf_size: U32,
}

/// `struct fuse_in_header`: the first bytes of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RequestHeader {
    /// Bytes of the request, with this header.
    pub len: U32,
    /// The operation.
    pub opcode: U32,
    /// The driver's number of the request, which the reply repeats.
    pub unique: U64,
    /// The inode, by the number that an earlier reply has given to it.
    pub inode: U64,
    /// The user for whom the request is.
    pub uid: U32,
    /// The group for whom the request is.
    pub gid: U32,
    /// The process for which the request is.
    pub pid: U32,
    /// Lengths of extensions, and padding.
    pub extensions: U32,
}

/// `struct fuse_out_header`: the first bytes of a reply.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ReplyHeader {
    /// Bytes of the reply, with this header.
    pub len: U32,
    /// Zero, or the negated number of an error.
    pub error: U32,
    /// The request's number.
    pub unique: U64,
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_layout_is_that_of_the_specification() {
        assert_eq!(size_of::<super::Config>(), 44);
        assert_eq!(size_of::<super::RequestHeader>(), 40);
        assert_eq!(size_of::<super::ReplyHeader>(), 16);
    }
}
