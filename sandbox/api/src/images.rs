//! Names of the images that containerd's shim makes of roots. containerd and the kubelet do not
//! know of these images, so the node removes them once nothing uses them, and must not take a
//! user's image for one of them: `containerd` is a folder of Docker Hub, too.

/// The folder of the names.
const FOLDER: &str = "containerd";
/// The beginning of the key of an image that is one container's alone.
const OWN: &str = "own-";
/// The digits of a key: 16 bytes in hexadecimal.
const DIGITS: usize = 32;
/// Counts the ways in which images were made of layers: another one makes them anew.
const FORMAT: u32 = 1;

/// Returns the name of the image of layers that any number of containers have. `key` is the 32
/// digits of their identity.
pub fn of_layers(key: &str) -> String {
    format!("{FOLDER}/{key}:{FORMAT}")
}

/// Returns the name of the image that is one container's alone. `key` is the 32 digits of the
/// container's identity.
pub fn of_container(key: &str) -> String {
    format!("{FOLDER}/{OWN}{key}:{FORMAT}")
}

/// Returns whether an image with this name, in its short form, was made by a shim of this or an
/// earlier build.
pub fn is_of_containerd(name: &str) -> bool {
    let rest = name.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix('/'));
    let Some((key, format)) = rest.and_then(|rest| rest.split_once(':')) else { return false };
    let key = key.strip_prefix(OWN).unwrap_or(key);
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_key = key.len() == DIGITS && key.bytes().all(is_digit);
    is_key && !format.is_empty() && format.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_image_in_the_same_folder_is_not_the_shims() {
        let key = "0123456789abcdef0123456789abcdef";
        for name in [of_layers(key), of_container(key), format!("containerd/{key}:17")] {
            assert!(is_of_containerd(&name), "{name}");
        }
        let others = [
            "containerd/nerdbox:1".to_owned(),
            "containerd/busybox:1.36".to_owned(),
            "containerd/own-app:1".to_owned(),
            format!("containerd/{key}:latest"),
            format!("containerd/{key}0:1"),
            format!("containerd/{}:1", key.to_uppercase()),
            format!("containerd/{key}"),
            format!("containerd/{key}:1@sha256:{key}{key}"),
            format!("containerd/team/{key}:1"),
            format!("ghcr.io/containerd/{key}:1"),
            format!("{key}:1"),
        ];
        for name in others {
            assert!(!is_of_containerd(&name), "{name}");
        }
    }
}
