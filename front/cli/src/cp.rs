//! `slipway cp`: files between the host and a container.
//!
//! An archive that comes out of a container is a guest's, which may be hostile: what is unpacked of
//! it here, `slipway-tar-tree` decides ([`Rules::of_guest`]). On the host, files are read and made
//! on threads beside the one that talks to the daemon.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use slipway_runtime::v1::{self, copy_in_request, copy_out_reply};
use slipway_runtime::{Config, SandboxClient};
use slipway_tar_tree::{
    Error, LeftOut, PIECE, PieceReader, PieceWriter, Place, Rules, Source, TOP, ends_as_directory,
    find, is_contents, pack, place_itself, read_end, unpack,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::args::{CopyEnd, CpArgs, NodeArgs};
use crate::client::{answer, connect, refused};
use crate::table::printable;

/// The most messages in flight.
const QUEUE: usize = 4;

/// Runs `slipway cp`. Returns the exit status.
pub async fn cp(node: &NodeArgs, config: &Config, args: &CpArgs) -> Result<i32> {
    let left_out = match (&args.source, &args.dest) {
        (CopyEnd::Container { name, path }, CopyEnd::Host(dest)) => {
            let client = connect(node, config).await?;
            copy_out(client, request(name, path, args), dest, args.archive).await?
        }
        (CopyEnd::Container { name, path }, CopyEnd::Archive) => {
            if io::stdout().is_terminal() {
                bail!("an archive is nothing for a terminal: redirect standard output");
            }
            let top = if is_contents(Path::new(path)) { OsStr::new(".") } else { name_of(path)? };
            let request =
                v1::CopyOutRequest { top: top.as_bytes().to_vec(), ..request(name, path, args) };
            print(connect(node, config).await?, request).await?
        }
        (CopyEnd::Host(source), CopyEnd::Container { name, path }) => {
            let (to, found) = source_on_host(source, args.follow_link)?;
            let to = v1::CopyInTo { name: name.clone(), path: path.clone(), ..to };
            let to = v1::CopyInTo { owners: args.archive, ..to };
            let client = connect(node, config).await?;
            let (told, packing) =
                copy_in(client, to, move |sender| send_tree(&found, sender)).await;
            both(told, packing).await?
        }
        (CopyEnd::Archive, CopyEnd::Container { name, path }) => {
            if io::stdin().is_terminal() {
                bail!("an archive does not come from a terminal: redirect standard input");
            }
            let (name, path) = (name.clone(), path.clone());
            let to = v1::CopyInTo { name, path, source: None, owners: args.archive };
            let client = connect(node, config).await?;
            match copy_in(client, to, send_archive).await {
                // Perhaps standard input could not be read: that says more.
                (Err(told), sending) if sending.is_finished() => both(Err(told), sending).await?,
                // The rest of standard input, behind the archive's end, is not read.
                (told, _) => told?,
            }
        }
        (CopyEnd::Container { .. }, CopyEnd::Container { .. }) => {
            bail!("nothing is copied between containers: copy to the host, and from there")
        }
        _ => bail!("one of SRC and DEST is a path in a container: NAME:PATH"),
    };
    tell(&left_out);
    Ok(0)
}

/// Says what was not copied.
fn tell(left_out: &v1::LeftOut) {
    if left_out.count > 0 {
        let below = left_out.first.strip_prefix(TOP).and_then(|path| path.strip_prefix('/'));
        let (count, first) = (left_out.count, printable(below.unwrap_or(&left_out.first)));
        eprintln!(
            "slipway: left out {count} devices, pipes, sockets or file systems of the kernel; the \
             first is {first}"
        );
    }
}

/// Returns the request for what is at a path in a container, as an archive of [`TOP`].
fn request(name: &str, path: &str, args: &CpArgs) -> v1::CopyOutRequest {
    let (name, path) = (name.to_owned(), path.to_owned());
    v1::CopyOutRequest { name, path, follow: args.follow_link, top: TOP.into() }
}

/// Returns the name of what is at a path in a container.
fn name_of(path: &str) -> Result<&OsStr> {
    let name = Path::new(path).file_name();
    name.with_context(|| format!("{path} ends with no name: give the path without \"..\""))
}

/// Returns the root of the host's paths.
fn host_root() -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/", flags, Mode::empty()).context("the root directory")
}

/// Returns the absolute form of a path on the host, whose end stays as it is.
fn full(path: &Path) -> Result<PathBuf> {
    if path.is_absolute() {
        return Ok(path.to_owned());
    }
    let mut full = std::env::current_dir().context("the working directory")?.into_os_string();
    full.push("/");
    full.push(path);
    Ok(full.into())
}

