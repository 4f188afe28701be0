//! What a host makes before the function.

use std::sync::Arc;

use slipway_pci::{Doorbells, InterruptSink};
use slipway_ram::{DmaMap, Memory};
use slipway_telemetry::{Clock, MonotonicClock};

use crate::doorbells::SharedPage;
use crate::interrupts::EventSink;
use crate::{Config, DoorbellMode};

/// The parts that a function is built from and an endpoint then serves.
pub struct EndpointParts {
    pub(crate) map: DmaMap,
    pub(crate) sink: Arc<EventSink>,
    pub(crate) page: Option<Arc<SharedPage>>,
    pub(crate) clock: Arc<dyn Clock>,
    mode: DoorbellMode,
}

impl EndpointParts {
    /// Parts for one endpoint.
    pub fn new(config: &Config) -> Self {
        Self {
            map: DmaMap::new(),
            sink: Arc::default(),
            page: None,
            clock: Arc::new(MonotonicClock::new()),
            mode: config.doorbells,
        }
    }

    /// The client's memory, empty until a client maps some.
    pub fn memory(&self) -> Memory {
        self.map.memory()
    }

    /// Where the function's interrupts go. Dropped while no client listens.
    pub fn interrupts(&self) -> Arc<dyn InterruptSink> {
        self.sink.clone()
    }

    /// `count` doorbell cells of the configured mode. Called at most once: a later call makes
    /// cells that no client ever maps.
    ///
    /// # Errors
    /// No memory or descriptors left, for mapped doorbells.
    pub fn doorbells(&mut self, count: usize) -> std::io::Result<Doorbells> {
        match self.mode {
            DoorbellMode::Trapped => Ok(Doorbells::trapped(count)),
            DoorbellMode::Mapped => {
                let page = Arc::new(SharedPage::new(count)?);
                self.page = Some(page.clone());
                Ok(Doorbells::shared(page))
            }
        }
    }

    /// The clock that the endpoint compares the function's deadlines with: the function must use
    /// the same.
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }
}
