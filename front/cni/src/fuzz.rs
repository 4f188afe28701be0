//! The body of the fuzz target.

use slipway_plane_api::trace::Caller;

use crate::configuration::{Configuration, version};
use crate::environment::Environment;
use crate::failure::Failure;
use crate::ipam;

/// The longest error of a parser beside what it quotes, in bytes.
const LONGEST: usize = 4096;

/// Takes `data` for the environment's values, each up to a zero byte, and the configuration after
/// them, which stands for the runtime's place in a trace as well.
pub fn operation(data: &[u8]) {
    const NAMES: [&str; 5] =
        ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_ARGS"];
    let mut parts = data.splitn(NAMES.len() + 1, |byte| *byte == 0);
    let words = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];
    let variables: Vec<_> = NAMES
        .iter()
        .filter_map(|name| {
            let value = String::from_utf8_lossy(parts.next()?).into_owned();
            // One byte chooses the operation.
            let word = value.bytes().next().map_or("", |byte| words[usize::from(byte) % 6]);
            let value = if *name == "CNI_COMMAND" { word.to_owned() } else { value };
            Some((name.into(), value.into()))
        })
        .collect();
    let input = parts.next().unwrap_or_default();
    let _ = version(input);
    place_in_trace(input);
    if let Ok(chosen) = ipam::parse("any", input) {
        assert!(!chosen.addresses.is_empty());
    }
    let one_line = |failure: &Failure| {
        assert!(!failure.message().is_empty() && !failure.message().contains('\n'));
        assert!(failure.to_json("1.1.0").to_string().len() < LONGEST + 8 * data.len());
    };
    match Environment::of(variables.into_iter()) {
        Ok(environment) => {
            // Other operations do not look at the names.
            if environment.command.names_container() {
                let names = [&environment.container, &environment.interface];
                assert!(names.iter().all(|name| !name.contains('/')));
            }
            match Configuration::parse(input, &environment) {
                Ok(configuration) => {
                    let _ = configuration.publish().map_err(|failure| one_line(&failure));
                    let _ = configuration.rates().map_err(|failure| one_line(&failure));
                    let _ = configuration.addresses();
                }
                Err(failure) => one_line(&failure),
            }
        }
        Err(failure) => one_line(&failure),
    }
}

/// Makes the metadata of a place in a trace, which is read as it is written.
fn place_in_trace(value: &[u8]) {
    use std::os::unix::ffi::OsStrExt;
    let request = Caller::of(Some(std::ffi::OsStr::from_bytes(value))).request(());
    for (_, value) in request.metadata().clone().into_headers() {
        let value = std::ffi::OsStr::from_bytes(value.as_bytes());
        assert!(!Caller::of(Some(value)).request(()).metadata().is_empty());
    }
}
