//! Prints the cost of the ledger's writes in the folders that are named: one writer, and 200 at
//! once.
//!
//!     cargo run --release -p slipway-vf-pool --example ledger -- /dev/shm /var/tmp

use std::sync::Barrier;
use std::time::{Duration, Instant};

use slipway_vf_pool::{Ledger, Owner, Record, Standing};

const WRITES: u32 = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for folder in std::env::args().skip(1) {
        let own = tempfile::tempdir_in(&folder)?;
        let ledger = Ledger::open(&own.path().join("ledger"))?;
        let record = |vf: u32| -> Record {
            let owner = Owner::new("sandbox", format!("{vf:064x}")).expect("a good owner");
            Record { standing: Standing::Taken { owner }, since_ns: 0 }
        };
        let begun = Instant::now();
        for vf in 0..WRITES {
            ledger.write("pool", vf, Some(&record(vf)))?;
        }
        let alone = begun.elapsed() / WRITES;
        let start = Barrier::new(WRITES as usize + 1);
        let together =
            std::thread::scope(|scope| -> Result<Duration, slipway_vf_pool::LedgerError> {
                let writer = |vf: u32| {
                    let (start, ledger, record) = (&start, &ledger, &record);
                    scope.spawn(move || {
                        start.wait();
                        ledger.write("pool", vf, Some(&record(vf)))
                    })
                };
                let writers: Vec<_> = (0..WRITES).map(writer).collect();
                start.wait();
                let begun = Instant::now();
                for writer in writers {
                    writer.join().expect("a writer panicked")?;
                }
                Ok(begun.elapsed())
            })?;
        println!("{folder}: {alone:?} for one write, {together:?} for {WRITES} at once");
    }
    Ok(())
}
