//! A socket engine and nothing else, as `slipway socket engine` runs it. `slipway bench socket
//! --engine` starts it in place of that, so that the engine can be built optimised and measured
//! without the rest of `slipway`.
//!
//!     cargo build --release -p slipway-sgiov --example engine
//!     slipway bench socket --engine target/release/examples/engine
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use slipway_sgiov::{Engine, NodeCarrier, Policy, Settings, raise_descriptor_limit};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |option: &str| {
        let mut words = words.iter().skip_while(|word| *word != option);
        PathBuf::from(words.nth(1).unwrap_or_else(|| panic!("engine … {option} PATH")))
    };
    raise_descriptor_limit(1 << 20);
    let policy = Policy::read(&value("--policy")).unwrap();
    let remote = NodeCarrier::read(&value("--links"), &policy).unwrap();
    let remote = remote.map(|carrier| Box::new(carrier) as Box<_>);
    let socket = value("--socket");
    let settings = Settings { socket, proof: true, policy, remote, ..Settings::default() };
    Engine::bind(settings).unwrap().run().unwrap();
}
