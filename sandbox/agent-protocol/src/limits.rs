//! Names of resource limits (getrlimit(2)), as `ulimit` and docker write them.

use rustix::process::Resource;

/// Returns the resource of a limit by its name in any case, with or without `RLIMIT_`: "nofile",
/// "RLIMIT_NOFILE". Returns `None` if there is no such limit.
pub fn resource(name: &str) -> Option<Resource> {
    let bare = name.to_ascii_lowercase();
    Some(match bare.strip_prefix("rlimit_").unwrap_or(&bare) {
        "as" => Resource::As,
        "core" => Resource::Core,
        "cpu" => Resource::Cpu,
        "data" => Resource::Data,
        "fsize" => Resource::Fsize,
        "locks" => Resource::Locks,
        "memlock" => Resource::Memlock,
        "msgqueue" => Resource::Msgqueue,
        "nice" => Resource::Nice,
        "nofile" => Resource::Nofile,
        "nproc" => Resource::Nproc,
        "rss" => Resource::Rss,
        "rtprio" => Resource::Rtprio,
        "rttime" => Resource::Rttime,
        "sigpending" => Resource::Sigpending,
        "stack" => Resource::Stack,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_spellings() {
        assert_eq!(resource("nofile"), Some(Resource::Nofile));
        assert_eq!(resource("RLIMIT_NPROC"), Some(Resource::Nproc));
        assert_eq!(resource("files"), None);
    }
}
