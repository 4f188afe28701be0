//! Compiles the message definitions in pure Rust (no protoc needed).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = [
        "proto/ttrpc.proto",
        "proto/containerd.proto",
        "proto/containers.proto",
        "proto/sandbox.proto",
    ];
    // The shim's process leaves times of its own to the next one, as JSON.
    let serde = "#[derive(serde::Serialize, serde::Deserialize)]";
    tonic_prost_build::configure()
        .type_attribute(".slipway.shim.containerd.Timestamp", serde)
        .compile_fds(protox::compile(files, ["proto"])?)?;
    Ok(())
}
