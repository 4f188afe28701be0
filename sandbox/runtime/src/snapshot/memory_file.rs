//! The file of a snapshot's memory, most of which is copied while the sandbox runs.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use slipway_hypervisor::{Error as HypervisorError, PageSink, Vm};
use slipway_space::Allowance;

use crate::node::Node;
use crate::record::Record;
use crate::templates::{Unfinished, apart, create_file};
use crate::{Error, Result, memory};

/// The file of a snapshot's memory.
pub(crate) struct MemoryFile {
    file: Arc<File>,
    /// The file has all pages but those that were written to since they were copied.
    pub(super) ahead: bool,
    /// The bytes of its file system that stay free.
    reserve: u64,
}

impl MemoryFile {
    /// Makes the file at `path`, of `bytes` bytes.
    fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = create_file(path)?;
        file.set_len(bytes)?;
        let reserve = Allowance::of(&file)?.reserve;
        Ok(Self { file: Arc::new(file), ahead: false, reserve })
    }

    /// Returns what writes pages into the file. It fails with [`ErrorKind::StorageFull`] before it
    /// takes the reserve.
    pub(super) fn sink(&self) -> PageSink {
        let (file, mut space) = (Arc::clone(&self.file), Allowance::keeping(self.reserve));
        Box::new(move |at, page: &[u8]| {
            space.take(&*file, page.len() as u64)?;
            file.write_all_at(page, at)
        })
    }
}

/// Makes the file of the memory, and copies most of the memory while the sandbox runs, that of a
/// fork once it has all of it. If its VMM cannot tell what is written meanwhile, as that of a
/// sandbox with room for more memory, the file is left empty.
///
/// # Errors
/// [`Error::VmEnded`]; those of [`memory::complete`], and of making the file, or that its disk is
/// full.
pub(crate) async fn copy_ahead(
    node: &Node,
    vm: &dyn Vm,
    record: &Record,
    unfinished: &Unfinished,
) -> Result<MemoryFile> {
    if let Some(memory) = record.plugged.client_memory.filter(|_| record.template.is_some()) {
        memory::complete(node, memory).await?;
    }
    let path = unfinished.memory();
    let (its, bytes) = (path.clone(), record.memory_file_bytes());
    // Not on this thread, which serves others: the disk may be busy with their writes.
    let made =
        apart(move || MemoryFile::create(&its, bytes).map_err(Error::file("cannot create", its)));
    let mut memory = made.await?;
    if record.hot_bytes() > 0 {
        // Its VMM does not note what is written to memory that may be unplugged meanwhile.
        return Ok(memory);
    }
    let copied = tokio::select! {
        copied = vm.copy_ahead(bytes, memory.sink()) => copied,
        ended = vm.wait() => return Err(Error::vm_ended(&ended)),
    };
    match copied {
        Ok(()) => memory.ahead = true,
        // The sandbox need not stand still for a copy that cannot be made.
        Err(error) if is_full(&error) => return Err(error.into()),
        Err(error) => {
            tracing::warn!(sandbox = record.name, %error, "no memory is copied ahead of a save");
            // A page that was copied may be zeros by now, which are not copied.
            let file = Arc::clone(&memory.file);
            apart(move || {
                let emptied = file.set_len(0).and_then(|()| file.set_len(bytes));
                emptied.map_err(Error::file("cannot write", &path))
            })
            .await?;
        }
    }
    Ok(memory)
}

/// Returns whether a page could not be kept for want of space.
fn is_full(error: &HypervisorError) -> bool {
    let full = |source: &io::Error| source.kind() == ErrorKind::StorageFull;
    matches!(error, HypervisorError::System { source, .. } if full(source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_leaves_a_part_of_its_disk_free() {
        let dir = tempfile::tempdir().unwrap();
        let mut memory = MemoryFile::create(&dir.path().join("memory"), 1 << 20).unwrap();
        memory.reserve = 0;
        memory.sink()(4096, &[7; 4096]).unwrap();
        memory.reserve = u64::MAX;
        let source = memory.sink()(8192, &[7; 4096]).unwrap_err();
        let mut pages = [1; 8192];
        memory.file.read_exact_at(&mut pages, 4096).unwrap();
        assert!(pages[..4096] == [7; 4096] && pages[4096..] == [0; 4096]);
        assert!(is_full(&HypervisorError::System { action: "keeping a page", source }));
        let source = io::Error::from(ErrorKind::NotFound);
        assert!(!is_full(&HypervisorError::System { action: "keeping a page", source }));
    }
}