/// Copies out of a container to `dest` on the host.
async fn copy_out(
    mut client: SandboxClient,
    request: v1::CopyOutRequest,
    dest: &Path,
    owners: bool,
) -> Result<v1::LeftOut> {
    check_dest(dest)?;
    let path = request.path.clone();
    let mut replies = answer(client.copy_out(request).await)?;
    let is_directory = begin(&mut replies).await?;
    check_kind(&path, is_directory)?;
    let is_contents = is_contents(Path::new(&path));
    let name = if is_contents { OsStr::new("") } else { name_of(&path)? };
    let source = Source { is_directory, is_contents, name };
    // The guest says when this is done: a link may have come to the place since it was checked.
    let place = place_itself(host_root()?.as_fd(), &full(dest)?, source).map_err(message)?;
    let (sender, pieces) = mpsc::channel(QUEUE);
    let unpacking = tokio::task::spawn_blocking(move || receive(pieces, &place, owners));
    let taken = take(&mut replies, sender).await;
    let unpacked = unpacking.await.context("unpacking")?;
    // Without an end of the archive, the reason is the daemon's; otherwise that of a file.
    let told = taken?;
    let own = unpacked.map_err(message)?;
    Ok(sum(told.unwrap_or_default(), own))
}

/// Returns whether what is copied is a directory, by the first reply.
async fn begin(replies: &mut Streaming<v1::CopyOutReply>) -> Result<bool> {
    match replies.message().await.map_err(refused)?.and_then(|reply| reply.kind) {
        Some(copy_out_reply::Kind::Found(found)) => Ok(found.directory),
        _ => bail!("the daemon does not say what it copies; its log may tell more"),
    }
}

/// Refuses a symbolic link at the place of a copy, unless the path ends as that of a directory and
/// the link leads to one. A guest may have sent the link for an earlier copy, with any target: the
/// next copy to the same place would let the guest write that file, or a file of the source's name
/// in that directory.
fn check_dest(dest: &Path) -> Result<()> {
    // Without a slash at the end, which would have the call follow the link.
    let bare = dest.components().as_path();
    let is_link = bare.symlink_metadata().is_ok_and(|found| found.is_symlink());
    let is_named_directory = ends_as_directory(dest) && dest.is_dir();
    if is_link && !is_named_directory {
        bail!(
            "{} is a symbolic link, which may come from an earlier copy and is not followed: \
             remove it, or name the file that it leads to, or end the path of a directory with \
             a slash",
            dest.display()
        );
    }
    Ok(())
}

/// Refuses a file, or a link, that a guest sends in place of the directory that was asked for. As a
/// link with the directory's name, it would lead the next copy to this place elsewhere.
fn check_kind(path: &str, is_directory: bool) -> Result<()> {
    if !is_directory && ends_as_directory(Path::new(path)) {
        bail!("the sandbox sends a file in place of the directory {path}, which is not taken");
    }
    Ok(())
}

/// Returns the next piece of an archive, or what was left out at its end.
async fn next(
    replies: &mut Streaming<v1::CopyOutReply>,
) -> Result<std::result::Result<Vec<u8>, v1::LeftOut>> {
    match replies.message().await.map_err(refused)?.and_then(|reply| reply.kind) {
        Some(copy_out_reply::Kind::Data(data)) => Ok(Ok(data)),
        Some(copy_out_reply::Kind::End(left_out)) => Ok(Err(left_out)),
        _ => bail!("the copy was ended half-way; the daemon's log may tell more"),
    }
}

/// Carries an archive to the thread that unpacks it. `None` comes last. Returns what the guest has
/// left out, or `None` if the thread has ended before.
async fn take(
    replies: &mut Streaming<v1::CopyOutReply>,
    sender: mpsc::Sender<Option<Vec<u8>>>,
) -> Result<Option<v1::LeftOut>> {
    loop {
        let data = match next(replies).await? {
            Ok(data) => data,
            Err(left_out) => {
                let _ = sender.send(None).await;
                return Ok(Some(left_out));
            }
        };
        if sender.send(Some(data)).await.is_err() {
            return Ok(None);
        }
    }
}

