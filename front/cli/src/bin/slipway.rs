//! The program `slipway`.

fn main() {
    slipway_cli::slipway();
}
