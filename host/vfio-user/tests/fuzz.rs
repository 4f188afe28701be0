//! Runs the fuzz target's body on fixed noise: a smoke test where no fuzzer runs.

#[test]
fn noise_does_no_harm() {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..3000 {
        let len = (next() % 2000) as usize;
        let mut data: Vec<u8> = (0..len).map(|_| next() as u8).collect();
        // Small numbers produce valid commands and fields.
        if round % 2 == 0 {
            data.iter_mut().for_each(|byte| *byte %= 40);
        }
        data.insert(0, (round % 4) as u8);
        slipway_vfio_user::fuzz(&data);
    }
}
