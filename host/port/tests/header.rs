//! Checks that `slipway_port.h` agrees with `slipway_ring` in numbers and sizes, and compiles
//! without a warning.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::path::{Path, PathBuf};
use std::process::Command;

use slipway_ring::{Descriptor, Geometry, Hello, PROTOCOL, Takes, Welcome, layout};

/// Compiles `source` with the system's C compiler. Returns `None` after printing why the test is
/// skipped.
fn compile(source: &str, dir: &Path) -> Option<PathBuf> {
    let (file, program) = (dir.join("test.c"), dir.join("test"));
    std::fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-I"];
    let run =
        Command::new("cc").args(flags).arg(include).arg(&file).arg("-o").arg(&program).output();
    let Ok(output) = run else {
        println!("SKIPPED: slipway_port.h: needs a C compiler (cc)");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

#[test]
fn numbers_are_those_of_the_rings() {
    let numbers = [
        ("SLIPWAY_RING_MAGIC", layout::MAGIC),
        ("SLIPWAY_RING_VERSION", layout::VERSION),
        ("SLIPWAY_RING_RINGS", layout::RINGS as u64),
        ("SLIPWAY_RING_HEAD", layout::HEAD as u64),
        ("SLIPWAY_RING_TAIL", layout::TAIL as u64),
        ("SLIPWAY_RING_ASLEEP", layout::ASLEEP as u64),
        ("SLIPWAY_RING_DESCRIPTORS", layout::DESCRIPTORS as u64),
        ("SLIPWAY_RING_LENGTH", Descriptor::new(u32::MAX).0),
        ("SLIPWAY_RING_MORE", Descriptor::new(0).and_more().0),
        ("SLIPWAY_PORT_VERSION", PROTOCOL.into()),
        ("SLIPWAY_HELLO_LENGTH", Hello::LEN as u64),
        ("SLIPWAY_WELCOME_LENGTH", Welcome::LEN as u64),
    ];
    let mut source = "#include \"slipway_port.h\"\n".to_owned();
    for (name, value) in numbers {
        source += &format!("_Static_assert({name} == UINT64_C({value}), \"{name}\");\n");
    }
    // Sizes of several geometries, and the messages byte by byte.
    source += "int main(void) {\n";
    for (slots, payload) in [(16, 64), (512, 2048), (1024, 9216), (32_768, 65_536)] {
        let geometry = Geometry { slots, payload };
        let (stride, data) = (layout::stride(&geometry), layout::data(&geometry));
        let size = layout::ring_size(&geometry);
        source += &format!(
            "if (slipway_ring_stride({payload}) != {stride} || slipway_ring_data({slots}) != \
             {data} || slipway_ring_size({slots}, {payload}) != {size}) return {slots} % 251;\n"
        );
    }
    let hello = Hello { takes: Takes::default() }.encode();
    let welcome = Welcome { version: 1, status: 0x0403_0201, mac: [9; 6] }.encode();
    source += &format!("const unsigned char hello[] = {};\n", array(&hello));
    source += &format!("const unsigned char welcome[] = {};\n", array(&welcome));
    source += "uint64_t magic = SLIPWAY_PORT_MAGIC; uint32_t version = SLIPWAY_PORT_VERSION, \
        status = 0x04030201;\n\
               if (memcmp(hello, &magic, 8) || memcmp(hello + 8, &version, 4)) return 1;\n\
               if (memcmp(welcome, &magic, 8) || memcmp(welcome + SLIPWAY_WELCOME_STATUS, \
               &status, 4)) return 2;\n\
               return welcome[SLIPWAY_WELCOME_MAC] != 9 || welcome[SLIPWAY_WELCOME_MAC + 5] != 9 \
               ? 3 : 0;\n}\n";
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(&source, dir.path()) else { return };
    let status = Command::new(program).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

fn array(bytes: &[u8]) -> String {
    let numbers: Vec<_> = bytes.iter().map(ToString::to_string).collect();
    format!("{{{}}}", numbers.join(", "))
}
