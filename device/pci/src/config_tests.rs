use super::*;
use crate::Bar;

const IDENTITY: Identity = Identity {
    vendor: 0x1af4,
    device: 0x1234,
    subsystem_vendor: 0xaaaa,
    subsystem: 0xbbbb,
    class: 0x01_08_02,
    revision: 7,
};

fn space() -> ConfigSpace {
    let description = Description {
        bars: vec![
            Bar {
                index: 0,
                size: 16 << 10,
                wide: true,
                ports: false,
                doorbells: None,
                notifications: None,
            },
            Bar {
                index: 2,
                size: 1 << 20,
                wide: false,
                ports: false,
                doorbells: None,
                notifications: None,
            },
            Bar {
                index: 4,
                size: 8 << 30,
                wide: true,
                ports: false,
                doorbells: None,
                notifications: None,
            },
        ],
        vectors: 65,
        pin: true,
    };
    ConfigSpace::new(&IDENTITY, &description, Some(&MsixLayout::new(0, 65, 0x2000, 0x3000)))
}

fn read32(config: &ConfigSpace, offset: u16) -> u32 {
    let mut bytes = [0; 4];
    config.read(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn write32(config: &mut ConfigSpace, offset: u16, value: u32) {
    assert_eq!(config.write(offset, &value.to_le_bytes()), ConfigEffect::None);
}

/// Returns the offset of the capability with this ID, found by walking the list as software does.
fn find(config: &ConfigSpace, id: u8) -> u16 {
    let mut at = read32(config, 0x34) & 0xff;
    for _ in 0..48 {
        assert!(at >= 0x40, "capability {id:#x} is not in the list");
        let header = read32(config, at as u16);
        if header as u8 == id {
            return at as u16;
        }
        at = header >> 8 & 0xff;
    }
    panic!("the capability list is a loop");
}

#[test]
fn header_tells_the_identity() {
    let config = space();
    assert_eq!(read32(&config, 0x00), 0x1234_1af4);
    assert_eq!(read32(&config, 0x04), 0x0010_0000);
    assert_eq!(read32(&config, 0x08), 0x0108_0207);
    assert_eq!(read32(&config, 0x2c), 0xbbbb_aaaa);
    assert_eq!(read32(&config, 0x3c), 0x0100, "INTA#, no line");
}

#[test]
fn identity_cannot_be_written() {
    let mut config = space();
    let all: Vec<u8> = vec![0xff; CONFIG_SIZE];
    assert_eq!(config.write(0, &all), ConfigEffect::FunctionLevelReset);
    assert_eq!(read32(&config, 0x00), 0x1234_1af4);
    assert_eq!(read32(&config, 0x08), 0x0108_0207);
    assert_eq!(read32(&config, 0x04), 0x0010_0546);
    assert_eq!(read32(&config, 0x100), 0, "no extended capability");
}

#[test]
fn bars_are_sized_by_writing_ones() {
    let mut config = space();
    for offset in (0x10..0x28).step_by(4) {
        write32(&mut config, offset, !0);
    }
    let sizes: Vec<u32> = (0x10..0x28).step_by(4).map(|at| read32(&config, at)).collect();
    assert_eq!(sizes, [0xffff_c004, !0, 0xfff0_0000, 0, 4, 0xffff_fffe]);
}

#[test]
fn bars_keep_their_address() {
    let mut config = space();
    write32(&mut config, 0x10, 0xfeed_ffff);
    write32(&mut config, 0x14, 0x12);
    write32(&mut config, 0x18, 0xe010_0000);
    assert_eq!(config.bar_address(0), 0x12_feed_c000);
    assert_eq!(config.bar_address(2), 0xe010_0000);
    assert_eq!((config.bar_address(3), config.bar_address(6), config.bar_address(255)), (0, 0, 0));
}

#[test]
fn bytes_of_a_register_are_written_alone() {
    let mut config = space();
    assert_eq!(config.write(0x13, &[0xab]), ConfigEffect::None);
    assert_eq!(read32(&config, 0x10), 0xab00_0004);
    assert_eq!(config.write(0x04, &[0x06]), ConfigEffect::None);
    assert!(config.memory_enabled() && config.bus_master());
    assert_eq!(config.write(0x05, &[0xff]), ConfigEffect::None);
    assert!(config.memory_enabled() && config.bus_master());
}

#[test]
fn list_holds_power_management_express_and_msix() {
    let config = space();
    let express = find(&config, 0x10);
    assert_eq!(read32(&config, express) >> 16, 2, "version 2, endpoint");
    assert_eq!(read32(&config, find(&config, 0x01)) >> 16, 3);
    let msix = find(&config, 0x11);
    assert_eq!(read32(&config, msix) >> 16, 64);
    assert_eq!((read32(&config, msix + 4), read32(&config, msix + 8)), (0x2000, 0x3000));
}

#[test]
fn msix_control_is_seen() {
    let mut config = space();
    assert_eq!(config.msix_control(), MsixControl { enabled: false, masked: false });
    let control = find(&config, 0x11) + 2;
    assert_eq!(config.write(control, &[0xff, 0xff]), ConfigEffect::None);
    assert_eq!(config.msix_control(), MsixControl { enabled: true, masked: true });
    assert_eq!(config.write(control + 1, &[0x80]), ConfigEffect::None);
    assert_eq!(config.msix_control(), MsixControl { enabled: true, masked: false });
    assert_eq!(read32(&config, control - 2) >> 16, 0x8040, "the table size is read-only");
}

#[test]
fn function_level_reset_is_asked_by_its_bit_only() {
    let mut config = space();
    let control = find(&config, 0x10) + 8;
    assert_eq!(config.write(control, &[0, 0x80]), ConfigEffect::FunctionLevelReset);
    assert_eq!(config.write(control + 1, &[0x80]), ConfigEffect::FunctionLevelReset);
    assert_eq!(config.write(control + 1, &[0x7f]), ConfigEffect::None);
    assert_eq!(config.write(control, &[0x80]), ConfigEffect::None);
    assert_eq!(config.write(control + 2, &[0x80]), ConfigEffect::None);
    assert_eq!(read32(&config, control) & 0x8000, 0, "the bit reads as zero");
}

#[test]
fn accesses_at_and_past_the_end() {
    let mut config = space();
    let mut bytes = [0xee; 8];
    config.read(4092, &mut bytes);
    assert_eq!(bytes, [0; 8]);
    let mut bytes = [0xee; 3];
    config.read(u16::MAX, &mut bytes);
    assert_eq!(bytes, [0; 3]);
    assert_eq!(config.write(4094, &[0xff; 64]), ConfigEffect::None);
    assert_eq!(config.write(u16::MAX, &[0xff; 64]), ConfigEffect::None);
    config.read(0, &mut []);
}

#[test]
fn reset_restores_every_register() {
    let mut config = space();
    let before = config.save();
    let _ = config.write(0, &[0xff; CONFIG_SIZE]);
    assert_ne!(config.save(), before);
    config.reset();
    assert_eq!(config.save(), before);
}

#[test]
fn state_goes_through_json_and_back() {
    let mut config = space();
    write32(&mut config, 0x10, 0xfebf_0000);
    write32(&mut config, 0x04, 6);
    let text = serde_json::to_string(&config.save()).unwrap();
    let mut successor = space();
    successor.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(successor.save(), config.save());
    assert!(successor.bus_master());
}

#[test]
fn foreign_states_are_refused_and_leave_a_reset_space() {
    let fresh = space().save();
    let spoil: [fn(&mut ConfigState); 6] = [
        |state| state.version = 2,
        |state| state.registers.clear(),
        |state| state.registers.push(Register { offset: 0, value: 0 }),
        |state| state.registers.swap(0, 1),
        |state| state.registers[0].value ^= 1 << 20,
        |state| state.registers[1].offset = u16::MAX,
    ];
    for spoil in spoil {
        let mut config = space();
        write32(&mut config, 0x04, 6);
        let mut state = config.save();
        spoil(&mut state);
        assert!(config.restore(&state).is_err(), "{state:?}");
        assert_eq!(config.save(), fresh);
    }
}

#[test]
fn the_pin_is_off_when_software_says_so_or_uses_msix() {
    let mut config = space();
    let msix = find(&config, 0x11) + 2;
    assert!(config.pin_enabled());
    write32(&mut config, 0x04, 1 << 10);
    assert!(!config.pin_enabled(), "Interrupt Disable");
    write32(&mut config, 0x04, 0);
    let _ = config.write(msix, &0x8000_u16.to_le_bytes());
    assert!(!config.pin_enabled(), "MSI-X Enable");
    let state = config.save();
    config.reset();
    assert!(config.pin_enabled());
    config.restore(&state).unwrap();
    assert!(!config.pin_enabled());
    let description = Description { bars: Vec::new(), vectors: 1, pin: false };
    let without = ConfigSpace::new(&IDENTITY, &description, None);
    assert_eq!(read32(&without, 0x3c), 0);
    assert!(!without.pin_enabled());
}

#[test]
fn interrupt_status_is_read_whatever_the_access_and_never_written_or_saved() {
    let mut config = space();
    let fresh = config.save();
    config.set_interrupt_status(true);
    for (offset, len, at) in [(6, 1, 0), (6, 2, 0), (4, 4, 2), (0, 8, 6), (5, 2, 1)] {
        let mut bytes = vec![0; len];
        config.read(offset, &mut bytes);
        assert_eq!(bytes[at] & 1 << 3, 1 << 3, "{len} bytes at {offset}");
    }
    let mut other = [0; 2];
    config.read(7, &mut other);
    assert_eq!(other[0], 0);
    config.read(4, &mut other);
    assert_eq!(other, [0; 2]);
    write32(&mut config, 0x04, 0xffff_0000);
    assert_eq!(read32(&config, 0x04), 0x0018_0000);
    assert_eq!(config.save(), fresh);
    config.reset();
    assert_eq!(read32(&config, 0x04), 0x0010_0000);
}

#[test]
fn a_state_of_before_the_pin_is_taken_over() {
    let mut state = space().save();
    let line = state.registers.iter_mut().find(|register| register.offset == 0x3c).unwrap();
    line.value = 0x0b;
    let mut config = space();
    config.restore(&state).unwrap();
    assert_eq!(read32(&config, 0x3c), 0x010b);
}

#[test]
#[should_panic(expected = "the MSI-X table lies in its BAR")]
fn a_table_outside_its_bar_is_a_mistake() {
    let description = Description { bars: Vec::new(), vectors: 1, pin: false };
    ConfigSpace::new(&IDENTITY, &description, Some(&MsixLayout::new(0, 1, 0, 64)));
}

#[test]
fn vendor_capabilities_are_chained_behind_the_others_and_masked() {
    let window = VendorCapability { bytes: vec![0xff; 8], writable: vec![0xff; 8] };
    let more = [VendorCapability::fixed(&[0, 0, 0, 7, 8]), window];
    let bar = Bar {
        index: 0,
        size: 16 << 10,
        wide: true,
        ports: false,
        doorbells: None,
        notifications: None,
    };
    let description = Description { bars: vec![bar], vectors: 65, pin: false };
    let layout = MsixLayout::new(0, 65, 0x2000, 0x3000);
    let mut config = ConfigSpace::with_vendor(&IDENTITY, &description, Some(&layout), &more);
    let mut at = [0];
    let (mut found, mut link) = (Vec::new(), 0x34);
    loop {
        config.read(link, &mut at);
        if at[0] == 0 {
            break;
        }
        let mut id = [0];
        config.read(at[0].into(), &mut id);
        found.push((id[0], u16::from(at[0])));
        link = u16::from(at[0]) + 1;
    }
    let vendor: Vec<u16> = found.iter().filter(|(id, _)| *id == 9).map(|(_, at)| *at).collect();
    assert_eq!(vendor, [config.vendor_capability(0), config.vendor_capability(1)]);
    assert_eq!(found.len(), 5);
    assert_eq!(config.write(vendor[0], &[0xee; 5]), ConfigEffect::None);
    assert_eq!(config.write(vendor[1], &[0xee; 8]), ConfigEffect::None);
    let (mut first, mut second) = ([0; 5], [0; 8]);
    config.read(vendor[0], &mut first);
    config.read(vendor[1], &mut second);
    assert_eq!((first[0], &first[2..]), (9, &[5, 7, 8][..]));
    assert_eq!((second[0], second[2], &second[3..]), (9, 8, &[0xee; 5][..]));
}

#[test]
fn a_bar_of_ports_is_sized_and_enabled_as_one() {
    let memory = Bar {
        index: 0,
        size: 128 << 10,
        wide: false,
        ports: false,
        doorbells: None,
        notifications: None,
    };
    let ports = Bar { index: 1, size: 64, ports: true, ..memory.clone() };
    let description = Description { bars: vec![memory, ports], vectors: 0, pin: true };
    let mut config = ConfigSpace::new(&IDENTITY, &description, None);
    write32(&mut config, 0x04, 0xffff);
    assert_eq!(read32(&config, 0x04) & 7, 7, "ports, memory, bus master");
    write32(&mut config, 0x14, u32::MAX);
    assert_eq!(read32(&config, 0x14), 0xffff_ffc1);
    write32(&mut config, 0x14, 0xc044);
    assert_eq!((read32(&config, 0x14), config.bar_address(1)), (0xc041, 0xc040));
}
