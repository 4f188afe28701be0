//! Finding and executing the program.

use std::ffi::{CString, OsStr};
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::io::Errno;

use super::seccomp::Filter;
use super::user::User;
use super::{Failure, NOT_EXECUTABLE, NOT_FOUND, foreign};

/// A program's arguments and environment in the kernel's form.
pub struct Program {
    name: String,
    search: String,
    args: Vec<CString>,
    environment: Vec<CString>,
}

impl Program {
    /// Makes a program of its arguments and environment.
    ///
    /// # Errors
    /// There are no arguments, or one has a NUL byte.
    pub fn new(args: &[String], environment: &[(String, String)]) -> Result<Program> {
        let name = args.first().filter(|name| !name.is_empty()).context("no command given")?;
        let search = environment.iter().find(|(name, _)| name == "PATH");
        let strings = |text: &str| CString::new(text).context("a NUL byte in the command line");
        Ok(Program {
            name: name.clone(),
            search: search.map(|(_, value)| value.clone()).unwrap_or_default(),
            args: args.iter().map(|arg| strings(arg)).collect::<Result<_>>()?,
            environment: environment
                .iter()
                .map(|(name, value)| strings(&format!("{name}={value}")))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns the program's path: its name if that has a slash, otherwise the first executable in
    /// `PATH`. `user` must be allowed to execute it. The kernel decides in the end, but this check
    /// gives the clearer message.
    pub fn find(&self, user: &User) -> Result<CString, Failure> {
        let mut denied = None;
        for candidate in self.candidates() {
            match std::fs::metadata(&candidate) {
                Ok(metadata) if metadata.is_file() && may_execute(&metadata, user) => {
                    return Ok(CString::new(candidate).context("a NUL byte in PATH")?);
                }
                Ok(metadata) if metadata.is_dir() && self.name.contains('/') => {
                    denied = Some("is a directory");
                }
                Ok(_) => denied = denied.or(Some("permission denied")),
                Err(_) => {}
            }
        }
        Err(match denied {
            Some(reason) => self.failure(NOT_EXECUTABLE, reason),
            None if self.name.contains('/') => self.failure(NOT_FOUND, "no such file or directory"),
            None => self.failure(NOT_FOUND, "executable file not found in $PATH"),
        })
    }

    fn candidates(&self) -> Vec<String> {
        if self.name.contains('/') {
            return vec![self.name.clone()];
        }
        let directories = self.search.split(':').filter(|directory| directory.starts_with('/'));
        directories.map(|directory| format!("{directory}/{}", self.name)).collect()
    }

    fn failure(&self, exit_status: u32, reason: &str) -> Failure {
        Failure::Execute { exit_status, message: format!("exec: {:?}: {reason}", self.name) }
    }

    /// Loads `filter` and executes the program. Returns only if that failed, with the reason. The
    /// filter sees no other system call of this process, unless execve fails.
    pub fn execute(&self, path: &CString, filter: Option<&Filter>) -> Failure {
        reset_signals();
        if let Some(Err(error)) = filter.map(Filter::load) {
            return Failure::Setup(error);
        }
        let error = execve(path, &self.args, &self.environment);
        match error {
            // ENOENT for an existing file means that its interpreter is missing.
            Errno::NOENT if Path::new(&*path.to_string_lossy()).exists() => {
                self.failure(NOT_FOUND, "its interpreter was not found")
            }
            Errno::NOENT => self.failure(NOT_FOUND, "no such file or directory"),
            Errno::NOEXEC => {
                let reason = foreign::reason(Path::new(OsStr::from_bytes(path.as_bytes())));
                self.failure(NOT_EXECUTABLE, reason.as_deref().unwrap_or("exec format error"))
            }
            Errno::TOOBIG => self.failure(NOT_EXECUTABLE, "argument list too long"),
            Errno::ACCESS => self.failure(NOT_EXECUTABLE, "permission denied"),
            other => self.failure(NOT_EXECUTABLE, &other.to_string()),
        }
    }
}

/// Returns whether the mode bits allow `user` to execute the file. Root may execute a file that
/// anyone may (capabilities(7)).
fn may_execute(metadata: &Metadata, user: &User) -> bool {
    let mode = metadata.mode();
    if user.uid == 0 {
        return mode & 0o111 != 0;
    }
    let in_group = user.gid == metadata.gid() || user.groups.contains(&metadata.gid());
    let shift = match () {
        () if user.uid == metadata.uid() => 6,
        () if in_group => 3,
        () => 0,
    };
    mode >> shift & 1 != 0
}

/// Restores the default signal actions and mask: Rust's runtime ignores SIGPIPE, but a container's
/// program must find the default.
fn reset_signals() {
    // SAFETY: setting a default action touches no memory of ours; an empty set is a valid mask.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

fn execve(path: &CString, args: &[CString], environment: &[CString]) -> Errno {
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (args, environment) = (pointers(args), pointers(environment));
    // SAFETY: both arrays end in a null pointer and hold NUL-terminated strings that outlive the
    // call, as does the path.
    let _: i32 = unsafe { libc::execve(path.as_ptr(), args.as_ptr(), environment.as_ptr()) };
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn user(uid: u32) -> User {
        User { uid, gid: uid, groups: vec![], home: "/".into() }
    }

    fn program(name: &str, path: &str) -> Program {
        Program::new(&[name.into()], &[("PATH".into(), path.into())]).unwrap()
    }

    fn status(result: Result<CString, Failure>) -> (u32, String) {
        match result {
            Err(Failure::Execute { exit_status, message }) => (exit_status, message),
            _ => panic!("no exec failure"),
        }
    }

    #[test]
    fn search_order_and_failures() {
        let dir = tempfile::tempdir().unwrap();
        for (name, mode) in [("a/tool", 0o644), ("b/tool", 0o755), ("a/data", 0o644)] {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        }
        let base = dir.path().to_str().unwrap();
        let search = format!("relative:{base}/a:{base}/b:{base}/missing");
        let found = program("tool", &search).find(&user(0));
        assert_eq!(found.ok().unwrap().to_str().unwrap(), format!("{base}/b/tool"));
        let (code, message) = status(program("data", &search).find(&user(0)));
        assert_eq!(code, 126);
        assert!(message.contains("permission denied"), "{message}");
        let (code, message) = status(program("nothing", &search).find(&user(0)));
        assert_eq!(code, 127);
        assert!(message.contains("executable file not found in $PATH"), "{message}");
        let (code, message) = status(program(base, &search).find(&user(0)));
        assert_eq!(code, 126);
        assert!(message.contains("is a directory"), "{message}");
        assert_eq!(status(program("/no/such", &search).find(&user(0))).0, 127);
    }

    #[test]
    fn mode_bits_decide_for_users() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tool");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o704)).unwrap();
        let owner = std::fs::metadata(&path).unwrap().uid();
        let find = |uid| program(path.to_str().unwrap(), "").find(&user(uid)).is_ok();
        assert!(find(owner));
        assert!(!find(owner + 4321));
    }

    #[test]
    fn an_empty_command_is_refused() {
        assert!(Program::new(&[], &[]).is_err());
        assert!(Program::new(&[String::new()], &[]).is_err());
        assert!(Program::new(&["a\0b".into()], &[]).is_err());
    }
}
