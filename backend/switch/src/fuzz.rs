//! Entries of the fuzz targets.

use std::time::Duration;

use slipway_ethernet_spec::EthernetFrame;
use slipway_ram::Span;
use slipway_ring::{Descriptor, Geometry, Link};

use crate::ports::{MemoryPort, NullPort, Tell};
use crate::{
    Abilities, BURST, Burst, Delivered, Learning, LearningOptions, Mac, Offload, Pick, Port,
    PortConfig, Switch, VlanMode, Vlans,
};

/// A port that sends the frames of the input, whatever they claim.
struct Script {
    memory: Span,
    frames: Vec<(usize, usize, Offload)>,
}

impl Port for Script {
    fn abilities(&self) -> Abilities {
        Abilities::NONE
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let count = self.frames.len().min(limit).min(burst.room());
        for (at, len, offload) in self.frames.drain(..count) {
            // Reading memory of this process cannot fail. Two pieces, so that a head may have parts
            // of both.
            let half = len / 2;
            let mut frame = burst.begin();
            let _ = frame.append(&self.memory, at, half);
            let _ = frame.append(&self.memory, at + half, len - half);
            frame.finish(offload);
        }
        !self.frames.is_empty()
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        Delivered { frames: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        false
    }
}

/// Returns settings for the port whose peer is the input; `strict` ones check addresses, and
/// `translated` ones translate the peer's.
fn config(strict: bool, translated: bool) -> PortConfig {
    let mut allowed = Vlans::none();
    allowed.insert(5);
    PortConfig {
        mac: (strict || translated).then_some(Mac::local(1)),
        peer_mac: translated.then_some(Mac::local(2)),
        addresses: if strict { vec![[10, 0, 0, 1].into()] } else { Vec::new() },
        spoof_check: strict,
        vlans: VlanMode::Trunk { native: Some(1), allowed },
        ..PortConfig::default()
    }
}

fn switch(port: Box<dyn Port>, flags: u8) -> Switch {
    let table = Learning::new(LearningOptions { stations: 64, per_port: 8, age: 10 }, 7);
    let mut switch = Switch::new(Box::new(table));
    let access =
        PortConfig { vlans: VlanMode::Access(5), max_frame: 1514, ..PortConfig::default() };
    let plain = Box::new(Wire(Abilities::NONE));
    let summed = Box::new(Wire(Abilities { checksum: true, ..Abilities::NONE }));
    // Trusted, so that it gets frames for unknown stations as well.
    let translated = PortConfig {
        mac: Some(Mac::local(3)),
        peer_mac: Some(Mac::local(4)),
        trust: true,
        ..PortConfig::default()
    };
    for (port, config) in [
        (port, config(flags & 1 != 0, flags & 2 != 0)),
        (plain, PortConfig::default()),
        (summed, access),
        (Box::new(Wire(Abilities::NONE)), translated),
        (Box::new(NullPort), PortConfig::default()),
    ] {
        assert!(switch.attach(port, config).is_ok());
    }
    switch
}

/// A port that takes frames as they go over a wire, and reads each byte of them.
struct Wire(Abilities);

impl Port for Wire {
    fn abilities(&self) -> Abilities {
        self.0
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, _: &mut Burst, _: usize) -> bool {
        false
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        for pick in picks {
            let len = burst.len_of(*pick);
            let mut bytes = vec![0; len + 1];
            assert_eq!(
                burst.read(*pick).read(&mut bytes).ok(),
                Some(len),
                "the length is that of the bytes"
            );
            drop(EthernetFrame::new_unchecked(&bytes[..len]).to_string());
            let offload = burst.offload_of(*pick);
            assert!(offload.checksum.is_none() || self.0.checksum, "what it cannot take");
            assert_eq!(offload.segmentation, crate::Segmentation::None, "what it cannot take");
            delivered.frames += 1;
            delivered.bytes += len as u64;
        }
        delivered
    }

    fn arm(&mut self) -> bool {
        false
    }
}

/// Sends frames from `data`, each with a virtio header of ten bytes and a length, through a switch
/// to ports that can take little.
///
/// # Panics
/// If a port gets a frame that it cannot take, which is the finding.
pub fn frames(data: &[u8]) {
    let Some((&flags, mut rest)) = data.split_first() else { return };
    let memory = Span::heap(data.len() + 8);
    let _ = memory.write(0, data);
    let mut frames = Vec::new();
    while let Some((header, after)) = rest.split_first_chunk::<10>() {
        let Some((length, bytes)) = after.split_first_chunk::<2>() else { break };
        let len = usize::from(u16::from_le_bytes(*length)).min(bytes.len());
        if let Some(offload) = Offload::from_header(header).filter(|_| len > 0) {
            frames.push((data.len() - bytes.len(), len, offload));
        }
        rest = &bytes[len..];
    }
    let mut switch = switch(Box::new(Script { memory, frames }), flags);
    for second in 0..8 {
        let _ = switch.turn(0, BURST, Duration::from_secs(second * 4));
        switch.age(Duration::from_secs(second * 4));
    }
}

/// Runs a link whose peer does what `data` says: its messages, its stores, and the moves of its
/// counters.
///
/// # Panics
/// If a message decodes that no encoder writes so, which is the finding.
pub fn link(data: &[u8]) {
    let hello = slipway_ring::Hello::decode(data);
    assert!(hello.is_err() || hello.is_ok_and(|hello| hello.encode() == data));
    if let Some(welcome) = slipway_ring::Welcome::decode(data) {
        assert_eq!(slipway_ring::Welcome::decode(&welcome.encode()), Some(welcome));
    }
    let Some((&flags, rest)) = data.split_first() else { return };
    let Ok(link) = Link::new(Geometry { slots: 16, payload: 64 }) else { return };
    let Ok(tell) = Tell::new() else { return };
    let mut switch = switch(Box::new(MemoryPort::new(&link, tell, Abilities::NONE)), flags);
    let (_, mut output) = link.peer();
    for step in rest.chunks(16) {
        let Some((word, bytes)) = step.split_first_chunk::<8>() else { break };
        let word = u64::from_le_bytes(*word);
        let free = output.free(1).unwrap_or(0);
        if free > 0 {
            let _ = output.memory().write(output.place(0), bytes);
            output.describe(0, Descriptor(word));
            output.publish(1);
        }
        if word >> 61 == 7 {
            output.publish((word >> 56 & 31) as usize);
        }
        let _ = switch.turn(0, BURST, Duration::ZERO);
    }
}
