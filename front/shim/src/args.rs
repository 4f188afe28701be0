//! The command line that containerd uses: flags as Go programs have them, then a command.

use std::path::PathBuf;

/// The longest container id, bytes.
const LONGEST_ID: usize = 256;

/// A parsed command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    /// containerd's namespace.
    pub namespace: String,
    /// The container; for the command [`Command::Serve`], the group that the shim serves.
    pub id: String,
    /// The path of containerd's own socket.
    pub address: String,
    /// The container's bundle; the working directory if it is empty.
    pub bundle: PathBuf,
    /// Set if details are to be logged.
    pub debug: bool,
    /// The container that the command [`Command::Remove`] removes.
    pub leftover: Leftover,
    /// The command.
    pub command: Command,
}

/// A container whose shim has died, as the daemon knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftover {
    /// The name by which the daemon knows it.
    pub name: String,
    /// The name of the image that is this container's alone, if there is one.
    pub private: Option<String>,
    /// The names of snapshots: of the one with which its sandbox begins, and of those that were
    /// being made of it.
    pub snapshots: Vec<String>,
}

impl Args {
    /// Returns the container's bundle.
    pub fn bundle(&self) -> PathBuf {
        if self.bundle.as_os_str().is_empty() {
            std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"))
        } else {
            self.bundle.clone()
        }
    }

    /// Returns the words of a serving process's command line.
    pub fn words(&self) -> Vec<String> {
        let words = [
            ["-namespace", self.namespace.as_str()],
            ["-id", self.id.as_str()],
            ["-address", self.address.as_str()],
        ];
        let debug = self.debug.then_some("-debug");
        words.into_iter().flatten().chain(debug).map(str::to_owned).collect()
    }

    /// Returns the words of the holder's command line. They have another form, so that whoever
    /// looks for the processes of shims by their command lines finds those that serve.
    pub fn words_of_holder(&self) -> Vec<String> {
        let words = [
            format!("--namespace={}", self.namespace),
            format!("--id={}", self.id),
            format!("--address={}", self.address),
        ];
        let debug = self.debug.then(|| "--debug".to_owned());
        words.into_iter().chain(debug).collect()
    }
}

/// The program's tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Command {
    /// Serve the task service on the socket that is standard input.
    #[default]
    Serve,
    /// Serve in place of a process that was killed; standard input leads to the [`Command::Hold`].
    Resume,
    /// Hold descriptors for the process that serves; see [`crate::hold`].
    Hold,
    /// Start a shim, and print its address.
    Start,
    /// Clean up after a shim that died.
    Delete,
    /// Carry on a removal that [`Command::Delete`] has begun while no daemon served.
    Remove,
    /// Mount a root for an importer that this process becomes; see [`crate::mount`].
    Import,
    /// Become a logger; see [`crate::logger`].
    Log,
    /// Have a network namespace for a container's hooks; see [`crate::netns`].
    Network,
    /// Print the version.
    Version,
    /// Print what this runtime is, as a message.
    Info,
}

/// Parses a command line without the program's name.
///
/// # Errors
/// One line that says what is wrong.
pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Args, String> {
    let mut args = Args::default();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some(flag) = word.strip_prefix('-') else {
            args.command = command(&word)?;
            continue;
        };
        let flag = flag.strip_prefix('-').unwrap_or(flag);
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        match name {
            "debug" => args.debug = inline.as_deref() != Some("false"),
            "v" | "version" => args.command = Command::Version,
            "info" => args.command = Command::Info,
            _ => {
                let value = inline.or_else(|| words.next());
                let value = value.ok_or_else(|| format!("-{name} needs a value"))?;
                take(&mut args, name, value)?;
            }
        }
    }
    check(&args)?;
    Ok(args)
}

fn take(args: &mut Args, name: &str, value: String) -> Result<(), String> {
    match name {
        "namespace" => args.namespace = value,
        "id" => args.id = value,
        "address" => args.address = value,
        "bundle" => args.bundle = value.into(),
        "name" => args.leftover.name = value,
        "private" => args.leftover.private = Some(value),
        "snapshot" => args.leftover.snapshots.push(value),
        // Events go over containerd's ttrpc socket, and the shim's own address follows from the id.
        "publish-binary" | "socket" => {}
        _ => return Err(format!("there is no flag -{name}")),
    }
    Ok(())
}

fn command(word: &str) -> Result<Command, String> {
    match word {
        "start" => Ok(Command::Start),
        "resume" => Ok(Command::Resume),
        "hold" => Ok(Command::Hold),
        "delete" => Ok(Command::Delete),
        "remove" => Ok(Command::Remove),
        "import" => Ok(Command::Import),
        "log" => Ok(Command::Log),
        "network" => Ok(Command::Network),
        _ => Err(format!("there is no command \"{word}\"; containerd runs this program")),
    }
}

/// Returns whether `value` can be a container's id or a namespace: letters, digits, '-', '_' and
/// '.', at most 256 bytes.
pub fn is_id(value: &str) -> bool {
    let fits = value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    fits && !value.is_empty() && value.len() <= LONGEST_ID
}

fn check(args: &Args) -> Result<(), String> {
    // The others are of a container.
    if let Command::Version | Command::Info | Command::Import | Command::Log | Command::Network =
        args.command
    {
        return Ok(());
    }
    for (name, value) in [("namespace", &args.namespace), ("id", &args.id)] {
        if !is_id(value) {
            return Err(format!(
                "-{name} is \"{value}\"; it is letters, digits, '-', '_' and '.'. containerd runs \
                 this program: see docs/containerd.md"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &str) -> Result<Args, String> {
        parse(words.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn containerds_own_command_lines() {
        let start = of("-namespace default -address /run/containerd/containerd.sock \
             -publish-binary /usr/bin/containerd -id one -debug start")
        .unwrap();
        assert_eq!(start.command, Command::Start);
        assert_eq!((start.namespace.as_str(), start.id.as_str()), ("default", "one"));
        assert!(start.debug);
        let delete = of("-namespace default -id one --bundle=/b delete").unwrap();
        assert_eq!((delete.command, delete.bundle), (Command::Delete, PathBuf::from("/b")));
        let remove =
            of("-namespace n -id one -name one-1 -private i -snapshot s -snapshot t remove");
        let remove = remove.unwrap();
        let (private, snapshots) = (Some("i".into()), vec!["s".into(), "t".into()]);
        let left = Leftover { name: "one-1".into(), private, snapshots };
        assert_eq!((remove.command, remove.leftover), (Command::Remove, left));
        assert_eq!(of("-v").unwrap().command, Command::Version);
        assert_eq!(of("-info").unwrap().command, Command::Info);
        assert_eq!(of("log").unwrap().command, Command::Log);
        assert_eq!(of("network").unwrap().command, Command::Network);
    }

    #[test]
    fn the_processes_of_a_shim_have_the_same_words_in_two_forms() {
        let args = Args {
            namespace: "n".into(),
            id: "one".into(),
            address: "/a".into(),
            debug: true,
            ..Args::default()
        };
        assert_eq!(parse(args.words()).as_ref(), Ok(&args));
        assert_eq!(parse(args.words_of_holder()), Ok(args));
        assert_eq!(of("-namespace n -id one resume").unwrap().command, Command::Resume);
        assert_eq!(of("--namespace=n --id=one hold").unwrap().command, Command::Hold);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for bad in
            ["", "start", "-id one start", "-namespace n -id a/b start", "-x y", "-id", "run"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
