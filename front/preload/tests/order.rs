//! Under `libslipway.so`, bytes that a program sent on one connection before those that it sent on
//! another are reported before them.
#![allow(clippy::unwrap_used)]

mod library;
mod script;

use std::process::Command;

#[test]
fn what_came_first_is_reported_first() {
    let ran = script::run("what_came_first_is_reported_first", |library, socket| {
        let mut program = Command::new("python3");
        program.arg(script::path("order.py")).arg("1000");
        program.env("LD_PRELOAD", library).env("SLIPWAY_SOCKET", socket);
        program
    });
    let Some(script::Ran { succeeded, output, errors }) = ran else { return };
    assert!(succeeded && !errors.contains("ours: 0\n"), "{output}{errors}");
}
