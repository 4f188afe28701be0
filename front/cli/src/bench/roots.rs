//! `slipway bench roots`: measures how soon many owners have roots.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use slipway_bench::roots::{
    RootFiles, RootLoad, RootPlan, RootReport, RootServer, RootSubject, RootWay, Way, root_table,
};
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_plane_api::v1::disk::Kind;
use slipway_plane_api::v1::nvme_controller::DoorbellMode;

use super::reports::{self, View};
use super::scratch::Scratch;
use super::subjects;
use crate::args::RootsArgs;

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 3] = [
    ("made", "functions that are made when they are asked for"),
    ("ready", "functions that were made before, and are connected when they are asked for"),
    ("floor", "functions that are connected and brought up: two reads"),
];
/// Owners of a quick run.
const QUICK: u32 = 20;
const QUICK_ROUNDS: u32 = 2;

/// Measures, or shows an earlier report.
pub fn roots(args: &RootsArgs) -> Result<i32> {
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<RootReport> = View::of(RootReport::picture, root_table);

fn loads(args: &RootsArgs) -> Vec<RootLoad> {
    let counts = if args.quick { vec![QUICK] } else { args.count.clone() };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let orders = if args.at_once.is_empty() {
        vec![0, u32::try_from(cpus).unwrap_or(u32::MAX)]
    } else {
        args.at_once.clone()
    };
    let cold = args.cold;
    let load = |owners| orders.iter().map(move |&at_once| RootLoad { owners, at_once, cold });
    counts.into_iter().flat_map(load).collect()
}

fn run(args: &RootsArgs) -> Result<RootReport> {
    let rounds = if args.quick { args.rounds.min(QUICK_ROUNDS) } else { args.rounds };
    let plan = RootPlan::new(loads(args), rounds);
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let place = match &args.directory {
        Some(directory) => std::path::absolute(directory)?,
        None => std::env::temp_dir(),
    };
    // Owners and functions are of one process, with several descriptors each.
    crate::daemon::raise_descriptor_limit();
    // Dropped after the plane, whose sockets are in it.
    let folder = Scratch::make_in(&place)?;
    let files = Arc::new(RootFiles::make(folder.path())?);
    let server: Arc<dyn RootServer> = Arc::new(Served(Plane::new(Settings::default())?));
    let subject = |(name, _): (&str, &str)| -> Box<RootSubject> {
        let way = match name {
            "made" => Way::Made,
            "ready" => Way::Ready,
            _ => Way::Floor,
        };
        Box::new(RootWay::new(way, Arc::clone(&server), Arc::clone(&files)))
    };
    subjects::report(chosen.into_iter().map(subject).collect(), plan, "none".to_owned())
}

/// A plane of this process, with one reactor.
struct Served(Plane);

impl RootServer for Served {
    fn make(&self, id: &str, files: &RootFiles, socket: &Path) -> Result<()> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let path = text(&files.image());
        let image = v1::FileDisk { path, read_only: true, ..Default::default() };
        let layer = v1::OverlayDisk { base_path: text(&files.template()), limit_bytes: 0 };
        let disks = [Kind::File(image), Kind::Overlay(layer)];
        let namespaces = (1..).zip(disks).map(|(nsid, kind)| v1::Namespace {
            nsid,
            disk: Some(v1::Disk { block_size: 0, kind: Some(kind) }),
            ..Default::default()
        });
        self.0.create(&v1::CreateEndpointRequest {
            id: id.to_owned(),
            socket_path: text(socket),
            nvme: Some(v1::NvmeController {
                namespaces: namespaces.collect(),
                doorbells: DoorbellMode::Rung.into(),
                ..Default::default()
            }),
            ..Default::default()
        })?;
        Ok(())
    }

    fn remove(&self, id: &str) -> Result<()> {
        Ok(self.0.remove(id)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_reads_the_roots_of_its_owners_and_leaves_none() {
        let folder = tempfile::tempdir().unwrap();
        let files = Arc::new(RootFiles::make(folder.path()).unwrap());
        let plane = Plane::new(Settings::default()).unwrap();
        let server: Arc<dyn RootServer> = Arc::new(Served(plane.clone()));
        for way in [Way::Made, Way::Ready, Way::Floor] {
            let mut subject = RootWay::new(way, Arc::clone(&server), Arc::clone(&files));
            let subject: &mut RootSubject = &mut subject;
            for load in ["n5", "n5-a2-cold"] {
                let measured = subject.run(&load.parse().unwrap()).unwrap();
                assert!(measured.p99_ns <= measured.most_ns, "{way:?}: {measured:?}");
                assert!(measured.cpu_ns > 0 && measured.other_cpu_ns > 0, "{way:?}");
                assert!(plane.list().is_empty(), "{way:?}");
            }
        }
    }

    #[test]
    fn a_turn_that_fails_leaves_no_function() {
        let folder = tempfile::tempdir().unwrap();
        let files = Arc::new(RootFiles::make(folder.path()).unwrap());
        let plane = Plane::new(Settings::default()).unwrap();
        std::fs::remove_file(files.template()).unwrap();
        let server: Arc<dyn RootServer> = Arc::new(Served(plane.clone()));
        for way in [Way::Made, Way::Ready] {
            let mut subject = RootWay::new(way, Arc::clone(&server), Arc::clone(&files));
            let subject: &mut RootSubject = &mut subject;
            assert!(subject.run(&"n3".parse().unwrap()).is_err(), "{way:?}");
            assert!(plane.list().is_empty(), "{way:?}");
        }
    }
}
