//! A guest whose disk is driven from user space, as a subject.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use slipway_bench::Own;
use slipway_bench::block::{Measured, Subject, Workload, load_command, load_measured};
use slipway_runtime::v1::volume_spec::Device;

use super::guest::volume;
use super::node::{Guest, LOAD_PLACE, Node};

/// One guest with a function of its own, which the guest's kernel has released.
pub struct UserGuest {
    name: String,
    about: &'static str,
    guest: Guest,
    node: Rc<Node>,
    /// PCI address of the function in the guest.
    address: String,
}

impl UserGuest {
    /// Starts the guest; its disk is `file`.
    pub fn start(node: &Rc<Node>, name: &str, about: &'static str, file: &Path) -> Result<Self> {
        let guest = Guest::start(node, name, vec![volume(file, Device::PlaneFunction)])?;
        guest.install_load()?;
        let take = format!("{LOAD_PLACE} take {}", super::guest::OWN);
        let address = node.wait(guest.shell(&take, Duration::ZERO))?.trim().to_owned();
        Ok(Self { name: name.to_owned(), about, guest, node: Rc::clone(node), address })
    }
}

impl Subject for UserGuest {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.to_owned()
    }

    fn own(&self) -> Own {
        Own::Node
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let command = load_command(LOAD_PLACE, &self.address, workload, warm_up, time);
        let output = self.node.wait(self.guest.shell(&command, warm_up + time))?;
        load_measured(&output, workload)
    }
}
