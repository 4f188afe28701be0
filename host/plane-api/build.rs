//! Compiles the interface definition in pure Rust (no protoc needed).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    // Messages of the plane that `vf.proto` uses are those of the module `v1`. This writes a file
    // for the plane as well, without them: the second run writes it anew.
    let files = protox::compile(["proto/vf.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .extern_path(".slipway.plane.v1", "crate::v1")
        .compile_fds(files)?;
    let files = protox::compile(["proto/plane.proto", "proto/network.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
