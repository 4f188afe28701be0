//! A layer of an image: a tar archive, merged over itself three times and written out.
//!
//! Every header of an archive has a checksum, which no mutation keeps right. So headers get their
//! right checksum here, unless the input's first byte is odd.
#![no_main]

const BLOCK: usize = 512;
const SIZE: std::ops::Range<usize> = 124..136;
const CHECKSUM: std::ops::Range<usize> = 148..156;

fn layer(data: &[u8]) {
    let Some((choice, archive)) = data.split_first() else { return };
    let mut archive = archive.to_vec();
    if choice % 2 == 0 {
        mend_checksums(&mut archive);
    }
    slipway_image::fuzz_layer(&archive);
}

/// Goes from header to header as a reader of the archive does.
fn mend_checksums(archive: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = archive.get_mut(at..at + BLOCK) {
        if header.iter().any(|byte| *byte != 0) {
            header[CHECKSUM].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let octal = header[SIZE].iter().map_while(|byte| char::from(*byte).to_digit(8));
        let size = octal.fold(0usize, |size, digit| size.wrapping_mul(8) + digit as usize);
        at += BLOCK + size.min(archive.len()).next_multiple_of(BLOCK);
    }
}

slipway_fuzz::target!(layer);
