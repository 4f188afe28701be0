//! A script of socket calls behaves the same under `libslipway.so` as with kernel sockets, errno
//! for errno.
#![allow(clippy::unwrap_used)]

mod library;
mod script;

use std::process::Command;

#[test]
fn sockets_behave_as_the_kernels_do() {
    let ran = script::run("sockets_behave_as_the_kernels_do", |library, socket| {
        let mut program = Command::new(script::path("run.sh"));
        program.arg(library).arg(socket);
        program
    });
    let Some(script::Ran { succeeded, output, errors }) = ran else { return };
    assert!(succeeded, "{output}{errors}");
}
