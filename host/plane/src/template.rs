//! Templates of sandboxes' memory, which the pool has.

use std::ops::Range;
use std::path::Path;

use slipway_plane_api::v1;
use slipway_pool::{Pool, TemplateName, TemplateStats};
use tonic::{Code, Status};

use crate::Plane;

/// Of a template's bytes, one in so many may be copied ahead for each fork: a single fork that
/// touches all of its memory must not make all others take as much.
const AHEAD: u64 = 2;
/// The most parts that are copied ahead, so that they fit into a message.
const PARTS: usize = 1 << 17;

/// Has the pool give memory that begins as a file. Waits for the file's disk.
pub(crate) fn add(
    plane: &Plane,
    request: &v1::AddTemplateRequest,
) -> Result<v1::AddTemplateReply, Status> {
    let (pool, name) = (pool(plane)?, name(&request.name)?);
    if stats(pool, name).is_none() {
        let path = Path::new(&request.path);
        let template = slipway_pool::load(path)
            .map_err(|error| Status::internal(format!("{}: {error}", path.display())))?;
        // If another call was quicker, the name has the same content.
        let _ = pool.add_template(name, template);
    }
    pool.keep_ready(name, request.spare_forks as usize);
    let gone = || Status::aborted("the template was removed meanwhile");
    let TemplateStats { bytes, held, .. } = stats(pool, name).ok_or_else(gone)?;
    Ok(v1::AddTemplateReply { bytes, held_bytes: held })
}

/// Removes a template of the pool. A template that the pool does not have is no error.
pub(crate) fn remove(
    plane: &Plane,
    request: &v1::RemoveTemplateRequest,
) -> Result<v1::RemoveTemplateReply, Status> {
    pool(plane)?.remove_template(name(&request.name)?);
    Ok(v1::RemoveTemplateReply {})
}

/// Has the pages that a sandbox has touched of its template copied ahead for later ones.
pub(crate) fn learn(
    plane: &Plane,
    request: &v1::LearnTemplateRequest,
) -> Result<v1::LearnTemplateReply, Status> {
    let (pool, name) = (pool(plane)?, name(&request.name)?);
    let absent = || Status::not_found("no sandbox has this memory");
    let touched = pool.copied((request.device, request.inode)).ok_or_else(absent)?;
    let ahead_bytes = have_copied(pool, name, &touched)?;
    let range = |range: &Range<u64>| v1::ByteRange { start: range.start, end: range.end };
    Ok(v1::LearnTemplateReply { ahead_bytes, ahead: touched.iter().map(range).collect() })
}

/// Has bytes of a template copied ahead for those that begin with it later.
pub(crate) fn copy_ahead(
    plane: &Plane,
    request: &v1::CopyAheadRequest,
) -> Result<v1::CopyAheadReply, Status> {
    let (pool, name) = (pool(plane)?, name(&request.name)?);
    let ranges: Vec<_> = request.ranges.iter().map(|range| range.start..range.end).collect();
    have_copied(pool, name, &ranges).map(|_| v1::CopyAheadReply {})
}

/// Has the pool copy these bytes of a template ahead. Returns their number.
fn have_copied(pool: &Pool, name: TemplateName, ranges: &[Range<u64>]) -> Result<u64, Status> {
    let absent = || Status::not_found(format!("the pool has no template {name}"));
    let most = stats(pool, name).ok_or_else(absent)?.held / AHEAD;
    let (bytes, parts) = (bytes_of(ranges), ranges.len());
    if bytes > most || parts > PARTS {
        let why = format!("{bytes} bytes in {parts} parts: at most {most} are copied ahead");
        return Err(Status::failed_precondition(why));
    }
    match pool.copy_ahead(name, ranges) {
        true => Ok(bytes),
        false => Err(absent()),
    }
}

/// Returns the number of bytes in ranges, of which any may be reversed and so empty.
fn bytes_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().fold(0, |sum: u64, one| sum.saturating_add(one.end.saturating_sub(one.start)))
}

fn pool(plane: &Plane) -> Result<&Pool, Status> {
    let absent = "this kernel has no userfaultfd for memory of templates (Linux 6.1)";
    plane.pool().ok_or_else(|| Status::new(Code::FailedPrecondition, absent))
}

fn name(text: &str) -> Result<TemplateName, Status> {
    let why = "a template's name has 1 to 64 visible characters of ASCII";
    TemplateName::new(text).ok_or_else(|| Status::invalid_argument(why))
}

fn stats(pool: &Pool, name: TemplateName) -> Option<TemplateStats> {
    pool.stats().templates.into_iter().find(|one| one.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::reversed_empty_ranges)] // as a caller may send them
    fn ranges_of_any_bounds_are_counted() {
        assert_eq!(bytes_of(&[0..4096, 8192..8193, 5..5, 9..3]), 4097);
        assert_eq!(bytes_of(&[0..u64::MAX, 0..u64::MAX]), u64::MAX);
    }
}
