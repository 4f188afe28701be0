//! A host with pools of memory, one after the other, for tests.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use slipway_keeper::Keeper;
use slipway_pool::{Left, Pool, SLOTS, Settings, Shelves};
use slipway_ram::LateFiles;

/// The bytes of a sandbox, and the most that a pool keeps.
pub const BYTES: u64 = 8 << 20;
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Connects to a keeper that may not listen yet.
fn connect(path: &Path) -> Keeper {
    let tries = std::iter::repeat_with(|| Keeper::connect(path)).take(60_000);
    let connected = tries.map(Result::ok).find_map(|keeper| {
        std::thread::sleep(Duration::from_millis(1));
        keeper
    });
    connected.unwrap()
}

/// Waits for a predecessor to end. Returns what it left at the keeper.
pub fn left_at(keeper: &Keeper) -> Vec<Left> {
    let mut left: Vec<Left> = Vec::new();
    for (slot, file) in keeper.take(PATIENCE).unwrap() {
        let number = slot / SLOTS;
        if left.last().is_none_or(|last| last.number != number) {
            left.push(Left { number, files: Default::default() });
        }
        left.last_mut().unwrap().files.insert(slot % SLOTS, file);
    }
    left
}

/// A node: a keeper, a directory, and one pool after the other.
pub struct Node {
    directory: tempfile::TempDir,
    /// The memory that devices find by its file.
    pub files: LateFiles,
}

impl Node {
    /// Returns `None` after a message where the kernel cannot serve faults, and in a process that a
    /// test has started.
    pub fn new() -> Option<Self> {
        if !Path::new("/dev/userfaultfd").exists() || std::env::var_os("POOL").is_some() {
            eprintln!("needs /dev/userfaultfd");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper");
        std::thread::spawn(move || slipway_keeper::serve(&path));
        Some(Self { directory, files: LateFiles::default() })
    }

    /// Connects to the keeper. Returns what a predecessor left there, too.
    pub fn keeper(&self) -> (Arc<Keeper>, Vec<Left>) {
        let keeper = self.connect();
        let left = left_at(&keeper);
        (Arc::new(keeper), left)
    }

    /// Connects to the keeper.
    pub fn connect(&self) -> Keeper {
        connect(&self.directory.path().join("keeper"))
    }

    /// Makes a pool that goes on with what its predecessor left.
    pub fn pool(&self, ahead: bool, kept: bool) -> Pool {
        self.pool_of(BYTES, ahead, kept)
    }

    /// Makes a pool that keeps at most `limit` bytes.
    pub fn pool_of(&self, limit: u64, ahead: bool, kept: bool) -> Pool {
        let keeper = kept.then(|| self.keeper());
        let (shelves, left) = match keeper {
            Some((keeper, left)) => (Some(Shelves::new(keeper, 0..SLOTS * 16)), left),
            None => (None, Vec::new()),
        };
        let files = self.files.clone();
        let of_spares = Settings { spare_bytes: BYTES, ..Settings::default() };
        let settings = Settings { limit, ahead, files, shelves, ..of_spares };
        let pool = Pool::new(settings).unwrap();
        pool.resume(left).unwrap();
        pool
    }

    /// Starts the test `predecessor` of this program as a process of its own, and waits until its
    /// pool serves the node ([`be_predecessor`]).
    pub fn predecessor(&self) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["predecessor", "--exact"]).env("POOL_NODE", self.path());
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        let mut waited = Duration::ZERO;
        while !self.path().join("serves").exists() {
            assert!(waited < PATIENCE, "the predecessor does not serve");
            std::thread::sleep(Duration::from_millis(5));
            waited += Duration::from_millis(5);
        }
        child
    }

    /// Returns the path of the node's directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the path of the pool's socket.
    pub fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("pool")
    }
}

/// Waits until the pool has taken all memory back.
pub fn all_back(pool: &Pool) {
    let mut waited = Duration::ZERO;
    while pool.stats().lent > 0 || pool.stats().free_bytes == 0 {
        assert!(waited < PATIENCE, "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

/// Has a pool serve the node that this process was started for ([`Node::predecessor`]) until the
/// process is killed. `prepare` is called with the pool and the path of its socket before that.
/// Does nothing in a process that was started for no node.
pub fn be_predecessor(prepare: impl FnOnce(&Pool, &Path)) {
    let Some(directory) = std::env::var_os("POOL_NODE") else { return };
    let directory = Path::new(&directory);
    let keeper = connect(&directory.join("keeper"));
    assert!(keeper.take(PATIENCE).unwrap().is_empty());
    let shelves = Some(Shelves::new(Arc::new(keeper), 0..SLOTS * 16));
    let of_spares = Settings { spare_bytes: BYTES, ..Settings::default() };
    let pool = Pool::new(Settings { limit: BYTES, shelves, ..of_spares }).unwrap();
    let socket = directory.join("pool");
    let _server = pool.listen(&socket).unwrap();
    prepare(&pool, &socket);
    std::fs::write(directory.join("serves"), "").unwrap();
    std::thread::sleep(PATIENCE * 10);
}
