//! The program `slipway-bench`: what `slipway bench` runs.

fn main() {
    slipway_cli::slipway_bench();
}
