//! A node's pool of recycled memory for sandboxes.
//!
//! Making gigabytes of pages costs time, and so does writing zeros into them, most of which nobody
//! ever looks at. A [`Pool`] keeps the memory of sandboxes that have ended, as files in memory, and
//! gives one to the next sandbox at once. Its pages are zeroed later, each before anybody sees it
//! (`slipway_ram::LateMemory`; FastIOV, section 4.3.2, decouples zeroing from mapping in the same
//! way):
//! - pages that the VMM touches before its guest runs, or that the guest touches, fault. A thread
//!   of each sandbox (`lease`) serves its faults, up to 2 MiB at a time;
//! - a device of this process that meets a page first zeroes it (`slipway_ram::LateFiles`, which
//!   knows the pool's files);
//! - a thread (`background`) zeroes ahead, for sandboxes first, then memory that nobody has. It
//!   waits at idle priority until a CPU is idle, and zeroes at the default priority, a few granules
//!   at a time: with a granule half zeroed it must not lose its CPU for long, since others wait for
//!   the granule. When it has zeroed all of a sandbox's memory, the sandbox's faults are the
//!   kernel's again.
//!
//! On a host with several NUMA nodes each memory has a home, one of them, from its making on. Its
//! pages are made there, whoever touches them first, and stay when it is recycled; other nodes help
//! out when that one is full. A launcher asks for the node where its VMM is to run, and is told the
//! memory's (`choose`).
//!
//! Memory may begin as a template ([`Template`]) instead of zeros: the memory of a VM that was
//! saved, as a file that nobody can change. Such memory is a new file without pages. A page is
//! copied from the template when its sandbox or a device first needs it (`fork`), or ahead of that
//! if it was told which pages forks need ([`Pool::copy_ahead`], [`Pool::copied`]), or before there
//! is a sandbox, in memory that is ready for the next fork ([`Pool::keep_ready`], `prepare`). The
//! sandbox never has the template itself. When it ends its pages go to the kernel. All of it is
//! copied before another process that serves the sandbox's guest has the file (`complete`).
//!
//! Pages are the machine's own or, of hugetlbfs, of 2 MiB, reserved with the host when memory is
//! made ([`Page`](slipway_pool_spec::Page)).
//!
//! Memory is given again when no thread of the VMM's process runs any more, and no device of this
//! process refers to it. The lease's connection ends first (`POLLRDHUP`), which a process that runs
//! on can bring about, too. From then on UFFDIO_CONTINUE is tried every 50 ms, until it fails with
//! ESRCH: the kernel says so that the process is gone.
//!
//! If this process dies, nobody may close the last userfaultfd of memory that is not zeroed yet:
//! the kernel would then show its bytes. So userfaultfd, file and table lie with a keeper, and a
//! successor goes on ([`Pool::resume`]); with a fork lies its template. If a part is not there, the
//! sandbox's faults wait until it is ended, and no page is shown. Without a keeper, memory is
//! zeroed, or copied from its template, before it is given ([`Settings::zero_first`] has recycled
//! memory zeroed so in any case).
//!
//! Hardware is given memory when all of it is zero (`slipway_ram::Region::give_to_hardware`), which
//! the start of a sandbox waits for. So memory that hardware had is zeroed before all other when it
//! returns, without a wait for an idle CPU, and the next sandbox is given what is zeroed furthest.
//!
//! Not here: pages that move to another NUMA node with their sandbox.
//!
//! Dependencies: `slipway-pool-spec` and `slipway-pool-wire` for the protocol, `slipway-keeper` for
//! what outlives the process, `slipway-ram` for the pages and templates, `slipway-numa` for their
//! nodes, `slipway-reactor` for its bell, `slipway-peer` for descriptors, `rustix` and `libc` for
//! calls, `thiserror` for the errors, `tracing` for the daemon's log.

mod background;
mod choose;
mod complete;
mod fork;
mod lease;
mod make;
mod pool;
mod prepare;
mod saved;
mod server;
mod settle;
mod shared;
mod shelf;
mod spares;
mod templates;
mod userfault;

pub use choose::NodeBytes;
pub use pool::Pool;
pub use saved::{load, save};
pub use server::Server;
pub use shared::{Settings, Stats};
pub use shelf::{Left, SLOTS, Shelves};
pub use slipway_pool_spec::TemplateName;
pub use slipway_ram::Template;
pub use templates::{NameTaken, TemplateStats};
