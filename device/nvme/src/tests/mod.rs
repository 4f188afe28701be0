//! Through the driver, on heap memory, in virtual time.

mod abort;
mod admin;
mod arithmetic;
mod attachment;
mod bad_commands;
mod coalescing;
mod hostile;
mod init;
mod io;
mod killed;
mod lanes;
mod lifecycle;
mod limits;
mod mailbox;
mod parts;
mod pin;
mod prp;
mod queues;
mod rig;
mod saved;
mod sgl;
mod shadow;
mod steady;
mod steps;
mod trace;
mod turn;