/// Unpacks an archive of a guest. Runs on a thread of its own.
fn receive(
    mut pieces: mpsc::Receiver<Option<Vec<u8>>>,
    place: &Place,
    owners: bool,
) -> Result<LeftOut, Error> {
    let mut reader = PieceReader::new(|| match pieces.blocking_recv() {
        Some(piece) => Ok(piece),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    });
    let left_out = unpack(&mut reader, place, Rules::of_guest(owners))?;
    read_end(reader)?;
    Ok(left_out)
}

/// Writes the archive of what a request names to standard output.
async fn print(mut client: SandboxClient, request: v1::CopyOutRequest) -> Result<v1::LeftOut> {
    let mut replies = answer(client.copy_out(request).await)?;
    begin(&mut replies).await?;
    let mut stdout = io::stdout();
    loop {
        match next(&mut replies).await? {
            Ok(data) => stdout.write_all(&data).context("cannot write the archive")?,
            Err(left_out) => {
                stdout.flush().context("cannot write the archive")?;
                return Ok(left_out);
            }
        }
    }
}

type Sender = mpsc::Sender<v1::CopyInRequest>;

/// The thread that makes an archive.
type Packing = tokio::task::JoinHandle<Result<LeftOut, Error>>;

/// Sends an archive, which `archive` makes on a thread of its own, to the place `to`. Returns the
/// daemon's answer and that thread.
async fn copy_in(
    mut client: SandboxClient,
    to: v1::CopyInTo,
    archive: impl FnOnce(&Sender) -> Result<LeftOut, Error> + Send + 'static,
) -> (Result<v1::LeftOut>, Packing) {
    let (sender, messages) = mpsc::channel(QUEUE);
    // The queue is empty, so this never fails for lack of room.
    let _ = sender.try_send(copy_message(copy_in_request::Kind::To(to)));
    let packing = tokio::task::spawn_blocking(move || {
        let left_out = archive(&sender)?;
        let _ = sender.blocking_send(copy_message(copy_in_request::Kind::End(true)));
        Ok::<_, Error>(left_out)
    });
    let reply = answer(client.copy_in(ReceiverStream::new(messages)).await);
    (reply.map(|reply| reply.left_out.unwrap_or_default()), packing)
}

/// Returns what was left out of a tree of the host at both ends.
async fn both(told: Result<v1::LeftOut>, packing: Packing) -> Result<v1::LeftOut> {
    let own = match packing.await.context("packing")? {
        Ok(own) => own,
        // Nobody took the rest any more: the answer says why. After success, the rest was the end
        // of the archive, which its reader need not take.
        Err(error) if is_broken(&error) => LeftOut::default(),
        Err(error) => return Err(message(error)),
    };
    Ok(sum(told?, own))
}

/// Adds what was left out at this end to what the other end tells.
fn sum(told: v1::LeftOut, own: LeftOut) -> v1::LeftOut {
    let first = if told.count > 0 { told.first } else { own.first };
    v1::LeftOut { count: told.count.saturating_add(own.count), first }
}

fn copy_message(kind: copy_in_request::Kind) -> v1::CopyInRequest {
    v1::CopyInRequest { kind: Some(kind) }
}

