//! The user of a process: `user[:group]`, looked up in the container's own `/etc/passwd` and
//! `/etc/group` (passwd(5), group(5)). The C library's lookups are not used: they load modules of
//! the container's choosing, and a static program has none.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A user in the form that the kernel and the environment need.
#[derive(Debug, PartialEq, Eq)]
pub struct User {
    /// The user id.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// The supplementary groups, sorted.
    pub groups: Vec<u32>,
    /// The home directory for `HOME`; `/` if the user has no entry.
    pub home: String,
}

impl User {
    /// Adds supplementary groups.
    pub fn with_groups(mut self, groups: &[u32]) -> Self {
        self.groups.extend(groups);
        self.groups.sort_unstable();
        self.groups.dedup();
        self
    }
}

/// The largest database in bytes, since it is read whole at every start.
const MAX_DATABASE: u64 = 16 << 20;

/// Resolves `text`: "", "user", "uid", "user:group", "uid:gid" and mixtures. A number needs no
/// entry, but a name does. Without a group, the user's own group and all groups that list the user
/// apply; with a group, only that group.
pub fn resolve(root: &Path, text: &str) -> Result<User> {
    let passwd = read(&root.join("etc/passwd"))?;
    let group = read(&root.join("etc/group"))?;
    let (user, chosen_group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let entry = find_user(&passwd, user);
    let uid = match (&entry, user.parse::<u32>()) {
        (Some(entry), _) => entry.uid,
        (None, Ok(uid)) => uid,
        (None, Err(_)) => bail!("unable to find user {user}: no matching entry in passwd file"),
    };
    let (gid, groups) = match chosen_group {
        Some(name) => (find_group(&group, name)?, Vec::new()),
        None => (
            entry.as_ref().map_or(0, |entry| entry.gid),
            entry.as_ref().map(|entry| memberships(&group, entry.name)).unwrap_or_default(),
        ),
    };
    let home = entry.map(|entry| entry.home).filter(|home| !home.is_empty()).unwrap_or("/");
    Ok(User { uid, gid, groups, home: home.to_owned() })
}

fn read(path: &Path) -> Result<String> {
    let said = || path.display().to_string();
    let unusable = || format!("{} is not a file of a usable size", path.display());
    // A FIFO or a device would block or never end.
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => bail!(unusable()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(error).with_context(said),
    }
    // The container's processes may have put one there since.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).with_context(said)?;
    if !file.metadata().with_context(said)?.is_file() {
        bail!(unusable());
    }
    read_bounded(file).with_context(said)?.with_context(unusable)
}

/// Reads a database to its end, whatever its size is said to be: that of a file of `/proc` is 0.
/// Returns `None` if it is too large.
fn read_bounded(file: impl Read) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    file.take(MAX_DATABASE + 1).read_to_end(&mut bytes)?;
    let fits = u64::try_from(bytes.len()).is_ok_and(|len| len <= MAX_DATABASE);
    Ok(fits.then(|| String::from_utf8_lossy(&bytes).into_owned()))
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn find_user<'a>(passwd: &'a str, wanted: &str) -> Option<PasswdEntry<'a>> {
    let entries = || passwd.lines().filter_map(parse_user);
    // A name that looks like a number is first looked up as a name, as in docker.
    entries().find(|entry| entry.name == wanted).or_else(|| {
        let uid: u32 = wanted.parse().ok()?;
        entries().find(|entry| entry.uid == uid)
    })
}

fn parse_user(line: &str) -> Option<PasswdEntry<'_>> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let mut fields = fields.skip(1);
    let uid = fields.next()?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).unwrap_or_default();
    Some(PasswdEntry { name, uid, gid, home })
}

/// Parses an entry to (name, gid, members). Returns `None` if the line is malformed.
fn parse_group(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let gid = fields.nth(1)?.parse().ok()?;
    Some((name, gid, fields.next().unwrap_or_default()))
}

fn find_group(group: &str, wanted: &str) -> Result<u32> {
    let by_name = group.lines().filter_map(parse_group).find(|(name, ..)| *name == wanted);
    match (by_name, wanted.parse()) {
        (Some((_, gid, _)), _) | (None, Ok(gid)) => Ok(gid),
        (None, Err(_)) => bail!("unable to find group {wanted}: no matching entry in group file"),
    }
}

