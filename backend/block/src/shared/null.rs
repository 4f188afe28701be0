//! A shared disk that drops writes and leaves reads' spans unchanged.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::Span;

use super::Medium;
use crate::ram::whole_blocks;
use crate::{Completion, Disk, Geometry, NullDisk, OpenError, Operation, Request, Transferred};

pub(super) struct NullMedium {
    shape: Geometry,
    blocks: AtomicU64,
}

impl NullMedium {
    pub fn new(shape: Geometry) -> Self {
        Self { shape, blocks: AtomicU64::new(shape.blocks) }
    }
}

impl Medium for NullMedium {
    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.load(Ordering::Acquire), ..self.shape }
    }

    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        let disk = NullDisk::new(Geometry { read_only, ..self.geometry() });
        Ok(Box::new(SharedNull { medium: self, disk }))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        if let Some(bytes) = bytes {
            self.blocks.store(whole_blocks(bytes, self.shape.block_size)?, Ordering::Release);
        }
        Ok(())
    }

    fn trim(&self) -> Result<(), OpenError> {
        Ok(())
    }
}

struct SharedNull {
    medium: Arc<NullMedium>,
    disk: NullDisk,
}

impl Disk for SharedNull {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn refresh(&mut self) -> Geometry {
        let read_only = self.disk.geometry().read_only;
        self.disk = NullDisk::new(Geometry { read_only, ..self.medium.geometry() });
        self.geometry()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.disk.submit(requests, completions);
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        self.disk.transfer(operation, at, spans)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.disk.poll(completions);
    }

    fn copies(&self, operation: Operation) -> bool {
        self.disk.copies(operation)
    }
}
