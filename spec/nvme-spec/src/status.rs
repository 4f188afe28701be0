//! Status of a completed command (section 4.6.1).

/// The status field of a completion, as bits 31:17 of dword 3 shifted down by 17 (section 4.6.1):
/// status code, status code type, retry delay, "more" and "do not retry".
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

/// DNR: a retry of the same command would fail.
const DO_NOT_RETRY: u16 = 1 << 14;
/// M: the Error Information log has more about the failure.
const MORE: u16 = 1 << 13;

impl Status {
    /// Returns the status code with its type in bits 10:8, without "more" and "do not retry".
    pub const fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// Returns whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.code() == 0
    }

    /// Returns whether "do not retry" is set.
    pub const fn do_not_retry(self) -> bool {
        self.0 & DO_NOT_RETRY != 0
    }

    /// Returns whether "more" is set.
    pub const fn has_more(self) -> bool {
        self.0 & MORE != 0
    }

    /// Returns this status with "do not retry" set.
    #[must_use]
    pub const fn dnr(self) -> Self {
        Self(self.0 | DO_NOT_RETRY)
    }

    /// Returns this status with "more" set.
    #[must_use]
    pub const fn more(self) -> Self {
        Self(self.0 | MORE)
    }
}

macro_rules! status_codes {
    ($($(#[$item:meta])* $name:ident = $value:expr,)*) => {
        impl Status {
            $($(#[$item])* pub const $name: Self = Self($value);)*
        }

        impl core::fmt::Debug for Status {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match Self(self.code()) {
                    $(Self::$name => f.write_str(stringify!($name))?,)*
                    Self(other) => write!(f, "Status({other:#05x})")?,
                }
                if self.do_not_retry() {
                    f.write_str("|DNR")?;
                }
                Ok(())
            }
        }
    };
}

// Generic codes: section 4.6.1.2.1; command specific: 4.6.1.2.2; media and data integrity:
// 4.6.1.2.3.
status_codes! {
    /// Successful Completion.
    SUCCESS = 0x000,
    /// Invalid Command Opcode.
    INVALID_OPCODE = 0x001,
    /// Invalid Field in Command.
    INVALID_FIELD = 0x002,
    /// Command ID Conflict.
    COMMAND_ID_CONFLICT = 0x003,
    /// Data Transfer Error: memory could not be read or written.
    DATA_TRANSFER_ERROR = 0x004,
    /// Internal Error.
    INTERNAL_ERROR = 0x006,
    /// Command Abort Requested.
    ABORT_REQUESTED = 0x007,
    /// Command Aborted due to SQ Deletion.
    ABORTED_QUEUE_DELETED = 0x008,
    /// Command Aborted due to Failed Fused Command.
    FUSED_FAILED = 0x009,
    /// Command Aborted due to Missing Fused Command.
    FUSED_MISSING = 0x00a,
    /// Invalid Namespace or Format.
    INVALID_NAMESPACE = 0x00b,
    /// Command Sequence Error.
    COMMAND_SEQUENCE_ERROR = 0x00c,
    /// Invalid SGL Segment Descriptor.
    SGL_SEGMENT_INVALID = 0x00d,
    /// Invalid Number of SGL Descriptors.
    SGL_COUNT_INVALID = 0x00e,
    /// Data SGL Length Invalid.
    SGL_LENGTH_INVALID = 0x00f,
    /// SGL Descriptor Type Invalid.
    SGL_TYPE_INVALID = 0x011,
    /// PRP Offset Invalid.
    PRP_OFFSET_INVALID = 0x013,
    /// Keep Alive Timeout Expired.
    KEEP_ALIVE_EXPIRED = 0x019,
    /// SGL Data Block Granularity Invalid.
    SGL_GRANULARITY_INVALID = 0x01e,
    /// Namespace is Write Protected.
    WRITE_PROTECTED = 0x020,
    /// LBA Out of Range.
    LBA_OUT_OF_RANGE = 0x080,
    /// Capacity Exceeded: the write would exceed the space behind the namespace.
    CAPACITY_EXCEEDED = 0x081,
    /// Completion Queue Invalid (Create I/O Submission Queue).
    COMPLETION_QUEUE_INVALID = 0x100,
    /// Invalid Queue Identifier.
    INVALID_QUEUE_ID = 0x101,
    /// Invalid Queue Size.
    INVALID_QUEUE_SIZE = 0x102,
    /// Abort Command Limit Exceeded.
    ABORT_LIMIT_EXCEEDED = 0x103,
    /// Asynchronous Event Request Limit Exceeded.
    EVENT_LIMIT_EXCEEDED = 0x105,
    /// Invalid Interrupt Vector.
    INVALID_INTERRUPT_VECTOR = 0x108,
    /// Invalid Log Page.
    INVALID_LOG_PAGE = 0x109,
    /// Invalid Queue Deletion: a submission queue still uses the completion queue.
    INVALID_QUEUE_DELETION = 0x10c,
    /// Feature Identifier Not Saveable.
    FEATURE_NOT_SAVEABLE = 0x10d,
    /// Feature Not Changeable.
    FEATURE_NOT_CHANGEABLE = 0x10e,
    /// Feature Not Namespace Specific.
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f,
    /// Attempted Write to Read Only Range.
    WRITE_TO_READ_ONLY_RANGE = 0x182,
    /// Command Size Limit Exceeded (Copy).
    COPY_SIZE_EXCEEDED = 0x183,
    /// Write Fault.
    WRITE_FAULT = 0x280,
    /// Unrecovered Read Error.
    UNRECOVERED_READ_ERROR = 0x281,
    /// Compare Failure.
    COMPARE_FAILURE = 0x285,
}
