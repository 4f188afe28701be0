//! The program; `slipway_snapshotter` is all of it.

fn main() -> std::process::ExitCode {
    slipway_snapshotter::main()
}
