//! Compiles the message definitions in pure Rust (no protoc needed).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = [
        "proto/ttrpc.proto",
        "proto/containerd.proto",
        "proto/containers.proto",
        "proto/sandbox.proto",
    ];
    tonic_prost_build::configure().compile_fds(protox::compile(files, ["proto"])?)?;
    Ok(())
}
