//! Opcodes of admin and NVM commands.

open_enum! {
    /// Admin commands (section 5, figure "Opcodes for Admin Commands").
    AdminOpcode(u8) {
        /// Delete I/O Submission Queue (section 5.6).
        DeleteSubmissionQueue = 0x00,
        /// Create I/O Submission Queue (section 5.4).
        CreateSubmissionQueue = 0x01,
        /// Get Log Page (section 5.14).
        GetLogPage = 0x02,
        /// Delete I/O Completion Queue (section 5.5).
        DeleteCompletionQueue = 0x04,
        /// Create I/O Completion Queue (section 5.3).
        CreateCompletionQueue = 0x05,
        /// Identify (section 5.15).
        Identify = 0x06,
        /// Abort (section 5.1).
        Abort = 0x08,
        /// Set Features (section 5.21).
        SetFeatures = 0x09,
        /// Get Features (section 5.13).
        GetFeatures = 0x0a,
        /// Asynchronous Event Request (section 5.2).
        AsynchronousEventRequest = 0x0c,
        /// Keep Alive (section 5.16).
        KeepAlive = 0x18,
        /// Doorbell Buffer Config (section 5.7).
        DoorbellBufferConfig = 0x7c,
        /// Format NVM (section 5.23).
        FormatNvm = 0x80,
    }
}

open_enum! {
    /// Commands of the NVM command set (section 6, figure "Opcodes for NVM Commands").
    NvmOpcode(u8) {
        /// Flush (section 6.8).
        Flush = 0x00,
        /// Write (section 6.15).
        Write = 0x01,
        /// Read (section 6.9).
        Read = 0x02,
        /// Compare (section 6.6).
        Compare = 0x05,
        /// Write Zeroes (section 6.17).
        WriteZeroes = 0x08,
        /// Dataset Management (section 6.7).
        DatasetManagement = 0x09,
        /// Verify (section 6.14).
        Verify = 0x0c,
        /// Copy (TP 4065; NVM Command Set Specification 1.0, section 3.2.2).
        Copy = 0x19,
    }
}
