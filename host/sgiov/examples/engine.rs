//! A socket engine and nothing else: what `slipway socket engine` serves with, to be measured optimised
//! without the rest of `slipway`, by `slipway bench socket --engine`, which starts it as it starts that.
//!
//!     cargo build --release -p slipway-sgiov --example engine
//!     slipway bench socket --engine target/release/examples/engine
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use slipway_sgiov::{Carrier, Engine, Policy, Settings, raise_descriptor_limit};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |option: &str| {
        let mut words = words.iter().skip_while(|word| *word != option);
        PathBuf::from(words.nth(1).unwrap_or_else(|| panic!("engine … {option} PATH")))
    };
    raise_descriptor_limit(1 << 20);
    let policy = Policy::read(&value("--policy")).unwrap();
    let remote = Carrier::read(&value("--links"), &policy).unwrap();
    let remote = remote.map(|carrier| Box::new(carrier) as Box<_>);
    let socket = value("--socket");
    let settings = Settings { socket, proof: true, policy, remote, ..Settings::default() };
    Engine::bind(settings).unwrap().run().unwrap();
}
