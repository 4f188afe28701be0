//! The names and files of containers' attachments, as the daemon and those that leave it notes know
//! them.
//!
//! An attachment is a container's interface in a network. CNI knows it by three names: those of the
//! network configuration, the container and the interface. The daemon keeps a file of each
//! attachment, [`FILE`], in the directory [`DIR`] of its networks. A container that is removed
//! while no daemon serves leaves an empty file there, the [`NOTE`], and the next daemon removes the
//! attachment.

/// The directory of attachments, in the daemon's directory of networks.
pub const DIR: &str = "attachments";
/// The extension of an attachment's file.
pub const FILE: &str = "json";
/// The extension of a note that says that the attachment is to be removed.
pub const NOTE: &str = "gone";
/// The longest name of a network configuration in bytes.
const CONFIGURATION: usize = 64;
/// The longest id of a container in bytes.
const CONTAINER: usize = 128;
/// The longest name of an interface in bytes.
const INTERFACE: usize = 15;

/// Checks the names of an attachment, which become the name of a file and of an interface.
///
/// # Errors
/// A message that names the one that is invalid, and the rule.
pub fn check(configuration: &str, container: &str, interface: &str) -> Result<(), String> {
    check_configuration(configuration)?;
    check_word("a container's id", container, CONTAINER)?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@+".contains(&byte);
    // The last two stand for all interfaces and for new ones (sysctl net.ipv4.conf).
    let reserved = ["", ".", "..", "all", "default"].contains(&interface);
    if reserved || interface.len() > INTERFACE || !interface.bytes().all(fits) {
        return Err(format!(
            "{interface:?} cannot be the name of a container's interface; it has at most \
             {INTERFACE} letters, digits, '-', '_', '.', '@' and '+', and is not \"all\" or \
             \"default\""
        ));
    }
    Ok(())
}

/// Checks the name of a network configuration.
///
/// # Errors
/// A message that names it, and the rule.
pub fn check_configuration(name: &str) -> Result<(), String> {
    check_word("the name of a network configuration", name, CONFIGURATION)
}

fn check_word(what: &str, text: &str, most: usize) -> Result<(), String> {
    let begins = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if begins && text.len() <= most && text.bytes().all(fits) {
        return Ok(());
    }
    Err(format!(
        "{text:?} cannot be {what}; it has a letter or a digit and then letters, digits, '_', '.' \
         and '-', at most {most} in all"
    ))
}

/// Returns the id of an attachment: the name of its files without the extension. No sandbox's id
/// has a comma.
pub fn id(configuration: &str, container: &str, interface: &str) -> String {
    format!("{configuration},{container},{interface}")
}

/// Returns the names of the configuration, the container and the interface that [`id`] made an id
/// of; `None` for the id of a sandbox.
pub fn parts(id: &str) -> Option<(&str, &str, &str)> {
    let (configuration, rest) = id.split_once(',')?;
    let (container, interface) = rest.split_once(',')?;
    Some((configuration, container, interface))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_the_directory_are_refused() {
        check("blue.1", "0123abcd-x_y", "eth0@if7").unwrap();
        for (configuration, container, interface, word) in [
            ("", "a", "eth0", "configuration"),
            ("a/b", "a", "eth0", "configuration"),
            ("a,b", "a", "eth0", "configuration"),
            ("a", "../a", "eth0", "container"),
            ("a", &"x".repeat(129), "eth0", "container"),
            ("a", "a\n", "eth0", "container"),
            ("a", "a", "..", "interface"),
            ("a", "a", "a/b", "interface"),
            ("a", "a", "default", "interface"),
            ("a", "a", "0123456789abcdef", "interface"),
        ] {
            let error = check(configuration, container, interface).unwrap_err();
            assert!(error.contains(word) && !error.contains('\n'), "{error}");
        }
        let longest = id(&"x".repeat(CONFIGURATION), &"x".repeat(CONTAINER), "0123456789abcde");
        assert!(longest.len() + 1 + FILE.len() <= 255, "a file name in Linux");
    }
}
