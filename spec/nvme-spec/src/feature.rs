//! Features (sections 5.13, 5.21).

open_enum! {
    /// Feature identifiers (section 5.21.1).
    FeatureId(u8) {
        /// Arbitration (section 5.21.1.1).
        Arbitration = 0x01,
        /// Power Management (section 5.21.1.2).
        PowerManagement = 0x02,
        /// Temperature Threshold (section 5.21.1.4).
        TemperatureThreshold = 0x04,
        /// Error Recovery (section 5.21.1.5).
        ErrorRecovery = 0x05,
        /// Volatile Write Cache (section 5.21.1.6).
        VolatileWriteCache = 0x06,
        /// Number of Queues (section 5.21.1.7).
        NumberOfQueues = 0x07,
        /// Interrupt Coalescing (section 5.21.1.8).
        InterruptCoalescing = 0x08,
        /// Interrupt Vector Configuration (section 5.21.1.9).
        InterruptVectorConfiguration = 0x09,
        /// Write Atomicity Normal (section 5.21.1.10).
        WriteAtomicity = 0x0a,
        /// Asynchronous Event Configuration (section 5.21.1.11).
        AsynchronousEventConfiguration = 0x0b,
        /// Timestamp (section 5.21.1.14).
        Timestamp = 0x0e,
        /// Keep Alive Timer (section 5.21.1.15).
        KeepAliveTimer = 0x0f,
        /// Host Behavior Support (section 5.21.1.22).
        HostBehaviorSupport = 0x16,
        /// Host Identifier (section 5.21.1, FID 81h).
        HostIdentifier = 0x81,
    }
}

open_enum! {
    /// The value that Get Features asks for (section 5.13, SEL).
    Select(u8) {
        /// The value in use.
        Current = 0,
        /// The value after a reset.
        Default = 1,
        /// The saved value.
        Saved = 2,
        /// Not a value but the feature's [`capability`] bits.
        Capabilities = 3,
    }
}

/// Bits of the answer to [`Select::Capabilities`] (section 5.13.1).
pub mod capability {
    /// The feature can be saved.
    pub const SAVEABLE: u32 = 1;
    /// The feature has a value for each namespace.
    pub const NAMESPACE_SPECIFIC: u32 = 1 << 1;
    /// The feature can be changed.
    pub const CHANGEABLE: u32 = 1 << 2;
}
