//! Namespaces of the kernel's.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::path::PathBuf;

use rustix::thread::{UnshareFlags, unshare_unsafe};
use slipway_netlink::Netlink;
use slipway_netns::{Error, Namespace, identify, own};

#[test]
fn a_file_that_is_no_network_namespace_is_refused() {
    let missing = Namespace::open("/proc/self/ns/none".as_ref()).unwrap_err();
    assert!(matches!(missing, Error::Open { .. }), "{missing}");
    // A character device, a directory, a file of /proc, and a pipe that nobody writes to.
    let pipe = std::env::temp_dir().join(format!("slipway-netns-{}", std::process::id()));
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for path in ["/dev/null", "/", "/proc/self/status", pipe.to_str().unwrap()] {
        let error = Namespace::open(path.as_ref()).unwrap_err();
        assert!(matches!(error, Error::NotOne(_)), "{error}");
        assert!(error.to_string().contains(path), "{error}");
        let error = identify(path.as_ref()).unwrap_err();
        assert!(matches!(error, Error::NotOne(_)), "{error}");
    }
    std::fs::remove_file(pipe).unwrap();
}

#[test]
fn a_closure_runs_in_the_namespace_and_nothing_else_does_as_root() {
    let (tell, told) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        // SAFETY: descriptors stay shared; the namespace concerns this thread, which ends here.
        let made = unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.is_ok();
        tell.send(made.then(|| rustix::thread::gettid().as_raw_nonzero())).unwrap();
        let _ = ended.recv();
    });
    let Some(thread) = told.recv().unwrap() else {
        return println!("SKIPPED: a_closure_runs_in_the_namespace_as_root: needs root");
    };
    let tasks = PathBuf::from(format!("/proc/self/task/{thread}/ns"));
    let namespace = Namespace::open(&tasks.join("net")).unwrap();
    assert_ne!(namespace.identity(), own().unwrap());
    assert_eq!(namespace.identity(), identify(&tasks.join("net")).unwrap());
    assert!(matches!(Namespace::open(&tasks.join("mnt")), Err(Error::NotOne(_))));
    let names = || -> Vec<String> {
        let links = Netlink::open().unwrap().links().unwrap();
        links.into_iter().map(|link| link.name).collect()
    };
    let here = names();
    // A new namespace has a loopback interface, and a socket opened there stays there.
    let mut netlink = namespace.run(|| Netlink::open().unwrap()).unwrap();
    drop(end);
    other.join().unwrap();
    drop(namespace);
    assert!(!netlink.links().unwrap().iter().find(|link| link.name == "lo").unwrap().up);
    assert_eq!(names(), here);
}
