//! Offloads of sent frames: checksums, TCP segmentation and tags (section 3.5), applied to a
//! private copy of a frame's first bytes, or left to the switch.
//!
//! A checksum of TCP or UDP, and cutting, are left to the switch ([`Offload`]), which does them
//! only for a peer that cannot take the frame as it is.

use slipway_e1000_spec::{Context, command, option};
use slipway_ethernet_spec::checksum::{fold, sum};
use slipway_ethernet_spec::{HEADER, Ipv4Packet, Ipv6Packet, TAG, TYPE, TcpSegment, ipv6, tcp};
use slipway_switch::{Offload, Segmentation};

/// Bytes of a frame's private copy: the longest headers that a context can name, and a tag.
pub(crate) const HEAD: usize = 256;
/// Bytes of the longest headers.
pub(crate) const LONGEST_HEAD: usize = HEAD - TAG;

/// The offloads that a frame's descriptors ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct OffloadRequest {
    /// Bits of [`option`].
    pub options: u8,
    /// The context that the options, or segmentation, refer to.
    pub context: Context,
    /// TCP segmentation.
    pub segments: bool,
    /// The tag's type and control information.
    pub tag: Option<(u16, u16)>,
}

impl OffloadRequest {
    /// Returns whether the frame's head is to be changed. Otherwise [`OffloadRequest::offload`]
    /// suffices.
    #[inline]
    pub fn edits(&self) -> bool {
        self.segments || self.options & option::IXSM != 0 || self.tag.is_some()
    }

    /// Returns what is left to the switch of a frame of `total` bytes that is not cut. Returns
    /// `None` if the checksum lies beyond the frame, or covers only a part of it, which is not
    /// implemented.
    #[inline]
    pub fn offload(&self, total: usize) -> Option<Offload> {
        if self.options & option::TXSM == 0 {
            return Some(Offload::NONE);
        }
        let Context { tucss, tucso, tucse, .. } = self.context;
        let whole = tucse == 0 || usize::from(tucse) + 1 == total;
        let offset =
            tucso.checked_sub(tucss).filter(|_| usize::from(tucso) + 2 <= total && whole)?;
        Some(Offload { checksum: Some((tucss.into(), offset.into())), ..Offload::NONE })
    }

    /// Changes `head`, the first bytes of a frame of `total` bytes, without a tag. Returns what is
    /// left to the switch, or `None` if that cannot be done.
    pub fn edit(&self, head: &mut [u8], total: usize) -> Option<Offload> {
        let mut offload = self.offload(total)?;
        if self.segments {
            self.segment(head, total, &mut offload)?;
        }
        if self.options & option::IXSM != 0 {
            let Context { ipcss, ipcso, ipcse, .. } = self.context;
            let covered = head.get(usize::from(ipcss)..=usize::from(ipcse))?;
            let value = !fold(sum(covered));
            put(head, usize::from(ipcso), value)?;
        }
        Some(offload)
    }

    /// Completes the headers of a frame that is to be cut: the driver leaves out its length, in the
    /// IP header and in the sum of the pseudo header (section 3.5.7).
    fn segment(&self, head: &mut [u8], total: usize, offload: &mut Offload) -> Option<()> {
        let Context { ipcss, tucss, tucso, header, mss, command, .. } = self.context;
        let is_tcp = command & command::TCP != 0 && self.options & option::TXSM != 0;
        let header = usize::from(header);
        if !is_tcp || mss == 0 || header > head.len() || header >= total || tucss <= ipcss {
            return None;
        }
        let (ip, transport) = (usize::from(ipcss), usize::from(tucss));
        let is_ipv4 = command & command::IP != 0;
        let packet = head.get_mut(ip..)?;
        if is_ipv4 {
            let length = u16::try_from(total - ip).ok()?;
            Ipv4Packet::new_checked(packet).ok()?.set_total_length(length);
        } else {
            let length = u16::try_from(total.checked_sub(ip + ipv6::HEADER)?).ok()?;
            Ipv6Packet::new_checked(packet).ok()?.set_payload_length(length);
        }
        let pseudo = get(head, usize::from(tucso))?;
        let length = u64::try_from(total - transport).ok()?;
        put(head, usize::from(tucso), fold(u64::from(pseudo) + length))?;
        if total - header > usize::from(mss) {
            let segment = TcpSegment::new_checked(head.get(transport..)?).ok()?;
            offload.segmentation = if is_ipv4 { Segmentation::Tcp4 } else { Segmentation::Tcp6 };
            offload.segment = mss;
            offload.ecn = segment.flags() & tcp::flag::CWR != 0;
        }
        Some(())
    }
}

