//! The parts that a host makes before the function.

use std::io::Error;
use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_pci::{Function, InterruptSink, StateError};
use slipway_peer::Bin;
use slipway_ram::{DmaMap, Memory};
use slipway_telemetry::{Clock, MonotonicClock};

use crate::doorbells::SharedPage;
use crate::interrupts::EventSink;
use crate::keeping::Keeping;
use crate::{Config, DoorbellMode, Hardware, Kept};
use crate::{kept, slots};

/// The parts that a function is built from and that an endpoint then serves.
pub struct EndpointParts {
    pub(crate) map: DmaMap,
    pub(crate) bin: Bin,
    pub(crate) sink: Arc<EventSink>,
    pub(crate) page: Option<(Arc<SharedPage>, Doorbells)>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) kept: Option<(Box<kept::Parts>, Keeping)>,
    pub(crate) mode: DoorbellMode,
    pub(crate) hardware: Option<Box<dyn Hardware>>,
}

impl EndpointParts {
    /// Returns parts for one endpoint.
    pub fn new(config: &Config) -> Self {
        Self {
            map: DmaMap::new(),
            bin: Bin::new(),
            sink: Arc::default(),
            page: None,
            clock: Arc::new(MonotonicClock::new()),
            kept: None,
            mode: config.doorbells,
            hardware: None,
        }
    }

    /// Sets the driver of the hardware behind the function, which is told of the client. Such an
    /// endpoint is not kept, and is served alone ([`crate::Endpoint::serve_alone`]).
    pub fn set_hardware(&mut self, hardware: Box<dyn Hardware>) {
        self.hardware = Some(hardware);
    }

    /// Returns parts for an endpoint that outlives the process. The memory that a predecessor's
    /// client had mapped is mapped on return.
    ///
    /// # Errors
    /// The predecessor has another version, or left memory that cannot be mapped.
    pub fn kept(config: &Config, kept: Kept) -> std::io::Result<Self> {
        let mut own = Self::new(config);
        let mut parts = Box::new(kept.take_apart(&own.bin)?);
        let keeping = Keeping::new(&mut parts)?;
        if parts.found.contains_key(&slots::CLIENT) {
            keeping.map_regions(&mut own.map, &parts, config)?;
        }
        own.kept = Some((parts, keeping));
        Ok(own)
    }

    /// Returns whether a predecessor's client is still connected.
    fn has_client(&self) -> bool {
        let kept = self.kept.as_ref();
        kept.is_some_and(|(parts, keeping)| {
            parts.found.contains_key(&slots::CLIENT) && keeping.client().is_some()
        })
    }

    /// Returns whether a predecessor's client is expected to connect again and to resume the
    /// function.
    fn is_held(&self) -> bool {
        self.kept.as_ref().is_some_and(|(_, keeping)| keeping.holds())
    }

    /// Has a newly made function go on where the predecessor's was, if the predecessor's client is
    /// still connected. If the client is expected to connect again, the endpoint decides that later
    /// and does not poll the function until then. Otherwise the function abandons what the
    /// predecessor left. To be called once, before the endpoint is made of these parts.
    ///
    /// # Errors
    /// The errors of [`Function::recover`].
    pub fn hand_down(&self, function: &mut dyn Function) -> Result<(), StateError> {
        if self.has_client() {
            return function.recover();
        }
        if !self.is_held() {
            function.abandon();
        }
        Ok(())
    }

    /// Returns the client's memory, empty until a client maps some.
    pub fn memory(&self) -> Memory {
        self.map.memory()
    }

    /// Returns the bin that closes and unmaps what the endpoint's clients leave: descriptors,
    /// connections, memory.
    pub fn bin(&self) -> Bin {
        self.bin.clone()
    }

    /// Returns the sink for the function's interrupts. Interrupts without a route are dropped.
    pub fn interrupts(&self) -> Arc<dyn InterruptSink> {
        self.sink.clone()
    }

    /// Returns `count` doorbell cells of the configured mode. Called at most once: a later call
    /// makes cells that no client ever maps.
    ///
    /// # Errors
    /// No memory or descriptors are left, for shared doorbells; or a predecessor's doorbells were
    /// not kept; or there are more cells than an endpoint can keep.
    pub fn doorbells(&mut self, count: usize) -> std::io::Result<Doorbells> {
        let has_client = self.has_client() || self.is_held();
        let found = |parts: &kept::Parts| parts.found.contains_key(&slots::DOORBELLS);
        let is_kept = self.kept.as_ref().is_none_or(|(parts, _)| found(parts));
        if has_client && !is_kept && self.mode != DoorbellMode::Trapped {
            return Err(Error::other("the client's doorbells were not kept"));
        }
        self.doorbells_of_reset(count)
    }

    /// Returns cells as [`EndpointParts::doorbells`] does, for a function that is as after a reset
    /// when it goes on for a predecessor's client. If that predecessor has kept no cells, the
    /// client has none, and these are new.
    ///
    /// # Errors
    /// As for [`EndpointParts::doorbells`], except that none need have been kept.
    pub fn doorbells_of_reset(&mut self, count: usize) -> std::io::Result<Doorbells> {
        let has_client = self.has_client() || self.is_held();
        match (self.mode, &mut self.kept) {
            (DoorbellMode::Trapped, None) => Ok(Doorbells::trapped(count)),
            (DoorbellMode::Trapped, Some((parts, _))) => kept::cells(&parts.cells, count),
            (DoorbellMode::Mapped | DoorbellMode::Rung, kept) => {
                let page = match kept {
                    None => Arc::new(SharedPage::new(count)?),
                    Some((parts, keeping)) => {
                        let found = parts.found.remove(&slots::DOORBELLS).filter(|_| has_client);
                        let page = SharedPage::kept(count, parts.shelf.clone(), found)?;
                        let page = Arc::new(page);
                        keeping.share(page.clone());
                        page
                    }
                };
                let doorbells = match self.mode {
                    DoorbellMode::Rung => Doorbells::rung(page.clone()),
                    _ => Doorbells::shared(page.clone()),
                };
                self.page = Some((page, doorbells.clone()));
                Ok(doorbells)
            }
        }
    }

    /// Returns the clock that the endpoint compares the function's deadlines with: the function
    /// must use the same clock.
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }
}
