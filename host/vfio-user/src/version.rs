//! Negotiation of version and capabilities (section *VFIO_USER_VERSION*).

use rustix::io::Errno;
use slipway_vfio_user_spec as spec;
use slipway_vfio_user_wire::{Capabilities, MAX_DATA_XFER_SIZE, MAX_MSG_FDS, encode, parse};
use zerocopy::FromBytes;

/// The largest number of DMA maps of one client.
pub(crate) const MAX_DMA_MAPS: u64 = slipway_ram::MAX_REGIONS as u64;
/// The page size of DMA maps: 4 KiB, so that every multiple works, too.
pub(crate) const PAGE_SIZE: u64 = 4096;

/// The capabilities that both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// The largest number of data bytes that the client accepts.
    pub(crate) max_xfer: usize,
    /// The largest number of descriptors that the client accepts with one message.
    pub(crate) max_files: usize,
    /// `VFIO_USER_REGION_WRITE_MULTI` may be sent.
    pub(crate) write_multiple: bool,
    /// The client connects again after the server was replaced, and resumes the function.
    pub(crate) resume: bool,
}

/// The extensions that a function has for a client that knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extensions {
    /// The client may resume the function after a replacement of the server.
    pub(crate) resume: bool,
    /// The function ends with the client's connection.
    pub(crate) one_connection: bool,
}

/// Answers a proposal. Returns the negotiated capabilities and the reply's payload.
///
/// # Errors
/// `EINVAL` if the major version differs or the data violate the specification: the connection
/// ends.
pub(crate) fn negotiate(proposal: &[u8], has: Extensions) -> Result<(Negotiated, Vec<u8>), Errno> {
    let (version, data) = spec::Version::read_from_prefix(proposal).map_err(|_| Errno::INVAL)?;
    if version.major.get() != spec::MAJOR {
        return Err(Errno::INVAL);
    }
    let theirs = parse(data).ok_or(Errno::INVAL)?;
    let max_xfer = theirs.max_data_xfer_size.unwrap_or(spec::DEFAULT_MAX_DATA_XFER_SIZE);
    if max_xfer == 0 {
        return Err(Errno::INVAL);
    }
    let resume = theirs.resume == Some(true) && has.resume;
    // "The capability list must be a subset of those proposed." Without the first two, a client
    // assumes defaults that equal ours or are stricter, so they are left out like the others.
    let ours = Capabilities {
        max_msg_fds: theirs.max_msg_fds.map(|_| MAX_MSG_FDS as u64),
        max_data_xfer_size: theirs.max_data_xfer_size.map(|_| MAX_DATA_XFER_SIZE as u64),
        max_dma_maps: theirs.max_dma_maps.map(|_| MAX_DMA_MAPS),
        pgsizes: theirs.pgsizes.map(|_| PAGE_SIZE),
        write_multiple: theirs.write_multiple,
        resume: theirs.resume.filter(|_| has.resume),
        one_connection: theirs.one_connection.filter(|_| has.one_connection),
        posted_writes: theirs.posted_writes.filter(|_| !resume),
    };
    let minor = version.minor.get().min(spec::MINOR);
    let negotiated = Negotiated {
        max_xfer: usize::try_from(max_xfer).unwrap_or(usize::MAX).min(MAX_DATA_XFER_SIZE),
        max_files: theirs.max_msg_fds.unwrap_or(spec::DEFAULT_MAX_MSG_FDS).min(MAX_MSG_FDS as u64)
            as usize,
        write_multiple: theirs.write_multiple == Some(true),
        resume,
    };
    Ok((negotiated, encode(minor, ours)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    const RESUMES: Extensions = Extensions { resume: true, one_connection: false };

    fn proposal(major: u16, minor: u16, data: &[u8]) -> Vec<u8> {
        let version = spec::Version { major: spec::U16::new(major), minor: spec::U16::new(minor) };
        [version.as_bytes(), data].concat()
    }

    #[test]
    fn a_reply_holds_only_what_was_proposed() {
        let (agreed, reply) =
            negotiate(&proposal(0, 0, b"{\"capabilities\":{\"max_msg_fds\":8}}\0"), RESUMES)
                .unwrap();
        assert_eq!(
            agreed,
            Negotiated { max_xfer: 1 << 20, max_files: 8, write_multiple: false, resume: false }
        );
        assert_eq!(reply, proposal(0, 0, b"{\"capabilities\":{\"max_msg_fds\":16}}\0"));
    }

    #[test]
    fn a_newer_minor_version_gets_ours_and_data_are_optional() {
        let (_, reply) = negotiate(&proposal(0, 77, b""), RESUMES).unwrap();
        assert_eq!(reply, proposal(0, 1, b"{\"capabilities\":{}}\0"));
    }

    #[test]
    fn resuming_is_agreed_on_where_both_can() {
        let asks = b"{\"capabilities\":{\"slipway_resume\":true}}\0";
        let (agreed, reply) = negotiate(&proposal(0, 1, asks), RESUMES).unwrap();
        assert!(agreed.resume);
        assert_eq!(reply, proposal(0, 1, asks));
        let (agreed, reply) = negotiate(&proposal(0, 1, asks), Extensions::default()).unwrap();
        assert!(!agreed.resume);
        assert_eq!(reply, proposal(0, 1, b"{\"capabilities\":{}}\0"));
    }

    #[test]
    fn a_client_that_asks_learns_that_a_function_ends_with_its_connection() {
        let asks = b"{\"capabilities\":{\"slipway_one_connection\":true}}\0";
        let ends = Extensions { resume: false, one_connection: true };
        assert_eq!(negotiate(&proposal(0, 1, asks), ends).unwrap().1, proposal(0, 1, asks));
        let none = proposal(0, 1, b"{\"capabilities\":{}}\0");
        assert_eq!(negotiate(&proposal(0, 1, asks), RESUMES).unwrap().1, none);
        assert_eq!(negotiate(&proposal(0, 1, b""), ends).unwrap().1, none);
    }

    #[test]
    fn writes_are_posted_where_no_successor_would_miss_them() {
        let asks = b"{\"capabilities\":{\"slipway_resume\":true,\"slipway_posted_writes\":true}}\0";
        let resumes = proposal(0, 1, b"{\"capabilities\":{\"slipway_resume\":true}}\0");
        assert_eq!(negotiate(&proposal(0, 1, asks), RESUMES).unwrap().1, resumes);
        let posts = proposal(0, 1, b"{\"capabilities\":{\"slipway_posted_writes\":true}}\0");
        assert_eq!(negotiate(&proposal(0, 1, asks), Extensions::default()).unwrap().1, posts);
        assert_eq!(negotiate(&posts, RESUMES).unwrap().1, posts);
    }

    #[test]
    fn bad_proposals_are_refused() {
        let nested = [b"[".repeat(100_000), vec![0]].concat();
        let cases: [&[u8]; 8] = [
            b"{}",
            b"\0\0",
            b"{\0",
            b"{\"capabilities\":7}\0",
            b"{\"capabilities\":{\"max_msg_fds\":-1}}\0",
            b"{\"capabilities\":{\"max_data_xfer_size\":0}}\0",
            b"\xff\0",
            &nested,
        ];
        for data in cases {
            assert_eq!(negotiate(&proposal(0, 1, data), RESUMES), Err(Errno::INVAL));
        }
        assert_eq!(negotiate(&proposal(1, 0, b""), RESUMES), Err(Errno::INVAL));
        assert_eq!(negotiate(&[0, 0, 0], RESUMES), Err(Errno::INVAL));
    }
}