fn memberships(group: &str, user: &str) -> Vec<u32> {
    let mut groups: Vec<u32> = group
        .lines()
        .filter_map(parse_group)
        .filter(|(_, _, members)| members.split(',').any(|member| member == user))
        .map(|(_, gid, _)| gid)
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n# comment\nbroken:x\n\
        daemon:x:1:1::/usr/sbin:/bin/false\nada:x:1000:1000:Ada,,:/home/ada:/bin/sh\n\
        1001:x:7:7::/seven:/bin/sh\nnohome:x:8:8:::\n";
    const GROUP: &str = "root:x:0:\nwheel:x:10:root,ada\naudio:x:29:ada\nada:x:1000:\n\
        audio2:x:29:ada\nprefix:x:50:adam\n";

    fn database() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/passwd"), PASSWD).unwrap();
        std::fs::write(root.path().join("etc/group"), GROUP).unwrap();
        root
    }

    fn ok(text: &str) -> (u32, u32, Vec<u32>, String) {
        let user = resolve(database().path(), text).unwrap();
        (user.uid, user.gid, user.groups, user.home)
    }

    #[test]
    fn names_numbers_and_groups() {
        assert_eq!(ok(""), (0, 0, vec![10], "/root".into()));
        assert_eq!(ok("ada"), (1000, 1000, vec![10, 29], "/home/ada".into()));
        assert_eq!(ok("1000"), (1000, 1000, vec![10, 29], "/home/ada".into()));
        assert_eq!(ok("ada:audio"), (1000, 29, vec![], "/home/ada".into()));
        assert_eq!(ok("ada:77"), (1000, 77, vec![], "/home/ada".into()));
        assert_eq!(ok("4242"), (4242, 0, vec![], "/".into()));
        assert_eq!(ok("4242:43"), (4242, 43, vec![], "/".into()));
        assert_eq!(ok("1001").0, 7, "a numeric name is a name first");
        assert_eq!(ok("nohome").3, "/");
        assert_eq!(ok(":wheel"), (0, 10, vec![], "/root".into()));
        assert_eq!(ok("ada:"), (1000, 1000, vec![10, 29], "/home/ada".into()));
    }

    #[test]
    fn given_groups_join_the_users_own() {
        let groups = |text: &str, more: &[u32]| {
            resolve(database().path(), text).unwrap().with_groups(more).groups
        };
        assert_eq!(groups("ada", &[77, 10, 5]), [5, 10, 29, 77]);
        assert_eq!(groups("1000:1000", &[77, 5, 77]), [5, 77], "with a group, exactly these");
    }

    #[test]
    fn unknown_names_say_so() {
        let root = database();
        for (text, said) in [
            ("eve", "unable to find user eve"),
            ("broken", "unable to find user broken"),
            ("ada:eves", "unable to find group eves"),
            ("-1", "unable to find user -1"),
            ("4294967296", "unable to find user 4294967296"),
        ] {
            let error = resolve(root.path(), text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn an_image_without_databases_has_root() {
        let root = tempfile::tempdir().unwrap();
        let user = resolve(root.path(), "").unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (0, 0, "/"));
        assert!(resolve(root.path(), "ada").is_err());
    }

    #[test]
    fn a_database_that_is_no_file_is_refused() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("etc/passwd")).unwrap();
        assert!(resolve(root.path(), "0").is_err());
    }

    #[test]
    fn a_database_is_read_up_to_a_bound() {
        let read = |bytes: u64| read_bounded(std::io::repeat(b'a').take(bytes)).unwrap();
        let most = read(MAX_DATABASE).unwrap();
        assert_eq!(u64::try_from(most.len()).unwrap(), MAX_DATABASE);
        assert!(read(MAX_DATABASE + 1).is_none());
        assert!(read_bounded(std::io::repeat(b'a')).unwrap().is_none(), "it has no end");
        // A file without a size, as that of /proc/self/pagemap is.
        let root = database();
        let passwd = root.path().join("etc/passwd");
        std::fs::remove_file(&passwd).unwrap();
        std::os::unix::fs::symlink("/proc/version", &passwd).unwrap();
        assert_eq!(resolve(root.path(), "0").unwrap().uid, 0);
    }
}
