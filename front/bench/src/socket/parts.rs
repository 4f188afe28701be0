//! The work of two linked engines on each byte, with every part measured alone. The engines' own
//! time is compared with the sum.

use std::hint::black_box;
use std::sync::mpsc::channel;
use std::thread::spawn;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::time::{ClockId, clock_gettime};
use slipway_warp::record::{self, HEADER, TAG};
use slipway_warp::{Cipher, Opener, Sealer, Secret};

use super::links::RECORD;
use super::turn::turn;
use super::{Parts, SocketLoad, SocketMeasured, Traffic, Way};
use crate::block::native::pin;

/// Bytes that each part except transport is measured with.
const BYTES: usize = 256 << 20;
/// Bytes that the other processor writes before they are copied.
const FIFO: usize = 512 << 10;
/// Records that are copied into: as many as an engine fills before it sends.
const RECORDS: usize = 4;

/// Measures the parts between the namespaces of `way`.
///
/// # Errors
/// If sealing, copying or the transport fails.
pub(super) fn measure(way: &Way) -> Result<Parts> {
    let (seal, open) = crypto()?;
    let copy = copy([way.cpus.client.clone(), way.cpus.target.clone()])?;
    Ok(Parts { copy, seal, open, transport: transport(way)? })
}

/// Returns whether `way` has these parts with `load`: it needs two engines, and a load that fills
/// records.
pub(super) fn belong(way: &Way, load: &SocketLoad) -> bool {
    let linked = way.engines.as_ref().is_some_and(|engines| engines.ids().len() > 1);
    linked && load.traffic == Traffic::Stream && load.bytes as usize >= RECORD
}

fn own_cpu() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

fn per_byte(time: Duration, bytes: usize) -> f64 {
    time.as_nanos() as f64 / bytes as f64
}

/// Returns the time per byte of a copy on the second of two processors, from memory that the first
/// one writes.
fn copy([writes, copies]: [Vec<usize>; 2]) -> Result<f64> {
    let (written, to_copy) = channel::<Vec<u8>>();
    let (copied, to_write) = channel::<Vec<u8>>();
    // The writer ends when the other thread has dropped its end of `to_write`.
    let writer = spawn(move || {
        on(&writes)?;
        for mut fifo in to_write {
            write_over(&mut fifo);
            written.send(fifo)?;
        }
        anyhow::Ok(())
    });
    let copier = spawn(move || {
        on(&copies)?;
        copied.send(vec![1; FIFO])?;
        let (mut out, mut time) = (vec![0; RECORDS * RECORD], Duration::ZERO);
        for _ in 0..BYTES / FIFO {
            let fifo = to_copy.recv()?;
            let begin = own_cpu();
            for (at, from) in fifo.chunks(RECORD).enumerate() {
                let to = at % RECORDS * RECORD;
                out[to..to + RECORD].copy_from_slice(black_box(from));
            }
            time += own_cpu() - begin;
            black_box(&mut out);
            copied.send(fifo)?;
        }
        // Takes the last FIFO, so that the writer's send does not fail.
        drop(to_copy.recv()?);
        anyhow::Ok(time)
    });
    let failed = |_| anyhow!("a thread that measures copies failed");
    let time = copier.join().map_err(failed)??;
    writer.join().map_err(failed)??;
    Ok(per_byte(time, BYTES))
}

fn on(cpus: &[usize]) -> Result<()> {
    if cpus.is_empty() { Ok(()) } else { pin(cpus) }
}

fn write_over(fifo: &mut [u8]) {
    fifo.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
}

/// Returns the times per byte of sealing and opening, in place.
fn crypto() -> Result<(f64, f64)> {
    let secret = Secret::derive(&[1; 32], &[]);
    let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
    let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
    let mut buffer = vec![0; HEADER + RECORD + TAG];
    let (mut seal, mut open) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..BYTES / RECORD {
        let begin = own_cpu();
        record::seal(&mut sealer, &mut buffer)?;
        let middle = own_cpu();
        black_box(record::open(&mut opener, &mut buffer)?);
        (seal, open) = (seal + (middle - begin), open + (own_cpu() - middle));
    }
    Ok((per_byte(seal, BYTES), per_byte(open, BYTES)))
}

/// Returns the time per byte of kernel TCP: the same two programs, with messages of a record's
/// size.
fn transport(way: &Way) -> Result<f64> {
    let way = Way {
        name: "transport",
        about: String::new(),
        net: way.net.clone(),
        tls: None,
        engines: None,
        program: way.program.clone(),
        cpus: way.cpus.clone(),
        times: way.times,
    };
    let bytes = (HEADER + RECORD + TAG) as u32;
    let load = SocketLoad { traffic: Traffic::Stream, bytes, sockets: 1 };
    let SocketMeasured { bytes, client, server, kernel, .. } =
        turn(&way, &load).context("transport alone")?;
    Ok(client.plus(server).plus(kernel).cpu_ns as f64 / bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_take_time_and_copies_are_two() {
        let (seal, open) = crypto().unwrap();
        assert!(copy([Vec::new(), Vec::new()]).unwrap() > 0.0 && seal > 0.0 && open > 0.0);
        assert_eq!(Parts { copy: 1.0, seal: 2.0, open: 3.0, transport: 4.0 }.sum(), 11.0);
    }
}
