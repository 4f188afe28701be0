//! The program; `slipway_cni` is all of it.

fn main() -> std::process::ExitCode {
    slipway_cni::main()
}
