use super::*;

const ON: MsixControl = MsixControl { enabled: true, masked: false };
const FUNCTION_MASKED: MsixControl = MsixControl { enabled: true, masked: true };
const OFF: MsixControl = MsixControl { enabled: false, masked: false };

fn msix() -> Msix {
    Msix::new(MsixLayout::new(4, 65, 0x1000, 0x2000))
}

fn unmask(msix: &mut Msix, vector: u64, address: u64, data: u32) {
    let entry = 0x1000 + 16 * vector;
    assert_eq!(msix.write(4, entry, &address.to_le_bytes()), Access::Done);
    assert_eq!(msix.write(4, entry + 8, &data.to_le_bytes()), Access::Done);
    assert_eq!(msix.write(4, entry + 12, &[0; 4]), Access::Done);
}

#[test]
fn every_vector_is_masked_after_reset() {
    let msix = msix();
    for vector in 0..65 {
        assert_eq!(msix.route(vector, ON), Route::Masked);
    }
    assert_eq!(msix.route(65, ON), Route::Off);
    assert_eq!(msix.route(u16::MAX, ON), Route::Off);
}

#[test]
fn every_width_reaches_the_table() {
    for width in [1, 2, 4, 8, 16] {
        let mut msix = msix();
        let entry: Vec<u8> = (0x10..0x1c).chain([0xfe, 0xff, 0xff, 0xff]).collect();
        for (index, part) in entry.chunks(width).enumerate() {
            let at = 0x1000 + 64 * 16 + (index * width) as u64;
            assert_eq!(msix.write(4, at, part), Access::Done);
        }
        let message = Message { address: 0x1716_1514_1312_1110, data: 0x1b1a_1918 };
        assert_eq!(msix.route(64, ON), Route::Deliver(message));
        let mut back = [0; 16];
        for (index, part) in back.chunks_mut(width).enumerate() {
            let at = 0x1000 + 64 * 16 + (index * width) as u64;
            assert_eq!(msix.read(4, at, part), Access::Done);
        }
        assert_eq!(back[..12], entry[..12]);
        assert_eq!(back[12..], [0; 4], "only the mask bit of Vector Control is there");
    }
}

#[test]
fn masks_and_enable_decide_the_route() {
    let mut msix = msix();
    unmask(&mut msix, 3, 0xfee0_1003, 0x42);
    let message = Message { address: 0xfee0_1000, data: 0x42 };
    assert_eq!(msix.route(3, ON), Route::Deliver(message));
    assert_eq!(msix.route(3, FUNCTION_MASKED), Route::Masked);
    assert_eq!(msix.route(3, OFF), Route::Off);
}

#[test]
fn a_masked_interrupt_waits_in_the_pending_bits() {
    let mut msix = msix();
    assert_eq!(msix.raise(64, ON), Route::Masked);
    assert_eq!(msix.raise(0, ON), Route::Masked);
    assert_eq!(msix.raise(1, OFF), Route::Off);
    let mut bits = [0; 16];
    assert_eq!(msix.read(4, 0x2000, &mut bits), Access::Done);
    assert_eq!((bits[0], bits[8]), (1, 1));
    assert_eq!(msix.write(4, 0x2000, &[0; 16]), Access::Done);
    assert!(msix.is_pending(64), "pending bits are read-only");
    assert_eq!(msix.take_unmasked(ON), None);
    unmask(&mut msix, 64, 0xfee0_0000, 9);
    assert_eq!(msix.take_unmasked(FUNCTION_MASKED), None);
    let message = Message { address: 0xfee0_0000, data: 9 };
    assert_eq!(msix.take_unmasked(ON), Some((64, message)));
    assert_eq!(msix.take_unmasked(ON), None);
    assert!(msix.is_pending(0) && !msix.is_pending(64) && !msix.is_pending(1));
}

#[test]
fn hostile_offsets_are_refused_or_read_as_zeros() {
    let mut msix = msix();
    let mut bytes = [0xee; 8];
    for (bar, offset) in [(0, 0x1000), (4, 0xfff), (4, 0x1410), (4, 0x2010), (4, u64::MAX)] {
        assert_eq!(msix.read(bar, offset, &mut bytes), Access::Refused);
        assert_eq!(msix.write(bar, offset, &bytes), Access::Refused);
    }
    assert_eq!(msix.write(4, 0x140f, &[0xff; 8]), Access::Done);
    assert_eq!(msix.read(4, 0x140f, &mut bytes), Access::Done);
    assert_eq!(bytes, [0; 8], "past the table there is nothing");
    assert_eq!(msix.read(4, 0x200f, &mut [0; 64]), Access::Done);
}

#[test]
fn state_is_carried_over() {
    let mut msix = msix();
    unmask(&mut msix, 7, 0xfee0_0000, 7);
    let _ = msix.raise(64, ON);
    let text = serde_json::to_string(&msix.save()).unwrap();
    let mut successor = self::msix();
    successor.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(successor.save(), msix.save());
    assert!(matches!(successor.route(7, ON), Route::Deliver(_)) && successor.is_pending(64));
}

#[test]
fn foreign_states_are_refused() {
    let mut msix = msix();
    let good = msix.save();
    let other = Msix::new(MsixLayout::new(4, 64, 0x1000, 0x2000)).save();
    let mut unaligned = good.clone();
    unaligned.vectors[64].address = 2;
    let mut newer = good.clone();
    newer.version += 1;
    for state in [other, unaligned, newer] {
        assert!(msix.restore(&state).is_err());
        assert_eq!(msix.save(), good);
    }
}
