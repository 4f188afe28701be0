//! The classes of executors.

/// SG-IOV's letter for how an executor relates to the transfer that a pipe makes anyway. The slides
/// name units of a SmartNIC; the text behind each colon says what the class is on a host core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Zero-copy across nodes: the socket to the other engine takes bytes from where they lie, and
    /// the core copies none.
    Z,
    /// Full copy: the core copies from ring to ring and nothing else.
    F,
    /// In-line accelerator and transfer: the core transforms while it copies from the ring to the
    /// memory that is sent to the other node, so that a byte is fetched once.
    I,
    /// Loopback in-line: the core transforms while it copies, with both ends on this node.
    L,
    /// Look-aside: source and sink are buffers of the engine, before or after a transfer that
    /// another executor makes.
    A,
    /// In-motion look-aside: as class A, on pieces of a transfer that goes on meanwhile.
    M,
}

impl Class {
    /// Returns the class's letter in the slides.
    pub fn letter(self) -> char {
        match self {
            Self::Z => 'Z',
            Self::F => 'F',
            Self::I => 'I',
            Self::L => 'L',
            Self::A => 'A',
            Self::M => 'M',
        }
    }
}
