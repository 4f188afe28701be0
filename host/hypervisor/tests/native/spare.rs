//! VMs in VMMs that were started ahead.

use std::fs;
use std::path::PathBuf;

use rustix::process::{Pid, Signal};
use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::{
    Accel, AccelChoice, Credentials, Error, FreePages, Hypervisor, ShutdownReason, Spare,
    SpareSpec, Vm, VmSpec, Vmms,
};

use super::{Server, and_dies, directory, is_missing, meanwhile, spec, vmm};

/// Starts a spare for a VM.
async fn spare_for(native: &SlipwayVmm, spec: &VmSpec) -> Spare {
    let VmSpec { credentials, cgroup_procs, .. } = spec.clone();
    let gives_back = spec.free_pages == FreePages::GivenBack;
    native.launch_spare(&SpareSpec { credentials, cgroup_procs, gives_back }).await.unwrap()
}

async fn end(vm: Box<dyn Vm>) {
    vm.quit().await.unwrap();
    let exit = vm.wait().await;
    assert_eq!(exit.reason, Some(ShutdownReason::GuestReset), "{exit:?}");
}

#[test]
fn a_vm_is_launched_in_a_vmm_that_was_started_ahead() {
    if is_missing("a_vm_is_launched_in_a_vmm_that_was_started_ahead") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let server = Server::new(directory.path().join("one"));
    let spec = spec(directory.path(), std::slice::from_ref(&server.path));
    and_dies(async {
        let spare = spare_for(&native, &spec).await;
        assert!(spare.fits(&spec));
        let pid = spare.pid();
        let vm = native.launch_in(spare, &spec).await.unwrap();
        assert_eq!((vm.record().pid, vm.accel()), (pid, Accel::Kvm));
        let connection = meanwhile(|| server.accept("hello 0"));
        end(vm).await;
        drop(connection);
    });
    let console = fs::read_to_string(&spec.console_log).unwrap();
    for fact in ["memory 134217728", "kernel the kernel", "initramfs the initramfs", "runs"] {
        assert!(console.contains(fact), "{fact} is not in {console}");
    }
    assert_eq!(fs::read_dir(&spec.run_dir).unwrap().count(), 0);
}

#[test]
fn a_vm_that_a_spare_does_not_fit_has_a_vmm_of_its_own() {
    if is_missing("a_vm_that_a_spare_does_not_fit_has_a_vmm_of_its_own") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let spec = spec(directory.path(), &[]);
    let gives_back = VmSpec { free_pages: FreePages::GivenBack, ..spec.clone() };
    let others = [
        gives_back.clone(),
        VmSpec { credentials: Some(Credentials { uid: 1, gid: 1 }), ..spec.clone() },
        VmSpec { cgroup_procs: vec![PathBuf::from("/sys/fs/cgroup/cgroup.procs")], ..spec.clone() },
        VmSpec { accel: AccelChoice::Only(Accel::Tcg), ..spec.clone() },
    ];
    and_dies(async {
        let spare = spare_for(&native, &spec).await;
        for other in &others {
            assert!(!spare.fits(other), "{other:?}");
        }
        let (pid, ended) = (spare.pid(), spare.ended().unwrap());
        let vm = native.launch_in(spare, &gives_back).await.unwrap();
        assert_ne!(vm.record().pid, pid);
        ended.await;
        end(vm).await;
        let spare = spare_for(&native, &gives_back).await;
        assert!(spare.fits(&gives_back) && !spare.fits(&spec));
    });
}

#[test]
fn a_spare_that_has_ended_fits_nothing() {
    if is_missing("a_spare_that_has_ended_fits_nothing") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let spec = spec(directory.path(), &[]);
    and_dies(async {
        let spare = spare_for(&native, &spec).await;
        let process = Pid::from_raw(spare.pid()).unwrap();
        rustix::process::kill_process(process, Signal::KILL).unwrap();
        spare.ended().unwrap().await;
        assert!(!spare.fits(&spec));
        let vm = native.launch_in(spare, &spec).await.unwrap();
        end(vm).await;
        // One that nobody needs any more.
        let spare = spare_for(&native, &spec).await;
        let ended = spare.ended().unwrap();
        assert!(spare.end().await);
        ended.await;
    });
}

#[test]
fn a_node_of_qemu_has_no_spares() {
    let directory = directory();
    let vmms = Vmms::new("qemu".parse().unwrap(), Ok("/nowhere".into()), directory.path());
    let ahead = SpareSpec { credentials: None, cgroup_procs: Vec::new(), gives_back: false };
    let refused = and_dies(vmms.launch_spare(&ahead)).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
}
