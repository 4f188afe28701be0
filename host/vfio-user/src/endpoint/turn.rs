//! One step of an endpoint: what it handles, in which order.
//!
//! [`Endpoint::turn`] is the order. Each part of it may end the endpoint on this reactor, or have
//! it move, and then the parts behind it are left out.

use std::ops::ControlFlow;
use std::time::Instant;

use slipway_reactor::{Context, Step};

use super::connected::Outcome;
use super::ready::{Ready, UNMASK};
use super::residence::Residence;
use super::{Endpoint, EndpointState, RETRY};

/// The reason for which clients are disconnected if interrupts would have to be written to their
/// eventfds, a write that may wait for ever.
pub(super) const NO_INTERRUPTS: &str = "interrupts cannot be delivered: the kernel has no \
    asynchronous I/O context and no io_uring left";

impl Endpoint {
    /// Does the work of one step. Breaks with the step that ends the endpoint here, or has it move.
    pub(super) fn turn(&mut self, ready: Ready, context: &mut Context<'_>) -> ControlFlow<Step> {
        let now = context.now();
        self.obey(ready, context)?;
        // The client comes first: a new connection is refused only if the old client is really
        // still connected.
        self.serve(ready, context)?;
        // Before the poll that looks for the event's reason.
        if ready.bell {
            self.device.take_event();
        }
        self.poll_device(ready, now);
        if ready.unmask {
            self.unmask_pin(context);
        }
        self.drain(now)?;
        self.tend_entrance(ready, context);
        self.watch(context);
        self.shared.live.set_stage(self.stage());
        ControlFlow::Continue(())
    }

    /// Does what the endpoint's control has asked for, and disconnects a client whose interrupts
    /// cannot be delivered.
    fn obey(&mut self, ready: Ready, context: &mut Context<'_>) -> ControlFlow<Step> {
        if ready.control {
            self.shared.silence();
            if self.shared.take_poke() {
                self.device.pace.kick();
            }
            if self.relocates() {
                return ControlFlow::Break(Step::Leave);
            }
        }
        if self.device.sink.failure.take() {
            self.disconnect(NO_INTERRUPTS, context);
        }
        if self.shared.is_closing() {
            self.disconnect("the endpoint was closed", context);
            if matches!(self.state, EndpointState::Listening) {
                return ControlFlow::Break(self.end());
            }
        }
        ControlFlow::Continue(())
    }

    /// Serves the client. Breaks if the endpoint must move to a thread of its own for it.
    fn serve(&mut self, ready: Ready, context: &mut Context<'_>) -> ControlFlow<Step> {
        let EndpointState::Connected(connection) = &mut self.state else {
            return ControlFlow::Continue(());
        };
        let outcome = connection.step(&mut self.device, &self.config, (ready, context.now()));
        connection.give_up(&mut self.device, &mut self.kept);
        match outcome {
            Outcome::Stays => {}
            Outcome::Ends(why) => self.disconnect(&why, context),
            Outcome::Moves if self.residence == Residence::OwnForGood => self.settle(true, context),
            Outcome::Moves => {
                self.residence = Residence::MovingForClient { slept: false };
                return ControlFlow::Break(Step::Leave);
            }
        }
        ControlFlow::Continue(())
    }

    /// Takes the new home that the endpoint was told to move to, if any. Returns whether to move
    /// there now.
    fn relocates(&mut self) -> bool {
        let Some(home) = self.shared.take_home() else { return false };
        self.home = home;
        // On a thread of its own, the endpoint moves when its client disconnects, or never.
        self.residence == Residence::Home && !self.shared.is_closing()
    }

    /// Polls the function if there is a reason to.
    fn poll_device(&mut self, ready: Ready, now: Instant) {
        let wanted = match &self.state {
            _ if !self.device.runs() => false,
            EndpointState::Connected(connection) if connection.is_quiescing() => false,
            EndpointState::Connected(_) => {
                ready.wake || self.device.pace.is_unannounced() || self.device.pace.is_due(now)
            }
            EndpointState::Listening => ready.wake || self.device.pace.is_due(now),
            EndpointState::Draining(_) | EndpointState::Ended => false,
        };
        if wanted {
            self.device.pass_event();
            self.device.poll(now);
        }
    }

    /// Cleans up after the last client, if there was one. Breaks if the endpoint ends when that has
    /// been done, or returns from the thread that it had for the client.
    fn drain(&mut self, now: Instant) -> ControlFlow<Step> {
        let EndpointState::Draining(draining) = &mut self.state else {
            return ControlFlow::Continue(());
        };
        if !draining.step(&mut self.device, now) {
            return ControlFlow::Continue(());
        }
        self.shared.live.mapped(&self.device.map);
        self.state = EndpointState::Listening;
        if self.shared.is_closing() {
            return ControlFlow::Break(self.end());
        }
        if self.residence == Residence::OwnForClient {
            self.residence = Residence::Home;
            return ControlFlow::Break(Step::Leave);
        }
        ControlFlow::Continue(())
    }

    /// Opens the entrance if it is time to, and accepts the connections that wait there.
    fn tend_entrance(&mut self, ready: Ready, context: &mut Context<'_>) {
        let now = context.now();
        self.entrance.pause_ends(now);
        self.open_entrance(context);
        let accepts = self.admits() && self.entrance.retry_at.is_none();
        if accepts && ready.listener && !self.client_leaves() && self.accept(context).is_err() {
            self.entrance.retry_at = Some(now + RETRY);
        }
    }

    /// Unmasks the pin for the client, after the poll that may have deasserted it.
    fn unmask_pin(&mut self, context: &mut Context<'_>) {
        if !self.device.unmask_pin() {
            // Watching the eventfd further would only keep this thread busy.
            context.unwatch(UNMASK);
        }
    }
}
