//! Physical region page entries (section 4.3).

/// Bytes of a PRP entry.
pub const ENTRY: usize = 8;

/// Returns the bytes from `address` to the end of its memory page of `page` bytes (a power of two).
pub const fn left_in_page(address: u64, page: u64) -> u64 {
    page - (address & (page - 1))
}

/// Returns whether `address` is the start of a memory page of `page` bytes (a power of two).
pub const fn is_page_aligned(address: u64, page: u64) -> bool {
    address & (page - 1) == 0
}

/// Returns whether `address` may be the first PRP of data: bits 1:0 of the offset are zero.
pub const fn is_data_aligned(address: u64) -> bool {
    address & 3 == 0
}

/// Returns whether `address` may be the pointer to a PRP list: bits 2:0 of the offset are zero.
pub const fn is_list_aligned(address: u64) -> bool {
    address & 7 == 0
}