/// Sends a piece of an archive.
fn send(sender: &Sender, piece: Vec<u8>) -> io::Result<()> {
    let sent = sender.blocking_send(copy_message(copy_in_request::Kind::Data(piece)));
    sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// Returns whether an archive has no receiver any more.
fn is_broken(error: &Error) -> bool {
    matches!(error, Error::File { cause, .. } if cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Finds a file or directory of the host. Returns the place that it asks for, without container.
fn source_on_host(path: &Path, follow: bool) -> Result<(v1::CopyInTo, slipway_tar_tree::Found)> {
    let mut asked = full(path)?;
    if asked.file_name().is_none() {
        // As docker: the directory that ".." leads to has its own name.
        asked = asked.canonicalize().with_context(|| path.display().to_string())?;
    }
    let found = find(host_root()?.as_fd(), &asked, follow).map_err(message)?;
    let source = v1::CopySource {
        directory: found.is_directory(),
        contents: found.is_directory() && (is_contents(path) || is_contents(&asked)),
        name: asked.file_name().map(|name| name.as_bytes().to_vec()).unwrap_or_default(),
    };
    Ok((v1::CopyInTo { source: Some(source), ..Default::default() }, found))
}

fn send_tree(found: &slipway_tar_tree::Found, sender: &Sender) -> Result<LeftOut, Error> {
    pack(found, Path::new(TOP), PieceWriter::new(|piece| send(sender, piece)))
}

/// Sends standard input. Its reader need not take what follows the end of the archive.
fn send_archive(sender: &Sender) -> Result<LeftOut, Error> {
    let mut stdin = io::stdin().lock();
    loop {
        let mut piece = vec![0; PIECE];
        let read = match stdin.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(Error::Archive)?,
        };
        piece.truncate(read);
        if read == 0 || send(sender, piece).is_err() {
            return Ok(LeftOut::default());
        }
    }
}

/// Returns the error's text, which has its cause.
fn message(error: Error) -> anyhow::Error {
    anyhow::Error::msg(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_of_the_host_has_the_name_that_docker_gives_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/file"), "x").unwrap();
        for (path, name, directory, contents) in [
            ("a/file", "file", false, false),
            ("a", "a", true, false),
            ("a/", "a", true, false),
            ("a/.", "a", true, true),
            ("a/b/..", "a", true, false),
        ] {
            let (to, _) = source_on_host(&dir.path().join(path), false).unwrap();
            let source = to.source.unwrap();
            assert_eq!(String::from_utf8(source.name).unwrap(), name, "{path}");
            assert_eq!((source.directory, source.contents), (directory, contents), "{path}");
        }
        let missing = source_on_host(&dir.path().join("none"), false);
        assert!(missing.err().unwrap().to_string().contains("none: No such file"));
        let device = source_on_host(Path::new("/dev/null"), false);
        assert!(device.err().unwrap().to_string().contains("/dev/null: it is a device"));
    }

    #[test]
    fn a_path_in_a_container_ends_with_a_name() {
        assert_eq!(name_of("/etc/hosts/").unwrap(), "hosts");
        assert!(name_of("/etc/..").unwrap_err().to_string().contains("/etc/.."));
    }

    #[test]
    fn a_link_from_an_earlier_copy_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "x").unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        for (target, link) in [("file", "to-file"), ("none", "to-none"), ("sub", "to-sub")] {
            std::os::unix::fs::symlink(target, dir.path().join(link)).unwrap();
        }
        for (dest, is_refused) in [
            ("to-file", true),
            ("to-none", true),
            ("to-none/", true),
            ("to-sub", true),
            ("to-sub/", false),
            ("to-sub/.", false),
            ("to-sub/new", false),
            ("file", false),
            ("sub", false),
            ("new", false),
        ] {
            let checked = check_dest(&dir.path().join(dest));
            assert_eq!(checked.is_err(), is_refused, "{dest}: {checked:?}");
        }
    }

    #[test]
    fn a_file_is_not_taken_for_a_directory() {
        for path in ["/out/", "/out/.", "/out/..", "/"] {
            let error = check_kind(path, false).unwrap_err().to_string();
            assert!(error.contains(path), "{error}");
            check_kind(path, true).unwrap();
        }
        check_kind("/out", false).unwrap();
        check_kind("/out", true).unwrap();
    }

    #[tokio::test]
    async fn the_end_of_an_archive_need_not_be_taken() {
        let packing = |kind: io::ErrorKind| {
            tokio::task::spawn_blocking(move || {
                Err(Error::File { path: "top".to_owned(), cause: kind.into() })
            })
        };
        let left_out = || v1::LeftOut { count: 1, first: "a".to_owned() };
        let broken = io::ErrorKind::BrokenPipe;
        assert_eq!(both(Ok(left_out()), packing(broken)).await.unwrap(), left_out());
        let told = both(Err(anyhow::anyhow!("no room")), packing(broken)).await;
        assert_eq!(told.unwrap_err().to_string(), "no room");
        // A file that cannot be read is no success, whatever the answer.
        let unread = both(Ok(left_out()), packing(io::ErrorKind::PermissionDenied)).await;
        assert!(unread.unwrap_err().to_string().starts_with("top: "));
    }

    #[test]
    fn the_end_of_a_path_stays_as_it_is() {
        for path in ["/a/.", "/a/", "/a/.."] {
            assert_eq!(full(Path::new(path)).unwrap().as_os_str(), path);
        }
        let relative = full(Path::new("a/.")).unwrap();
        assert!(relative.is_absolute() && relative.as_os_str().as_bytes().ends_with(b"/a/."));
    }

    #[test]
    fn what_both_ends_left_out_is_one_number() {
        let told = v1::LeftOut { count: 1, first: "a".to_owned() };
        let own = LeftOut { count: 2, first: "b".to_owned() };
        let both = v1::LeftOut { count: 3, first: "a".to_owned() };
        assert_eq!(sum(told, own.clone()), both);
        assert_eq!(sum(v1::LeftOut::default(), own).first, "b");
    }
}