/// Inserts a tag into the `len` bytes of a frame's head, which has room for it, and moves the place
/// of its checksum. Returns `false` if the frame has no whole header.
pub(crate) fn insert_tag(
    head: &mut [u8; HEAD],
    len: usize,
    (kind, control): (u16, u16),
    offload: &mut Offload,
) -> bool {
    if !(HEADER..=LONGEST_HEAD).contains(&len) {
        return false;
    }
    head.copy_within(TYPE..len, TYPE + TAG);
    head[TYPE..TYPE + 2].copy_from_slice(&kind.to_be_bytes());
    head[TYPE + 2..TYPE + TAG].copy_from_slice(&control.to_be_bytes());
    if let Some((start, _)) = &mut offload.checksum {
        *start += TAG as u16;
    }
    true
}

pub(crate) fn get(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

fn put(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at + 2)?.copy_from_slice(&value.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        Context {
            ipcss: 14,
            ipcso: 24,
            ipcse: 33,
            tucss: 34,
            tucso: 50,
            command: command::TSE | command::TCP | command::IP,
            header: 54,
            mss: 100,
            ..Context::default()
        }
    }

    #[test]
    fn a_segment_gets_its_lengths_and_the_sum_of_its_header() {
        let request = OffloadRequest { options: 3, context: context(), segments: true, tag: None };
        let mut head = [0; 54];
        (head[14], head[46]) = (0x45, 0x50);
        head[50..52].copy_from_slice(&0xfff0_u16.to_be_bytes());
        let offload = request.edit(&mut head, 1054).unwrap();
        assert_eq!(get(&head, 16), Some(1040));
        assert_eq!(fold(sum(&head[14..34])), 0xffff, "the header's checksum is right");
        assert_eq!(get(&head, 50), Some(fold(0xfff0 + 1020)));
        assert_eq!(offload.segmentation, Segmentation::Tcp4);
        assert_eq!((offload.segment, offload.checksum), (100, Some((34, 16))));
        let whole = request.edit(&mut head, 154).unwrap();
        assert_eq!(whole.segmentation, Segmentation::None, "one segment is not cut");
        let v6 =
            Context { command: command::TSE | command::TCP, tucss: 54, tucso: 70, ..context() };
        let request =
            OffloadRequest { options: 2, context: Context { header: 74, ..v6 }, ..request };
        let mut head = [0; 74];
        (head[14], head[66]) = (0x60, 0x50);
        let offload = request.edit(&mut head, 1074).unwrap();
        assert_eq!(get(&head, 18), Some(1020));
        assert_eq!(offload.segmentation, Segmentation::Tcp6);
    }

    #[test]
    fn requests_that_cannot_be_fulfilled_are_refused() {
        let good = OffloadRequest { options: 3, context: context(), segments: true, tag: None };
        let with = |change: fn(&mut OffloadRequest)| {
            let mut request = good;
            change(&mut request);
            let mut head = [0; 100];
            (head[14], head[46]) = (0x45, 0x50);
            request.edit(&mut head, 1054)
        };
        assert!(with(|_| ()).is_some());
        assert_eq!(with(|request| request.context.mss = 0), None);
        assert_eq!(with(|request| request.context.header = 255), None);
        assert_eq!(with(|request| request.context.command = command::IP), None, "UDP is not cut");
        assert_eq!(with(|request| request.context.tucss = 14), None);
        assert_eq!(with(|request| request.context.tucso = 20), None, "in front of its start");
        assert_eq!(with(|request| request.context.ipcse = 500), None);
        assert_eq!(with(|request| request.context.ipcss = 40), None);
        assert_eq!(with(|request| request.context.tucse = 60), None, "a part of the frame");
        assert_eq!(with(|request| request.options = 1), None);
        assert_eq!(good.edit(&mut [0; 100], 1054), None, "no IPv4 header");
        let plain = OffloadRequest { segments: false, ..good };
        assert_eq!(plain.offload(51), None, "the checksum lies behind the frame");
        assert!(plain.offload(52).is_some());
    }

    #[test]
    fn a_tag_moves_what_is_behind_it() {
        let mut head = [7; HEAD];
        let mut offload = Offload { checksum: Some((34, 16)), ..Offload::NONE };
        assert!(insert_tag(&mut head, 60, (0x8100, 0x2064), &mut offload));
        assert_eq!(head[11..17], [7, 0x81, 0, 0x20, 0x64, 7]);
        assert_eq!(offload.checksum, Some((38, 16)));
        assert!(!insert_tag(&mut head, 13, (0, 0), &mut offload));
        assert!(!insert_tag(&mut head, 253, (0, 0), &mut offload));
    }
}
