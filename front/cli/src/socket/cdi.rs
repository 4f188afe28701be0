//! `slipway socket cdi`: describes the library and the engine's socket as a device of the Container
//! Device Interface.
//!
//! The file follows version 0.5.0 of the interface's specification
//! (github.com/cncf-tags/container-device-interface, `SPEC.md`), which Podman from 4.3, Docker from
//! 25 and containerd from 1.7 know: a kind, and devices, each with what it adds to a container.
//! There is one device for each C library, since one preload library cannot serve both.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::elf::Linkage;
use super::run::library;
use crate::args::SocketCdiArgs;

/// The version of the specification.
const VERSION: &str = "0.5.0";
/// The kind of device: the part of `--device` before `=` and the C library.
const KIND: &str = "slipway.io/socket";
/// The library's path in a container.
const LIBRARY: &str = "/run/slipway/libslipway.so";
/// The path of the engine's folder in a container.
const FOLDER: &str = "/run/slipway/socket.d";

/// Writes the description of the devices.
pub fn describe(args: &SocketCdiArgs, socket: &Path) -> Result<i32> {
    let socket = std::path::absolute(socket)?;
    let folder = slipway_sgiov::folder(&socket);
    let musl = library(Linkage::Musl).ok();
    let found = [("glibc", Some(library(Linkage::Glibc)?)), ("musl", musl)];
    let found = found.iter().filter_map(|(name, library)| Some((*name, library.as_deref()?)));
    let devices = found.map(|(name, library)| device(name, library, &folder));
    let devices = devices.collect::<Result<Vec<_>>>()?;
    let spec = json!({ "cdiVersion": VERSION, "kind": KIND, "devices": devices });
    let text = format!("{spec:#}\n");
    if args.output == Path::new("-") {
        crate::out::print(format_args!("{text}"));
        return Ok(0);
    }
    // A container that starts before the engine mounts the folder, which the engine fills later.
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    write(&args.output, &text)?;
    if !slipway_sgiov::is_served(&socket) {
        eprintln!(
            "slipway: no engine serves {}; until one does (`slipway socket engine`) containers \
             use the kernel's sockets",
            socket.display()
        );
    }
    Ok(0)
}

fn device(name: &str, library: &Path, folder: &Path) -> Result<Value> {
    // A socket accepts connections through a read-only mount, too.
    let mount = |from: &Path, to: &str| {
        let Some(from) = from.to_str() else { bail!("{} is not UTF-8", from.display()) };
        let options = ["ro", "rbind", "nosuid", "nodev"];
        Ok(json!({ "hostPath": from, "containerPath": to, "options": options }))
    };
    let socket = format!("{FOLDER}/{}", slipway_sgiov::SHARED);
    Ok(json!({ "name": name, "containerEdits": {
        "env": [format!("LD_PRELOAD={LIBRARY}"), format!("SLIPWAY_SOCKET={socket}")],
        "mounts": [mount(library, LIBRARY)?, mount(folder, FOLDER)?],
    } }))
}

/// Replaces the file as a whole, since runtimes watch the folder. They read only files that end in
/// `.json`.
fn write(path: &Path, text: &str) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(failed)?;
    }
    let new = path.with_extension("new");
    std::fs::write(&new, text).with_context(failed)?;
    std::fs::rename(&new, path).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_fields_of_the_specification_and_no_other() {
        let made = device("glibc", Path::new("/l/libslipway.so"), Path::new("/run/e.d")).unwrap();
        assert_eq!(made["name"], "glibc");
        let edits = &made["containerEdits"];
        assert_eq!(edits["env"][0], "LD_PRELOAD=/run/slipway/libslipway.so");
        assert_eq!(edits["env"][1], "SLIPWAY_SOCKET=/run/slipway/socket.d/engine.sock");
        let mounts = edits["mounts"].as_array().unwrap();
        let from: Vec<_> = mounts.iter().map(|mount| mount["hostPath"].as_str().unwrap()).collect();
        assert_eq!(from, ["/l/libslipway.so", "/run/e.d"]);
        for mount in mounts {
            assert_eq!(mount.as_object().unwrap().len(), 3, "{mount}");
            // A library cannot be mapped from a mount with noexec.
            let options = mount["options"].as_array().unwrap();
            assert!(options.contains(&json!("ro")) && !options.contains(&json!("noexec")));
        }
        assert_eq!(edits.as_object().unwrap().len(), 2);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cdi/slipway.json");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
